"""How right the planner is about rows it has not seen: time, memory, intervals, and the choice of a layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_rows import PARTS, SEEDS, Bench, Line, Mask, Rows, Section, Told, Trial, at_most, errors
from planner.keys import key_of
from planner.schema import Floats

BIGGEST, CHOSEN_FROM = "vtrain_multi", ("vtrain_multi", "bigscience_tr11")
FEW: Final = 5
"""Measured steps that a new cluster is given."""
FEWEST_LEFT: Final = 4
"""Configurations to foretell after those, that a source must have to be counted."""
FEWEST_ROWS: Final = 3
"""Rows of a source whose error counts towards the median over sources."""
FEWEST_LAYOUTS: Final = 4
COVERED: Final = (85.0, 95.0)
"""Percent of rows that 90 % intervals are to hold."""
SPLIT: Final = f"a quarter of the groups held out, {SEEDS} seeds, pooled"
COMPARABLE: Final = "source hidden layers heads kv_heads head_dim ffn seq vocab n_gpus gbs precision"
"""What rows have in common that differ in their layout."""
Limits = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Foretold:
    """Answers for rows that were not calibrated on; a row may occur more than once."""

    rows: Rows
    at: NDArray[np.int64]
    """Which row each answer is for."""
    told: Mapping[str, NDArray[Any]]
    """Columns of `Told`."""

    @classmethod
    def of(cls, rows: Rows, masks: Sequence[Mask], answers: Sequence[Told]) -> Self:
        """The answers for the rows of some masks, joined."""
        names = ("seconds", "low", "high", "gib", "fits")
        told = {name: np.concatenate([getattr(one, name) for one in answers]) for name in names}
        return cls(rows, np.concatenate([np.flatnonzero(mask) for mask in masks]), told)

    def time(self, name: str, which: Mask, limits: Limits | None = None) -> Line:
        """How right the times and intervals of a table's rows `which` are."""
        mine = which[self.at] & self.rows.timed[self.at]
        true = self.rows.seconds[self.at][mine]
        if not len(true):
            return Line(name, 0, {})
        seconds, low, high = (self.told[column][mine] for column in ("seconds", "low", "high"))
        within = 100 * float(np.mean((low <= true) & (true <= high)))
        width = 100 * float(np.median(high / seconds) - 1)
        return Line(name, len(true), errors(seconds, true) | {"in interval": within, "width": width}, limits or {})

    def memory(self, name: str, which: Mask, limits: Limits | None = None) -> Line:
        """How right the memory of a table's rows `which` is."""
        true = self.rows.memory_gib[self.at]
        mine = which[self.at] & np.isfinite(true)
        figures = errors(self.told["gib"][mine], true[mine]) if np.any(mine) else {}
        return Line(name, int(mine.sum()), figures, limits or {})

    def refused(self, name: str, which: Mask, limits: Limits | None = None) -> Line:
        """How many of a table's rows `which` are said not to fit."""
        mine = which[self.at]
        count, refused = int(mine.sum()), int(np.sum(~self.told["fits"][mine]))
        figures = {"refused": float(refused), "not refused": float(count - refused), "percent": 100 * refused / count}
        return Line(name, count, figures, limits or {})


def held_out(rows: Rows, bench: Bench) -> list[Section]:
    """Time, intervals and memory of rows held out."""
    masks = [rows.quarters(seed)[0] for seed in range(SEEDS)]
    told = bench.answers("held-out quarters", [rows.trial(mask, intervals=True) for mask in masks])
    rest = rows.quarters(0)[1:]
    others = bench.answers("the other quarters", [rows.trial(mask) for mask in rest])
    found = Foretold.of(rows, masks, told)
    return [_time(found), _memory(found), _refused(Foretold.of(rows, [masks[0], *rest], [told[0], *others]))]


def _time(found: Foretold) -> Section:
    rows, covered = found.rows, {"in interval": COVERED}
    goals: dict[str, Limits] = {BIGGEST: {"MAPE": at_most(6)}}
    lines = [found.time(name, rows.source == name, goals.get(name)) for name in rows.sources()]
    lines += [
        found.time("dense, pooled", ~rows.experts, {"MAPE": at_most(6), "median": at_most(3), **covered}),
        found.time("experts, pooled", rows.experts, {"MAPE": at_most(18), **covered}),
        found.time("all, pooled", rows.timed, covered),
    ]
    how = f"{SPLIT}; errors in %, percent of rows in the 90 % interval, its median + side"
    return Section("Step time", how, [line for line in lines if line.n])


