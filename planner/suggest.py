"""Which layouts to measure next: those that would narrow the predictions most for the accelerator hours they take.

    python -m planner suggest --profiles DIR --rows ROWS.csv [--model WORD] [--count 5] [--out NEXT.csv] [--json]

Rows with a step time have been measured; rows without one may be, and so may the neighbours of every row (a size twice
or half as large, another ZeRO stage or recomputation that its program was seen with). The model is made linear in its
constants around the profile, with the prior that fitting uses, so that what a row would teach is known before it is
measured (Bayesian experimental design, Chaloner and Verdinelli 1995): the next row is the one that takes most off the
mean variance per hour.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.constants import NAMES, Constants
from planner.errors import PlanError
from planner.fit import LOOSE, NOISE, TIGHT, bound, free, modelled
from planner.keys import Key, key_of
from planner.memory import MemoryConstants, fits
from planner.profiles import Profile, Profiles
from planner.rows import Row, Steps, read, steps
from planner.schema import Floats
from planner.speed import step_seconds

STEPS: Final = 20
"""Optimizer steps of a measurement, warm-up included."""
START_S: Final = 300.0
"""Before the first step: processes, kernels, the first batches. An assumption."""
NINETY: Final = 1.645
"""Standard deviations on either side of the middle that hold 90 % of a normal distribution."""
WIDTH: Final = 1e-3
SIZES: Final = (
    *("n_gpus", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq"),
    *("tp", "pp", "vpp", "dp", "cp", "ep", "mbs", "ga"),
)
"""Numbers that, with the ZeRO stage and four words, make a row the measurement that it is."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A step worth measuring."""

    row: Row
    """With the columns of measured tables, the measured ones empty."""
    seconds: float
    """Predicted, per step."""
    gpu_hours: float
    before: float
    """Half the 90 % interval that the constants leave in the mean of the profile's predictions, as a share of them; and
    once this row and those above it are measured."""
    after: float


class Beliefs:
    """What the constants of one profile may still be, and what that leaves open in the predictions of some rows."""

    def __init__(self, measured: Steps | None, candidates: Steps, known: Constants) -> None:
        """Start from the prior that fits use, narrowed by what was measured; `known` has no axes."""
        curvature = np.diag([1 / LOOSE.get(name, TIGHT) ** 2 for name in NAMES])
        if measured is not None:
            slopes = sensitivities(measured, known)
            curvature = curvature + slopes.T @ slopes / NOISE**2
        self.covariance: Matrix = np.linalg.inv(curvature)
        self.slopes = sensitivities(candidates, known)

    @property
    def open(self) -> float:
        """Half the width of the 90 % interval, of the candidates' mean variance, as a share of the prediction."""
        variance = np.einsum("ni,ij,nj->n", self.slopes, self.covariance, self.slopes)
        return float(np.expm1(NINETY * np.sqrt(variance.mean())))

    def gains(self) -> Matrix:
        """By how much each candidate, measured, would lower the mean variance of all."""
        told = self.slopes @ self.covariance
        mean = self.slopes.T @ self.slopes / len(self.slopes)
        lowered = np.einsum("ni,ij,nj->n", told, mean, told)
        return np.asarray(lowered / (NOISE**2 + np.einsum("ni,ni->n", told, self.slopes)))

    def learn(self, candidate: int) -> None:
        """Take a candidate as measured (Sherman and Morrison)."""
        slope = self.slopes[candidate]
        told = self.covariance @ slope
        self.covariance = self.covariance - np.outer(told, told) / (NOISE**2 + slope @ told)


def sensitivities(rows: Steps, known: Constants) -> Matrix:
    """Change of the logarithm of every step time with each constant, in `fit`'s unbounded units: (rows, constants)."""
    count = len(NAMES)
    here = np.array([free(name, float(getattr(known, name))) for name in NAMES])
    points = np.vstack([here + WIDTH * np.eye(count), here - WIDTH * np.eye(count)])
    logs = np.log(modelled(rows, known, {name: bound(name, points[:, at]) for at, name in enumerate(NAMES)}))
    return np.asarray((logs[:count] - logs[count:]).T / (2 * WIDTH), dtype=np.float64)


