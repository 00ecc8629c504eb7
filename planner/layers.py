"""How long one layer takes on one rank for one micro-batch: products, attention, small kernels, and what it sends."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.collectives import ring
from planner.constants import Constants
from planner.schema import PRECISIONS, RECOMPUTE, Configs, Floats, is_code

TILE: Final = 128.0
"""Rows and columns of the output that one multiprocessor computes at a time."""
RAMP: Final = 96.0
"""Inner size at which a product reaches half of its speed."""
CORE_RAMP: Final = 48.0
"""The same on a CPU's core. This, the exponents below and the other figures of cores: benchmarks/planner_live.py."""
EXPONENTS: Final = 12.0
"""A core takes as long for a score's exponent as for so many elements of a head."""
ATTENTION_BACKWARD: Final = 2.5 * 1.15
"""Flash attention's backward does five products for the forward's two (Dao 2023, arXiv:2307.08691), somewhat slower."""
ATTENTION_RAMP: Final = 1024.0
"""Sequence length at which attention reaches half of its speed."""
GEMM, ATTENTION, SMALL, ROUTING, TP, EP, CP = (
    "gemm",
    "attention",
    "elementwise",
    "routing",
    "tensor parallel",
    "expert parallel",
    "context parallel",
)


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one layer's forward or backward pass, by part."""

    parts: dict[str, Floats]

    @property
    def total(self) -> Floats:
        """Of all parts."""
        return sum(self.parts.values(), start=np.zeros(()))


@dataclass(frozen=True, slots=True)
class Rates:
    """What the constants leave of the hardware's figures."""

    flops: Floats
    """Of 16-bit products."""
    products: Floats
    """Of products in the precision of the run."""
    attention: Floats
    memory: Floats
    links: Floats
    network: Floats

    @classmethod
    def of(cls, configs: Configs, constants: Constants) -> "Rates":
        """FLOP/s and bytes per second."""
        hardware, code = configs.hardware, configs.software.precision
        scaled = is_code(code, PRECISIONS, "mxfp8", "fp8_rowwise")
        share = np.where(
            code == PRECISIONS.index("fp8"),
            constants.fp8,
            np.where(scaled, constants.block8, np.where(code == PRECISIONS.index("nvfp4"), constants.fp4, 1.0)),
        )
        flops = hardware.flops * constants.gemm
        return cls(
            flops=flops,
            products=flops * np.maximum(hardware.speedup * share, 1.0),
            attention=hardware.flops * constants.attention * hardware.attention,
            memory=hardware.memory * constants.memory,
            links=hardware.intra * constants.links,
            network=hardware.inter * constants.network,
        )


def gemm(m: Floats, n: Floats, k: Floats, flops: Floats, memory: Floats, multiprocessors: Floats) -> Floats:
    """Seconds of one product of (m, k) by (k, n): tiles and waves not full, short inner sizes, memory's floor."""
    tile = np.where(multiprocessors > 1, TILE, 8.0)
    rows, columns = np.ceil(m / tile), np.ceil(n / tile)
    tiles = rows * columns
    full = tiles / (np.ceil(tiles / multiprocessors) * multiprocessors)
    # Splitting a long inner size fills what a single short wave would leave idle.
    split = np.minimum(1.0, tiles * np.maximum(k / 2048.0, 1.0) / multiprocessors)
    full = np.where(tiles < multiprocessors, np.maximum(full, split), full)
    padded = rows * columns * (tile * tile)
    ramp: Floats = np.where(multiprocessors > 1, RAMP, CORE_RAMP)
    arithmetic = 2.0 * padded * (k + ramp) / (flops * (0.15 + 0.85 * full))
    return np.asarray(np.maximum(arithmetic, 2.0 * (m * k + k * n + m * n) / memory))


def on_core(configs: Configs, yes: float = 1.0, no: float = 0.0) -> Floats:
    """A figure of a CPU's core, which nothing runs beside and which starts itself, or of an accelerator."""
    hardware = configs.hardware  # in the precision of the columns: a sweep's single precision stays single
    return np.asarray(np.where(hardware.multiprocessors == 1, yes, no), dtype=hardware.memory.dtype)


def linear(m: Floats, n: Floats, k: Floats, rates: Rates, configs: Configs) -> tuple[Floats, Floats]:
    """Forward, and backward (for the input and for the weight), of one linear layer in the run's precision."""
    rest = (rates.products, rates.memory, configs.hardware.multiprocessors)
    return gemm(m, n, k, *rest), gemm(m, k, n, *rest) + configs.software.trained * gemm(n, k, m, *rest)


