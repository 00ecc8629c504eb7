"""How often to save a checkpoint: what saving costs against what a failure loses (Young 1974, Daly 2006).

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner.errors import PlanError
from planner.model import parameters
from recipes.weights import adapters

if TYPE_CHECKING:
    from planner.estimate import Estimate
    from recipes.spec import Recipe

HOURS_BETWEEN_FAILURES: Final = 54 * 24 * 16_384 / 419
"""Accelerator-hours from one unplanned interruption to the next, 50,677: Llama 3 405B had 419 of them (466 with planned
maintenance) in 54 days on 16,384 H100s (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4)."""
BYTES_PER_WEIGHT: Final = 12
"""A checkpoint's fp32 weight and two fp32 moments of Adam."""
HERE_S: Final = 900.0
"""Between two checkpoints on this machine."""
NODE_GB_PER_S: Final = 1.0
"""What one node writes to its storage, where nobody measured it. An assumption: a local disk took 2.6 GB/s."""


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to save, in steps, and what it costs beside what the recipe says."""

    every: int
    """Optimizer steps between two saves."""
    interval_s: float
    """Undisturbed training between two saves. Unit: seconds, as are the others."""
    save_s: float
    failure_s: float
    """Mean time from one failure of any accelerator to the next."""
    waste: float
    """Time spent on saves and on doing lost steps again, as a share of the undisturbed training time."""
    yours: int
    """What the recipe says, in steps, and what that wastes."""
    your_waste: float

    def __str__(self) -> str:
        """The advice as a sentence."""
        why = f"one of the accelerators fails about every {_span(self.failure_s)}, a save takes {_span(self.save_s)}"
        best = f"every {self.every:,} steps ({_span(self.interval_s)})"
        if self.your_waste < self.waste + 0.001:
            return f"Checkpoints every {self.yours:,} steps waste {self.your_waste:.1%}, hardly more than any: {why}."
        return (
            f"Save checkpoints {best}, which wastes {self.waste:.1%} of the time; yours every {self.yours:,} steps "
            f"wastes {_share(self.your_waste)}: {why}."
        )


def advise(step_s: float, save_s: float, accelerators: int, yours: int, steps: int) -> Advice:
    """The best `train.checkpoint_every` for a run of `steps` steps, beside `yours`. Times in seconds.

    The last step is always saved, so no interval is longer than the run. Raises `PlanError` for a value that is not
    positive.
    """
    failure_s = between_failures_s(accelerators)
    told = {"step time": step_s, "save time": save_s, "interval in steps": yours, "number of steps": steps}
    _check(told)
    best = _round(daly_s(save_s, failure_s) / step_s)
    every = min(max(best, 1), steps)

    def cost(interval: int) -> float:
        return waste(min(interval, steps) * step_s, save_s, failure_s)

    return Advice(every, every * step_s, save_s, failure_s, cost(every), yours, cost(yours))


def checkpoint_steps(recipe: Recipe, best: Estimate, gb_per_s: float = NODE_GB_PER_S) -> int:
    """Optimizer steps between two checkpoints of a recipe: as it says or, where it says auto, as its plan advises.

    `best` is the plan's layout, `gb_per_s` what each node writes. This machine is switched off sooner than a core of it
    fails: there it is a quarter of an hour. Never more than a quarter of the run.
    """
    train, cluster = recipe.train, recipe.cluster
    if train.checkpoint_every != "auto":
        return train.checkpoint_every
    if cluster.kind == "local":
        every = round(HERE_S / best.step_seconds)
    else:
        save_s = planned_save_s(saved_weights(recipe), cluster.nodes, gb_per_s)
        every = advise(best.step_seconds, save_s, best.layout.world_size, 1, train.steps).every
    return max(1, min(every, math.ceil(train.steps / 4)))


def saved_weights(recipe: Recipe) -> float:
    """How many trained numbers a checkpoint holds: all weights, or the adapters alone."""
    train, model = recipe.train, recipe.model
    if train.lora_rank:
        return float(adapters(model, train.lora_rank, train.lora_targets))
    return float(parameters(model, recipe.data.sequence_length))


def between_failures_s(accelerators: int, hours: float = HOURS_BETWEEN_FAILURES) -> float:
    """Mean seconds between failures of any accelerator, each failing once in `hours`; raises `PlanError`."""
    _check({"number of accelerators": accelerators, "time between failures": hours})
    return hours * 3600 / accelerators


def planned_save_s(weights: float, nodes: int, gb_per_s: float = NODE_GB_PER_S) -> float:
    """Seconds to write a checkpoint of so many weights where none was measured; every node writes its share."""
    _check({"number of weights": weights, "number of nodes": nodes, "storage rate": gb_per_s})
    return weights * BYTES_PER_WEIGHT / (nodes * gb_per_s * 1e9)


def young_s(save_s: float, failure_s: float) -> float:
    """Young's interval, to first order: the root of 2 x save x time between failures. Seconds, as are both."""
    return math.sqrt(2 * save_s * failure_s)


def daly_s(save_s: float, failure_s: float) -> float:
    """Daly's interval (2006): higher orders of Young's, and no longer than the time between failures."""
    if save_s >= 2 * failure_s:
        return failure_s
    part = math.sqrt(save_s / (2 * failure_s))
    return young_s(save_s, failure_s) * (1 + part / 3 + part * part / 9) - save_s


def waste(interval_s: float, save_s: float, failure_s: float, restart_s: float = 0.0) -> float:
    """Extra time as a share of undisturbed training, when failures come at random (Daly 2006).

    `restart_s` is what a restart takes beside the lost work; it makes no interval better than another.
    """
    exponent = (interval_s + save_s) / failure_s
    if exponent + restart_s / failure_s > 700:
        return math.inf
    return failure_s * math.exp(restart_s / failure_s) * math.expm1(exponent) / interval_s - 1


def _check(told: dict[str, float]) -> None:
    for name, value in told.items():
        if not 0 < value < math.inf:
            raise PlanError(f"no checkpoint interval can be advised: the {name} is {value:g}; give a positive one.")


def _round(steps: float) -> int:
    """Two leading digits: the waste is flat around its least."""
    digits = max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return int(round(steps, -digits))


def _span(seconds: float) -> str:
    for unit, size in (("years", 31_557_600.0), ("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _share(waste: float) -> str:
    return f"{waste:.1%}" if waste < 10 else "most of it"
