"""Adapters without a network: how a trained pair of small matrices joins the weight beside it, in torch or NumPy."""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

M = TypeVar("M", "np.ndarray[Any, Any]", "torch.Tensor")


def merged(weight: M, down: M, up: M, scale: float, *, transposed: bool = False) -> M:
    """Return weight + scale up down (Hu et al., "LoRA", 2021, section 4.1), in the widest type of the three.

    weight [rows, columns], down = lora_A [rank, columns], up = lora_B [rows, rank]; `transposed` for GPT-2, whose
    weights are [columns, rows]. scale is lora_alpha / lora_rank.
    """
    product = up @ down
    joined: M = weight + (product.T if transposed else product) * scale
    return joined
