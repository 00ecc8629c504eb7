"""What the planner answers: layouts, what each needs and takes, and which is best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Trainer = Literal["castra", "megatron"]


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank needs at its peak. Unit: GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Gathered layers, reduction buckets, casts, the loss, and the runtime itself."""
    fragmentation: float
    """What the allocator holds and cannot use."""

    @property
    def total(self) -> float:
        """All of it."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers + self.fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the global batch and the model are cut up; the global batch is micro x accumulation x dp sequences."""

    software: Trainer = "castra"
    strategy: str
    """Castra's: ddp, fsdp2, zero0 to zero3. Megatron's: ddp, zero1, zero2, fsdp, hsdp."""
    tp: int = 1
    """Tensor parallel size; likewise pipeline (pp), interleaved stages per rank (vpp), data, context and expert."""
    pp: int = 1
    vpp: int = 1
    dp: int
    cp: int = 1
    ep: int = 1
    zero: int
    """What is split over the data-parallel ranks: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too."""
    shard: int
    """Over how many ranks it is split."""
    micro_batch_size: int
    """Sequences per data-parallel rank and forward pass."""
    gradient_accumulation: int
    """Micro-batches per optimizer step."""
    recompute: str = "none"
    """One of `schema.RECOMPUTE`."""
    offload: str = "none"
    """One of `schema.OFFLOAD`."""
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Ranks at work."""
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        """As people say it: 'fsdp2, micro batch 4 x 2', or 'tp4 pp2 dp8 zero1, micro batch 1 x 64, full recompute'."""
        batch = f"micro batch {self.micro_batch_size} x {self.gradient_accumulation}"
        if self.software == "castra":
            return ", ".join([self._own(), batch, *self._away()])
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp", "ep", "dp")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "dp"]
        words += (
            [] if self.strategy == "ddp" else [self.strategy + (str(self.shard) if self.strategy == "hsdp" else "")]
        )
        rest = [] if self.recompute == "none" else [f"{self.recompute} recompute"]
        rest += self._away()
        rest += ["sequence parallel"] if self.sequence_parallel else []
        return ", ".join([" ".join(words), batch, *rest])

    def _own(self) -> str:
        """Castra's strategy, with the sizes that are above one and, where there are any, the data parallel one."""
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        hybrid = [f"shard{self.shard}"] if self.zero == 3 and self.shard < self.dp else []
        return " ".join([self.strategy, *words, *([f"dp{self.dp}"] if words or hybrid else []), *hybrid])

    def _away(self) -> list[str]:
        what, _, disk = self.offload.partition("-")
        return [] if what == "none" else [f"{what} offloaded" + (" to nvme" if disk else "")]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout on one machine."""

    layout: Layout
    step_seconds: float
    low: float
    """90 % of measured steps lie between `low` and `high`. Unit: seconds per step."""
    high: float
    tokens_per_second: float
    """Of all ranks together."""
    tokens_per_second_per_gpu: float
    mfu: float | None
    """Model FLOPs over peak FLOPs; None on this machine, whose peak is an assumption."""
    memory: Memory
    fits: bool
    why_not: str
    """Empty if it fits."""
    phases: dict[str, float]
    """Seconds per step of each phase; they add up to `step_seconds`."""
    total_seconds: float
    """All steps of the recipe, without the set-up of the machines."""
    usd: float | None
    """All of the bill; None where nothing is paid or no price is known."""
    usd_per_billion_tokens: float | None
    """What the instances cost while they train."""
    bill: dict[str, float] = field(default_factory=dict)
    """Dollars by what they are paid for."""

    @property
    def days(self) -> float:
        """`total_seconds` in days."""
        return self.total_seconds / 86400


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one recipe on one machine."""

    best: Estimate
    """The fastest that fits, or the one the recipe prescribes."""
    ranked: list[Estimate]
    """All that fit and that the recipe's software runs, best first."""
    refused: list[Estimate]
    """Those that do not fit, leanest first."""
    notes: list[str]
    """Sentences for the reader: what the figures rest on, how a prescribed layout compares."""
    considered: int
    """Layouts whose time and memory were estimated."""
    refused_by: dict[str, int]
    """How many layouts each constraint refused."""
    elsewhere: Estimate | None
    """Megatron's fastest layout, where it beats all that our trainer can run."""
    alternatives: list[Estimate]
    """Megatron's layouts, best first, where the recipe's own software is another."""
    advice: list[str]
    """Sentences: changes that would make it faster."""
