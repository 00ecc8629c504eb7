"""Ranks in milliseconds: a process that has imported torch once forks every training process the tests ask for.

The forked processes are what torchrun would start: one per rank, told its place by the environment, killable.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from recipes.spec import Recipe
from tests.training.forks import Forks, Run, serve
from training.data.format import BEGINS, TARGET, Layout, PartWriter, part_facts, write_facts

LENGTH, VOCABULARY = 32, 10_000  # so large that the loss is made in slices


class Nursery(Forks):
    """Training processes, as torchrun would start them."""

    def __init__(self) -> None:
        super().__init__(__file__)

    def start(self, job: Path, ranks: int = 1, program: str = "training.run") -> Run:
        """Start the ranks of a job, each a node of its own."""
        port = free_port()
        places = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "GROUP_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "GROUP_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(ranks)
        ]
        return self.fork(job.parent, places, program=program, job=str(job))

    def run(self, job: Path, ranks: int = 1, program: str = "training.run") -> tuple[list[int], Run]:
        """Start a job and wait for its end: exit codes and what it said."""
        run = self.start(job, ranks, program)
        return run.wait(), run


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def write_dataset(folder: Path, sequences: int = 96, *, marked: bool = False) -> Path:
    """Write skewed random tokens as a dataset; `marked`, some are no targets and documents are apart."""
    rng = np.random.default_rng(0)
    facts: dict[str, Any] = {
        "dtype": "uint16", "sequence_length": LENGTH, "stride": LENGTH, "vocab_size": VOCABULARY, "eos_id": 0,
        "pad_id": 0, "bos_id": None, "kind": "text", "packing": "concat", "documents_apart": marked, "marks": marked,
        "tokenizer_sha256": "", "sources": {}, "dropped": {},
    }  # fmt: skip
    for part, count in (("train", sequences), ("held_out", 10)):
        ids = (rng.zipf(1.5, count * LENGTH + 1) % VOCABULARY).astype("<u2")
        marks = (rng.random(len(ids)) < 0.7) * TARGET + (rng.random(len(ids)) < 0.1) * BEGINS
        with PartWriter(folder, part, Layout(LENGTH, LENGTH, "uint16", marked), count) as writer:
            writer.write(ids, marks.astype(np.uint8) if marked else None)
            facts[part] = part_facts(writer.close(), len(ids), 1, len(ids))
    write_facts(folder, facts)
    return folder


def spec(
    strategy: str = "ddp",
    micro: int = 4,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Return the resolved recipe of a run that takes a second."""
    small = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_size": 64, "vocab_size": VOCABULARY}
    short = {"steps": 6, "warmup_steps": 2, "global_batch_size": 8, "checkpoint_every": 2}
    recipe = {
        "model": small | (model or {}),
        "data": {"sequence_length": LENGTH},
        "train": short | train,
        "parallel": {"strategy": strategy, "micro_batch_size": micro} | (parallel or {}),
    }
    return Recipe.model_validate(recipe).model_dump(mode="json")


def write_job(folder: Path, spec: dict[str, Any], **inputs: Path) -> Path:
    """Write folder/job.json with its output in folder/out."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"spec": spec, "inputs": {name: str(path) for name, path in inputs.items()}, "output": str(folder / "out")}
    (folder / "job.json").write_text(json.dumps(told))
    return folder / "job.json"


def losses(output: Path, name: str = "loss") -> list[float]:
    """Return the losses of progress.jsonl, whose steps must be 1, 2, 3, …, or what else was told of some steps."""
    records = [json.loads(line) for line in (output / "progress.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record[name] for record in records if name in record]


def refused(nursery: Nursery, job: Path, ranks: int = 1) -> str:
    """Run a job that must be refused on every rank, with one sentence and no traceback."""
    codes, run = nursery.run(job, ranks)
    assert set(codes) == {2}, run.log.read_text()
    assert "Traceback" not in run.log.read_text()
    (error,) = run.say("error")
    return str(error["message"])


def result(output: Path) -> dict[str, Any]:
    """Return result.json."""
    return cast("dict[str, Any]", json.loads((output / "result.json").read_text()))


def _be_a_rank(question: dict[str, Any]) -> NoReturn:
    sys.argv = [question["program"], question["job"]]
    from training import ranks
    from training.checks.calibrate import calibrate
    from training.checks.network import prove
    from training.checks.pairs import find
    from training.run import train

    programs = {
        "training.run": train,
        "training.checks.calibrate": calibrate,
        "training.checks.network": prove,
        "training.checks.pairs": find,
    }
    ranks.run(programs[question["program"]])


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  # here, so that no forked rank has to

    import training.checks.calibrate
    import training.checks.network
    import training.parallel.zero
    import training.run  # noqa: F401

    serve(_be_a_rank)
