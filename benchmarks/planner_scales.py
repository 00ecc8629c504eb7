"""Choose the scales of the planner's residual process by leaving out one group of rows at a time."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Final

import numpy as np

from benchmarks.planner_figures import BIGGEST, SPLIT, Foretold
from benchmarks.planner_rows import SEEDS, Bench, Rows, Section, Trial, learned
from planner.profiles import Profiles
from planner.residual import Residual, Scales, left_out

GRIDS: Final[Mapping[str, tuple[float, ...]]] = {
    "cluster": (0.3, 0.4, 0.6),
    "framework": (0.1, 0.2, 0.3, 0.4),
    "model": (0, 0.03, 0.06, 0.1, 0.2, 0.3),
    "release": (0, 0.05, 0.1, 0.2, 0.3),
    "layout": (0, 0.05, 0.1, 0.2, 0.3),
    "joint": (0.05, 0.07, 0.1, 0.14, 0.2, 0.3),
    "model_length": (0.35, 0.7, 1.4, 2.8),
    "release_length": (0.15, 0.25, 0.5, 1.0),
    "layout_length": (0.7, 1.4, 2.8, 5.6),
    "software_length": (0.35, 0.7, 1.4, 2.8),
    "shape_length": (0.7, 1.4, 2.8, 5.6),
    "cut_length": (0.5, 1, 2, 4),
    "size_length": (1, 2, 4, 8),
    "alike": (0.02, 0.1, 0.3, 0.5, 0.7, 0.9),
    "noise": (0.02, 0.03, 0.045, 0.07, 0.1),
}
"""Values tried for each scale, one scale after the other."""
ROUNDS: Final = 3
FLOOR: Final = {"dense": 0.02, "experts": 0.04}
"""Errors (of logarithms) below this hardly count: repeated measurements differ by as much."""


def tuned(rows: Rows) -> str:
    """The scales chosen on all rows, as Python."""
    found = scales_of(learned(rows.all))
    text = [f'    "{kind}": Scales(\n' + "".join(_fields(scales)) + "    ),\n" for kind, scales in found.items()]
    return "SCALES: Final = {\n" + "".join(text) + "}"


def _fields(scales: Scales) -> list[str]:
    return [f"        {name}={value},\n" for name, value in asdict(scales).items()]


def scales_of(profiles: Profiles) -> dict[str, Scales]:
    """By kind of model, those that foretell best what one group's residuals are from all the others'.

    Found without a look at the shipped ones, so that a training part's know nothing of the rows held out.
    """
    return {kind: _search(residual, FLOOR[kind]) for kind, residual in profiles.residuals.items()}


def _search(residual: Residual, floor: float) -> Scales:
    """Coordinate search from the middle of the grids; a group is what looks alike to the process."""
    at = residual.at
    looks = np.column_stack([*(np.round(matrix, 6) for matrix in at.features.values()), at.release, at.number])
    group = np.unique(looks, axis=0, return_inverse=True)[1].reshape(-1)

    def loss(scales: Scales) -> float:
        off = left_out(at, residual.found, group, scales)
        return float(np.mean(np.sqrt(floor**2 + off**2)))

    best = Scales(**{name: float(grid[len(grid) // 2]) for name, grid in GRIDS.items()})
    least = loss(best)
    for name in (*GRIDS,) * ROUNDS:
        for value in GRIDS[name]:
            other = replace(best, **{name: float(value)})
            if (found := loss(other)) < least - 1e-6:
                best, least = other, found
    return best


def nested(rows: Rows, bench: Bench) -> list[Section]:
    """Held-out rows with the shipped scales, with those chosen on all rows, and on the training part alone."""
    masks = [rows.quarters(seed)[0] for seed in range(SEEDS)]
    trials = [rows.trial(mask) for mask in masks]
    every, *own = bench.each("scales", _scales_for, [Trial(rows.all, []), *trials])
    ways = {
        "shipped scales": trials,
        "scales chosen on all rows": [replace(trial, scales=every) for trial in trials],
        "in the training part": [replace(trial, scales=scales) for trial, scales in zip(trials, own, strict=True)],
    }
    told = bench.answers("held-out quarters, three ways", [trial for way in ways.values() for trial in way])
    lines = []
    for at, words in enumerate(ways):
        found = Foretold.of(rows, masks, told[at * SEEDS : (at + 1) * SEEDS])
        lines += [
            found.time(f"{name}, {words}", which).without("in interval", "width")
            for name, which in ((BIGGEST, rows.source == BIGGEST), ("dense", ~rows.experts), ("experts", rows.experts))
        ]
    return [Section("What the scales know of the held-out rows", f"{SPLIT}; errors in %", lines)]


def _scales_for(trial: Trial) -> dict[str, Scales]:
    return scales_of(learned(trial.known))
