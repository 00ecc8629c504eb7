"""Whether the planner keeps the laws: times scale with the data, names mean nothing, more of a resource never hurts."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Final

import numpy as np

from benchmarks.planner_rows import Bench, Line, Mask, Rows, Section, Told, Trial, at_most, foretold, learned
from planner.keys import key_of
from planner.rows import Row
from planner.schema import Floats

FACTOR: Final = 1.37
WITHIN: Final = (FACTOR * 0.98, FACTOR * 1.02)
FEWEST: Final = 10
"""Steps of a profile whose times are scaled; sources are, whatever they have."""
FASTER: Final = (1.1, 2.0, 4.0)
"""Times the bandwidth between nodes."""
ROUNDING: Final = 1e-5
"""Of the figures that `predict` writes; their second differences add up several."""


def laws(rows: Rows, bench: Bench) -> list[Section]:
    """All laws."""
    return [*_scaled(rows, bench), _renamed(rows, bench), _more(rows)]


def _scaled(rows: Rows, bench: Bench) -> list[Section]:
    """Multiply the times of one profile, or source, and see whose predictions follow."""
    unseen = rows.quarters(0)[0]
    profiles = np.array([str(key_of(row)) for row in rows.all])
    large = [name for name in np.unique(profiles) if np.sum((profiles == name) & ~unseen & rows.timed) >= FEWEST]
    kinds = (("profile", profiles, large), ("source", rows.source, rows.sources()))
    cases = [(kind, name, label == name) for kind, label, names in kinds for name in names]
    cases = [(kind, name, mine) for kind, name, mine in cases if np.any(mine & rows.timed & ~unseen)]
    trials = [Trial(list(compress(_slower(rows, mine), ~unseen)), rows.all) for _, _, mine in cases]
    before, *after = bench.answers("laws: times scale", [Trial(rows.where(~unseen), rows.all), *trials])
    sections = {kind: list[Line]() for kind, _, _ in kinds}
    for (kind, name, mine), told in zip(cases, after, strict=True):
        ratio = told.seconds / before.seconds
        ends = {"least": ratio[mine].min(), "most": ratio[mine].max()}
        others = {"others' least": ratio[~mine].min(), "others' most": ratio[~mine].max()}
        figures = {what: float(value) for what, value in (ends | others).items()}
        limits = {"least": WITHIN, "most": WITHIN} if kind == "profile" else {}
        sections[kind].append(Line(name, int(mine.sum()), figures, limits))
    how = "seed 0's training rows with its times multiplied, recalibrated; predictions of all rows, new over old"
    return [Section(f"Times x {FACTOR} of one {kind}", how, lines) for kind, lines in sections.items()]


def _slower(rows: Rows, which: Mask) -> list[Row]:
    """All rows, the times of some multiplied."""
    pairs = zip(rows.all, which.tolist(), strict=True)
    return [dict(row) | {"iter_s": _times(row["iter_s"], FACTOR)} if slow else row for row, slow in pairs]


def _times(value: str, factor: float) -> str:
    return str(float(value) * factor) if value else ""


def _renamed(rows: Rows, bench: Bench) -> Section:
    """Other sources, ids and groups' names, and another order: the same predictions to the last digit."""
    order = np.random.default_rng(0).permutation(len(rows.all))
    renamed = [
        dict(rows.all[at]) | {"id": f"row {at}", "source": "x" * (at % 7), "group": rows.all[at]["group"][::-1]}
        for at in order
    ]
    trials = [Trial(some, some, intervals=True) for some in (rows.all, renamed)]
    before, after = bench.answers("laws: names", trials)
    columns = {"time": (before.seconds, after.seconds), "memory": (before.gib, after.gib)}
    columns["interval"] = before.high, after.high
    figures = {name: float(np.max(np.abs(new[np.argsort(order)] / old - 1))) for name, (old, new) in columns.items()}
    limits = dict.fromkeys(figures, at_most(0))
    lines = [Line("renamed and shuffled rows", len(order), figures, limits)]
    return Section("Names mean nothing", "largest relative difference of predictions, all rows calibrate", lines)


def _more(rows: Rows) -> Section:
    """What happens to each row's prediction when it gets more of something; profiles of all rows."""
    profiles = learned(rows.all)

    def told(which: Callable[[Row], bool], **changes: Callable[[Row], str]) -> tuple[list[Row], Told]:
        chosen = [row for row in rows.all if which(row)]
        changed = [dict(row) | {name: change(row) for name, change in changes.items()} for row in chosen]
        return chosen, foretold(profiles, changed)

    lines = []
    _, slow = told(_all)
    for factor in FASTER:
        chosen, fast = told(_all, inter_node_gbps=_multiplied("inter_node_gbps", factor))
        lines.append(_law(f"network x {factor:g}: time", chosen, fast.seconds / slow.seconds - 1))
        slow = fast
    lines += [*(_stage(told, stage) for stage in range(3)), _linear(told)]
    how = "every row of the table, profiles of all rows; the largest change is relative"
    return Section("More is never worse", how, lines)


def _multiplied(name: str, factor: float) -> Callable[[Row], str]:
    """What a column holds, times a factor."""
    return lambda row: _times(row[name], factor)


def _all(_: Row) -> bool:
    return True


def _stage(told: Callable[..., tuple[list[Row], Told]], stage: int) -> Line:
    """One ZeRO stage up from `stage`, over the shards the row states or all data-parallel ranks."""

    def shards(row: Row) -> str:
        return row["shard_size"] if float(row["shard_size"] or 0) > 1 else ""

    rows, low = told(_all, zero=lambda _: str(stage), shard_size=shards)
    _, high = told(_all, zero=lambda _: str(stage + 1), shard_size=shards)
    return _law(f"ZeRO {stage} to {stage + 1}: memory", rows, high.gib / low.gib - 1)


def _linear(told: Callable[..., tuple[list[Row], Told]]) -> Line:
    """Steps of once, twice and three times as many micro-batches differ by the same."""

    def stated(row: Row) -> bool:
        return bool(row["mbs"] and row["ga"] and float(row["ga"]) >= 1)

    found = [told(stated, ga=_multiplied("ga", count), gbs=_multiplied("gbs", count)) for count in (1, 2, 3)]
    one, two, three = (each.seconds for _, each in found)
    bent = np.abs(three - 2 * two + one) / one
    return _law("twice and thrice the micro-batches: time linear", found[0][0], bent, 5 * ROUNDING)


def _law(name: str, rows: Sequence[Row], worse: Floats, rounding: float = ROUNDING) -> Line:
    """How often and how far a change that must not be positive is."""
    at, count = int(np.argmax(worse)), int(np.sum(worse > rounding))
    told = f"{name}; worst in {rows[at]['id']}" if count else name
    return Line(told, len(rows), {"violations": float(count), "largest": float(worse[at])}, {"violations": at_most(0)})
