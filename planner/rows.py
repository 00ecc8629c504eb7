"""Measured training steps as a table: read from CSV, with a sentence for what is wrong in which line and column."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.errors import BadTable
from planner.hardware import ACCELERATORS, hardware, shared_out
from planner.latencies import with_latencies
from planner.links import Links
from planner.schema import OFFLOAD, PRECISIONS, RECOMPUTE, Configs, Floats, Layout, Shape, take
from planner.software import of_framework

Row = Mapping[str, str]
# fmt: off
NUMBERS: Final = (
    "gpus_per_node", "inter_node_gbps", "n_gpus", "hidden", "ffn", "gated_mlp", "layers", "heads", "kv_heads",
    "head_dim", "vocab", "tied_emb", "seq", "n_experts", "topk", "moe_ffn", "shared_experts", "dense_layers", "mla",
    "tp", "pp", "vpp", "dp", "cp", "ep", "zero", "shard_size", "mbs", "gbs", "ga", "seq_parallel", "flash_attn",
    "tp_overlap", "compile",
)
# fmt: on
"""Columns that hold numbers; the words are hw, framework, precision, recompute and offload."""
MEASURED: Final = ("iter_s", "mem_gib")
OPTIONAL: Final = {"tp", "pp", "dp", "gbs", "mbs", "ga", "shard_size", "zero", "vpp", "cp", "ep", *MEASURED}
"""Cells that may be empty: what they hold then is the usual, or is tried out (mbs)."""
WORDS: Final = {"precision": PRECISIONS, "recompute": RECOMPUTE, "offload": OFFLOAD}
TRIED: Final = (1, 2, 4, 8)
"""Micro-batch sizes tried where none is stated: people publish the fastest."""


@dataclass(frozen=True)
class Steps:
    """Rows of a table, and the configurations that stand for them: more than one where no micro-batch is stated."""

    rows: list[Row]
    configs: Configs
    own: NDArray[np.int64]
    """For each configuration the row it belongs to."""
    seconds: Floats
    """Measured per optimizer step, one per row; NaN where it was not. Likewise memory, in GiB."""
    memory_gib: Floats
    ran_out: NDArray[np.bool_]
    """The run ended for want of memory."""
    group: NDArray[np.str_]
    """Rows of one group are the same configuration."""

    def fastest(self, seconds: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """Of every row's configurations the shortest time, and which it is."""
        seconds = np.broadcast_to(seconds, self.own.shape)
        order = np.lexsort((seconds, self.own))
        first = order[np.searchsorted(self.own[order], np.arange(len(self.rows)))]
        return seconds[first], first

    def of(self, which: NDArray[np.bool_]) -> "Steps":
        """The rows that a mask picks."""
        chosen = np.flatnonzero(which)
        kept = np.isin(self.own, chosen)
        return Steps(
            rows=[self.rows[at] for at in chosen],
            configs=take(self.configs, kept),
            own=np.searchsorted(chosen, self.own[kept]),
            seconds=self.seconds[which],
            memory_gib=self.memory_gib[which],
            ran_out=self.ran_out[which],
            group=self.group[which],
        )


def read(path: Path, links: Links | None = None) -> Steps:
    """The steps of a CSV table with the columns of tables/measured.csv; raises `BadTable`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadTable(f"{path} cannot be read as a table: {problem}") from None
    return parse(path, text, links)


def parse(path: Path, text: str, links: Links | None = None) -> Steps:
    """The steps of a table's text, named `path` in complaints; raises `BadTable`."""
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = list(reader)
        columns = set(reader.fieldnames or ())
    except csv.Error as problem:
        raise BadTable(f"{path} cannot be read as a table: {problem}") from None
    words = ("id", "hw", "framework", *WORDS)
    if missing := sorted({*NUMBERS, *words} - columns):
        raise BadTable(f"{path} lacks the column {missing[0]}: its first line must name the columns of public.csv.")
    if not rows:
        raise BadTable(f"{path} holds no row below its first line.")
    for line, row in enumerate(rows, 2):
        _check(path, line, row)
    return steps(rows, links)


def steps(rows: Sequence[Row], links: Links | None = None) -> Steps:
    """The configurations of checked rows."""
    trials = [(at, mbs, ga) for at, row in enumerate(rows) for mbs, ga in _micro_batches(row)]
    own = np.array([trial[0] for trial in trials], dtype=np.int64)
    configs = _configs([rows[at] for at in own], [trial[1] for trial in trials], [trial[2] for trial in trials], links)
    return Steps(
        rows=list(rows),
        configs=configs,
        own=own,
        seconds=np.where(_usable(rows), _column(rows, "iter_s", np.nan), np.nan),
        memory_gib=_column(rows, "mem_gib", np.nan),
        ran_out=np.array([row.get("usable") == "oom" for row in rows]),
        group=np.array([row.get("group") or row["id"] for row in rows]),
    )


