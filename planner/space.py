"""Every layout there is for a model on some numbers of accelerators, as columns; what cannot be is counted by reason.

A space is a list of blocks. A block is a product: of cuts (how the ranks are spread and the batch is divided) along its
second axis and of choices (ZeRO stage, recomputation, offload, sequence parallelism) along its first, so that what
depends on one of them alone is computed once for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.schema import OFFLOAD, RECOMPUTE, Floats, Layout, Shape

Ints = NDArray[np.int64]
MICRO_BATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Sequences per micro-batch that are tried."""
LEAST_TOKENS: Final = 2048
"""Context parallelism leaves each rank at least this many tokens of a sequence."""
MOST_STAGES: Final = 128
MOST_CHUNKS: Final = 8
"""Interleaved stages per rank at most."""
STAGES_TRIED: Final = (1, 2, 4, 8, 16, 32, 64)
SHARDS: Final = (1, 4)
"""Nodes over which HSDP shards."""
PIPELINED, TENSOR, DATA, NODE_SHARD, NODES_SHARD = (1 << place for place in range(5))
"""What a cut leaves open, as bits: see `_kinds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Which sizes and choices are tried; one alone is pinned. `recompute` and `offload` are places in the schema's."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    mbs: tuple[int, ...] = MICRO_BATCHES
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[int, ...] = tuple(RECOMPUTE.index(name) for name in ("none", "selective", "full"))
    offload: tuple[int, ...] = tuple(OFFLOAD.index(name) for name in ("none", "optimizer"))
    sequence_parallel: tuple[int, ...] = (0, 1)

    @classmethod
    def of(cls, shape: Shape, per_node: int, **pinned: int | None) -> Axes:
        """All that may suit a model on nodes of `per_node` accelerators; `pinned` sizes are tried alone."""
        layers, experts = int(shape.layers), int(shape.experts)
        open_: dict[str, tuple[int, ...]] = {
            "tp": tuple(_powers(max(2 * per_node, 2))),
            "pp": tuple(sorted({size for size in divisors(layers) if size <= MOST_STAGES} | set(STAGES_TRIED))),
            "vpp": tuple(size for size in divisors(layers) if size <= MOST_CHUNKS),
            "cp": tuple(_powers(min(int(shape.sequence) // LEAST_TOKENS, 64))) or (1,),
            "ep": tuple(size for size in divisors(experts) if size <= 64) if experts else (1,),
        }
        told = {name: (size,) for name, size in pinned.items() if size is not None}
        return cls(**open_ | told)


@dataclass(slots=True)
class Block:
    """A product of cuts and choices; columns of equal length each."""

    cuts: dict[str, Ints]
    choices: dict[str, Ints]

    def __len__(self) -> int:
        return self.width * self.height

    @property
    def width(self) -> int:
        """Number of cuts."""
        return len(self.cuts["tp"])

    @property
    def height(self) -> int:
        """Number of choices for each."""
        return len(self.choices["zero"])

    def layout(self, cuts: slice) -> Layout:
        """Columns, in single precision, of some cuts with all choices: cuts along the last axis, choices the first."""
        shard = self._shard(self.cuts, self.choices["shard"][:, None], cuts)
        columns: dict[str, Floats] = {"shard": shard.astype(np.float32)}
        for name in _FIELDS & self.cuts.keys():
            columns[name] = self.cuts[name][None, cuts].astype(np.float32)
        for name in _FIELDS & self.choices.keys():
            columns[name] = self.choices[name][:, None].astype(np.float32)
        return Layout(**columns)

    def rows(self, which: Ints) -> dict[str, Ints]:
        """Whole columns of some configurations, by their places in the block."""
        tall, wide = np.divmod(which, self.width)
        found = {name: column[wide] for name, column in self.cuts.items()}
        found |= {name: column[tall] for name, column in self.choices.items()}
        return found | {"shard": self._shard(found, found["shard"], slice(None))}

    @staticmethod
    def _shard(cuts: dict[str, Ints], nodes: Ints, which: slice) -> Ints:
        """Over how many ranks states are split: all data-parallel ones, or those on some nodes."""
        dp, room = cuts["dp"][which], cuts["room"][which]
        return np.asarray(np.where(nodes > 0, nodes * room, dp))


@dataclass(frozen=True, slots=True)
class Space:
    """All layouts, and why others are none."""

    blocks: list[Block]
    refused: Counter[str] = field(default_factory=Counter)
    """By reason; a cut that falls out counts once, whatever choices it might have been joined with."""

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def rows(self, which: Ints) -> dict[str, Ints]:
        """Columns of some configurations, by their places in the whole space."""
        ends = np.cumsum([0, *map(len, self.blocks)])
        block = np.searchsorted(ends, which, side="right") - 1
        parts = [(np.flatnonzero(block == at), self.blocks[at]) for at in np.unique(block)]
        found = {name: np.zeros(len(which), dtype=np.int64) for name in _COLUMNS}
        for places, one in parts:
            rows = one.rows(which[places] - ends[block[places[0]]])
            for name, column in found.items():
                column[places] = rows[name]
        return found


class _Rows:
    """Columns that grow by products and shrink by constraints, which are counted."""

    def __init__(self, **columns: Iterable[int]) -> None:
        self.columns: dict[str, Ints] = {}
        self.refused: Counter[str] = Counter()
        for name, values in columns.items():
            self.times(name, values)

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def times(self, name: str, values: Iterable[int]) -> None:
        """Join every row with every value."""
        column = np.fromiter(values, dtype=np.int64)
        old = len(next(iter(self.columns.values()), [0]))
        self.columns = {key: np.repeat(one, len(column)) for key, one in self.columns.items()}
        self.columns[name] = np.tile(column, old)

    def keep(self, mask: NDArray[np.bool_], reason: str) -> None:
        """Drop the rows where the mask is false, counting them under the reason unless it is empty."""
        lost = int(mask.size - np.count_nonzero(mask))
        if lost:
            self.columns = {name: column[mask] for name, column in self.columns.items()}
            if reason:
                self.refused[reason] += lost


def enumerate_layouts(shape: Shape, per_node: int, ranks: Sequence[int], batch: int, axes: Axes) -> Space:
    """Megatron's layouts of a global batch (sequences) on each of the numbers of accelerators, simplest first."""
    rows = _Rows(tp=axes.tp, cp=axes.cp, ep=axes.ep, pp=axes.pp, vpp=axes.vpp)
    _cut_model(rows, shape, per_node)
    _spread(rows, ranks, batch)
    _cut_batch(rows, axes.mbs)
    _order(rows)
    return _blocks(rows, per_node, axes)