def _memory(found: Foretold) -> Section:
    rows = found.rows
    goals: dict[str, Limits] = {"bigscience_tr11": {"MAPE": at_most(6)}}
    lines = [found.memory(name, rows.source == name, goals.get(name)) for name in rows.sources()]
    lines.append(found.memory("pooled", np.isfinite(rows.memory_gib), {"MAPE": at_most(12)}))
    return Section("Peak memory", f"{SPLIT}; errors in %", [line for line in lines if line.n])


def _refused(found: Foretold) -> Section:
    rows, ran = found.rows, ~found.rows.ran_out
    lines = [found.refused(f"really ran: {name}", ran & (rows.source == name)) for name in rows.sources()]
    lines = [
        found.refused("ran out of memory", rows.ran_out, {"not refused": at_most(1)}),
        found.refused("really ran", ran, {"percent": at_most(5)}),
        *(line for line in lines if line.figures["refused"]),
    ]
    return Section("Refused for memory", f"every row held out once, in {PARTS} parts of whole groups", lines)


def clusters(rows: Rows, bench: Bench) -> list[Section]:
    """Time on clusters nobody calibrated."""
    names = [name for name in rows.sources() if np.any(rows.timed & (rows.source == name))]
    masks = [rows.source == name for name in names]
    told = bench.answers("never seen", [rows.trial(mask, intervals=True) for mask in masks])
    found = Foretold.of(rows, masks, told)
    goals: dict[str, Limits] = {BIGGEST: {"MAPE": at_most(13)}}
    lines = [found.time(name, rows.source == name, goals.get(name)) for name in names]
    dense = [line for line, mask in zip(lines, masks, strict=True) if not np.any(rows.experts[mask])]
    middles = [
        _middle(
            [line for line in some if line.n >= FEWEST_ROWS], f"median of {words}, {FEWEST_ROWS} rows and more", MAPE=15
        )
        for words, some in (("dense sources", dense), ("sources", lines))
    ]
    lines += [
        found.time("dense, pooled", ~rows.experts),
        found.time("experts, pooled", rows.experts),
        found.time("all, pooled", rows.timed),
        *middles,
    ]
    how = (
        "each source left out of the calibration; errors in %, percent of rows in the 90 % interval, its median + side"
    )
    return [Section("Clusters nobody calibrated", how, lines)]


def _middle(lines: Sequence[Line], name: str, **most: float) -> Line:
    """The medians of some figures over sources, or profiles, and what they are to be at most."""
    figures = {each.replace("_", " "): limit for each, limit in most.items()}
    middles = {each: float(np.median([line.figures[each] for line in lines])) for each in figures}
    return Line(name, len(lines), middles, {each: at_most(limit) for each, limit in figures.items()})


def few(rows: Rows, bench: Bench) -> list[Section]:
    """Time on clusters of which a few steps were measured."""
    profile = np.array([str(key_of(row)) for row in rows.all])
    return [_few(rows, bench, rows.source, "source"), _few(rows, bench, profile, "profile")]


def _few(rows: Rows, bench: Bench, label: NDArray[np.str_], kind: str) -> Section:
    """Each source, or profile, without any of its steps and with a few, several times."""
    groups = {name: len(set(rows.group[rows.timed & (label == name)].tolist())) for name in np.unique(label)}
    names = [name for name, count in groups.items() if count >= FEW + FEWEST_LEFT]
    cases = [_given(rows, label == name, seed) for name in names for seed in (None, *range(SEEDS))]
    told = bench.answers(f"after {FEW} steps of a {kind}", [trial for trial, _ in cases])
    each = [Foretold.of(rows, [mask], [one]).time("", mask) for (_, mask), one in zip(cases, told, strict=True)]
    lines, dense = list[Line](), list[Line]()
    for at, name in enumerate(names):
        before, *after = each[at * (SEEDS + 1) :][: SEEDS + 1]
        mapes = [one.figures["MAPE"] for one in after]
        figures = {"MAPE": float(np.mean(mapes)), "best seed": min(mapes), "worst seed": max(mapes)}
        lines.append(Line(name, sum(one.n for one in after), {"MAPE before": before.figures["MAPE"]} | figures))
        dense += [] if np.any(rows.experts[label == name]) else lines[-1:]
    how = f"all other {kind}s and {FEW} rows by chance calibrate, the rest is foretold; {SEEDS} seeds; errors in %"
    goals = {"MAPE_before": 15, "MAPE": 8}
    middles = [_middle(some, f"median of {words}{kind}s", **goals) for words, some in (("dense ", dense), ("", lines))]
    return Section(f"A new {kind} after {FEW} measured steps", how, [*lines, *middles])


