"""Which rank is slow, told from how long each worked itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from training.supervise.beat import Beat, Seat

SLOW: Final = 1.2
"""How many times the others' median a rank's own time must be to be worth a line."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest rank: seconds it worked per step, the median of the others, and the first by the second."""

    rank: int
    node: int
    host: str
    seconds: float
    others_seconds: float
    ratio: float


class Pace:
    """Compares the ranks over windows of so many steps of rank 0."""

    def __init__(self, every: int) -> None:
        self._every, self._due = every, every
        self._before: dict[int, tuple[int, float]] = {}

    def look(self, beats: Mapping[int, Beat], seats: Sequence[Seat]) -> Straggler | None:
        """Return the slowest rank of a window that has ended, if it is slow; until every rank was heard, wait."""
        if beats[0].steps < self._due or len(beats) < 2:
            return None
        done = {rank: (beat.steps, beat.seconds) for rank, beat in beats.items()}
        means = {}
        for rank, (steps, seconds) in done.items():
            first, earlier = self._before.get(rank, (0, 0.0))
            if steps <= first:
                return None
            means[rank] = (seconds - earlier) / (steps - first)
        self._before, self._due = done, beats[0].steps + self._every
        slowest = max(means, key=lambda rank: means[rank])
        others = median(mean for rank, mean in means.items() if rank != slowest)
        ratio = means[slowest] / others if others > 0 else 1.0
        if ratio < SLOW:
            return None
        return Straggler(slowest, seats[slowest].node, seats[slowest].host, means[slowest], others, ratio)
