"""Training steps that others measured and published: read from a table, and filtered to what `training/` resembles."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from planner.grid import Grid
from planner.machine import Hardware
from planner.model import Floats, Shape
from planner.prior import family_of
from planner.software import Software

TABLE = Path(__file__).with_name("tables") / "measured.csv"
Row = dict[str, str]

ACCELERATORS: Final = {
    "A100-40": (312, 0.869, 1555, 300),
    "A100-80": (312, 0.869, 2039, 300),
    "H100-80": (989, 0.803, 3350, 450),
    "H100-96-500W": (989, 0.803, 2400, 450),
    "H200": (989, 0.803, 4800, 450),
}
"""bf16 TFLOPS, achievable share, memory GB/s, NVLink GB/s in one direction (clusters/instances.json names the sources;
the 96 GB H100 is the one torchtitan's tables were measured on, with HBM2e at 2.4 TB/s)."""
RECOMPUTE: Final = {"none": 0.0, "full": 1.0, "selective_op": 0.5, "selective": 0.0}
"""Share of the forward pass done again. torchtitan's per-operator choice keeps every second product: half, an
assumption; Megatron's 'selective' recomputes the attention scores, which flash attention does anyway."""

_SCOPE: Final[dict[str, Callable[[Row], bool]]] = {
    "mixture of experts": lambda row: float(row["n_experts"] or 0) == 0,
    "tensor, pipeline or context parallel": lambda row: {row["tp"], row["pp"], row["cp"]} <= {"1", "1.0"},
    "no step time": lambda row: "time" in row["usable"],
    "other precision": lambda row: row["precision"] in {"bf16", "fp16"},
    "offload": lambda row: row["offload"] == "none",
    "compiled": lambda row: row["compile"] == "0",
    "attention not flash": lambda row: row["flash_attn"] == "1",
    "recompute share not stated": lambda row: row["recompute"] in RECOMPUTE,
    "micro-batch not stated": lambda row: bool(row["mbs"] and row["ga"]),
    "accelerator without figures": lambda row: row["hw"] in ACCELERATORS,
}


@dataclass(frozen=True)
class Measured:
    """Measured steps and what is needed to predict them, one per element."""

    source: NDArray[np.str_]
    family: NDArray[np.str_]
    """Generation of the accelerator, as in tables/prior.json."""
    certain: NDArray[np.bool_]
    """The source states every field a prediction needs; the rest of the rows may be off by what was inferred."""
    group: NDArray[np.str_]
    """Rows of one group are the same configuration: never on both sides of a split."""
    grid: Grid
    hardware: Hardware
    seconds: Floats
    memory_gib: Floats
    """NaN where it was not measured."""


def rows_in_scope(path: Path = TABLE) -> tuple[list[Row], Counter[str]]:
    """The rows that resemble what `training/` does, and how many were left out for which reason.

    The columns are those of the measured table, documented in README.md. Raises ValueError naming a missing column.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    needed = {"source", "group", "hw", "iter_s", "usable", "recompute", "mbs", "ga", "compile", "flash_attn"}
    missing = sorted(needed - set(rows[0] if rows else ()))
    if missing:
        raise ValueError(f"{path} lacks the column {missing[0]}: give a table with the columns of {TABLE.name}.")
    kept, left_out = [], Counter[str]()
    for row in rows:
        reason = next((name for name, holds in _SCOPE.items() if not holds(row)), None)
        if reason is None:
            kept.append(row)
        else:
            left_out[reason] += 1
    return kept, left_out


def arrays(rows: list[Row]) -> Measured:
    """The rows as arrays, ready for `speed.phases` and `memory.breakdown`."""

    def column(name: str) -> Floats:
        return np.array([float(row[name] or "nan") for row in rows])

    named = {"sequence": "seq", "gated": "gated_mlp", "tied": "tied_emb"}
    shape = Shape(**{field.name: column(named.get(field.name, field.name)) for field in fields(Shape)})
    grid = Grid(
        shape=shape,
        software=_software(column("zero"), [row["framework"] for row in rows]),
        micro=column("mbs"),
        accumulation=column("ga"),
        ranks=column("n_gpus"),
        ranks_per_node=np.minimum(column("gpus_per_node"), column("n_gpus")),
        recompute=np.array([RECOMPUTE[row["recompute"]] for row in rows]),
    )
    return Measured(
        source=np.array([row["source"] for row in rows]),
        family=np.array([family_of(row["hw"]) for row in rows]),
        certain=np.array([row["quality"] == "A" for row in rows]),
        group=np.array([row["group"] for row in rows]),
        grid=grid,
        hardware=_hardware([row["hw"] for row in rows], column("inter_node_gbps")),
        seconds=column("iter_s"),
        memory_gib=column("mem_gib"),
    )


def select(rows: Measured, which: NDArray[np.bool_]) -> Measured:
    """Those of the rows that `which` marks."""

    def cut(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{field.name: cut(getattr(value, field.name)) for field in fields(value)})
        return value[which]

    return Measured(**{field.name: cut(getattr(rows, field.name)) for field in fields(Measured)})


def _hardware(names: Iterable[str], inter_gbps: Floats) -> Hardware:
    tflops, share, memory, links = np.array([ACCELERATORS[name] for name in names]).T
    return Hardware(flops=tflops * share * 1e12, memory=memory * 1e9, intra=links * 1e9, inter=inter_gbps * 1e9 / 8)


def _software(stage: Floats, frameworks: list[str]) -> Software:
    """What the measured programs do, as far as their sources say: bf16 throughout, logits kept whole."""
    deepspeed = np.array([name.startswith("DeepSpeed") for name in frameworks], dtype=np.float64)
    same = np.ones_like(stage)
    return Software(
        stage=stage,
        deepspeed=deepspeed,
        weights=np.where(deepspeed, 2.0, 4.0),
        gradients=np.where(deepspeed, 2.0, 4.0),
        optimizer=np.where(deepspeed, 12.0, 8.0),
        copies=0 * same,
        value=2 * same,
        gathered=2 * same,
        reduced=2 * same,
        reduces_each=1 * same,
        holds_gradients=0 * same,
        saved_hidden=20 * same,
        saved_ffn=8 * same,
        saved_kv=4 * same,
        saved_input=2 * same,
        # fp32 logits, their softmax and its gradient, and two bf16 copies
        logits=12 * same,
    )
