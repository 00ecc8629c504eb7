"""Find the constants that explain measured steps best: bounded, robust, and drawn to what was known before."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.constants import BOUNDS, NAMES, Constants
from planner.rows import Steps
from planner.schema import Configs, Floats, mapped
from planner.speed import step_seconds

NOISE: Final = 0.06
"""Spread of repeated measurements of one configuration, as a logarithm: tr11's repeats differ by 3 to 8 %."""
OUTLIER: Final = 1.5
"""Residuals beyond this many spreads weigh less and less (Huber)."""
LOOSE: Final[dict[str, float]] = {"scale": 0.5, "launch_us": 0.3}
"""How far a constant may well be from what was known before, in units of the search's own scale (see `free`);"""
TIGHT: Final = 0.6
"""likewise for the others."""
ROUNDS: Final = 40

Vector = NDArray[np.float64]


def fit(
    steps: Steps,
    known: Constants,
    centred: NDArray[np.int64] | None = None,
    weights: Floats | float = 1.0,
) -> Constants:
    """The constants (each without axes) that explain `steps`, drawn to `known`.

    `centred` numbers the rows' profiles: then only differences within a profile count, since each will have a scale of
    its own. `weights` says how much each row counts. Levenberg and Marquardt's method on log ratios, reweighted after
    Huber; the same rows give the same result.
    """
    problem = _Problem(steps, known, centred, weights)
    at, cost, damping = problem.start, problem.cost(problem.start), 1e-2
    for _ in range(ROUNDS):
        gradient, curvature = problem.model(at)
        step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
        found = problem.cost(at + step)
        if found < cost:
            gained, at, cost, damping = cost - found, at + step, found, max(damping / 4, 1e-6)
            if gained < 1e-5 * (1 + cost):
                break
        else:
            damping *= 6
            if damping > 1e6:
                break
    return problem.constants(at)


def log_ratios(steps: Steps, constants: Constants) -> Floats:
    """Logarithm of modelled over measured, one per row."""
    seconds, _ = steps.fastest(step_seconds(steps.configs, constants))
    return np.asarray(np.log(seconds / steps.seconds))


def modelled(steps: Steps, known: Constants, changes: Mapping[str, Floats]) -> NDArray[np.float64]:
    """Seconds of every row (second axis) at every point (first axis), all in one pass.

    `changes` has for some constants a value per point; the others are `known`, which has no axes.
    """
    count = len(next(iter(changes.values())))
    many: Configs = mapped(steps.configs, lambda item: np.tile(item, count) if np.ndim(item) else item)
    columns = {name: np.repeat(values, len(steps.own)) for name, values in changes.items()}
    seconds = step_seconds(many, replace(known, **columns)).reshape(count, -1)
    return np.stack([steps.fastest(row)[0] for row in seconds])


def huber(off: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half the squares of residuals (in spreads), growing only linearly beyond `OUTLIER`."""
    size = np.abs(off)
    return np.asarray(np.where(size < OUTLIER, 0.5 * size**2, OUTLIER * (size - 0.5 * OUTLIER)))


class _Problem:
    """Measured steps as a least-squares problem over unbounded variables."""

    def __init__(
        self,
        steps: Steps,
        known: Constants,
        centred: NDArray[np.int64] | None,
        weights: Floats | float,
    ) -> None:
        self.steps, self.weights = steps, weights
        self.groups = centred
        self.names = [name for name in NAMES if centred is None or name != "scale"]
        self.known = known
        self.start = np.array([free(name, float(getattr(known, name))) for name in self.names])
        self.spread = np.array([LOOSE.get(name, TIGHT) for name in self.names])

    def constants(self, at: Vector) -> Constants:
        """The constants that a point stands for."""
        return replace(self.known, **{name: np.asarray(bound(name, x)) for name, x in zip(self.names, at, strict=True)})

    def residuals(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log ratios over the noise at every point, one row each: all points are judged in one pass."""
        changes = {name: bound(name, points[:, i]) for i, name in enumerate(self.names)}
        found = np.log(modelled(self.steps, self.known, changes) / self.steps.seconds)
        return self._centre(found) / NOISE

    def _centre(self, found: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.groups is None:
            return found
        sizes = np.bincount(self.groups)
        means = np.stack([np.bincount(self.groups, row) for row in found]) / np.maximum(sizes, 1)
        return found - means[:, self.groups]

    def cost(self, at: Vector) -> float:
        """Huber's loss of the residuals, and the distance from what was known."""
        loss = huber(self.residuals(at[None])[0])
        away = (at - self.start) / self.spread
        return float(np.sum(self.weights * loss) + 0.5 * away @ away)

    def model(self, at: Vector) -> tuple[Vector, NDArray[np.float64]]:
        """Gradient and (Gauss and Newton's) curvature of the cost."""
        width = 1e-3
        found = self.residuals(np.vstack([at, at + width * np.eye(len(at))]))
        here, slopes = found[0], (found[1:] - found[0]).T / width
        weight = self.weights * np.minimum(1.0, OUTLIER / np.maximum(np.abs(here), 1e-9))
        prior = 1 / self.spread**2
        gradient = slopes.T @ (weight * here) + prior * (at - self.start)
        return gradient, (slopes * weight[:, None]).T @ slopes + np.diag(prior)


def free(name: str, value: float) -> float:
    """A bounded constant as a number without bounds: the logit of its place between them."""
    _, low, high = BOUNDS[name]
    if name == "scale":
        return float(np.log(value))
    place = np.clip((value - low) / (high - low), 1e-4, 1 - 1e-4)
    return float(np.log(place / (1 - place)))


def bound(name: str, x: Floats | float) -> Floats:
    """The constant that such a number stands for."""
    _, low, high = BOUNDS[name]
    if name == "scale":
        return np.asarray(np.exp(x))
    return np.asarray(low + (high - low) / (1 + np.exp(-np.asarray(x, dtype=np.float64))))
