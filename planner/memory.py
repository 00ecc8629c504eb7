"""How much memory one rank needs at its peak: states, activations, and what the software keeps besides."""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from planner.hardware import GIB
from planner.schema import OFFLOAD, OPTIMIZER_AWAY, PARAMETERS_AWAY, PRECISIONS, RECOMPUTE, Configs, Floats, is_code
from planner.states import (
    dense_share,
    end_parameters,
    expert_parameters,
    layer_parameters,
    parameters_per_rank,
    stage_layers,
)

PARTS: Final = ("weights", "gradients", "optimizer", "activations", "buffers", "fragmentation")
"""What a rank's memory is spent on; the parts add up to the peak."""
RUNTIME_GIB: Final = 4.0
"""Before the first weight on a GPU: CUDA context, kernels' workspaces and the buffers of NCCL's first communicators (an
assumption, fitted where rows are measured)."""
COMMUNICATOR_GIB: Final = 0.4
"""Each further kind of communicator: pipeline, context and expert parallelism (likewise)."""
CPU_RUNTIME_GIB: Final = 0.45
"""Python with torch and transformers; measured: 0.35 to 0.5."""
FRAGMENTED: Final = 0.1
"""What the allocator takes besides, for a byte of activations or buffers: blocks of the wrong size stay empty."""
USABLE: Final = {"gpu": 0.98, "cpu": 0.7}
"""Share of the memory that a plan may fill: the driver keeps a part of a GPU; a part of this machine belongs to other
programs."""
BUCKET, LIVE = 5e8, 1e9
"""Elements DeepSpeed gathers into one reduction, and keeps whole under stage 3 (its defaults)."""
LOGIT_BYTES, EAGER_LOGIT_BYTES = 6.0, 14.0
"""Per token and word of the vocabulary, at once: logits and gradient where a kernel of the loss's own works in place
(Megatron, Composer); PyTorch's own has 16-bit logits, their fp32 copy, the softmax and the gradient."""
HOST_BUFFERS: Final = 1.5
"""What DeepSpeed takes of the host's memory over the states that it keeps there."""
KEPT_BY_BLOCKS: Final = 0.25
"""Share of the blocks that keep their activations where some are recomputed: an assumption, for nobody tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Measured over modelled memory, by what it depends on: one value per configuration, or one for all."""

    runtime: Floats = field(default_factory=lambda: np.ones(()))
    """Of what is there before the first weight."""
    states: Floats = field(default_factory=lambda: np.ones(()))
    """Of weights, gradients and optimizer."""
    activations: Floats = field(default_factory=lambda: np.ones(()))
    """Of activations and of buffers."""


def breakdown(configs: Configs, constants: MemoryConstants | None = None) -> dict[str, Floats]:
    """GiB by part of the fullest rank at its peak, for every configuration (shapes broadcast); they sum to the peak.

    States after Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), activations after Korthikanti et al. 2022
    (arXiv:2205.05198). The first pipeline stage keeps the most micro-batches, the last one adds the logits.
    """
    given = constants or MemoryConstants()
    of_states, of_rest, of_runtime = (_like(item, configs) for item in (given.states, given.activations, given.runtime))
    weights, gradients, optimizer = (size * (of_states / GIB) for size in states(configs))
    kept, moving = activations(configs) * (of_rest / GIB), buffers(configs) * (of_rest / GIB)
    if np.any(configs.layout.zero == 3):
        # What stage 3 gathers again is never more than what it saved: a model that small is simply there at once.
        saved = parameters_per_rank(configs) * configs.software.weight_bytes * (of_states / GIB) - weights
        moving = moving + np.minimum(gathered(configs) * (of_rest / GIB), np.maximum(saved, 0) / (1 + FRAGMENTED))
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": kept,
        "buffers": moving + runtime(configs) * of_runtime,
        "fragmentation": FRAGMENTED * (kept + moving),
    }


def peak(configs: Configs, constants: MemoryConstants | None = None) -> Floats:
    """GiB of the fullest rank at its peak."""
    return sum(breakdown(configs, constants).values(), start=_number(configs, 0))


def usable(configs: Configs) -> Floats:
    """GiB of each rank's memory that a plan may fill."""
    share = _choose(configs, configs.hardware.multiprocessors > 1, USABLE["gpu"], USABLE["cpu"])
    return configs.hardware.capacity * (share / GIB)