def layer(configs: Configs, constants: Constants) -> tuple[Pass, Pass]:
    """Forward and backward pass of an average layer, without recomputation."""
    rates = Rates.of(configs, constants)
    parts: dict[str, tuple[Floats, Floats]] = {
        GEMM: _attention_products(configs, rates),
        ATTENTION: _attention(configs, rates),
        SMALL: _small(configs, rates),
        TP: _tensor_parallel(configs, rates, constants),
    }
    dense, routing = _dense_mlp(configs, rates), None
    if np.any(configs.shape.experts > 0):
        share = dense_share(configs)
        experts, routing = _experts(configs, rates, constants)
        dense = tuple(share * a + (1 - share) * b for a, b in zip(dense, experts, strict=True))  # type: ignore[assignment]  # two in, two out
        parts[ROUTING] = routing
        parts[EP] = _expert_parallel(configs, rates, constants)
    parts[GEMM] = (parts[GEMM][0] + dense[0], parts[GEMM][1] + dense[1])
    if np.any(configs.layout.cp > 1):
        parts[CP] = _context_parallel(configs, rates, *parts[ATTENTION])
    forward, backward = ({name: pair[way] for name, pair in parts.items()} for way in (0, 1))
    return Pass(forward), Pass(backward)


def again(configs: Configs, forward: Pass) -> dict[str, Floats]:
    """What recomputation adds to the backward pass, by part."""
    code = configs.layout.recompute
    small = np.where(code == RECOMPUTE.index("all_but_products"), 1.0, 0.0)
    share = np.where(code == RECOMPUTE.index("full"), 1.0, 0.0)
    share = np.where(code == RECOMPUTE.index("selective_op"), 0.4, share)
    share = np.where(code == RECOMPUTE.index("selective_blocks"), 0.35, share)
    core = np.where(code == RECOMPUTE.index("selective"), 1.0, share)
    shares = {ATTENTION: core, SMALL: np.maximum(share, small)}
    return {name: shares.get(name, share) * seconds for name, seconds in forward.parts.items()}


def dense_share(configs: Configs) -> Floats:
    """Share of the layers whose MLP is dense."""
    shape = configs.shape
    return np.where(shape.experts > 0, shape.dense_layers / shape.layers, 1.0)


def _attention_products(configs: Configs, rates: Rates) -> tuple[Floats, Floats]:
    shape, tp, tokens = configs.shape, configs.layout.tp, configs.tokens
    width = shape.heads * shape.head_dim / tp
    f1, b1 = linear(tokens, width + 2 * shape.kv_heads * shape.head_dim / tp, shape.hidden, rates, configs)
    if np.any(shape.mla > 0):
        # DeepSeek's low-rank queries (1536) and keys with values (512 and a rotary part of 64); heads of 192 and 256.
        low = [linear(tokens, np.asarray(2112.0), shape.hidden, rates, configs)]
        low += [linear(tokens, shape.heads * 192 / tp, np.asarray(1536.0), rates, configs)]
        low += [linear(tokens, shape.heads * 256 / tp, np.asarray(512.0), rates, configs)]
        f1 = np.where(shape.mla > 0, sum(one[0] for one in low), f1)
        b1 = np.where(shape.mla > 0, sum(one[1] for one in low), b1)
    f2, b2 = linear(tokens, shape.hidden, width, rates, configs)
    return f1 + f2, b1 + b2


def _dense_mlp(configs: Configs, rates: Rates) -> tuple[Floats, Floats]:
    shape, tp, tokens = configs.shape, configs.layout.tp, configs.tokens
    f1, b1 = linear(tokens, (1 + shape.gated) * shape.ffn / tp, shape.hidden, rates, configs)
    f2, b2 = linear(tokens, shape.hidden, shape.ffn / tp, rates, configs)
    return f1 + f2, b1 + b2


def routed(configs: Configs) -> Floats:
    """Tokens times experts visited per rank; with expert parallelism the tensor-parallel ranks share them."""
    layout = configs.layout
    return configs.tokens / np.where(layout.ep > 1, layout.tp, 1.0) * configs.shape.topk