def _given(rows: Rows, ours: Mask, seed: int | None) -> tuple[Trial, Mask]:
    """A few of our rows (none without a seed) beside all others; and the rest, less what is the same configuration."""
    ours = ours & rows.timed
    few = 0 if seed is None else FEW
    chosen = np.random.default_rng(seed or 0).choice(np.flatnonzero(ours), few, replace=False)
    given = np.isin(np.arange(len(rows.all)), chosen)
    unseen = ours & ~np.isin(rows.group, rows.group[chosen])
    return rows.trial(unseen, ~ours | given), unseen


def sizes(rows: Rows, bench: Bench) -> list[Section]:
    """Time of model sizes nobody measured: the source with most of them, one width of model left out at a time."""
    mine = rows.source == BIGGEST
    width = np.array([row["hidden"] for row in rows.all])
    widths = sorted(set(width[mine].tolist()), key=float)
    masks = [mine & (width == one) for one in widths]
    found = Foretold.of(rows, masks, bench.answers("model sizes", [rows.trial(mask) for mask in masks]))
    lines = [found.time(f"hidden {one}", mask) for one, mask in zip(widths, masks, strict=True)]
    lines.append(found.time("pooled", mine, {"MAPE": at_most(10)}))
    how = f"{BIGGEST}: each width of model left out; errors in %"
    return [Section("Model sizes nobody measured", how, [line.without("in interval", "width") for line in lines])]


def choosing(rows: Rows, bench: Bench) -> list[Section]:
    """What the planner's choice of a layout costs, where all were measured."""
    names = np.array(["|".join(row[column] for column in COMPARABLE.split()) for row in rows.all])
    eligible = rows.timed & np.isin(rows.source, CHOSEN_FROM)
    masks = [eligible & (names == name) for name in np.unique(names[eligible])]
    masks = [mask for mask in masks if len(set(rows.group[mask])) >= FEWEST_LAYOUTS]
    told = bench.answers("choosing", [rows.trial(mask) for mask in masks])
    lines = [_chosen(rows, mask, one) for mask, one in zip(masks, told, strict=True)]
    worst = {name: max(line.figures[name] for line in lines) for name in ("top 1", "best of top 3")}
    lines.append(Line("worst", len(lines), worst, {"best of top 3": at_most(5)}))
    how = (
        f"rows alike in {COMPARABLE}, with {FEWEST_LAYOUTS} layouts and more; none of them calibrates; how much slower "
        "than the fastest the chosen ones really are, in %; errors in %"
    )
    return [Section("Choosing a layout", how, lines)]


def _chosen(rows: Rows, mask: Mask, told: Told) -> Line:
    layouts, own = np.unique(rows.group[mask], return_inverse=True)
    measured = np.array([np.median(rows.seconds[mask][own == at]) for at in range(len(layouts))])
    foretold = np.array([told.seconds[own == at][0] for at in range(len(layouts))])
    order = np.argsort(foretold, kind="stable")
    slower: Floats = 100 * (measured / measured.min() - 1)
    figures = {"top 1": float(slower[order[0]]), "best of top 3": float(slower[order[:3]].min())}
    row = rows.where(mask)[0]
    name = f"{row['source']} {row['hidden']} x {row['layers']}, {row['heads']} heads, {row['n_gpus']} GPUs"
    return Line(name, len(layouts), figures | errors(foretold, measured), {"best of top 3": at_most(5)})
