"""What physics leaves over: a Gaussian process over configurations, learned from the residuals of measured steps.

It sees neither a bandwidth nor the number of micro-batches, so that the laws of the physics below it stay laws: more
bandwidth is never slower, and a step stays linear in its micro-batches. Rasmussen and Williams 2006, chapter 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from planner.keys import Key
from planner.schema import RECOMPUTE, Configs, Floats, is_code

Matrix = NDArray[np.float64]
GROUPS: Final = ("software", "shape", "cut", "size")
"""Of features: how the program is set, what is trained, how it is cut up, and how much of it at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Spreads of what is learned (as logarithms of time), and distances over which it holds."""

    cluster: float
    """Spread of what is common to one profile; likewise to one program on one generation,"""
    framework: float
    model: float
    """to one shape of model in one style of program,"""
    release: float
    """to one release of a framework on one generation,"""
    layout: float
    """to one layout in one style of program,"""
    joint: float
    """and to configurations that are alike in everything."""
    model_length: float
    release_length: float
    """Unit: years."""
    layout_length: float
    software_length: float
    shape_length: float
    cut_length: float
    size_length: float
    alike: float
    """What is left of the joint part in another profile, per difference between the two."""
    noise: float


SCALES: Final[dict[str, Scales]] = {
    "dense": Scales(
        cluster=0.6,
        framework=0.2,
        model=0.06,
        release=0.05,
        layout=0.0,
        joint=0.1,
        model_length=1.4,
        release_length=0.15,
        layout_length=1.4,
        software_length=0.7,
        shape_length=2.8,
        cut_length=1.0,
        size_length=4.0,
        alike=0.1,
        noise=0.03,
    ),
    "experts": Scales(
        cluster=0.3,
        framework=0.4,
        model=0.2,
        release=0.05,
        layout=0.05,
        joint=0.2,
        model_length=0.7,
        release_length=0.15,
        layout_length=1.4,
        software_length=0.35,
        shape_length=5.6,
        cut_length=2.0,
        size_length=8.0,
        alike=0.1,
        noise=0.02,
    ),
}
SCALES["core"] = SCALES["dense"]
"""Chosen by leaving out one group of the shipped rows at a time (`python -m benchmarks.planner --tune`)."""


@dataclass(frozen=True)
class Points:
    """Configurations as the process sees them: features by group, release, and the profile of each."""

    features: dict[str, Matrix]
    release: Matrix
    keys: tuple[Key, ...]
    """The profiles that occur."""
    number: NDArray[np.int64]
    """Of each configuration's profile in `keys`."""

    def of(self, which: Any) -> "Points":
        """Those that an index or a mask picks."""
        cut = {name: matrix[which] for name, matrix in self.features.items()}
        return Points(cut, self.release[which], self.keys, self.number[which])


def points(configs: Configs, keys: Sequence[Key]) -> Points:
    """One point per configuration; `keys` has the profile of each."""
    known = tuple(sorted(set(keys)))
    place = {key: at for at, key in enumerate(known)}
    count = len(keys)

    def columns(*items: Any) -> Matrix:
        return np.stack([np.broadcast_to(np.asarray(item, dtype=np.float64), count) for item in items], axis=1)

    layout, software = configs.layout, configs.software
    cuts = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep)
    features = {
        "software": columns(*_switches(configs)),
        "shape": columns(*_shape(configs)),
        "cut": columns(*(np.log2(cut) for cut in cuts)),
        "size": columns(np.log2(layout.mbs), np.log2(layout.dp) / 2),
    }
    number = np.array([place[key] for key in keys], dtype=np.int64)
    return Points(features, columns(software.release)[:, 0], known, number)


def _switches(configs: Configs) -> tuple[Any, ...]:
    layout, software = configs.layout, configs.software
    # who recomputes all but the products runs the kernels of who recomputes nothing, and nobody's steps say more of it
    plain = is_code(layout.recompute, RECOMPUTE, "none", "all_but_products")
    return (
        2.0 * plain,
        *(2.0 * (layout.recompute == RECOMPUTE.index(name)) for name in ("full", "unknown")),
        layout.zero,
        software.flash,
        software.tp_overlap,
        software.compiled,
        software.ep_overlap,
        layout.sequence_parallel * (layout.tp > 1),
    )


def _shape(configs: Configs) -> tuple[Any, ...]:
    shape, experts = configs.shape, configs.shape.experts > 0
    return (
        np.log2(shape.hidden),
        np.log2(shape.layers),
        np.log2(shape.sequence) / 2,
        np.log2(shape.heads),
        shape.gated,
        np.where(experts, np.log2(np.maximum(shape.experts, 1)) / 2, 0),
        np.where(experts, np.log2(np.maximum(shape.expert_ffn, 1)) / 2, 0),
        # rows of the scores that tensor cores cannot take
        np.where(configs.software.flash > 0, 0.0, np.minimum(np.mod(shape.head_dim, 8), 1) * 2),
    )


