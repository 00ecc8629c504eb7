"""A corpus with every kind of file, and the program that prepares it."""

import gzip
import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from training.data.format import ids_of
from training.data.prepare import prepare
from training.job import NodeJob

ROOT = Path(__file__).parents[2]
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]
QUICK = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def texts(count: int, seed: int, words: int = 90) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(20, words))) for _ in range(count)]


def lines(found: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(found))


def write_mixed(folder: Path, each: int = 200) -> Path:
    """One file of every kind, copies among them, and many plain texts."""
    folder.mkdir(parents=True)
    some = [texts(each, seed) for seed in range(5)]
    (folder / "a.jsonl").write_bytes(lines(some[0]))
    (folder / "b.ndjson.gz").write_bytes(gzip.compress(lines(some[1][:50])) + gzip.compress(lines(some[1][50:])))
    (folder / "c.json.zst").write_bytes(zstandard.compress(lines(some[2] + some[0][:20])))
    write_table({"text": some[3], "id": list(range(each))}, folder / "d.parquet", row_group_size=50)
    (folder / "texts").mkdir()
    for i, text in enumerate(some[4] + [some[1][7] + " more"]):
        (folder / "texts" / f"{i:04d}.txt").write_text(text)
    (folder / "e.txt.gz").write_bytes(gzip.compress(texts(1, 9)[0].encode()))
    return folder


def spec(source: Any, **data: Any) -> dict[str, Any]:
    usual = {
        "source": str(source) if isinstance(source, Path) else source,
        "include": ["*"],
        "kind": "text",
        "text_field": "text",
        "messages_field": "messages",
        "chat_template": "chatml",
        "packing": "concat",
        "documents_apart": False,
        "megatron": False,
        "workers": 1,
        "nodes": 1,
        "min_chars": 20,
        "max_chars": 100_000,
        "max_documents": None,
        "near_duplicate": 0.8,
        "held_out": 0.05,
        "sequence_length": 32,
        "tokenizer": "train",
    }
    return {"data": usual | data, "model": {"vocab_size": 600}}


def made(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def start(path: Path, asked: dict[str, Any], output: Path, **env: str) -> "subprocess.Popen[str]":
    path.write_text(json.dumps({"spec": asked, "output": str(output)}))
    command = [sys.executable, "-m", "training.data.prepare", str(path)]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | QUICK | env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def refusal(program: "subprocess.Popen[str]") -> str:
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 2, out
    told: dict[str, Any] = json.loads(out.splitlines()[-1].partition(" ")[2])
    assert told["event"] == "error"
    return str(told["message"])


def node(path: Path, asked: dict[str, Any], output: Path, rank: int) -> "subprocess.Popen[str]":
    """One of two nodes, as an indexed Job of Kubernetes starts it."""
    return start(path, asked, output, JOB_COMPLETION_INDEX=str(rank), CASTRA_NODES="2", MASTER_ADDR="127.0.0.1")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "corpus")


@pytest.fixture(scope="module")
def straight(mixed: Path) -> Path:
    """What one process makes of it."""
    prepare(NodeJob(spec(mixed), mixed.parent / "straight"))
    return mixed.parent / "straight"


def ids(folder: Path, facts: dict[str, Any], part: str) -> Any:
    return np.concatenate(list(ids_of(folder, facts, part)))


def write_table(columns: dict[str, Any], path: Path, **options: Any) -> None:
    importlib.import_module("pyarrow.parquet").write_table(
        importlib.import_module("pyarrow").table(columns), path, **options
    )
