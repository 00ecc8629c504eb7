"""Who holds up the others, told from everybody's last heartbeats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.supervise.beat import Beat, Seat


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence for people, and the ranks it blames; none when the network, or all of them, may be the cause."""

    sentence: str
    ranks: tuple[int, ...] = ()


def blame(beats: Mapping[int, tuple[Beat, float]], seats: Sequence[Seat], silence_s: float) -> Verdict:
    """Return which ranks are behind, by their beats and how long ago these came; silent ones first.

    Behind is who has done fewer steps, then who has entered fewer phases of the step, then who is not in a collective
    while others are.
    """
    silent = [rank for rank, (_, ago) in beats.items() if ago > silence_s]
    if silent:
        beat, ago = beats[silent[0]]
        last = f"in phase {beat.phase} of step {beat.step}"
        return Verdict(
            f"{_named(silent, seats)} has not been heard of for {ago:.0f} s, and was {last}: it is stopped, dead or "
            "stuck in C code, or its machine is",
            tuple(silent),
        )
    told = {rank: beat for rank, (beat, _) in beats.items()}
    least = min((beat.step, beat.order) for beat in told.values())
    behind = [rank for rank, beat in told.items() if (beat.step, beat.order) == least]
    beat = told[behind[0]]
    where = f"in phase {beat.phase} of step {beat.step} since {beat.age_s:.0f} s{_at(beat)}"
    if len(behind) < len(told):
        other = max(told.values(), key=lambda beat: (beat.step, beat.order))
        ahead = f"others are in phase {other.phase} of step {other.step}"
        return Verdict(f"{_named(behind, seats)} is behind: {where}, while {ahead}", tuple(behind))
    working = [rank for rank in behind if not told[rank].waits]
    if 0 < len(working) < len(behind):
        beat = told[working[0]]
        where = f"in phase {beat.phase} of step {beat.step} since {beat.age_s:.0f} s{_at(beat)}"
        return Verdict(f"{_named(working, seats)} is {where}, while others wait in a collective", tuple(working))
    many = f"all {len(told)} ranks are" if len(told) > 1 else "it is"
    return Verdict(f"{many} {where}: see their stacks; if they wait for each other, the network hangs")


def _named(ranks: Sequence[int], seats: Sequence[Seat]) -> str:
    first, more = ranks[0], len(ranks) - 1
    named = f"rank {first} (node {seats[first].node}, {seats[first].host})"
    return f"{named} with {more} more" if more else named


def _at(beat: Beat) -> str:
    return f" at {beat.place}" if beat.place else ""
