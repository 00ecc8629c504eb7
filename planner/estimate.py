"""What the planner answers: layouts, what each needs and takes, and which is best."""

from dataclasses import dataclass

from planner.memory import Memory


@dataclass(frozen=True, slots=True)
class Layout:
    """How the global batch and the model's states are cut up. micro x accumulation x ranks = global batch."""

    strategy: str
    """One of ddp, fsdp2, zero1, zero2, zero3."""
    micro_batch_size: int
    """Sequences per rank and forward pass."""
    gradient_accumulation: int
    """Micro-batches per optimizer step."""
    world_size: int

    def __str__(self) -> str:
        """As people say it."""
        return f"{self.strategy}, micro batch {self.micro_batch_size} x {self.gradient_accumulation}"


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
    """All nodes for `total_seconds` and the set-up; None where nothing is paid or no price is known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one recipe on one machine."""

    best: Estimate
    """The fastest that fits, or the one the recipe prescribes."""
    ranked: list[Estimate]
    """All that fit, best first."""
    refused: list[Estimate]
    """All that do not fit, leanest first."""
    notes: list[str]
    """Sentences for the reader: what the figures rest on, how a prescribed layout compares."""