def suggest(table: Sequence[Row], profiles: Profiles, count: int) -> list[Suggestion]:
    """The `count` most informative rows to measure, the best first; profiles are independent of each other.

    Raises `PlanError` if there is no candidate.
    """
    found = [one for key, rows in _by_profile(table) for one in _of_profile(rows, _profile(profiles, key), count)]
    if not found:
        raise PlanError("no layout is left to measure: add rows without iter_s, or rows of other models.")
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])][:count]


def neighbours(row: Row, others: Sequence[Row]) -> Iterator[Row]:
    """What differs from a row in one choice that its program has been seen to make in `others`, and can be run."""
    for name in ("mbs", "dp", *(name for name in ("tp", "pp") if any(float(one[name] or 1) > 1 for one in others))):
        for factor in (2.0, 0.5):
            yield from _checked(row, {name: float(row[name] or 1) * factor})
    for name in ("recompute", "zero"):
        for choice in sorted({one[name] for one in others} - {row[name], "unknown"}):
            yield from _checked(row, {name: choice})


def _checked(row: Row, change: Mapping[str, float | str]) -> Iterator[Row]:
    """The changed row with what follows from the change, if its sizes divide."""
    told = dict(row) | {name: value if isinstance(value, str) else f"{value:g}" for name, value in change.items()}
    size = {name: float(told[name] or 1) for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "mbs")}
    batch = float(row["gbs"] or 0) or float(row["mbs"] or 1) * float(row["ga"] or 1) * float(row["dp"] or 1)
    ranks = size["tp"] * size["pp"] * size["dp"] * size["cp"]
    parts = [
        *(batch / (size["dp"] * size["mbs"]), float(row["heads"]) / size["tp"], float(row["kv_heads"]) / size["tp"]),
        *(float(row["layers"]) / (size["pp"] * size["vpp"]), ranks / size["ep"], *size.values()),
    ]
    stage = float(told["zero"] or 0)
    clash = (stage >= 2 and size["pp"] > 1) or size["tp"] > float(row["gpus_per_node"]) or (stage and size["dp"] == 1)
    if clash or any(part < 1 or part % 1 for part in parts):
        return
    follows = {"gbs": batch, "ga": parts[0], "n_gpus": ranks, "shard_size": size["dp"] if stage else 1.0}
    fresh = told | {name: f"{value:g}" for name, value in follows.items()} | {"iter_s": "", "mem_gib": "", "group": ""}
    for name in ("tok_s_gpu", "tflops_gpu"):
        if name in fresh:
            fresh[name] = ""
    if _layout(fresh) != _layout(row):
        yield fresh


def _layout(row: Row) -> tuple[str | float, ...]:
    """What makes two rows the same measurement."""
    words = tuple(row[name] for name in ("hw", "framework", "precision", "recompute"))
    sizes = tuple(float(row[name] or 1) for name in SIZES)
    return (*words, float(row["zero"] or 0), *sizes)


def _by_profile(table: Sequence[Row]) -> list[tuple[Key, list[Row]]]:
    return [(key, [row for row in table if key_of(row) == key]) for key in sorted({key_of(row) for row in table})]


def _profile(profiles: Profiles, key: Key) -> Profile:
    cluster = {"per_node": key.per_node, "gbps": key.gbps}
    return profiles.find(key.accelerator, key.framework, key.precision, experts=key.experts, **cluster)


def _of_profile(rows: Sequence[Row], known: Profile, count: int) -> list[tuple[float, Suggestion]]:
    """Suggestions among the rows of one profile, each with the variance it takes off per accelerator hour."""
    links, done = known.profiles.links, [row for row in rows if row.get("iter_s")]
    fresh = _candidates(rows, {_layout(row) for row in done})
    candidates = steps(fresh, links)
    fitting = _fitting(candidates, known.memory)
    if not fitting.any():
        return []
    candidates = candidates.of(fitting)
    beliefs = Beliefs(steps(done, links) if done else None, candidates, known.constants)
    seconds, _ = candidates.fastest(step_seconds(candidates.configs, known.constants))
    ranks = np.array([float(row["n_gpus"]) for row in candidates.rows])
    hours = ranks * (STEPS * seconds + START_S) / 3600
    return list(_greedy(beliefs, candidates, seconds, hours, count))


