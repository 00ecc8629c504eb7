"""How a recipe's work is spread over the ranks."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from recipes.part import Part, Size, agreed

Strategy = Literal["auto", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"]


class Parallel(Part):
    """How the model and its states are spread over the ranks."""

    strategy: Strategy = Field(
        "auto",
        description="auto takes the planner's choice; ddp, fsdp2 (torch), zero0 to zero3 (DeepSpeed). Tensor, pipeline "
        "and context parallel sizes go with fsdp2.",
    )
    shard: Size = Field(
        "auto",
        description="fsdp2: ranks that one copy of the states is cut up among, each further group holding another copy "
        "(hybrid sharding); auto cuts it up among all data parallel ranks.",
        examples=[8],
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What DeepSpeed keeps outside the GPU's memory: the optimizer (zero1 to zero3), or the parameters "
        "too (zero3).",
    )
    offload_to: Literal["cpu", "nvme"] = Field("cpu", description="Where it keeps that: the node's memory, or a disk.")
    nvme_path: str = Field("/local_nvme", description="Execution. The nodes' fast disk, for offload_to nvme.")
    micro_batch_size: Size = Field(
        "auto", description="Sequences per rank and forward pass; auto takes the largest that fits.", examples=[4]
    )
    software: Literal["castra", "megatron"] = Field(
        "castra",
        description="Which training program is planned for: Castra's own, or Megatron, which case.framework "
        "megatron-lm, megatron-deepspeed and nemo run; these, ep above 1 and recompute mean megatron where nothing "
        "else is said.",
    )
    tp: Size = Field("auto", description="Tensor parallel ranks: each layer is cut up among them.", examples=[8])
    pp: Size = Field("auto", description="Pipeline stages, each with a part of the layers.", examples=[4])
    vpp: Size = Field("auto", description="Parts of the model that each pipeline stage holds (interleaved).")
    cp: Size = Field("auto", description="Context parallel ranks: each sequence is cut up among them.")
    ep: Size = Field("auto", description="Expert parallel ranks: the experts of each layer lie on so many.")
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="What Megatron's backward pass does again: nothing, the attention, or whole layers; Castra's own "
        "program has train.activation_checkpointing.",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_its_software(cls, value: Any) -> Any:
        """What only Megatron can do means Megatron."""
        if isinstance(value, dict) and "software" not in value and any(_is_megatrons(item) for item in value.items()):
            return value | {"software": "megatron"}
        return value

    @model_validator(mode="after")
    def _software_can(self) -> Self:
        if self.software == "megatron":
            return self
        beyond = [f"{name}: {value}" for name, value in self if _is_megatrons((name, value))]
        wrong = [f"{', '.join(beyond)} is Megatron's: write software: megatron"] if beyond else []
        cut = [
            f"{name}: {size}" for name in ("tp", "pp", "vpp", "cp") if (size := getattr(self, name)) not in ("auto", 1)
        ]
        if cut and self.strategy not in ("auto", "fsdp2"):
            wrong.append(f"{', '.join(cut)} goes with strategy: fsdp2, not {self.strategy}")
        if self.shard not in ("auto", 1) and self.strategy not in ("auto", "fsdp2"):
            wrong.append(f"shard: {self.shard} is of strategy: fsdp2, not {self.strategy}")
        return agreed(self, wrong + self._offload_fits())

    def _offload_fits(self) -> list[str]:
        able = {"none": None, "optimizer": ("zero1", "zero2", "zero3"), "parameters": ("zero3",)}[self.offload]
        if able is None or self.strategy in able:
            return []
        return [f"offload: {self.offload} needs strategy: {' or '.join(able)}, not {self.strategy}"]


def _is_megatrons(field: tuple[str, Any]) -> bool:
    """Whether a field of `parallel`, with its value, asks for more than Castra's own trainer can."""
    name, value = field
    if name == "recompute":
        return str(value) != "auto"
    return name == "ep" and str(value) not in {"auto", "1"}
