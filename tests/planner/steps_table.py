"""Rows of a table of steps, for tests: a Llama of 8 billion parameters, and what is said of it otherwise."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.constants import Constants, start
from planner.rows import Row, Steps, steps
from planner.speed import step_seconds

TOLD = """
id x source test hw H100-80 framework castra-fsdp2 precision bf16 model llama gpus_per_node 8 inter_node_gbps 3200
hidden 4096 ffn 14336 gated_mlp 1 layers 32 heads 32 kv_heads 8 head_dim 128 vocab 128256 tied_emb 0 seq 4096
n_experts 0 topk 0 moe_ffn 0 shared_experts 0 dense_layers 0 mla 0 tp 1 pp 1 vpp 1 cp 1 ep 1 zero 3 recompute none
seq_parallel 0 flash_attn 1 tp_overlap 0 compile 0 offload none usable time
"""
_WORDS = TOLD.split()
LLAMA = dict(zip(_WORDS[::2], _WORDS[1::2], strict=True)) | dict.fromkeys(("iter_s", "mem_gib", "group"), "")


def row(name: str, gpus: int, micro: int = 1, accumulation: int = 1, **changes: str) -> Row:
    """A row; the data-parallel ranks are all of them."""
    sizes = {"n_gpus": gpus, "dp": gpus, "shard_size": gpus, "mbs": micro, "ga": accumulation}
    told = {key: str(value) for key, value in (sizes | {"gbs": gpus * micro * accumulation}).items()}
    return LLAMA | {"id": name} | told | changes


def as_measured(rows: Sequence[Row], **truth: float) -> list[Row]:
    """The rows with the step times of a machine whose constants are `truth`, else the usual ones."""
    found = steps(rows)
    true: Constants = replace(start(), **{name: np.asarray(value) for name, value in truth.items()})
    seconds, _ = found.fastest(step_seconds(found.configs, true))
    return [dict(one, iter_s=f"{time:.6g}") for one, time in zip(rows, seconds, strict=True)]


def table(path: Path, rows: Sequence[Row]) -> Path:
    """Write the rows as CSV."""
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    return path


def measured_steps(rows: Sequence[Row], **truth: float) -> Steps:
    """The same as `as_measured`, as steps."""
    return steps(as_measured(rows, **truth))
