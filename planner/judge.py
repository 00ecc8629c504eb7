"""Estimate layouts one by one: time with its interval, memory, phases, dollars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner import cost
from planner.constants import Constants
from planner.estimate import Estimate, Layout, Memory
from planner.latencies import with_latencies
from planner.machine import Machine
from planner.memory import MemoryConstants, breakdown, hosted, usable
from planner.model import flops_beside, model_flops, shape_of, weights
from planner.profiles import Prediction, Profile, Profiles
from planner.schema import OFFLOAD, RECOMPUTE, Configs, Hardware, Shape, Software, mapped
from planner.schema import Layout as Columns
from planner.software import castra, megatron
from planner.space import Ints
from planner.speed import phases
from recipes.weights import adapters, matrices

if TYPE_CHECKING:
    from recipes.spec import Recipe

_SIZES = ("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "shard", "sequence_parallel")
WITHOUT_TP = ("gpt2",)
NAMES = ("ddp", "zero1", "zero2", "fsdp")
"""What Megatron's users call the ZeRO stages."""


C = TypeVar("C", Constants, MemoryConstants)
ALONE: Final = Layout(strategy="ddp", dp=1, zero=0, shard=1, micro_batch_size=1, gradient_accumulation=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be trained."""

    shape: Shape
    batch: int
    """Sequences per optimizer step."""
    steps: int
    precision: str
    extras: cost.Extras
    trained: float = 1.0
    """Share of the weights that learn."""
    quantised: float = 0.0
    """Share of the weights that are kept in 4 bits."""
    flops_beside: float = 0.0
    """Model FLOPs of one token that the shape does not tell."""
    lacks_tp: str = ""
    """What Castra's own program does not cut up by tensor parallelism, if that is to be trained."""

    @classmethod
    def of(cls, recipe: Recipe) -> Work:
        """A recipe's work."""
        shape = shape_of(recipe.model, recipe.data.sequence_length)
        extras = cost.Extras.of(recipe, float(weights(shape)))
        train = recipe.train
        rank, model = train.lora_rank, recipe.model
        return cls(
            shape=shape,
            batch=train.global_batch_size,
            steps=train.steps,
            precision=train.precision,
            extras=extras,
            trained=adapters(model, rank, train.lora_targets) / float(weights(shape)) if rank else 1.0,
            quantised=matrices(model, train.lora_targets) / float(weights(shape)) if train.lora_base == "nf4" else 0.0,
            flops_beside=flops_beside(model, recipe.data.sequence_length),
            lacks_tp=_lacks_tp(recipe),
        )

    @property
    def tokens(self) -> float:
        """Per optimizer step."""
        return self.batch * float(self.shape.sequence)


def _lacks_tp(recipe: Recipe) -> str:
    """What of a recipe `training.parallel` does not cut up by tensor parallelism; empty where it does."""
    reasons = {
        "adapters have": bool(recipe.train.lora_rank),
        "compiled blocks have": recipe.train.compile,
        f"a {recipe.model.family} model has": recipe.model.family in WITHOUT_TP,
    }
    return next((what for what, there in reasons.items() if there), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where it is to be trained, and what is known of how fast that goes."""

    machine: Machine
    profiles: Profiles
    nodes: int | None = None
    """As told, or as many as a layout needs."""
    processes_per_node: int | None = None
    """As told, or one per accelerator."""
    change: Callable[[Hardware], Hardware] | None = None
    """What if the hardware were another?"""

    def hardware(self, precision: str) -> Hardware:
        """One rank's, as columns without axes; raises `NoProfile`."""
        found = self.machine.hardware(precision, self.nodes or 1, self.processes_per_node)
        found = with_latencies(found, [self.machine.chip], self.profiles.links)
        found = mapped(found, lambda item: np.reshape(item, ()))
        found = self.profiles.achieved.over(found) if self.profiles.achieved else found
        return self.change(found) if self.change else found

    def peak(self, precision: str) -> float:
        """FLOP/s of the run's own arithmetic by the datasheet, whatever was reached there; raises `NoProfile`."""
        hardware = replace(self, profiles=replace(self.profiles, achieved=None)).hardware(precision)
        return float(hardware.flops * hardware.speedup)

    def nodes_of(self, layout: Layout) -> int:
        """How many machines a layout takes."""
        return self.nodes or math.ceil(layout.world_size / self.machine.accelerators)

    def profile(self, work: Work, software: str, strategy: str) -> Profile:
        """The nearest there is to this machine and that program."""
        framework = f"castra-{strategy}" if software == "castra" else "megatron"
        machine, experts = self.machine, bool(work.shape.experts > 0)
        cluster = {} if machine.local else {"per_node": machine.accelerators, "gbps": machine.inter_gbps}
        return self.profiles.find(machine.chip, framework, work.precision, experts=experts, **cluster)

    def room(self, work: Work) -> float:
        """GiB that a layout's peak may reach: what is usable, less the margin that the memory's formulas need."""
        configs = configs_of(work, self, [ALONE])
        return float(usable(configs).max()) / self.profiles.memory.margin


@dataclass(frozen=True, slots=True)
class _Found:
    """What the formulas say of one layout."""

    time: dict[str, float]
    """Seconds per step, and the interval's low and high."""
    phases: dict[str, float]
    memory: Memory
    room: float
    """Usable, in GiB."""
    peak: float
    """Of the run's own arithmetic. Unit: FLOP/s and rank."""
    ram: float
    """GiB that each node keeps of the states in its own memory; likewise on its disks."""
    disk: float

    def why_not(self, machine: Machine) -> str:
        """What is against it, as a clause; empty where it fits."""
        if self.memory.total > self.room:
            return f"needs {self.memory.total:.1f} GiB per rank, {self.room:.1f} GiB are usable"
        if self.ram > (room := machine.host_room_gib):
            return f"takes {self.ram:.0f} GiB of each node's own memory, {room:.0f} GiB are usable"
        if self.disk > (room := machine.disk_room_gib):
            return f"takes {self.disk:.0f} GiB of each node's NVMe drives, {room:.0f} GiB are there"
        return ""


def judge(work: Work, site: Site, layouts: Sequence[Layout]) -> list[Estimate]:
    """Estimate layouts of one training program, fitting or not, in the order given; raises `NoProfile`."""
    if not layouts:
        return []
    configs, count = configs_of(work, site, layouts), len(layouts)
    programs = [(layout.software, layout.strategy) for layout in layouts]
    known = {program: site.profile(work, *program) for program in dict.fromkeys(programs)}
    each = [known[program] for program in programs]
    step = _predict(configs, site, each)
    parts = _rows(phases(configs, stacked([profile.constants for profile in each])), count)
    memory = _rows(breakdown(configs, stacked([profile.memory for profile in each])), count)
    ram, disk = hosted(configs)
    times = _rows({"seconds": step.seconds, "low": step.low, "high": step.high}, count)
    beside = _rows({"ram": ram, "disk": disk}, count)
    room, peak = site.room(work), site.peak(work.precision)
    found = (
        _Found(time, split, Memory(**needs), room, peak, **hosts)
        for time, split, needs, hosts in zip(times, parts, memory, beside, strict=True)
    )
    return [_estimate(work, site, *pair) for pair in zip(layouts, found, strict=True)]


def shortlist(work: Work, site: Site, layouts: Sequence[Layout], keep: int) -> list[Layout]:
    """Of one program's layouts those that the formulas alone find best: the fastest that fit, or else the leanest."""
    if len(layouts) <= keep:
        return list(layouts)
    configs, profile = configs_of(work, site, layouts), site.profile(work, layouts[0].software, layouts[0].strategy)
    nothing = np.zeros(len(layouts))
    seconds = sum(phases(configs, profile.constants).values(), start=nothing)
    needed = sum(breakdown(configs, profile.memory).values(), start=nothing)
    fits = needed <= site.room(work)
    order = np.lexsort((np.where(fits, seconds, needed), ~fits))
    return [layouts[place] for place in order[:keep].tolist()]


def _predict(configs: Configs, site: Site, each: Sequence[Profile]) -> Prediction:
    """Calibrated steps. DeepSpeed around our own kernels is not taken to be faster than torch's sharding around them.

    Where nobody measured it, its prior rests on other people's programs, and they on other kernels.
    """
    whole = mapped(configs, lambda item: np.broadcast_to(item, len(each)))
    asked = [profile.asked for profile in each]
    step = site.profiles.predict(whole, asked)
    doubtful = [profile.steps == 0 and profile.asked.framework.startswith("castra-zero") for profile in each]
    if not any(doubtful):
        return step
    torch = site.profiles.predict(whole, [replace(key, framework="castra-fsdp2") for key in asked])
    slower = np.array(doubtful) & (torch.seconds > step.seconds)
    names = ("seconds", "low", "high")
    return Prediction(*(np.where(slower, getattr(torch, name), getattr(step, name)) for name in names))


def stacked(each: Sequence[C]) -> C:
    """Columns without axes as columns with one element for each."""
    names = [one.name for one in fields(each[0])]
    return type(each[0])(**{name: np.array([getattr(one, name) for one in each]) for name in names})


def configs_of(work: Work, site: Site, layouts: Sequence[Layout]) -> Configs:
    """Layouts of one training program as columns, in double precision."""
    return Configs(
        shape=work.shape,
        layout=columns_of(layouts),
        software=software_of(layouts, work),
        hardware=site.hardware(work.precision),
    )


def columns_of(layouts: Sequence[Layout]) -> Columns:
    """Layouts as the schema's columns."""

    def column(values: Iterable[float]) -> NDArray[np.float64]:
        return np.fromiter(values, dtype=np.float64, count=len(layouts))

    sizes = {name: column(getattr(layout, name) for layout in layouts) for name in _SIZES}
    return Columns(
        **sizes,
        mbs=column(layout.micro_batch_size for layout in layouts),
        ga=column(layout.gradient_accumulation for layout in layouts),
        recompute=column(RECOMPUTE.index(layout.recompute) for layout in layouts),
        offload=column(OFFLOAD.index(layout.offload) for layout in layouts),
    )


def software_of(layouts: Sequence[Layout], work: Work) -> Software:
    """The columns of the program that runs the layouts."""
    if layouts[0].software == "megatron":
        return megatron(work.precision)
    return castra([layout.strategy for layout in layouts], work.precision, work.trained, work.quantised)


def layouts_of(rows: dict[str, Ints]) -> list[Layout]:
    """Megatron's layouts from the columns of a space."""
    listed: dict[str, list[int]] = {name: column.tolist() for name, column in rows.items()}
    return [_layout(dict(zip(listed, row, strict=True))) for row in zip(*listed.values(), strict=True)]


def _layout(row: dict[str, Any]) -> Layout:
    stage = row["zero"]
    return Layout(
        software="megatron",
        strategy="hsdp" if stage == 3 and row["shard"] < row["dp"] else NAMES[stage],
        **{name: row[name] for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "shard")},
        micro_batch_size=row["mbs"],
        gradient_accumulation=row["ga"],
        recompute=RECOMPUTE[row["recompute"]],
        offload=OFFLOAD[row["offload"]],
        sequence_parallel=bool(row["sequence_parallel"]),
    )


def _estimate(work: Work, site: Site, layout: Layout, found: _Found) -> Estimate:
    seconds, nodes, memory = found.time["seconds"], site.nodes_of(layout), found.memory
    why_not = found.why_not(site.machine)
    # What measured steps add to the physics belongs to all phases alike.
    correction = seconds / sum(found.phases.values())
    speed, total = work.tokens / seconds, seconds * work.steps
    flops = (float(model_flops(work.shape, work.trained)) + work.flops_beside) * speed
    paid = cost.bill(site.machine, nodes, total, work.extras)
    return Estimate(
        layout=layout,
        step_seconds=seconds,
        low=found.time["low"],
        high=found.time["high"],
        tokens_per_second=speed,
        tokens_per_second_per_gpu=speed / layout.world_size,
        mfu=None if site.machine.local else flops / (found.peak * layout.world_size),
        memory=memory,
        fits=not why_not,
        why_not=why_not,
        phases={name: part * correction for name, part in found.phases.items()},
        total_seconds=total,
        usd=sum(paid.values()) if paid else None,
        usd_per_billion_tokens=cost.per_billion_tokens(site.machine, nodes, speed),
        bill=paid,
    )


def _rows(columns: dict[str, Any], count: int) -> list[dict[str, float]]:
    listed = {name: np.broadcast_to(values, count).tolist() for name, values in columns.items()}
    return [dict(zip(listed, row, strict=True)) for row in zip(*listed.values(), strict=True)]