def fits(configs: Configs, constants: MemoryConstants | None = None) -> NDArray[np.bool_]:
    """Whether the peak stays within what is usable."""
    return np.asarray(peak(configs, constants) <= usable(configs))


def split(configs: Configs, stage: int) -> Floats:
    """Over how many ranks a state is split that ZeRO splits from this stage on (experts: see `states`)."""
    layout = configs.layout
    shard = layout.shard
    if np.any(layout.cp > 1):  # where all data-parallel ranks share the states, the context-parallel ones do too
        shard = np.where(shard == layout.dp, shard * layout.cp, shard)
    from_here = layout.zero >= stage
    # Arithmetic on masks here and below: NumPy chooses between two arrays several times slower than it multiplies.
    return 1 + from_here * (np.maximum(shard, 1) - 1) if np.any(from_here) else _number(configs, 1)


def states(configs: Configs) -> tuple[Floats, Floats, Floats]:
    """Bytes of the weights, the gradients and the optimizer on the fullest rank."""
    layout, software = configs.layout, configs.software
    common, experts = parameters_per_rank(configs), None
    if np.any(configs.shape.experts > 0):
        experts = stage_layers(configs) * expert_parameters(configs)
        common = common - experts

    def spread(over: Floats, per_parameter: Floats) -> Floats:
        bytes_ = common * per_parameter / over
        if experts is None:
            return bytes_
        # The ranks that hold the same experts are fewer by those that hold others (Megatron: dp x cp x tp / ep).
        same = np.where(layout.ep > 1, np.maximum(over * layout.tp / layout.ep, 1), over)
        return bytes_ + experts * per_parameter / np.where(over > 1, same, 1)

    of_gradients = split(configs, 2)
    if np.any(of_gradients > 1):
        # A pipeline's stages, like FSDP2 as we use it, reduce gradients after the last micro-batch only.
        whole = ((software.holds_gradients > 0) & (layout.ga > 1)) | (layout.pp > 1)
        of_gradients = np.where(whole, 1, of_gradients)
    # Where gradients are summed in fp32 the backward pass still writes them in 16 bits.
    twice = _choose(configs, software.precision == PRECISIONS.index("bf16_fp32grad"), 2, 0)
    weights = spread(split(configs, 3), software.weight_bytes)
    gradients = spread(of_gradients, (software.gradient_bytes + twice) * software.trained)
    optimizer = spread(split(configs, 1), software.optimizer_bytes * software.trained)
    away = layout.offload >= OPTIMIZER_AWAY
    if not np.any(away):
        return weights, gradients, optimizer
    weights = np.where((layout.offload >= PARAMETERS_AWAY) & (layout.zero == 3), 0, weights)
    return weights, np.where(away & (layout.zero >= 2), 0, gradients), np.where(away, 0, optimizer)


def activations(configs: Configs) -> Floats:
    """Bytes kept for the backward pass when it begins, with the layer it is in and the logits."""
    layout, shape, software = configs.layout, configs.shape, configs.software
    kept, whole = per_layer(configs)
    stage = stage_layers(configs) * kept
    live = whole - kept
    eager = (software.reduces_each > 0) | (software.deepspeed > 0)
    each = _choose(configs, eager, EAGER_LOGIT_BYTES, LOGIT_BYTES) * (1 - software.fused_loss)
    first, last = (micro_batches * stage for micro_batches in in_flight(configs))
    away = layout.offload == OFFLOAD.index("act")
    if np.any(away):  # one layer's on its way out, one's on its way in
        first, last = (np.where(away, np.minimum(size, 2 * kept), size) for size in (first, last))
    return configs.tokens * np.maximum(first + live, last + np.maximum(live, each * shape.vocab / layout.tp))


def in_flight(configs: Configs) -> tuple[Floats, Floats]:
    """Micro-batches that the first and the last stage keep: 1F1B, and interleaved (Korthikanti et al. 2022, 4.2.3)."""
    layout = configs.layout
    first, last = layout.pp, _number(configs, 1)
    if np.any(layout.vpp > 1):
        more = (layout.pp - 1) / layout.vpp
        first, last = layout.pp + (layout.vpp > 1) * more, layout.pp - more
    return np.minimum(first, layout.ga), np.minimum(last, layout.ga)


