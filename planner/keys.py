"""Which steps have constants in common: the accelerator, the software, the arithmetic, and the cluster they ran on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from planner.hardware import ACCELERATORS, CORE

_STYLES: Final = (
    ("castra-zero", "deepspeed"),
    ("castra", "fsdp"),
    ("megatron", "megatron"),
    ("nemo", "megatron"),
    ("deepspeed", "deepspeed"),
    ("zero", "deepspeed"),
)
"""A word of a framework's name and the style of program it is; sharded data parallel for any other."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What a profile is for. Told from a row of measured steps, or asked for by a plan."""

    accelerator: str
    """As in `ACCELERATORS`."""
    framework: str
    """With its version, where one is stated."""
    precision: str
    experts: bool
    """The model has routed experts: other kernels, other constants."""
    per_node: float = 0
    """Accelerators per node; 0 stands for any cluster. Likewise Gbit/s between nodes."""
    gbps: float = 0

    def __str__(self) -> str:
        """As it is shown: 'A100-80|Composer-FSDP|bf16|8x1600'."""
        words = (self.accelerator, self.framework, self.precision, "experts" * self.experts, self.cluster)
        return "|".join(word for word in words if word)

    @property
    def cluster(self) -> str:
        """As it is shown: '8x1600'; empty for any. Two clusters of a kind are never alike, so they are told apart."""
        return f"{self.per_node:g}x{self.gbps:g}" if self.per_node else ""

    @property
    def kind(self) -> str:
        """Dense models and those with experts share nothing, nor do accelerators with a processor's cores."""
        return "core" if self.accelerator == CORE else "experts" if self.experts else "dense"

    @property
    def generation(self) -> str:
        """Of the accelerator."""
        return ACCELERATORS[self.accelerator].generation

    @property
    def style(self) -> str:
        """What sort of program the framework is: megatron, deepspeed or fsdp."""
        name = self.framework.lower()
        return next((style for word, style in _STYLES if word in name), "fsdp")

    @property
    def software(self) -> str:
        """What its memory is known by: accelerator, framework and precision, whatever the cluster and the model."""
        return f"{self.accelerator}|{self.framework}|{self.precision}"

    @property
    def program(self) -> str:
        """The framework, Castra's own strategies being one."""
        return "castra" if self.framework.startswith("castra-") else self.framework

    @property
    def family(self) -> str:
        """The prior that serves it: kind, generation and style."""
        return f"{self.kind} {self.generation} {self.style}"

    @property
    def anywhere(self) -> "Key":
        """The same on any cluster."""
        return replace(self, per_node=0, gbps=0)


def key_of(row: Mapping[str, str]) -> Key:
    """The key of a row of a table of measured steps."""
    return Key(
        accelerator=row["hw"],
        framework=" ".join(part for part in (row["framework"], row.get("framework_version", "")) if part),
        precision=row["precision"],
        experts=float(row["n_experts"] or 0) > 0,
        # A machine's cores are shared out among however many ranks there are: that makes no other machine of it.
        per_node=0 if row["hw"] == CORE else float(row["gpus_per_node"]),
        gbps=0 if row["hw"] == CORE else float(row["inter_node_gbps"]),
    )
