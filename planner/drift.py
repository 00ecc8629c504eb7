"""Where predicted and measured part: by how much, and which constant, changed alone, explains the steps best."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from planner.constants import NAMES, Constants
from planner.fit import LOOSE, NOISE, TIGHT, bound, free, huber, modelled
from planner.rows import Steps
from planner.schema import Floats, take
from planner.speed import phases, step_seconds

EVERYTHING: Final = "everything"
"""Named in place of a phase by the constant that all phases share."""
REACH: Final = 4.0
"""How far from what it was a constant is looked for, in units of its spread; beyond, it explains nothing."""
TRIED: Final = 81
MEMORY_OFF: Final = 0.15
"""Measured memory further than this from the predicted (as a share of it) is told: pooled, the formulas miss 12 %."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One constant that would explain what was measured."""

    phase: str
    """The phase of the step that it changes most."""
    constant: str
    value: float
    """Of the profile; and the value that explains the steps best."""
    needed: float
    left: float
    """What stays unexplained: the typical distance of predicted from measured, as a share of the measured."""
    strain: float
    """How much it asks one to believe, as -log(probability): the distances left, and how far the constant moved."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One training beside its prediction. Units: seconds per step, GiB per rank."""

    seconds: float
    low: float
    high: float
    """Ends of the 90 % interval."""
    measured_seconds: float
    gib: float
    measured_gib: float
    """NaN where it was not measured."""
    phases: Mapping[str, float]
    memory: Mapping[str, float]
    suspects: tuple[Suspect, ...]
    """The most likely first; empty where the measured time lies within the interval."""

    @property
    def off(self) -> float:
        """Measured over predicted step time, less one."""
        return self.measured_seconds / self.seconds - 1

    @property
    def time_drifts(self) -> bool:
        """Whether the measured time lies beyond the 90 % interval."""
        return not self.low <= self.measured_seconds <= self.high

    @property
    def memory_drifts(self) -> bool:
        """Whether measured memory is further from the predicted than the formulas usually are."""
        return abs(self.measured_gib / self.gib - 1) > MEMORY_OFF

    def sentences(self) -> list[str]:
        """What a person should know; nothing where predicted and measured agree."""
        told = []
        if self.time_drifts:
            slower = "slower" if self.off > 0 else "faster"
            told.append(
                f"A step took {self.measured_seconds:.3g} s, {abs(self.off):.0%} {slower} than planned "
                f"({self.low:.3g} to {self.high:.3g} s){self._why()}."
            )
        if self.memory_drifts:
            more = self.measured_gib - self.gib
            part = min(self.memory, key=lambda name: _distance(self.memory[name], more))
            told.append(
                f"A rank held {self.measured_gib:.3g} GiB, {self.gib:.3g} were planned: most likely {part}, "
                f"planned at {self.memory[part]:.3g} GiB."
            )
        return told

    def _why(self) -> str:
        if not self.suspects:
            return ""
        first = self.suspects[0]
        return f": most likely {first.phase} ({first.constant} {first.needed:.3g} in place of {first.value:.3g})"


def suspects(steps: Steps, known: Constants) -> tuple[Suspect, ...]:
    """Every constant that, changed alone, brings the rows of one profile nearer to what was measured; best first.

    Each is tried over its range; its strain is the least Huber loss of the log ratios plus the squared way it moved,
    in units of the spread that `fit` allows it. Constants (each without axes) that no row depends on are left out.
    """
    found = [one for name in NAMES if (one := _suspect(steps, known, name)) is not None]
    return tuple(sorted(found, key=lambda one: one.strain))


def explain(measured: Steps, times: tuple[float, float, float], gib: Mapping[str, float], known: Constants) -> Drift:
    """The drift of the first of the rows, all of one profile; the others help to tell which phase is off.

    `times` are its predicted seconds and the ends of their interval, `gib` its predicted memory by part.
    """
    one = measured.of(np.arange(len(measured.rows)) == 0)
    _, fastest = one.fastest(step_seconds(one.configs, known))
    seconds, low, high = times
    found = float(one.seconds[0])
    parts = {name: float(np.ravel(value)[0]) for name, value in phases(take(one.configs, fastest), known).items()}
    share = seconds / sum(parts.values())  # what was learned besides the physics belongs to all phases alike
    return Drift(
        seconds,
        low,
        high,
        found,
        sum(gib.values()),
        float(one.memory_gib[0]),
        {name: value * share for name, value in parts.items() if value > 0},
        gib,
        () if low <= found <= high else suspects(measured, known),
    )


def _suspect(steps: Steps, known: Constants, name: str) -> Suspect | None:
    spread, value = LOOSE.get(name, TIGHT), float(getattr(known, name))
    moved = np.linspace(-REACH, REACH, TRIED)
    values = np.asarray(bound(name, free(name, value) + moved * spread))
    off = np.log(modelled(steps, known, {name: values}) / steps.seconds)
    if np.ptp(off, axis=0).max() < NOISE / 10:
        return None
    strain = huber(off / NOISE).sum(axis=1) + 0.5 * moved**2
    best = int(np.argmin(strain))
    if best == TRIED // 2:
        return None
    left = float(np.median(np.expm1(np.abs(off[best]))))
    return Suspect(
        _phase(steps, known, name, values[best]), name, value, float(values[best]), left, float(strain[best])
    )


def _phase(steps: Steps, known: Constants, name: str, needed: float) -> str:
    if name == "scale":
        return EVERYTHING
    before, after = (_totals(steps, one) for one in (known, replace(known, **{name: np.asarray(needed)})))
    return max(before, key=lambda phase: abs(after[phase] - before[phase]))


def _totals(steps: Steps, constants: Constants) -> dict[str, float]:
    """Every phase's share of the step, summed over the rows."""
    told = phases(steps.configs, constants)
    whole: Floats = sum(told.values(), start=np.zeros(()))
    return {name: float(np.sum(value / whole)) for name, value in told.items()}


def _distance(planned: float, more: float) -> float:
    """By what factor a part would have to be off to explain so many GiB more than planned."""
    return abs(float(np.log((planned + more) / planned))) if planned > 0 and planned + more > 0 else np.inf