def per_layer(configs: Configs) -> tuple[Floats, Floats]:
    """Bytes per token that an average layer keeps as it recomputes, and without recomputation.

    Of a GPT block Korthikanti et al. 2022 count 34 bytes per element of the width, 5 more per score; of transformers'
    Llama this machine counted with saved-tensor hooks (tests/planner/test_memory_model.py).
    """
    layout, shape, software = configs.layout, configs.shape, configs.software
    value = _value(configs)
    spread = 1 + layout.sequence_parallel * (layout.tp - 1)
    stream = _stream_bytes(configs) * shape.hidden / spread
    heads, keys, wide = _widths(configs)
    linear = stream + value * (2 * heads + 2 * keys + wide) / layout.tp
    whole = linear
    if not np.all(software.flash > 0):
        scores = (2 * value + 1) * shape.heads * shape.sequence / layout.tp
        whole = linear + (1 - software.flash) * scores
    if not np.any(layout.recompute > 0):
        return whole, whole
    inputs = np.where(software.copy_bytes > 0, 4, value) * shape.hidden / spread
    products = value * (shape.hidden / spread + (1.5 * heads + keys + wide / 4) / layout.tp) + inputs
    choices = {
        "selective": linear,
        "selective_op": np.minimum(products, whole),
        "selective_blocks": KEPT_BY_BLOCKS * whole + (1 - KEPT_BY_BLOCKS) * inputs,
        "full": inputs,
        "unknown": inputs,
        # two products give the whole stream, before tensor parallel ranks add theirs up and share it out
        "all_but_products": np.minimum(value * (_products(configs) / layout.tp + 2 * shape.hidden) + inputs, whole),
    }
    kept = whole
    for name, bytes_ in choices.items():
        there = layout.recompute == RECOMPUTE.index(name)
        if np.any(there):
            kept = kept + there * (bytes_ - kept)
    return kept, whole


def _products(configs: Configs) -> Floats:
    """Elements per token that a block's attention and its matrix products give, but those that give the stream."""
    shape = configs.shape
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 2 * heads + 2 * keys + (1 + shape.gated) * shape.ffn


def hosted(configs: Configs) -> tuple[Floats, Floats]:
    """GiB that a node needs of its own memory for its ranks' states, and of its disks.

    16 bytes a parameter of optimizer and gradients, 2 of weights, and half as much again for buffers in memory; and
    under DeepSpeed every rank begins with the whole model in fp32 there: after `estimate_zero3_model_states_mem_needs`
    of DeepSpeed 0.19 (deepspeed/runtime/zero/stage3.py).
    """
    layout, all_ = configs.layout, parameters_per_rank(configs)
    each = (layout.offload >= OPTIMIZER_AWAY) * 16 * configs.software.trained + (layout.offload >= PARAMETERS_AWAY) * 2
    ranks = np.minimum(configs.hardware.per_node, configs.ranks) / GIB
    there = all_ / split(configs, 1) * ranks * each
    begun = configs.software.deepspeed * 4 * all_ * ranks
    on_disk = is_code(layout.offload, OFFLOAD, "optimizer-nvme", "parameters-nvme")
    return np.maximum(np.where(on_disk, 0, HOST_BUFFERS * there), begun), np.where(on_disk, there, 0)


def buffers(configs: Configs) -> Floats:
    """Bytes beside states and activations: reduction buckets, a copy for autocast, the fused loss."""
    shape, software, layout = configs.shape, configs.software, configs.layout
    result = _number(configs, 0)
    if not np.any((software.deepspeed > 0) | (software.copy_bytes > 0) | (software.fused_loss > 0)):
        return result
    weights = parameters_per_rank(configs)
    buckets = software.deepspeed * np.minimum(weights, BUCKET) * software.gathered_bytes
    # The loss makes the output embedding's gradient in fp32 in the forward pass, from a cast of its weights.
    loss = software.fused_loss * shape.vocab * shape.hidden / layout.tp * (4 + _value(configs))
    return buckets + weights * software.copy_bytes + loss


