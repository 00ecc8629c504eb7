"""How long one optimizer step takes: a roofline per phase, and the communication that nothing hides."""

from dataclasses import dataclass

import numpy as np

from planner.grid import Grid
from planner.machine import Hardware
from planner.model import Floats

PASSES = 3.0
"""A backward pass multiplies twice for each time forward: for the input's gradient and for the weight's."""
ATTENTION_PASSES = 3.5
"""Flash attention's backward does five products for the forward's two (Dao 2023, arXiv:2307.08691)."""
LLAMA_MOVES = (55.0, 5.0, 11.0)
"""Values read and written by the small kernels of one transformers Llama layer, per token: per element of the width
(two norms of 18, rotary embedding 11, residuals 6, a transposition 2), of the MLP's width (silu, product), of the
keys' width (rotary). Counted by hand from modeling_llama.py run without a compiler."""
GPT_MOVES = (14.0, 2.0, 2.0)
"""The same for a GPT layer with fused norms and no rotary embedding."""
LOSS_BYTES = 24.0
"""Moved per token and word of the vocabulary by softmax and its gradient, in fp32."""
OPTIMIZER_BYTES = 40.0
"""Moved per parameter by AdamW in fp32 (read 16, write 12) and by clipping (read 8, write 4)."""
DDP_BUCKET_BYTES = 25e6
"""Gradients that travel together (torch's default)."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What a family of machines reaches of its figures, before anybody measured this one. See tables/prior.json."""

    gemm: float
    """Of the achievable matrix product, by wide layers in training."""
    ramp: float
    """Width at which a layer's products reach half of that."""
    attention: float
    """Of the achievable matrix product, by flash attention."""
    memory: float
    """Of the memory bandwidth, by small kernels."""
    links: float
    """Of the links inside a node, by collectives."""
    network: float
    """Of the network between nodes, by collectives."""
    overlap: float
    """Of the communication that could hide behind computation, how much does."""
    latency_s: float
    """Of one collective inside a node; likewise per node that takes part:"""
    hop_s: float
    launch_s: float
    """To start the kernels of one layer's forward pass: a step is never faster than its host."""
    deepspeed: float
    """Time of DeepSpeed's step over torch's, the same work done."""
    interval: tuple[float, float]
    """Measured step over predicted step: 90 % of the measurements the constants never saw lie between these."""
    deepspeed_interval: tuple[float, float]
    """The same for DeepSpeed's steps."""

    def interval_of(self, strategy: str) -> tuple[float, float]:
        """The interval that a strategy's estimates have."""
        return self.deepspeed_interval if strategy.startswith("zero") else self.interval


def phases(grid: Grid, hardware: Hardware, prior: Prior) -> dict[str, Floats]:
    """Seconds of each phase of one optimizer step, for every configuration; their sum is the step."""
    compute = {
        "gemm": _gemm(grid, hardware, prior),
        "attention": _attention(grid, hardware, prior),
        "elementwise": _elementwise(grid, hardware, prior),
    }
    once = sum(compute.values(), start=np.zeros(1))
    host = grid.shape.layers * prior.launch_s * (PASSES + grid.recompute)
    compute["launch"] = np.maximum(host - once, 0.0)
    drag = 1 + grid.software.deepspeed * (prior.deepspeed - 1)
    result = {name: seconds * grid.accumulation * drag for name, seconds in compute.items()}
    busy = np.maximum(once, host) * grid.accumulation * drag
    result["communication"] = _exposed(grid, hardware, prior, busy)
    moved = OPTIMIZER_BYTES * grid.shape.parameters / grid.sharded(1)
    result["optimizer"] = moved / (hardware.memory * prior.memory) * drag
    return result


