"""Machines and recipes the planner's tests share."""

from collections.abc import Callable
from typing import Any

import pytest

from planner import Machine
from recipes import Recipe

LLAMA3_8B = {
    "hidden_size": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "ffn_size": 14336,
    "vocab_size": 128256,
    "tie_embeddings": False,
    "rope_theta": 500000.0,
}


@pytest.fixture
def llama3_8b() -> Callable[..., Recipe]:
    """A maker of 8 B recipes: overrides go to `train`, sequence and parallel have names of their own."""

    def make(sequence_length: int = 8192, parallel: Any = "auto", **train: Any) -> Recipe:
        settings = {"global_batch_size": 32, "precision": "bf16", "steps": 1000} | train
        data = {"sequence_length": sequence_length}
        return Recipe.model_validate({"model": LLAMA3_8B, "data": data, "train": settings, "parallel": parallel})

    return make


@pytest.fixture
def p5() -> Machine:
    return Machine(
        name="p5.48xlarge",
        accelerator="NVIDIA H100",
        accelerators=8,
        memory_gib=80,
        bf16_tflops=989,
        fp32_tflops=66.9,
        hbm_gb_per_s=3350,
        intra_gb_per_s=450,
        inter_gbps=3200,
        price_usd_per_hour=55.04,
        price_as_of="2026-07-20",
    )


@pytest.fixture
def p4de() -> Machine:
    return Machine(
        name="p4de.24xlarge",
        accelerator="NVIDIA A100 80GB",
        accelerators=8,
        memory_gib=80,
        bf16_tflops=312,
        fp32_tflops=19.5,
        hbm_gb_per_s=2039,
        intra_gb_per_s=300,
        inter_gbps=400,
        price_usd_per_hour=27.44705,
        price_as_of="2026-07-20",
    )
