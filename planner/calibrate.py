"""Choose the constants of the GPU priors from measured steps, and find out how far off they are on other steps."""

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from planner.measured import Measured, select
from planner.model import Floats
from planner.prior import ANY_GPU
from planner.speed import Prior, phases

START: Final = Prior(
    gemm=0.8,
    ramp=150.0,
    attention=0.4,
    memory=0.75,
    links=0.75,
    network=0.65,
    overlap=0.8,
    latency_s=15e-6,
    hop_s=6e-6,
    launch_s=250e-6,
    deepspeed=1.2,
    interval=(1.0, 1.0),
    deepspeed_interval=(1.0, 1.0),
)
"""Where the search starts. It varies `BOUNDS` only. `links` and `network` are the shares of the line that NCCL's own
tests reach (A100 NVLink 0.77; EFA 0.84 on p4de, 0.65 on p5, 0.73 on p6-b200, 0.44 on p6-b300, at gigabytes); the
latencies are of the same tests; `launch_s` is some 40 kernels of 6 µs; `deepspeed` was measured on CPUs (1.22-1.31)."""
BOUNDS: Final = {
    "gemm": (0.5, 1.0),
    "ramp": (0.0, 400.0),
    "attention": (0.1, 0.8),
    "memory": (0.4, 0.9),
    "overlap": (0.3, 1.0),
}
NARROWEST: Final = (0.8, 1.27)
"""No interval is narrower than this: models calibrated on one cluster miss another by 5 to 27 %."""


def step_seconds(rows: Measured, prior: Prior) -> Floats:
    """Predicted seconds per step of measured rows."""
    return np.asarray(sum(phases(rows.grid, rows.hardware, prior).values()))


def ratios(rows: Measured, prior: Prior) -> Floats:
    """Measured step over predicted step."""
    return np.asarray(rows.seconds / step_seconds(rows, prior))


def choose(rows: Measured, start: Prior = START) -> Prior:
    """The prior within `BOUNDS` whose steps differ least from the measured ones.

    Least mean |log ratio|, where a source of n rows weighs √n: many rows of one table say less than as many tables.
    Found coordinate by coordinate on grids that shrink, so that the same rows always give the same constants.
    """
    weights = 1 / np.sqrt(_rows_of_same_source(rows))
    best, error = start, _error(rows, start, weights)
    for narrowing in range(6):
        for name, (low, high) in BOUNDS.items():
            here, reach = getattr(best, name), (high - low) / 2 * 0.6**narrowing
            for value in np.linspace(max(low, here - reach), min(high, here + reach), 21):
                other = _with(best, name, round(float(value), 4))
                missed = _error(rows, other, weights)
                if missed < error - 1e-9:
                    best, error = other, missed
    return best


def derive(rows: Measured) -> dict[str, Prior]:
    """The GPU priors: each chosen on half of its certain rows, its interval taken from the rows it never saw.

    'gpu' is for generations without rows: chosen on all, its interval is how far each generation's prior misses the
    other generations. DeepSpeed has an interval of its own, common to all, since few of its steps were measured.
    """
    seen, families = chosen_on(rows), np.unique(rows.family)
    priors = {str(name): choose(select(rows, seen & (rows.family == name))) for name in families}
    native = rows.grid.software.deepspeed == 0
    unseen = {name: ~seen & (rows.family == name) for name in priors}
    deepspeed = _interval([(select(rows, unseen[name] & ~native), prior) for name, prior in priors.items()])
    strangers = [(select(rows, native & (rows.family != name)), prior) for name, prior in priors.items()]
    whole = replace(choose(select(rows, seen)), interval=_interval(strangers))
    result = {
        name: replace(prior, interval=_interval([(select(rows, unseen[name] & native), prior)]))
        for name, prior in priors.items()
    }
    return {
        name: replace(prior, deepspeed_interval=(min(deepspeed[0], prior.interval[0]), deepspeed[1]))
        for name, prior in {**result, ANY_GPU: whole}.items()
    }


def chosen_on(rows: Measured) -> NDArray[np.bool_]:
    """Which rows constants are chosen on: half of the groups, by their hash, without the uncertain rows."""
    half = np.array([int(group, 16) % 2 == 0 for group in rows.group])
    return np.asarray(rows.certain & half, dtype=np.bool_)


def _with(prior: Prior, name: str, value: float) -> Prior:
    change: dict[str, Any] = {name: value}
    return replace(prior, **change)


def _error(rows: Measured, prior: Prior, weights: Floats) -> float:
    return float(np.average(np.abs(np.log(ratios(rows, prior))), weights=weights))


def _rows_of_same_source(rows: Measured) -> Floats:
    _, place, count = np.unique(rows.source, return_inverse=True, return_counts=True)
    return np.asarray(count[place], dtype=np.float64)


def _interval(pairs: list[tuple[Measured, Prior]]) -> tuple[float, float]:
    """Between which shares of the prediction 90 % of the measured steps lie, every source counting the same."""
    pairs = [(rows, prior) for rows, prior in pairs if len(rows.seconds)]
    found = np.concatenate([ratios(rows, prior) for rows, prior in pairs])
    weights = np.concatenate([1 / _rows_of_same_source(rows) for rows, _ in pairs])
    order = np.argsort(found)
    below = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(found[order][np.searchsorted(below, at - 1e-9)]) for at in (0.05, 0.95))
    return round(min(low, NARROWEST[0]), 3), round(max(high, NARROWEST[1]), 3)