def _usable(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Whether a row's time may be believed: what it says of itself, if it says anything."""
    return np.array([not row.get("usable") or "time" in row["usable"] for row in rows])


def release_of(row: Row) -> float:
    """Year and month of the software's release as years, 0 where the row does not state it ("26.04.01 NeMo …")."""
    stated = row.get("framework_version") or row.get("notes") or ""
    found = re.search(r"\b(?:NeMo\s*)?(2\d)\.(0[1-9]|1[0-2])(?:\.(\d+))?(?:\s+NeMo|\b)", stated)
    if not found or "NeMo" not in stated:
        return 0.0
    year, month, patch = found.groups(default="0")
    return 2000 + int(year) + (int(month) - 1) / 12 + min(int(patch), 9) / 120


def _check(path: Path, line: int, row: Row) -> None:
    if None in row or any(value is None for value in row.values()):
        raise BadTable(f"{path}, line {line}: it has another number of cells than the first line has columns.")
    for name in (*NUMBERS, *(name for name in MEASURED if name in row)):
        _check_number(path, line, name, row[name])
    for name, known in WORDS.items():
        if row[name] not in known:
            raise BadTable(f"{path}, line {line}, column {name}: {row[name]!r} is none of {', '.join(known)}.")
    if row["hw"] not in ACCELERATORS:
        known_names = ", ".join(ACCELERATORS)
        raise BadTable(f"{path}, line {line}, column hw: {row['hw']!r} is no accelerator known here ({known_names}).")


def _check_number(path: Path, line: int, name: str, text: str) -> None:
    if not text and name in OPTIONAL:
        return
    try:
        value = float(text)
    except ValueError:
        raise BadTable(f"{path}, line {line}, column {name}: {text!r} is not a number.") from None
    least = 0 if name in _MAY_BE_ZERO else np.nextafter(0, 1)
    if not least <= value < np.inf:
        raise BadTable(
            f"{path}, line {line}, column {name}: {text} is not a {'possible' if value else 'positive'} value."
        )


# fmt: off
_MAY_BE_ZERO: Final = {
    "gated_mlp", "tied_emb", "n_experts", "topk", "moe_ffn", "shared_experts", "dense_layers", "mla", "zero",
    "shard_size", "ga", "seq_parallel", "flash_attn", "tp_overlap", "compile", "inter_node_gbps",
}
# fmt: on


def _micro_batches(row: Row) -> list[tuple[float, float]]:
    """Size and number of the micro-batches of a row; those that divide where no size is stated."""
    share = float(row["gbs"] or 0) / _data_parallel(row)
    if row["mbs"]:
        return [(float(row["mbs"]), float(row["ga"] or 0) or max(share / float(row["mbs"]), 1.0))]
    return [(size, share / size) for size in TRIED if share >= size and share % size == 0] or [(1.0, max(share, 1.0))]


def _data_parallel(row: Row) -> float:
    used = float(row["tp"] or 1) * float(row["pp"] or 1) * float(row["cp"] or 1)
    return float(row["dp"] or 0) or max(float(row["n_gpus"]) / used, 1.0)


def _column(rows: Sequence[Row], name: str, empty: float = 0.0) -> Floats:
    return np.array([float(row.get(name) or empty) for row in rows], dtype=np.float64)


def _codes(rows: Sequence[Row], name: str) -> Floats:
    return np.array([WORDS[name].index(row[name]) for row in rows], dtype=np.float64)


def _configs(rows: list[Row], mbs: list[float], ga: list[float], links: Links | None) -> Configs:
    shape = Shape(
        hidden=_column(rows, "hidden"),
        layers=_column(rows, "layers"),
        heads=_column(rows, "heads"),
        kv_heads=_column(rows, "kv_heads"),
        head_dim=_column(rows, "head_dim"),
        ffn=_column(rows, "ffn"),
        vocab=_column(rows, "vocab"),
        sequence=_column(rows, "seq"),
        gated=_column(rows, "gated_mlp"),
        tied=_column(rows, "tied_emb"),
        experts=_column(rows, "n_experts"),
        topk=_column(rows, "topk"),
        expert_ffn=_column(rows, "moe_ffn"),
        shared_experts=_column(rows, "shared_experts"),
        dense_layers=_column(rows, "dense_layers"),
        mla=_column(rows, "mla"),
    )
    dp = np.array([_data_parallel(row) for row in rows])
    layout = Layout(
        tp=_column(rows, "tp", 1.0),
        pp=_column(rows, "pp", 1.0),
        vpp=np.maximum(_column(rows, "vpp"), 1),
        dp=dp,
        cp=np.maximum(_column(rows, "cp"), 1),
        ep=np.maximum(_column(rows, "ep"), 1),
        zero=_column(rows, "zero"),
        shard=np.where(_column(rows, "shard_size") > 0, _column(rows, "shard_size"), dp),
        mbs=np.array(mbs),
        ga=np.array(ga),
        recompute=_codes(rows, "recompute"),
        sequence_parallel=_column(rows, "seq_parallel"),
        offload=_codes(rows, "offload"),
    )
    precision = _codes(rows, "precision")
    names = [row["hw"] for row in rows]
    per_node = _column(rows, "gpus_per_node")
    # What tables state for an NVLink domain of many trays is the network of eight accelerators.
    gbps = _column(rows, "inter_node_gbps") * np.maximum(per_node / 8, 1)
    machine = hardware(names, precision, per_node, gbps)
    machine = shared_out(with_latencies(machine, names, links or Links.shipped()), names, _column(rows, "n_gpus"))
    return Configs(shape=shape, layout=layout, software=of_framework(rows, precision, layout.zero), hardware=machine)
