"""Memory calibrated on measured steps: three factors per profile, drawn to its relatives' where rows are few."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from planner.hardware import ACCELERATORS
from planner.keys import Key
from planner.memory import MemoryConstants, breakdown, peak, runtime, usable
from planner.rows import Steps
from planner.schema import Configs, Floats, take

FACTORS: Final = tuple(field.name for field in fields(MemoryConstants))
ROOT, HOST = "all", "cpu"
"""What all profiles of accelerators, and of processors, descend from."""
NOISE: Final = 0.06
"""Spread of the logarithm of measured over modelled memory within a profile."""
SHARED: Final = 0.1
"""The same of a whole profile."""
BOUND_NOISE: Final = 0.12
"""Spread of what is only known as a bound: a run that did not end, or did, for want of memory."""
SPREAD: Final = ((0.7, 0.25, 0.25), (0.5, 0.3, 0.2), (0.5, 0.2, 0.3))
"""How far the logarithms of the factors lie from the formulas' (for all), from all (a family), from the family's."""
CONFIDENCE: Final = 0.6
"""Share of the measured rows that the margin covers."""
OUTSIDE_GIB: Final = 1.5
"""What lies outside the allocator, where only the allocator's figure is reported: CUDA context and NCCL's buffers."""
FADING: Final = 2.5
"""Spreads from which a violated bound is believed less and less."""
ROOM: Final = 0.93
"""Share of what is usable that runs are taken to have stayed below when they published no memory."""
ROUNDS, FOLDS = 12, 4
UNMEASURED_MARGIN: Final = 1.05
"""Where no row tells its memory."""


@dataclass(frozen=True)
class Level:
    """What was learned of one profile, or of a family of them."""

    factors: tuple[float, ...]
    """In the order of `FACTORS`."""
    outside: float
    """GiB that its programs leave out of the memory they report."""


UNKNOWN: Final = Level(tuple(1.0 for _ in FACTORS), 0.0)
"""The formulas as they stand."""


@dataclass(frozen=True)
class MemoryFit:
    """Factors by profile; a profile nobody measured has its family's, else everybody's."""

    levels: Mapping[str, Level]
    margin: float
    """What a prediction is multiplied by before it is compared with the machine."""

    def level(self, key: str) -> Level:
        """The nearest that is known."""
        known = (self.levels[name] for name in reversed(ancestors(key)) if name in self.levels)
        return next(known, UNKNOWN)

    def at(self, key: str) -> MemoryConstants:
        """The factors of one profile, without axes."""
        return MemoryConstants(**dict(zip(FACTORS, map(np.asarray, self.level(key).factors), strict=True)))

    def constants(self, keys: Sequence[str]) -> MemoryConstants:
        """The factors of several profiles: arrays as long as `keys`."""
        found = np.array([self.level(key).factors for key in keys]).reshape(-1, len(FACTORS))
        return MemoryConstants(**dict(zip(FACTORS, found.T, strict=True)))

    def predict(self, configs: Configs, keys: Sequence[str]) -> Floats:
        """GiB as the programs of these profiles report it; `keys` has one name per configuration."""
        outside = np.array([self.level(key).outside for key in keys])
        return np.asarray(peak(configs, self.constants(keys)) - outside)

    def fits(self, configs: Configs, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Whether the peak with its margin, all that the accelerator holds counted, stays within what is usable."""
        return np.asarray(peak(configs, self.constants(keys)) * self.margin <= usable(configs))

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        return {"margin": self.margin, "levels": {name: asdict(level) for name, level in self.levels.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave; raises KeyError where something is missing."""
        levels = {name: Level(tuple(item["factors"]), item["outside"]) for name, item in data["levels"].items()}
        return cls(levels, data["margin"])


@dataclass(frozen=True)
class _Table:
    """Rows as the fit sees them."""

    parts: Floats
    """GiB by factor at 1, one line per row."""
    goal: Floats
    """GiB measured, all that the accelerator holds counted; or the bound."""
    sign: NDArray[np.int64]
    """0 where it was measured, 1 where the prediction is to stay below, -1 where above."""
    weight: Floats
    """1 / sqrt(rows of the profile that tell the same thing): so that one does not speak for all the others."""
    outside: Floats

    def of(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> "_Table":
        return _Table(self.parts[which], self.goal[which], self.sign[which], self.weight[which], self.outside[which])

    def outside_of(self) -> float:
        """GiB the rows leave out, on average; of measured ones only."""
        told = self.sign == 0
        return float(np.mean(self.outside[told])) if np.any(told) else 0.0


def fit(steps: Steps, keys: Sequence[str]) -> MemoryFit:
    """Factors from rows that tell their memory, that ran out of it, or that at least ran; `keys`: one per row.

    The most probable factors under log-normal priors around the parent profile's (maximum a posteriori), with weights
    that bound what one row can do. The margin is split-conformal: from rows that the fit did not see.
    """
    told = np.isfinite(steps.memory_gib) | steps.ran_out | np.isfinite(steps.seconds)
    names = np.array(keys, dtype=np.str_)[told]
    table = _table(steps.of(told), names)
    order = np.lexsort((table.sign, table.goal, *table.parts.T, names))  # sums, too, do not depend on the rows' order
    table, names = table.of(order), names[order]
    # Rows of one configuration stay together; the fold hangs on nothing but the configuration.
    fold = np.unique(table.parts.round(9), axis=0, return_inverse=True)[1].reshape(-1) % FOLDS
    missed = [_missed(table, names, fold == one) for one in range(FOLDS)]
    errors = np.sort(np.concatenate(missed))
    rank = int(np.ceil(CONFIDENCE * (len(errors) + 1))) - 1
    margin = float(np.exp(errors[min(rank, len(errors) - 1)])) if len(errors) else UNMEASURED_MARGIN
    return MemoryFit(_levels(table, names), max(margin, 1.0))


def _missed(table: "_Table", names: NDArray[np.str_], held_out: NDArray[np.bool_]) -> Floats:
    """Logarithms of measured over predicted memory of rows held out."""
    learned = MemoryFit(_levels(table.of(~held_out), names[~held_out]), 1.0)
    seen = held_out & (table.sign == 0)
    factors = np.array([learned.level(key).factors for key in names[seen]]).reshape(-1, len(FACTORS))
    return np.asarray(np.log(table.goal[seen] / np.sum(table.parts[seen] * factors, axis=1)))


def _levels(table: "_Table", names: NDArray[np.str_]) -> dict[str, Level]:
    keys = sorted(set(names.tolist()))
    levels: dict[str, Level] = {}
    for depth, spread in enumerate(SPREAD):
        for name in sorted({ancestors(key)[depth] for key in keys}):
            mine = [key for key in keys if ancestors(key)[depth] == name]
            parent = levels[ancestors(mine[0])[depth - 1]] if depth else UNKNOWN
            levels[name] = _level(table.of(np.isin(names, mine)), parent, spread, alone=depth == len(SPREAD) - 1)
    return levels


def _level(table: "_Table", parent: Level, spread: tuple[float, ...], *, alone: bool) -> Level:
    """Gauss-Newton with weights renewed each round (Huber-like, 1 / sqrt(1 + r^2))."""
    width, start = np.array(spread), np.log(parent.factors)
    # What few rows say may rest on one wrong setting that they share.
    noise = np.where(table.sign == 0, np.hypot(NOISE, SHARED * table.weight), BOUND_NOISE)
    noise = noise if alone else noise / table.weight
    at = start
    for _ in range(ROUNDS):
        parts = table.parts * np.exp(at)
        total = parts.sum(axis=1)
        error = np.log(total / table.goal)
        error = np.where(table.sign == 0, error, np.where(error * table.sign > 0, error, 0.0)) / noise
        # A bound that contradicts everything else is a misprinted setting, so its pull fades (Geman and McClure 1987).
        weight = np.where(table.sign == 0, 1 / np.sqrt(1 + error**2), 1 / (1 + (error / FADING) ** 2) ** 2)
        slope = parts / total[:, None] / noise[:, None]
        normal = (slope * weight[:, None]).T @ slope + np.diag(1 / width**2)
        step = np.linalg.solve(normal, (slope * weight[:, None]).T @ error + (at - start) / width**2)
        at = at - np.clip(step, -0.5, 0.5)
    measured = bool(np.any(table.sign == 0))
    return Level(tuple(float(value) for value in np.exp(at)), table.outside_of() if measured else parent.outside)


def ancestors(key: str) -> tuple[str, ...]:
    """From everybody to the profile itself: kind of machine, generation and style, then the key as it is."""
    machine, _, rest = key.partition("|")
    style = Key(machine, rest.partition("|")[0], "", experts=False).style
    known = ACCELERATORS.get(machine)
    return ROOT if known else HOST, f"{known.generation if known else machine}|{style}", key


def leanest(steps: Steps, gib: Floats) -> NDArray[np.int64]:
    """Of every row's configurations the one that needs least: where no micro-batch is stated, nothing says more."""
    order = np.lexsort((np.broadcast_to(gib, steps.own.shape), steps.own))
    return np.asarray(order[np.searchsorted(steps.own[order], np.arange(len(steps.rows)))])


def _table(steps: Steps, keys: NDArray[np.str_]) -> "_Table":
    which = leanest(steps, peak(steps.configs))
    configs = take(steps.configs, which)
    measured = np.isfinite(steps.memory_gib)
    sign = np.where(measured, 0, np.where(steps.ran_out, -1, 1))
    outside = np.array([OUTSIDE_GIB * ("reserved" in row.get("mem_kind", "")) for row in steps.rows]) * measured
    limit = np.broadcast_to(usable(configs), which.shape)
    _, place = np.unique(keys, return_inverse=True)
    alike = np.zeros(len(keys))
    for kind in (0, 1, -1):
        alike += (sign == kind) * np.bincount(place, sign == kind)[place]
    limit = limit * np.where(steps.ran_out, 1.0, ROOM)
    goal = np.where(measured, np.nan_to_num(steps.memory_gib) + outside, limit)
    return _Table(_by_factor(configs, len(keys)), goal, sign, 1 / np.sqrt(alike), outside)


def _by_factor(configs: Configs, rows: int) -> Floats:
    """GiB that each of `FACTORS` scales, one column each."""
    parts = breakdown(configs)
    fixed, states = runtime(configs), parts["weights"] + parts["gradients"] + parts["optimizer"]
    rest = sum(parts.values(), start=np.zeros(())) - fixed - states
    return np.stack([np.broadcast_to(part, (rows,)) for part in (fixed, states, rest)], axis=1)