@dataclass(frozen=True)
class Residual:
    """A trained process."""

    scales: Scales
    at: Points
    found: Matrix
    """Logarithm of measured over modelled, one per point."""
    weights: Matrix
    inverse: Matrix

    @classmethod
    def learn(cls, at: Points, found: Floats, scales: Scales) -> Self:
        """The process of these residuals; a row that the others contradict counts less (it is noise to that degree)."""
        told: Matrix = found.astype(np.float64)
        gram = kernel(at, at, scales)
        noise = np.full(len(found), scales.noise**2)
        for _ in range(3):
            inverse = _inverse(gram + np.diag(noise))
            weights = inverse @ told
            spare = 1 / np.diag(inverse)
            spread = np.sqrt(np.maximum(spare - noise, 0) + scales.noise**2)
            noise = scales.noise**2 * np.maximum(1.0, (np.abs(weights * spare) / (2 * spread)) ** 2)
        return cls(scales, at, told, weights, inverse)

    def predict(self, new: Points) -> tuple[Floats, Floats]:
        """Mean and spread of the logarithm of measured over modelled."""
        cross = kernel(new, self.at, self.scales)
        left = prior_variance(new, self.scales) - np.einsum("ij,ij->i", cross @ self.inverse, cross)
        return cross @ self.weights, np.sqrt(np.maximum(left, 0.0) + self.scales.noise**2)


def _inverse(matrix: Matrix) -> Matrix:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def prior_variance(at: Points, scales: Scales) -> Floats:
    """Of the mean of each point before anything was measured."""
    parts = (scales.cluster, scales.framework, scales.model, scales.layout, scales.joint)
    return np.asarray(sum(part**2 for part in parts) + scales.release**2 * (at.release > 0))


def kernel(a: Points, b: Points, scales: Scales) -> Matrix:
    """Covariance of what is to be learned at points `a` (rows) and `b` (columns)."""
    same = _relations(a, b)
    far = {name: _distance(a.features[name], b.features[name]) for name in GROUPS}
    dated = (a.release[:, None] > 0) & (b.release[None] > 0)
    apart = np.where(dated, ((a.release[:, None] - b.release[None]) / scales.release_length) ** 2, 0.0)
    style = np.where(same["style"], 1.0, 0.3)
    result = scales.cluster**2 * same["key"] + scales.framework**2 * same["framework"]
    result = result + scales.release**2 * _matern(apart) * (same["framework"] & dated)
    result += scales.model**2 * style * _matern(far["shape"] / scales.model_length**2)
    if scales.layout:
        result += scales.layout**2 * style * _matern((far["cut"] + far["size"]) / scales.layout_length**2)
    whole = apart + sum(far[name] / getattr(scales, f"{name}_length") ** 2 for name in GROUPS)
    return np.asarray(result + scales.joint**2 * _matern(whole) * scales.alike ** same["differences"])


def _relations(a: Points, b: Points) -> dict[str, Any]:
    """What the profiles of every pair of points share, and how many things they do not."""

    def pairs(name: str) -> NDArray[np.bool_]:
        ours = np.array([str(getattr(key, name)) for key in a.keys])
        theirs = np.array([str(getattr(key, name)) for key in b.keys])
        return np.asarray(ours[:, None] == theirs[None])

    names = ("accelerator", "generation", "style", "framework", "program", "precision", "cluster")
    same = {name: pairs(name) for name in names}
    kind = same["accelerator"] & same["framework"] & same["precision"]
    # A cluster is told from others of its kind only: else a bandwidth would mean something to other programs.
    apart = ~same["generation"] * 1.0 + ~same["style"] + ~same["precision"] * 0.7 + (kind & ~same["cluster"]) * 0.5
    apart += (same["generation"] & ~same["accelerator"]) * 0.5 + (same["style"] & ~same["framework"]) * 0.5
    tables = {
        "key": kind & same["cluster"],
        "framework": same["program"] & same["generation"],
        "style": same["style"],
        "differences": apart,
    }
    return {name: table[np.ix_(a.number, b.number)] for name, table in tables.items()}


def _distance(a: Matrix, b: Matrix) -> Matrix:
    """Squares of distances."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.maximum(squares, 0.0))


def _matern(squares: Matrix) -> Matrix:
    """Matérn's covariance of smoothness 3/2 at distances whose squares are given."""
    root = np.sqrt(3 * squares)
    return np.asarray((1 + root) * np.exp(-root))


def left_out(at: Points, found: Floats, group: NDArray[Any], scales: Scales) -> Floats:
    """How far each row is from what the rows of all other groups say of it, in closed form."""
    inverse = np.linalg.inv(kernel(at, at, scales) + scales.noise**2 * np.eye(len(found)))
    weights, off = inverse @ found, np.empty(len(found))
    for rows in rows_by(group):
        off[rows] = np.linalg.solve(inverse[np.ix_(rows, rows)], weights[rows])
    return off


def rows_by(label: NDArray[Any]) -> list[NDArray[np.int64]]:
    """The rows that bear each label, labels in their own order."""
    _, number = np.unique(label, return_inverse=True)
    order = np.argsort(number, kind="stable")
    return np.split(order, np.cumsum(np.bincount(number))[:-1])
