"""Estimate time and memory of every layout of a space and keep the best: millions of layouts a second on a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.constants import Constants
from planner.estimate import Estimate
from planner.judge import Site, Work, judge, layouts_of
from planner.memory import MemoryConstants, breakdown
from planner.schema import Configs, Floats, Hardware, Layout, Shape, Software, mapped
from planner.software import megatron
from planner.space import Axes, Block, Ints, Space, enumerate_layouts
from planner.speed import Ends, LayerTime, assemble, ends, layer_time

CHUNK: Final = 1 << 14
"""Configurations at a time: their columns stay in the processor's second-level cache."""
Single = NDArray[np.float32]
JUDGED: Final = 128
"""Of the fastest by the formulas so many are estimated in full, and ranked by what measured steps say besides."""
_Fastest = tuple[Ints, Single, Ints]
"""For every cut: ranks, seconds of its fastest choice, the place of that."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found; configurations are named by their places in the space."""

    best: Ints
    """The fastest that fit, fastest first; of equally fast ones the simpler comes first."""
    seconds: Floats
    """Of `best`, per step, in single precision."""
    fastest: dict[int, int]
    """For every number of ranks the fastest that fits."""
    considered: int
    too_big: int
    """How many do not fit into the accelerators' memory."""
    leanest: int
    """Where none fits, the one that needs least memory; else -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All but the layouts, as columns without axes."""

    shape: Shape
    software: Software
    hardware: Hardware
    constants: Constants
    room: Floats
    """GiB that a rank's memory may reach."""
    memory: MemoryConstants | None = None

    def single(self) -> Setting:
        """In single precision."""
        return mapped(self, lambda item: item if item is None else np.asarray(item, dtype=np.float32))

    def configs(self, layout: Layout) -> Configs:
        """The layouts in this setting."""
        return Configs(shape=self.shape, layout=layout, software=self.software, hardware=self.hardware)


@dataclass(slots=True)
class _Tally:
    """The best so far."""

    keep: int
    places: Ints
    seconds: NDArray[np.float32]
    too_big: int = 0
    leanest: int = -1
    least: float = np.inf

    def consider(
        self, timed: NDArray[np.float32], needed: Floats, fits: NDArray[np.bool_], first: int, width: int
    ) -> None:
        """Take (choices, cuts) in: `timed` is infinite where they do not fit; `first` is the place of the first cut."""
        worst = self.seconds[-1] if len(self.seconds) == self.keep else np.float32(np.finfo(np.float32).max)
        tall, wide = np.nonzero(timed <= worst)
        places = np.concatenate([self.places, tall * width + first + wide])
        seconds = np.concatenate([self.seconds, timed[tall, wide]])
        order = np.lexsort((places, seconds))[: self.keep]
        self.places, self.seconds = places[order], seconds[order]
        self.too_big += int(fits.size - np.count_nonzero(fits))
        if not len(self.places) and needed.min() < self.least:
            tall, wide = np.divmod(int(np.argmin(needed)), needed.shape[1])
            self.least, self.leanest = float(needed.min()), int(tall * width + first + wide)


@dataclass(frozen=True, slots=True)
class Survey:
    """Megatron's layouts for some numbers of ranks."""

    ranked: list[Estimate]
    """The fastest that fit, fastest first."""
    leanest: Estimate | None
    """Where none fits, the one that needs least memory."""
    considered: int
    refused_by: Counter[str]
    fastest: dict[int, Estimate]
    """For each number of ranks, where asked for."""
    seconds: float = 0.0
    """That listing and estimating all took."""


def survey(work: Work, site: Site, ranks: Sequence[int], axes: Axes, keep: int = 64, *, each: bool = False) -> Survey:
    """Search Megatron's layouts on each of the numbers of ranks and estimate the best; `each`: for every number too.

    Raises `NoProfile`. The best by the formulas are ranked by the calibrated estimate.
    """
    hardware = site.hardware(work.precision)
    profile = site.profile(work, "megatron", "")
    began = perf_counter()
    space = enumerate_layouts(work.shape, int(hardware.per_node), ranks, work.batch, axes)
    setting = Setting(
        shape=work.shape,
        software=megatron(work.precision),
        hardware=hardware,
        constants=profile.constants,
        memory=profile.memory,
        room=np.asarray(site.room(work)),
    )
    found = search(space, setting, max(keep, JUDGED))
    took = perf_counter() - began
    refused_by = space.refused.copy()
    if found.too_big:
        refused_by["does not fit into the memory of an accelerator"] += found.too_big
    numbers = list(found.fastest) if each else []
    places = [*found.best.tolist(), *(found.fastest[number] for number in numbers)]
    estimates = judge(work, site, layouts_of(space.rows(np.array(places, dtype=np.int64))))
    ranked = sorted((one for one in estimates[: len(found.best)] if one.fits), key=lambda one: one.step_seconds)
    fastest = dict(zip(numbers, estimates[len(found.best) :], strict=True))
    leanest = None
    if not ranked and len(space):
        place = found.leanest if found.leanest >= 0 else int(found.best[0])
        leanest = judge(work, site, layouts_of(space.rows(np.array([place]))))[0]
    return Survey(ranked[:keep], leanest, len(space), refused_by, fastest, took)


