"""Less memory and less time per block: activations made again in the backward pass, blocks compiled."""

import os
import shutil
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.model.objective import NextTokenLoss
from training.process import JobError

KEPT: Final = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Products with weights, and fused attention: nearly all of a block's work, a small part of its activations.

Batched products are left out: they are the scores of capped attention, which grow with the square of the length.
"""


def checkpoint_activations(objective: NextTokenLoss, mode: Literal["selective"] | bool) -> None:
    """Have the backward pass make the activations of each block again: all, or all but the matrix products.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Call it before sharding and compiling. No block
    draws random numbers, so their state is not kept.
    """
    if mode:
        selective = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
        more: dict[str, Any] = selective if mode == "selective" else {}
        for block in objective.blocks:
            _replace_forward(
                block, partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)
            )


def compile_blocks(objective: NextTokenLoss) -> None:
    """Compile each block's forward pass with torch.compile; what sharding hooks around it stays outside.

    Raises JobError on a CPU without a C++ compiler.
    """
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if not torch.cuda.is_available() and not any(map(shutil.which, compilers)):
        raise JobError("train.compile needs a C++ compiler on a CPU and there is none; install g++ or set it to false")
    for block in objective.blocks:
        _replace_forward(block, torch.compile(block.forward))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _replace_forward(block: nn.Module, forward: Any) -> None:
    block.forward = forward
