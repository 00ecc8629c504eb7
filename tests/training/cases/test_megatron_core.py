"""Megatron-LM's library trains here by the command line that its case is told: tensor and pipeline parallel."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulator import guests
from emulator.guests import Pool
from recipes.load import load
from tests.clusters.yard import ROOT
from tests.training.cases.matrix import record
from training.data.megatron import MegatronWriter

CORE = Path(os.environ.get("CASTRA_MEGATRON_CORE", ROOT / ".tools" / "megatron"))
"""Megatron Core 0.16.1, put there by `pip install --no-deps --target .tools/megatron megatron-core==0.16.1`."""
STEPS, VOCABULARY, LENGTH = 4, 512, 32
SMALL = [
    *("model.hidden_size=64", "model.layers=4", "model.heads=4", "model.kv_heads=4", "model.ffn_size=128"),
    *(f"model.vocab_size={VOCABULARY}", f"data.sequence_length={LENGTH}", "train.precision=fp32", "train.seed=3"),
    *(f"train.steps={STEPS}", "train.warmup_steps=1", "train.global_batch_size=4", "train.learning_rate=0.003"),
    *("cluster.nodes=2", "parallel.pp=2", "parallel.micro_batch_size=2", "parallel.strategy=ddp", "parallel.ep=1"),
    *("parallel.shard=1", "parallel.recompute=none"),
    'case.arguments=["sequence-parallel=false"]',  # its norm needs Transformer Engine
]
pytestmark = [
    pytest.mark.root,
    pytest.mark.torch,
    pytest.mark.skipif(
        not (CORE.is_dir() and guests.possible()) and not os.environ.get("CI"),
        reason="needs root, iproute2 and Megatron Core in .tools/megatron",
    ),
]


def dataset(folder: Path) -> Path:
    """Text of few words, in Megatron's files as preprocessing writes them."""
    rng = np.random.default_rng(0)
    writer = MegatronWriter(folder / "megatron" / "train", VOCABULARY)
    ids = (rng.zipf(1.5, 2000) % VOCABULARY).astype(np.int64)
    writer.write(ids, np.array([500, 1500]))
    writer.close()
    return folder


def train(tmp_path: Path, tp: int) -> dict[str, Any]:
    """Train the smallest preset's miniature on two hosts, a pipeline stage each, cut into `tp`; returns its result."""
    framework, out = tmp_path / "framework", tmp_path / f"out{tp}"
    framework.mkdir(exist_ok=True)
    places = [str(ROOT), str(CORE)]
    program = f"import sys\nsys.path[:0] = {places}\nfrom tests.training.cases.megatron_miniature import main\n"
    (framework / "pretrain_gpt.py").write_text(f"{program}main(sys.argv[1:])\n")
    preset = ROOT / "recipes" / "cases" / "megatron-gpt3-1b7.yaml"
    recipe = load(preset, [*SMALL, f"parallel.tp={tp}", f"case.folder={framework}"])
    job = {"name": "megatron", "module": "training.cases.run", "output": str(out), "processes_per_node": tp}
    told = {"spec": recipe.model_dump(mode="json") | {"ranks_per_node": tp}, "timeout_s": 150.0, "grace_s": 2.0}
    inputs = {"inputs": {"dataset": str(dataset(tmp_path / "dataset"))}}
    (tmp_path / "job.json").write_text(json.dumps(job | told | inputs))
    pool = Pool([tmp_path])
    try:
        started = _start(pool, tmp_path)
        codes = [node.wait(180) for node in started]
    finally:
        pool.close()
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("log*")))
    assert codes == [0, 0], logs
    losses = [json.loads(line.partition("@castra ")[2]) for line in logs.splitlines() if '"unit": "step"' in line]
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result | {"losses": [one["metrics"]["loss"] for one in losses]}


def _start(pool: Pool, tmp_path: Path) -> list[Any]:
    up = [pool.boot(f"node{rank}") for rank in range(2)]
    common = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
    started = []
    for rank, guest in enumerate(up):
        place = {"JOB_COMPLETION_INDEX": str(rank), "CASTRA_NODES": "2", "MASTER_ADDR": up[0].address}
        words = [sys.executable, "-m", "training.node", str(tmp_path / "job.json")]
        with (tmp_path / f"log{rank}").open("wb") as log:
            started.append(guest.start(words, common | place, log, cwd=str(tmp_path)))
    return started


def test_tensor_and_pipeline_parallel_ranks_on_two_hosts_learn_what_fewer_do(tmp_path: Path) -> None:
    cut, whole = train(tmp_path, tp=2), train(tmp_path, tp=1)
    assert (cut["world_size"], whole["world_size"]) == (4, 2)
    assert len(cut["losses"]) == STEPS
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-4), "cutting tensors up changes no sum"
    assert cut["losses"][0] == pytest.approx(np.log(VOCABULARY), rel=0.05), "random weights know nothing"
    assert cut["losses"][-1] < cut["losses"][0] - 0.1
    assert (cut["steps"], cut["loss_last"]) == (STEPS, cut["losses"][-1])
    proof = "Megatron Core 0.16.1, CPUs for GPUs, tp 2 x pp 2 on two hosts; a stand-in for pretrain_gpt.py"
    record("megatron-gpt3-1b7", "local", "ran", f"its miniature: {proof}")
