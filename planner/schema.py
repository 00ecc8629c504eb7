"""Configurations to be judged, many at a time: what is trained, cut up how, by which software, on which machine.

Every field is an array or a scalar (an array without axes) and broadcasts against the others, so that thousands of
configurations cost one pass of NumPy and what they share is kept, and computed, once.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
C = TypeVar("C")

RECOMPUTE: Final = ("none", "selective", "selective_op", "selective_blocks", "full", "unknown", "all_but_products")
"""What the backward pass does again, by its place here: nothing; the attention core (Megatron's); every second product
(torchtitan's); some of the blocks; every block; not stated; all but the matrix products (Castra's selective)."""
PRECISIONS: Final = ("fp32", "fp16", "bf16", "bf16_fp32grad", "fp8", "fp8_rowwise", "mxfp8", "nvfp4")
"""Arithmetic of the matrix products, by its place here; bf16_fp32grad also keeps and reduces gradients in fp32."""
OFFLOAD: Final = ("none", "act", "optimizer", "optimizer-nvme", "parameters", "parameters-nvme")
"""What lies outside the accelerator's memory, by its place here: in the host's, or on the node's disks; where the
parameters do so does the optimizer. From `OPTIMIZER_AWAY` on the optimizer does, from `PARAMETERS_AWAY` on they do."""
OPTIMIZER_AWAY, PARAMETERS_AWAY = (float(OFFLOAD.index(name)) for name in ("optimizer", "parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Decoders: widths in elements, `sequence` in tokens; `gated`, `tied`, `mla` are 0 or 1; no experts is dense."""

    hidden: Floats
    layers: Floats
    heads: Floats
    kv_heads: Floats
    head_dim: Floats
    ffn: Floats
    vocab: Floats
    sequence: Floats
    gated: Floats
    """The MLP has three matrices (Llama) and not two (GPT)."""
    tied: Floats
    """Input and output embedding are one matrix."""
    experts: Floats
    """Routed experts per layer; 0 where the MLP is dense."""
    topk: Floats
    """Experts each token visits."""
    expert_ffn: Floats
    """Width of one expert's (gated) MLP."""
    shared_experts: Floats
    """Experts every token visits besides."""
    dense_layers: Floats
    """Leading layers without experts."""
    mla: Floats
    """Multi-head latent attention (DeepSeek)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the global batch and the model are cut up: mbs x ga x dp sequences a step on tp x pp x dp x cp ranks."""

    tp: Floats
    """Tensor parallel size; likewise pipeline (pp), interleaved stages per rank (vpp), data, context and expert."""
    pp: Floats
    vpp: Floats
    dp: Floats
    cp: Floats
    ep: Floats
    zero: Floats
    """What is split over the data-parallel ranks: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too (FSDP)."""
    shard: Floats
    """Over how many ranks it is split: dp, or fewer where shards are replicated (HSDP)."""
    mbs: Floats
    """Sequences per micro-batch."""
    ga: Floats
    """Micro-batches per optimizer step."""
    recompute: Floats
    """Place in `RECOMPUTE`."""
    sequence_parallel: Floats
    offload: Floats
    """Place in `OFFLOAD`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What the training program does with memory and network, 0 or 1 where no unit is named."""

    precision: Floats
    """Place in `PRECISIONS`."""
    flash: Floats
    """Attention never writes its scores to memory."""
    compiled: Floats
    tp_overlap: Floats
    """Tensor-parallel collectives run beside matrix products."""
    ep_overlap: Floats
    """All-to-alls run beside another micro-batch's computation."""
    ep_once: Floats
    """A token that several experts of another node want travels there once (DeepEP), not once for each of them."""
    dp_overlap: Floats
    """Gradients are reduced while the backward pass goes on."""
    weight_bytes: Floats
    """Bytes per parameter kept for the weights of the forward pass; likewise the gradients and the optimizer."""
    gradient_bytes: Floats
    optimizer_bytes: Floats
    reduced_bytes: Floats
    """Bytes per parameter when gradients travel."""
    gathered_bytes: Floats
    """Bytes per parameter when weights travel."""
    copy_bytes: Floats
    """Bytes per parameter of a second, lower-precision copy of the whole model."""
    collectives_per_layer: Floats
    """How many gathers one sharded layer takes (DeepSpeed gathers by tensor, FSDP by layer)."""
    reduces_each: Floats
    """Gradients travel after every micro-batch, not after the last one only."""
    holds_gradients: Floats
    """Between micro-batches every rank keeps all gradients, whatever the stage."""
    balanced_ends: Floats
    """Embedding and head take a layer's place in the pipeline, as they do where the layers do not divide."""
    fused_loss: Floats
    """The logits of all tokens never lie in memory at once."""
    deepspeed: Floats
    """DeepSpeed's ZeRO engine does the sharding."""
    cp_overlap: Floats
    """Keys and values go round the context-parallel ranks while attention computes; else they are gathered first."""
    trained: Floats
    """Share of the weights that learn: 1, but where adapters do beside frozen weights (LoRA)."""
    release: Floats
    """Year and month of the software's release as years (26.04 is 2026.25); 0 where it is not stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What each rank works with. Rates are of one accelerator, one direction, in FLOP/s and bytes per second."""

    flops: Floats
    """Dense peak of the arithmetic that attention and 16-bit products use; fp32's where that is the precision."""
    speedup: Floats
    """Peak of the products' own precision over `flops`: 1, 2 (8 bits) or 4 (4 bits)."""
    memory: Floats
    """Bandwidth of the accelerator's memory."""
    capacity: Floats
    """Size of the accelerator's memory. Unit: bytes."""
    multiprocessors: Floats
    intra: Floats
    """Links to the other accelerators of the node."""
    inter: Floats
    """Network of the whole node."""
    per_node: Floats
    """Accelerators that share a node (or an NVLink domain)."""
    host: Floats
    """Link between one accelerator and its host's memory."""
    intra_latency: Floats = field(default_factory=lambda: np.asarray(20e-6))
    """Of a collective inside a node; likewise between nodes, without what each more node adds. Unit: seconds."""
    inter_latency: Floats = field(default_factory=lambda: np.asarray(40e-6))
    disk: Floats = field(default_factory=lambda: np.asarray(1e9))
    """One accelerator's share of what the node's disks read or write. Unit: bytes per second."""
    attention: Floats = field(default_factory=lambda: np.asarray(1.0))
    """Speed of attention over that of other machines with such `flops`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configs:
    """Configurations, one per element."""

    shape: Shape
    layout: Layout
    software: Software
    hardware: Hardware

    @property
    def ranks(self) -> Floats:
        """Accelerators at work."""
        return self.layout.tp * self.layout.pp * self.layout.dp * self.layout.cp

    @property
    def tokens(self) -> Floats:
        """Tokens per rank and micro-batch."""
        return self.layout.mbs * self.shape.sequence / self.layout.cp


def mapped(columns: C, change: Any) -> C:
    """The same columns, `change` done to every array of them (however deep they lie)."""
    found = {one.name: getattr(columns, one.name) for one in fields(cast("Any", columns))}
    done = {name: mapped(item, change) if is_dataclass(item) else change(item) for name, item in found.items()}
    return type(columns)(**done)


def take(columns: C, which: Any) -> C:
    """The configurations that an index or a mask picks; what all share stays a scalar."""
    return mapped(columns, lambda item: item[which] if np.ndim(item) else item)


def is_code(codes: Floats, names: tuple[str, ...], *wanted: str) -> NDArray[np.bool_]:
    """Where a column of places in `names` holds one of the wanted names."""
    hits = [codes == names.index(name) for name in wanted]
    return np.asarray(np.logical_or.reduce(hits))
