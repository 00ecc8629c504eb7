"""How much memory one rank needs: states, activations, and what the software keeps besides."""

from dataclasses import dataclass

import numpy as np

from planner.grid import Grid
from planner.model import Floats

GIB = 2.0**30
RUNTIME_GIB = {"gpu": 3.0, "cpu": 0.45}
"""Before the first weight: CUDA context, NCCL's buffers and kernels' workspaces (an assumption); Python with torch and
transformers (measured: 0.35 to 0.5)."""
FRAGMENTED = {"gpu": 1.1, "cpu": 1.1}
"""What the allocator takes for a byte of activations or buffers: blocks of the wrong size stay empty."""
USABLE = {"gpu": 0.92, "cpu": 0.7}
"""Share of the memory that a plan may fill. The rest of a GPU is the estimate's own error (0.92 refuses 5 of 6 measured
out-of-memory runs); the rest of this machine belongs to other programs."""
BUCKET, LIVE = 5e8, 1e9
"""Elements DeepSpeed gathers into one reduction, and keeps whole under stage 3 (its defaults)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank needs at its peak. Unit: GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Gathered layers, reduction buckets, casts, the loss, and the runtime itself."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def breakdown(grid: Grid, kind: str) -> dict[str, Floats]:
    """The fields of `Memory` for every configuration, in GiB; `kind` is the machine's ('gpu' or 'cpu')."""
    software, weights = grid.software, grid.shape.parameters
    whole = software.holds_gradients * (grid.accumulation > 1)
    split = np.where(whole, 1, grid.sharded(2))
    parts = {
        "weights": weights * software.weights / grid.sharded(3),
        "gradients": weights * software.gradients / split,
        "optimizer": weights * software.optimizer / grid.sharded(1),
        "activations": activations(grid) * FRAGMENTED[kind],
        "buffers": _buffers(grid) * FRAGMENTED[kind] + RUNTIME_GIB[kind] * GIB,
    }
    return {name: np.asarray(size / GIB) for name, size in parts.items()}


def activations(grid: Grid) -> Floats:
    """Bytes kept for the backward pass when it begins: all layers' tensors, or all layers' inputs and one layer."""
    shape, software = grid.shape, grid.software
    per_token = (
        software.saved_hidden * shape.hidden + software.saved_ffn * shape.ffn + software.saved_kv * shape.kv_width
    )
    layer = grid.tokens * per_token
    inputs = shape.layers * grid.tokens * shape.hidden * software.saved_input
    kept = (1 - grid.recompute) * shape.layers * layer + grid.recompute * (inputs + layer)
    logits = software.logits * grid.tokens * shape.vocab
    return kept + logits


def _buffers(grid: Grid) -> Floats:
    """Bytes beside states and activations."""
    shape, software = grid.shape, grid.software
    weights, layer = shape.parameters, shape.layer_matrices
    ends = (2 - shape.tied) * shape.head_matrix
    stage3: Floats = np.where(software.stage == 3, 1.0, 0.0)
    # FSDP2: this layer and the next, gathered, the gradient of one, and the embeddings, which stay gathered.
    torch = (2 * layer + ends) * software.gathered + layer * software.reduced
    # ZeRO-3: gathered weights up to its limit, and the fp32 gradients of one group while the optimizer steps.
    live = np.minimum(weights, LIVE) * software.gathered + np.minimum(weights / grid.ranks, LIVE) * 4
    gathered: Floats = stage3 * np.where(software.deepspeed, live, torch)
    buckets = software.deepspeed * (1 + stage3) * np.minimum(weights, BUCKET) * software.gathered
    # The loss makes the output embedding's gradient in fp32 in the forward pass, from a cast of its weights.
    loss: Floats = np.where(software.logits, 0.0, shape.head_matrix * (4 + software.value))
    return gathered + buckets + weights * software.copies + loss