def _candidates(rows: Sequence[Row], seen: set[tuple[str | float, ...]]) -> list[Row]:
    """The rows without a time, and all neighbours, each layout once and none of those seen."""
    told = [row for row in rows if not row.get("iter_s")] + [other for row in rows for other in neighbours(row, rows)]
    fresh = {_layout(row): row for row in told if _layout(row) not in seen}
    return [dict(row, id=f"next-{at}") for at, row in enumerate(fresh.values())]


def _greedy(
    beliefs: Beliefs, candidates: Steps, seconds: Floats, hours: Floats, count: int
) -> Iterator[tuple[float, Suggestion]]:
    left = np.ones(len(hours), dtype=bool)
    for _ in range(min(count, len(hours))):
        worth = np.where(left, beliefs.gains() / hours, -np.inf)
        best = int(np.argmax(worth))
        before = beliefs.open
        beliefs.learn(best)
        left[best] = False
        yield (
            len(hours) * float(worth[best]),
            Suggestion(candidates.rows[best], float(seconds[best]), float(hours[best]), before, beliefs.open),
        )


def _fitting(candidates: Steps, memory: MemoryConstants) -> NDArray[np.bool_]:
    """Which rows fit into memory with any of their configurations."""
    if not candidates.rows:
        return np.zeros(0, dtype=np.bool_)
    whole = np.broadcast_to(fits(candidates.configs, memory), candidates.own.shape)
    return np.bincount(candidates.own, whole, len(candidates.rows)) > 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the suggestions; 2 and one sentence where they cannot be made."""
    asked = _parser().parse_args(argv)
    try:
        table = [row for row in read(asked.rows).rows if asked.model.lower() in row.get("model", "").lower()]
        found = suggest(table, Profiles.load(asked.profiles), asked.count)
        if asked.out:
            _write(asked.out, [one.row for one in found])
    except PlanError as problem:
        print(f"suggest: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:
        print(f"suggest: {asked.out} cannot be written: {problem.strerror}.", file=sys.stderr)
        return 2
    print(json.dumps([asdict(one) for one in found], indent=1) if asked.json else "\n".join(_lines(found)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m planner suggest", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profiles", type=Path, required=True, help="folder that calibrate wrote")
    parser.add_argument("--rows", type=Path, required=True, help="measured steps, and steps that may be (no iter_s)")
    parser.add_argument("--model", default="", help="only rows whose model's name holds this word")
    parser.add_argument("--count", type=int, default=5, help="how many to name; default: 5")
    parser.add_argument("--out", type=Path, help="write their rows here, to be filled in and calibrated on")
    parser.add_argument("--json", action="store_true", help="print for programs")
    return parser


def _write(path: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def _lines(found: Iterable[Suggestion]) -> Iterator[str]:
    for at, one in enumerate(found, 1):
        row = one.row
        size = {name: float(row[name] or 1) for name in ("n_gpus", "tp", "pp", "cp", "ep", "dp", "mbs", "ga")}
        many = [f"{name}{size[name]:g}" for name in ("tp", "pp", "cp", "ep", "dp") if size[name] > 1]
        cut = " ".join([*many, f"zero{float(row['zero'] or 0):g}"])
        yield (
            f"{at}. {row.get('model') or row['framework']} on {size['n_gpus']:g} {row['hw']}: {cut}, micro batch "
            f"{size['mbs']:g} x {size['ga']:g}, recompute {row['recompute']}: {one.seconds:.3g} s a step, "
            f"{one.gpu_hours:.3g} accelerator hours, narrows the intervals from ±{one.before:.1%} to ±{one.after:.1%}"
        )