def gathered(configs: Configs) -> Floats:
    """Bytes of what stage 3 makes whole again for a while; 0 elsewhere."""
    software, layout, ends = configs.software, configs.layout, end_parameters(configs)
    layer, weights = layer_parameters(configs), parameters_per_rank(configs)
    # FSDP: this layer and the next, gathered, the gradient of one, and the embeddings, which stay gathered.
    result = (2 * layer + ends) * software.gathered_bytes + layer * software.reduced_bytes
    if np.any(software.deepspeed > 0):
        # DeepSpeed: weights up to its limit and a bucket, and the fp32 gradients of one group as the optimizer steps.
        live = (np.minimum(weights, LIVE) + np.minimum(weights, BUCKET)) * software.gathered_bytes
        stepped = np.where(layout.offload >= OPTIMIZER_AWAY, 0, weights / split(configs, 3)) * software.trained
        live = live + np.minimum(stepped, LIVE) * 4
        result = np.where(software.deepspeed > 0, live, result)
    if np.any(layout.pp > 1):  # several micro-batches are under way: a stage stays gathered
        result = np.where(layout.pp > 1, weights * software.gathered_bytes, result)
    return np.asarray((layout.zero == 3) * result)


def runtime(configs: Configs) -> Floats:
    """GiB before the first weight."""
    layout = configs.layout
    each = _number(configs, COMMUNICATOR_GIB)
    gpu = RUNTIME_GIB + (layout.pp > 1) * each + (layout.cp > 1) * each + (layout.ep > 1) * each
    return np.where(configs.hardware.multiprocessors > 1, gpu, CPU_RUNTIME_GIB)


def _stream_bytes(configs: Configs) -> Floats:
    """Kept per token and element of the width outside the matrices: norms, their outputs, GPT's dropout masks."""
    software, value = configs.software, _value(configs)
    dropout = (1 - software.flash) * (1 - configs.shape.gated)  # its two masks, one byte each
    fused = 2 * value + 2 * _kept_bytes(configs) + 2 * dropout
    if not np.any(software.fused_loss > 0):
        return fused
    # transformers' own norms keep their fp32 steps; under autocast the residual stream stays in fp32 besides
    fp32 = software.precision == PRECISIONS.index("fp32")
    written_out = np.where(fp32, 24, np.where(software.copy_bytes > 0, 26, _number(configs, 16)))
    return np.where(software.fused_loss > 0, written_out, fused)


def _widths(configs: Configs) -> tuple[Floats, Floats, Floats]:
    """Elements kept per token: queries (and the output), keys (and the values), and all of the MLP."""
    shape = configs.shape
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # What enters the activation function and what leaves it; without a kernel of its own, the gate's output too.
    inner = (1 + shape.gated * (1 + configs.software.fused_loss)) + _kept_bytes(configs) / _value(configs)
    wide = inner * shape.ffn
    if np.any(shape.mla > 0):  # DeepSeek's heads: 192 for queries and keys, 128 for values and outputs
        heads = np.where(shape.mla > 0, 160 * shape.heads, heads)
        keys = np.where(shape.mla > 0, 160 * shape.heads, keys)
    if np.any(shape.experts > 0):
        # Per expert visited: the token itself, in and out, and the expert's MLP; the ranks of a tensor-parallel group
        # share the tokens or cut the expert up.
        routed = shape.topk * (inner * shape.expert_ffn + 2 * shape.hidden)
        routed = routed + inner * shape.expert_ffn * shape.shared_experts
        share = dense_share(configs)
        wide = share * wide + (1 - share) * routed
    return heads, keys, wide


def _value(configs: Configs) -> Floats:
    """Bytes of one value in the layers' arithmetic."""
    return _choose(configs, configs.software.precision == PRECISIONS.index("fp32"), 4, 2)


def _kept_bytes(configs: Configs) -> Floats:
    """Bytes of what enters a matrix product: Transformer Engine (Megatron's) keeps 8-bit products' inputs as such."""
    eight = (configs.software.precision >= PRECISIONS.index("fp8")) & (configs.software.weight_bytes == 2)
    return np.where(eight, 1, _value(configs))


def _number(configs: Configs, value: float) -> Floats:
    """A constant in the configurations' own precision, so that float32 stays float32."""
    return np.asarray(value, dtype=configs.tokens.dtype)


def _choose(configs: Configs, condition: Any, yes: float, no: float) -> Floats:
    return np.where(condition, _number(configs, yes), _number(configs, no))


def _like(values: Floats, configs: Configs) -> Floats:
    return np.asarray(values, dtype=configs.tokens.dtype)
