"""What training programs do with memory and network: Castra's own strategies, Megatron, and those others measured."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np

from planner.schema import PRECISIONS, Floats, Software, is_code

STRATEGIES: Final = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero0")
"""Castra's own, from the simplest to the most involved: of two equally fast ones the planner takes the simpler.
DeepSpeed's stage 0 is ddp by another program, so nobody is advised to take it."""

NF4_BYTES: Final = 0.5 + (1 + 4 / 256) / 64
"""Of a weight in NF4 with double quantisation (Dettmers et al. 2023, QLoRA, section 3): half a byte, and of each block
of 64 a byte that scales it, and of each 256 of these 4 bytes."""

_COMMON: Final[dict[str, float]] = {
    "flash": 1,
    "compiled": 0,
    "tp_overlap": 0,
    "ep_overlap": 0,
    "ep_once": 1,
    "dp_overlap": 1,
    "weight_bytes": 2,
    "gradient_bytes": 4,
    "optimizer_bytes": 12,
    "reduced_bytes": 4,
    "gathered_bytes": 2,
    "copy_bytes": 0,
    "collectives_per_layer": 1,
    "reduces_each": 0,
    "holds_gradients": 0,
    "balanced_ends": 0,
    "fused_loss": 0,
    "deepspeed": 0,
    "cp_overlap": 1,
    "trained": 1,
    "release": 0,
}
"""Megatron as it is now: 16-bit weights, fp32 gradients, fp32 master weights with Adam's two moments."""
_FRAMEWORKS: Final[tuple[tuple[str, dict[str, float]], ...]] = (
    ("megatron-deepspeed", {"dp_overlap": 0, "reduced_bytes": 2, "gradient_bytes": 2}),
    (
        "cpu adamw",
        {"reduced_bytes": 2, "gradient_bytes": 2, "collectives_per_layer": 12, "deepspeed": 1, "fused_loss": 1},
    ),
    ("deepspeed", {"reduced_bytes": 2, "gradient_bytes": 2, "collectives_per_layer": 12, "deepspeed": 1}),
    ("nccl alltoall", {"ep_once": 0}),
    ("megatron", {}),
    ("nemo", {}),
    ("composer", {"reduced_bytes": 2, "gradient_bytes": 4, "weight_bytes": 4, "optimizer_bytes": 8}),
    ("titan", {"weight_bytes": 4, "optimizer_bytes": 8, "reduces_each": 1}),
    ("fsdp", {"weight_bytes": 4, "optimizer_bytes": 8, "reduces_each": 1}),
)
"""Published programs by a word of their name, the first that is in it; what differs from `_COMMON`."""


def of_framework(rows: Sequence[Mapping[str, str]], precision: Floats, zero: Floats) -> Software:
    """What the program of each row of a table of measured steps does, by its name and the row's switches."""
    from planner.rows import release_of  # rows reads tables and needs this

    kinds = [_traits(row["framework"].lower(), row["precision"]) for row in rows]
    columns: dict[str, Floats] = {name: np.array([kind[name] for kind in kinds], dtype=np.float64) for name in _COMMON}
    fp32 = is_code(precision, PRECISIONS, "bf16_fp32grad")
    plain = np.array(["megatron-lm" in row["framework"].lower() for row in rows]) & (zero == 0)
    columns |= {
        "precision": precision,
        "flash": _switch(rows, "flash_attn"),
        "compiled": _switch(rows, "compile"),
        "tp_overlap": _switch(rows, "tp_overlap"),
        "ep_overlap": np.array([float("a2a overlap on" in row.get("notes", "")) for row in rows]),
        "dp_overlap": np.where(plain, 0.0, columns["dp_overlap"]),
        "gradient_bytes": np.where(fp32, 4.0, columns["gradient_bytes"]),
        "reduced_bytes": np.where(fp32, 4.0, columns["reduced_bytes"]),
        "balanced_ends": np.where(fp32, 1.0, 0.0),
        "release": np.array([release_of(row) for row in rows]),
    }
    return Software(**columns)


def megatron(precision: str, **switches: Any) -> Software:
    """Megatron-Core with its distributed optimizer; `switches` are fields of `Software`."""
    return _software(precision, _COMMON | {"tp_overlap": 1} | switches)


def castra(strategies: Sequence[str], precision: str, trained: float = 1.0, quantised: float = 0.0) -> Software:
    """Castra's own program, one column per strategy named (each one of `STRATEGIES`); a share of the weights learns.

    Another share is `quantised`: kept in 4 bits, of which autocast keeps no copy either.
    """
    kinds = [_ours(strategy, precision) | {"trained": trained} for strategy in strategies]
    for kind in kinds:
        kind["weight_bytes"] += quantised * (NF4_BYTES - kind["weight_bytes"])
        kind["copy_bytes"] *= 1 - quantised
    return _software(precision, {name: np.array([kind[name] for kind in kinds]) for name in _COMMON})


def _traits(name: str, precision: str) -> dict[str, float]:
    if (strategy := name.removeprefix("castra-")) in STRATEGIES:
        return _ours(strategy, precision)
    return _COMMON | next((traits for word, traits in _FRAMEWORKS if word in name), {})


def _switch(rows: Sequence[Mapping[str, str]], name: str) -> Floats:
    return np.array([float(row[name] or 0) for row in rows])


def _software(precision: str, traits: Mapping[str, Any]) -> Software:
    columns = {"precision": float(PRECISIONS.index(precision)), **traits}
    return Software(**{field.name: np.asarray(columns[field.name], dtype=np.float64) for field in fields(Software)})


def _ours(strategy: str, precision: str) -> dict[str, float]:
    """One strategy of `training.parallel`, in the terms of Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054)."""
    deepspeed = strategy.startswith("zero")
    # 16 bits are autocast over fp32 weights, or 16-bit weights throughout, of which FSDP2 keeps the fp32 shards
    low = precision in {"bf16", "fp16"}
    autocast = (low and strategy == "ddp") or (precision == "bf16" and strategy in {"zero0", "zero1"})
    cast = low and not autocast
    return _COMMON | {
        "deepspeed": float(deepspeed),
        "weight_bytes": 2 if cast and deepspeed else 4,
        # Adam's two moments, and the fp32 master weights DeepSpeed keeps whatever the weights are
        "optimizer_bytes": 12 if deepspeed and (cast or strategy != "zero0") else 8,
        "copy_bytes": 2 if autocast else 0,
        "gathered_bytes": 2 if cast else 4,
        "collectives_per_layer": 12 if strategy == "zero3" else 1,
        "reduces_each": float(strategy in {"zero2", "zero3"}),
        "holds_gradients": float(strategy == "fsdp2"),
        "cp_overlap": 0,
        "fused_loss": 1,
    }