def _experts(
    configs: Configs, rates: Rates, constants: Constants
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """The products of the local experts, evenly visited, and the shared one; and the work of routing."""
    shape, layout = configs.shape, configs.layout
    local = np.maximum(shape.experts / np.maximum(layout.ep, 1), 1)
    cut = np.where(layout.ep > 1, 1.0, layout.tp)
    each, wide = np.maximum(routed(configs) / local, 1.0), np.maximum(shape.expert_ffn, 1.0)
    f1, b1 = linear(each, 2 * wide / cut, shape.hidden, rates, configs)
    f2, b2 = linear(each, shape.hidden, wide / cut, rates, configs)
    shared, width = shape.shared_experts > 0, wide * np.maximum(shape.shared_experts, 1) / layout.tp
    f3, b3 = linear(configs.tokens, 2 * width, shape.hidden, rates, configs)
    f4, b4 = linear(configs.tokens, shape.hidden, width, rates, configs)
    products = (local * (f1 + f2) + np.where(shared, f3 + f4, 0), local * (b1 + b2) + np.where(shared, b3 + b4, 0))
    # Permute, unpermute and weigh: about eight passes over the routed tokens forward, ten backward.
    moved = (1 - dense_share(configs)) * routed(configs) * shape.hidden * 16.0 * constants.routing / rates.memory
    return products, (moved, moved * 1.3)


def _attention(configs: Configs, rates: Rates) -> tuple[Floats, Floats]:
    """Scores and their product with the values: flash kernels do the causal half; others write the scores out."""
    shape, layout = configs.shape, configs.layout
    flash = configs.software.flash > 0
    scores = layout.mbs * shape.heads / layout.tp * shape.sequence * shape.sequence / layout.cp
    width = np.where(shape.mla > 0, 160.0, shape.head_dim)
    ramp = np.where(on_core(configs) > 0, 1 + EXPONENTS / width, 1 + ATTENTION_RAMP / shape.sequence)
    fused = 2.0 * scores * width * ramp / rates.attention
    if np.all(flash):
        return fused, fused * ATTENTION_BACKWARD
    bad = np.where(np.mod(shape.head_dim, 8) != 0, 9.0, 1.0)  # no tensor cores for such rows
    product = 2.0 * scores * shape.head_dim / (rates.flops * 0.75 * shape.head_dim / (shape.head_dim + 64.0))
    vectors = 4.0 * layout.mbs * shape.heads / layout.tp * shape.sequence * shape.head_dim
    product = np.maximum(product, (2.0 * scores + vectors) / rates.memory) * bad
    forward = np.where(flash, fused, 2 * product + 8.0 * scores / rates.memory)
    backward = np.where(flash, fused * ATTENTION_BACKWARD, 4 * product + 10.0 * scores / rates.memory)
    return forward, backward


def _small(configs: Configs, rates: Rates) -> tuple[Floats, Floats]:
    """Norms, rotary embedding, activation functions, residuals: bytes over bandwidth."""
    shape, layout = configs.shape, configs.layout
    spread = np.where(layout.sequence_parallel > 0, layout.tp, 1.0)
    wide = np.where(shape.experts > 0, shape.topk * shape.expert_ffn, shape.ffn) / layout.tp
    common = 8.0 * shape.heads * shape.head_dim / layout.tp
    forward = 22.0 * shape.hidden / spread + np.where(shape.gated > 0, 6.0, 4.0) * wide + common
    backward = 24.0 * shape.hidden / spread + np.where(shape.gated > 0, 10.0, 6.0) * wide + common
    wide_values = np.where(configs.software.precision == 0, 2.0, 1.0)  # fp32 moves twice the bytes
    each = np.where(configs.software.compiled > 0, 0.6, 1.0) * configs.tokens * wide_values / rates.memory
    return forward * each, backward * each


def _tensor_parallel(configs: Configs, rates: Rates, constants: Constants) -> tuple[Floats, Floats]:
    """Two all-reduces each way (or the gathers and scatters of sequence parallelism: the same bytes)."""
    layout, hardware = configs.layout, configs.hardware
    size = 2.0 * configs.tokens * configs.shape.hidden
    size = size * np.where(configs.software.precision == 0, 2.0, 1.0)
    inside = ring(size, np.minimum(layout.tp, hardware.per_node), rates.links, hardware.intra_latency, 2.0)
    beyond = layout.tp > hardware.per_node
    outside = np.where(
        beyond, 2.0 * size * (1 - hardware.per_node / layout.tp) / rates.network + hardware.inter_latency, 0.0
    )
    hidden = np.where(configs.software.tp_overlap > 0, 1 - 0.7 * constants.overlap, 1.0)
    seconds = 2 * (inside + outside) * hidden
    return seconds, seconds


def _expert_parallel(configs: Configs, rates: Rates, constants: Constants) -> tuple[Floats, Floats]:
    """Two all-to-alls each way: tokens to their experts and back."""
    layout, hardware = configs.layout, configs.hardware
    size = routed(configs) * configs.shape.hidden * 2.0
    nodes = np.maximum(layout.ep / np.minimum(layout.ep, hardware.per_node), 1)
    topk = np.maximum(configs.shape.topk, 1)
    once = (nodes - 1) * (1 - (1 - 1 / nodes) ** topk) / topk
    away = np.where(configs.software.ep_once > 0, once, 1 - 1 / nodes)
    network = size * away / (rates.network / hardware.per_node)
    seconds = (
        np.where(layout.ep > 1, network + size / rates.links + 2 * hardware.intra_latency, 0.0)
        * 2
        * (1 - dense_share(configs))
    )
    seconds = seconds * np.where(configs.software.ep_overlap > 0, 1 - 0.8 * constants.overlap, 1.0)
    return seconds, seconds


def _context_parallel(configs: Configs, rates: Rates, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """Keys and values go round the ring while attention computes; what takes longer, or is not beside it, is seen."""
    shape, layout, hardware = configs.shape, configs.layout, configs.hardware
    size = 4.0 * configs.tokens * shape.kv_heads * shape.head_dim / layout.tp * (layout.cp - 1)
    near = layout.cp * layout.tp <= hardware.per_node
    rate = np.where(near, rates.links, rates.network / hardware.per_node)
    beside = configs.software.cp_overlap
    return np.maximum(size / rate - beside * forward, 0.0), np.maximum(2 * size / rate - beside * backward, 0.0)