def divisors(number: int) -> list[int]:
    """Every whole number that divides a positive one, smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def _cut_model(rows: _Rows, shape: Shape, per_node: int) -> None:
    """What the model's own sizes allow."""
    layers, sequence = int(shape.layers), int(shape.sequence)
    rows.keep((rows["vpp"] == 1) | (rows["pp"] > 1), "")
    rows.keep(rows["tp"] <= per_node, f"tensor parallelism over more than the {per_node} accelerators of a node")
    for size, name in ((shape.heads, "heads"), (shape.kv_heads, "key/value heads"), (shape.ffn, "columns of the MLP")):
        rows.keep(int(size) % rows["tp"] == 0, f"{int(size)} {name} do not divide by tp")
    whole = sequence % (2 * rows["cp"]) == 0
    rows.keep((rows["cp"] == 1) | whole, f"sequences of {sequence} do not divide by 2 x cp")
    rows.keep(layers % rows["pp"] == 0, f"{layers} layers do not divide by pp")
    rows.keep(layers // rows["pp"] % rows["vpp"] == 0, f"the layers of a stage ({layers} / pp) do not divide by vpp")
    rows.keep(int(shape.experts or 1) % rows["ep"] == 0, f"{int(shape.experts)} experts do not divide by ep")


def _spread(rows: _Rows, ranks: Sequence[int], batch: int) -> None:
    """Join the cuts of the model with the numbers of ranks; what remains of these is data parallel."""
    rows.times("ranks", ranks)
    rows.columns["model"] = rows["tp"] * rows["pp"] * rows["cp"]
    rows.keep(rows["ranks"] % rows["model"] == 0, "the GPUs do not divide by tp x pp x cp")
    rows.columns["dp"] = rows["ranks"] // rows["model"]
    rows.keep(batch % rows["dp"] == 0, f"the global batch of {batch} does not divide by dp")
    experts_room = rows["tp"] * rows["cp"] * rows["dp"]
    rows.keep(experts_room % rows["ep"] == 0, "the ranks of a stage do not divide by ep")
    rows.columns["part"] = batch // rows["dp"]


def _cut_batch(rows: _Rows, sizes: Sequence[int]) -> None:
    """Join with the micro-batches."""
    rows.times("mbs", sizes)
    rows.keep(rows["part"] % rows["mbs"] == 0, "a rank's part of the global batch does not divide by the micro-batch")
    rows.columns["ga"] = rows["part"] // rows["mbs"]
    # Megatron-Core takes them in groups of pp, of which the last may be smaller.
    rows.keep((rows["vpp"] == 1) | (rows["ga"] >= rows["pp"]), "interleaved stages need at least pp micro-batches")


def _order(rows: _Rows) -> None:
    """By the number of ranks, and simplest first, so that equally fast layouts rank as a reader expects."""
    keys = [rows[name] for name in ("mbs", "vpp", "cp", "ep", "pp", "tp", "ranks")]
    order = np.lexsort(keys)
    rows.columns = {name: column[order] for name, column in rows.columns.items()}


def _blocks(rows: _Rows, per_node: int, axes: Axes) -> Space:
    """Cuts that leave the same choices open, together."""
    rows.columns["room"] = np.maximum(per_node // (rows["tp"] * rows["cp"]), 1)
    kinds = _kinds(rows)
    blocks, refused = [], rows.refused
    for kind in np.flatnonzero(np.bincount(kinds)):
        cuts = {name: column[kinds == kind] for name, column in rows.columns.items()}
        choices = _choices(int(kind), axes)
        if kind & PIPELINED and (lost := sum(stage > 1 for stage in axes.zero)):
            refused["ZeRO 2 and 3 do not go with a pipeline"] += lost * len(cuts["tp"])
        if len(choices["zero"]):
            blocks.append(Block(cuts, choices))
    return Space(blocks, refused)


def _kinds(rows: _Rows) -> Ints:
    """For each cut the bits of what it leaves open."""
    dp, room = rows["dp"], rows["room"]
    kinds = PIPELINED * (rows["pp"] > 1) + TENSOR * (rows["tp"] > 1) + DATA * (dp > 1)
    for bit, nodes in zip((NODE_SHARD, NODES_SHARD), SHARDS, strict=True):
        kinds += bit * ((rows["pp"] == 1) & (room * nodes > 1) & (dp > room * nodes) & (dp % (room * nodes) == 0))
    return np.asarray(kinds)


def _choices(kind: int, axes: Axes) -> dict[str, Ints]:
    """What may be chosen for the cuts of one kind, simplest first; `shard` is nodes here, 0 for all ranks."""
    rows = _Rows(split=_splits(kind, axes.zero), recompute=axes.recompute, offload=axes.offload)
    sequence = [way for way in axes.sequence_parallel if way == 0 or kind & TENSOR] or [0]
    rows.times("sequence_parallel", sequence)
    zero, shard = np.divmod(rows["split"], 10)
    return {
        "zero": zero,
        "shard": shard,
        **{name: rows[name] for name in ("recompute", "offload", "sequence_parallel")},
    }


def _splits(kind: int, stages: Iterable[int]) -> Iterator[int]:
    """ZeRO stages times ten, plus the nodes of a shard where it is not spread over all."""
    open_ = [stage for stage in stages if stage < 2 or not kind & PIPELINED]
    if open_ and not kind & DATA:
        open_ = [0]  # all stages are one where there is nobody to split with
    for stage in open_:
        yield stage * 10
        if stage == 3:
            yield from (30 + nodes for bit, nodes in zip((NODE_SHARD, NODES_SHARD), SHARDS, strict=True) if kind & bit)


def _powers(most: int) -> Iterator[int]:
    return (1 << place for place in range(max(most, 1).bit_length()))


_FIELDS: Final = frozenset(one.name for one in fields(Layout)) - {"shard"}
_COLUMNS: Final = (
    "tp",
    "pp",
    "vpp",
    "dp",
    "cp",
    "ep",
    "mbs",
    "ga",
    "ranks",
    "zero",
    "shard",
    "recompute",
    "offload",
    "sequence_parallel",
)


def columns_of(rows: dict[str, Ints]) -> Layout:
    """Columns of the schema, in double precision, one element per configuration."""
    as_floats: dict[str, Floats] = {one.name: rows[one.name].astype(np.float64) for one in fields(Layout)}
    return Layout(**as_floats)