def _gemm(grid: Grid, hardware: Hardware, prior: Prior) -> Floats:
    """All matrix products of one micro-batch: the roofline of arithmetic and of reading the weights."""
    shape = grid.shape
    again = PASSES + grid.recompute
    weights = shape.layers * shape.layer_matrices * again + shape.head_matrix * PASSES
    reached = prior.gemm * shape.hidden / (shape.hidden + prior.ramp)
    arithmetic = 2 * grid.tokens * weights / (hardware.flops * reached)
    return np.maximum(arithmetic, weights * grid.software.value / hardware.memory)


def _attention(grid: Grid, hardware: Hardware, prior: Prior) -> Floats:
    """Scores and their product with the values, the causal half only."""
    shape = grid.shape
    forward = 2 * grid.tokens * shape.sequence * shape.heads * shape.head_dim * shape.layers
    return forward * (ATTENTION_PASSES + grid.recompute) / (hardware.flops * prior.attention)


def _elementwise(grid: Grid, hardware: Hardware, prior: Prior) -> Floats:
    """Norms, rotary embedding, activation functions, residuals, softmax of the loss: bytes over bandwidth."""
    shape = grid.shape
    hidden, ffn, keys = (np.where(shape.gated, a, b) for a, b in zip(LLAMA_MOVES, GPT_MOVES, strict=True))
    values = hidden * shape.hidden + ffn * shape.ffn + keys * shape.kv_width
    layers = shape.layers * values * grid.software.value * (PASSES + grid.recompute)
    return grid.tokens * (layers + LOSS_BYTES * shape.vocab) / (hardware.memory * prior.memory)


def _exposed(grid: Grid, hardware: Hardware, prior: Prior, busy: Floats) -> Floats:
    """Communication that computation does not hide. `busy` is the computation of the whole step, in seconds."""
    seconds = traffic(grid) / _bandwidth(grid, hardware, prior)
    nodes = grid.ranks / grid.ranks_per_node
    latency = prior.latency_s + np.where(nodes > 1, prior.hop_s * nodes, 0.0)
    seconds = (grid.ranks > 1) * (seconds + _collectives(grid) * latency)
    # Weights can be fetched during any computation; gradients can leave only while a backward pass makes more.
    backward = busy * 2 / 3 / np.where(grid.software.stage >= 2, 1, grid.accumulation)
    window = np.where(grid.software.stage == 3, busy, backward)
    return seconds - prior.overlap * np.minimum(seconds, window)


def traffic(grid: Grid) -> Floats:
    """Bytes that leave one rank in one step (ring collectives: gathering or reducing moves (n-1)/n of the whole).

    ddp reduces and spreads the gradients once; stage 1 and 2 reduce them and spread the weights; stage 3 gathers the
    weights for every forward and every backward pass (Rajbhandari et al. 2020, section 7).
    """
    software, steps = grid.software, grid.accumulation
    reductions = np.where(software.reduces_each, steps, 1) * software.reduced
    ddp = 2 * software.reduced
    split = reductions + software.gathered
    full = reductions + 2 * steps * software.gathered
    per_parameter = np.select([software.stage == 0, software.stage < 3], [ddp, split], full)
    return per_parameter * grid.shape.parameters * (grid.ranks - 1) / grid.ranks


def _collectives(grid: Grid) -> Floats:
    """How many collectives one step starts: one per layer and purpose under stage 3, one per bucket otherwise."""
    software, steps = grid.software, grid.accumulation
    reductions = np.where(software.reduces_each, steps, 1)
    buckets = 1 + grid.shape.parameters * software.reduced / DDP_BUCKET_BYTES
    layers = (grid.shape.layers + 1) * (2 * steps + reductions)
    return np.where(software.stage == 3, layers, buckets * reductions + (software.stage > 0))


def _bandwidth(grid: Grid, hardware: Hardware, prior: Prior) -> Floats:
    """Bytes per second through one rank: a ring over several nodes passes each node's network once."""
    inside = hardware.intra * prior.links
    between = np.minimum(inside, hardware.inter * prior.network)
    return np.where(grid.ranks > grid.ranks_per_node, between, inside)
