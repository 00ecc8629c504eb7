"""How each strategy of `training/` keeps a model's states, in bytes per parameter and per activation."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np

from planner.machine import Precision
from planner.model import Floats

STRATEGIES: Final = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
"""From the simplest to the most involved: of two equally fast ones the planner takes the simpler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What one training program does with memory and network: one value per configuration."""

    stage: Floats
    """What is split over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    deepspeed: Floats
    weights: Floats
    """Bytes per parameter kept for the weights; likewise gradients and optimizer."""
    gradients: Floats
    optimizer: Floats
    copies: Floats
    """Bytes per parameter of a second, lower-precision copy of the whole model."""
    value: Floats
    """Bytes of one value in the layers' arithmetic."""
    gathered: Floats
    """Bytes per parameter when weights travel."""
    reduced: Floats
    """Bytes per parameter when gradients travel."""
    reduces_each: Floats
    """Gradients travel after every micro-batch, not after the last one only."""
    holds_gradients: Floats
    """Between micro-batches every rank keeps all gradients, whatever the stage."""
    saved_hidden: Floats
    """Bytes kept for the backward pass per token and layer: per element of the width,"""
    saved_ffn: Floats
    """of the MLP's width,"""
    saved_kv: Floats
    """and of the keys' width."""
    saved_input: Floats
    """The same per element of the width when only the layer's input is kept."""
    logits: Floats
    """Bytes per token and word of the vocabulary that the loss holds at its peak."""

    @classmethod
    def of(cls, strategies: Sequence[str], precision: Precision) -> Self:
        """The rows of our own programs, one per strategy named; a strategy is one of `STRATEGIES`."""
        kinds = [_ours(strategy, precision) for strategy in STRATEGIES]
        place = [STRATEGIES.index(strategy) for strategy in strategies]
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.array([kind[name] for kind in kinds], dtype=np.float64)[place] for name in names})


# Bytes autograd keeps per token and layer of transformers' Llama with sdpa, counted with saved-tensor hooks: width,
# MLP width, keys' width, and the layer's input alone. Autocast keeps the residual stream and the norms in fp32.
# Korthikanti et al. 2022 (arXiv:2205.05198) give 34 for a GPT block whose attention keeps its scores besides.
_SAVED: Final = {"fp32": (32, 16, 8, 4), "bf16": (20, 8, 4, 2), "autocast": (30, 8, 4, 4)}


def _ours(strategy: str, precision: Precision) -> dict[str, float]:
    """One strategy of `training.parallel`, in the terms of Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054)."""
    deepspeed = strategy.startswith("zero")
    stage = int(strategy[-1]) if deepspeed else {"ddp": 0, "fsdp2": 3}[strategy]
    # bf16 is autocast over fp32 weights, or bf16 weights throughout, of which FSDP2 keeps the fp32 shards
    autocast = precision == "bf16" and strategy in {"ddp", "zero1"}
    cast = precision == "bf16" and not autocast
    saved = _SAVED["autocast" if autocast else precision]
    return {
        "stage": stage,
        "deepspeed": deepspeed,
        "weights": 2 if cast and deepspeed else 4,
        "gradients": 4,
        # Adam's two moments, and the fp32 master weights DeepSpeed keeps whatever the weights are
        "optimizer": 12 if deepspeed else 8,
        "copies": 2 if autocast else 0,
        "value": 2 if precision == "bf16" else 4,
        "gathered": 2 if cast else 4,
        "reduced": 4,
        "reduces_each": strategy in {"zero2", "zero3"},
        "holds_gradients": strategy == "fsdp2",
        "saved_hidden": saved[0],
        "saved_ffn": saved[1],
        "saved_kv": saved[2],
        "saved_input": saved[3],
        "logits": 0,
    }