@dataclass(frozen=True, slots=True)
class _Layers:
    """What layers and ends take, in single precision, computed once for all configurations that share it."""

    forward: Single
    """(choices, cuts); likewise the backward pass."""
    backward: Single
    first: Single
    """(cuts,); likewise the last stage's."""
    last: Single
    cuts: list[Ints]
    """For each block: the columns above of its cuts. Likewise the rows of its choices."""
    choices: list[Ints]

    @classmethod
    def of(cls, space: Space, setting: Setting) -> _Layers:
        """All that a space needs, in double precision until it is stored."""
        wide, cuts = _distinct([block.cuts for block in space.blocks], ("tp", "cp", "ep", "mbs"))
        tall, choices = _distinct([block.choices for block in space.blocks], ("recompute", "sequence_parallel"))
        unused = {name: np.ones(1) for name in ("pp", "vpp", "dp", "shard", "ga")}
        unused |= {name: np.zeros(1) for name in ("zero", "offload")}
        across = {name: column[None, :] for name, column in wide.items()}
        configs = setting.configs(
            Layout(**unused, **across, **{name: column[:, None] for name, column in tall.items()})
        )
        one, edge = layer_time(configs, setting.constants), ends(configs, setting.constants)
        shape = (len(tall["recompute"]), len(wide["tp"]))
        return cls(
            _table(one.forward, shape),
            _table(one.backward, shape),
            _table(edge.first, shape)[0],
            _table(edge.last, shape)[0],
            cuts,
            choices,
        )


def search(space: Space, setting: Setting, keep: int = 64) -> Found:
    """Time and memory of every layout: the `keep` fastest that fit, and the fastest for each number of ranks."""
    tally = _Tally(keep, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
    if len(space):
        layers, single = _Layers.of(space, setting), setting.single()
        starts = np.cumsum([0, *map(len, space.blocks)]).tolist()
        found = [_search(space.blocks[at], at, starts[at], layers, single, tally) for at in range(len(space.blocks))]
    return Found(
        best=tally.places,
        seconds=tally.seconds,
        fastest=_fastest(found) if len(space) else {},
        considered=len(space),
        too_big=tally.too_big,
        leanest=-1 if len(tally.places) else tally.leanest,
    )


def _search(block: Block, at: int, start: int, layers: _Layers, single: Setting, tally: _Tally) -> _Fastest:
    """Take a block into the tally; the fastest choice for every cut."""
    best, place = np.full(block.width, np.inf, dtype=np.float32), np.zeros(block.width, dtype=np.int64)
    step = max(CHUNK // block.height, 1)
    for cuts in (slice(begin, begin + step) for begin in range(0, block.width, step)):
        seconds, needed = _evaluate(block, cuts, layers, layers.cuts[at][cuts], layers.choices[at], single)
        fits = needed <= single.room
        timed = np.where(fits, seconds, np.float32(np.inf))
        choice, first = np.argmin(timed, axis=0), start + cuts.start
        across = np.arange(len(choice))
        best[cuts], place[cuts] = timed[choice, across], choice * block.width + first + across
        tally.consider(timed, needed, fits, first, block.width)
    return block.cuts["ranks"], best, place


def _evaluate(
    block: Block, cuts: slice, layers: _Layers, layer: Ints, choice: Ints, single: Setting
) -> tuple[Single, Single]:
    """Seconds per step and GiB per rank, (choices, cuts) each, of some cuts of a block."""
    configs, pick = single.configs(block.layout(cuts)), np.ix_(choice, layer)
    forward, backward = layers.forward[pick], layers.backward[pick]
    one = LayerTime(forward, backward, {"layers": forward + backward})
    edge = Ends(first=layers.first[None, layer], last=layers.last[None, layer])
    seconds = _total(assemble(configs, single.constants, one, edge))
    needed = _total(breakdown(configs, single.memory))
    shape = (block.height, len(layer))
    return np.broadcast_to(seconds, shape), np.broadcast_to(needed, shape)


def _distinct(blocks: list[dict[str, Ints]], names: tuple[str, ...]) -> tuple[dict[str, Floats], list[Ints]]:
    """The distinct rows of some columns of all blocks, and for each block which of them every row is."""
    columns = [np.concatenate([block[name] for block in blocks]) for name in names]
    code = np.zeros_like(columns[0])
    for column in columns:
        code = code * (column.max() + 1) + column
    _, first, own = np.unique(code, return_index=True, return_inverse=True)
    ends_ = np.cumsum([len(block[names[0]]) for block in blocks])[:-1]
    distinct: dict[str, Floats] = {}
    for name, column in zip(names, columns, strict=True):
        distinct[name] = column[first].astype(np.float64)
    return distinct, np.split(own, ends_)


def _table(values: Floats, shape: tuple[int, int]) -> Single:
    return np.ascontiguousarray(np.broadcast_to(values, shape), dtype=np.float32)


def _total(parts: dict[str, Floats]) -> Floats:
    first, *rest = parts.values()
    return sum(rest, start=first)


def _fastest(cuts: list[_Fastest]) -> dict[int, int]:
    """For every number of ranks the place of its fastest configuration, where any fits."""
    ranks, seconds, places = (np.concatenate(columns) for columns in zip(*cuts, strict=True))
    order = np.lexsort((places, seconds, ranks))
    order = order[np.isfinite(seconds[order])]
    counts, first = np.unique(ranks[order], return_index=True)
    return dict(zip(counts.tolist(), places[order][first].tolist(), strict=True))
