"""Ranks in milliseconds: a process that has imported torch once forks every training process the tests ask for.

The forked processes are what torchrun would start: one per rank, told its place by the environment, killable.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import numpy as np

from recipes.spec import Recipe
from training.data.format import BEGINS, TARGET, Layout, PartWriter, part_facts, write_facts

ROOT = Path(__file__).parents[2]
LENGTH, VOCABULARY = 32, 10_000  # so large that the loss is made in slices


@dataclass
class Run:
    """The ranks of one run: their process ids and what they said."""

    nursery: "Nursery"
    pids: list[int]
    log: Path

    def wait(self) -> list[int]:
        """Return every rank's exit code (negative: the signal that killed it)."""
        return cast("list[int]", self.nursery.ask({"wait": self.pids}))

    @property
    def told(self) -> list[dict[str, Any]]:
        """What was said on the lines that are for the control plane."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line.removeprefix("@castra ")) for line in lines if line.startswith("@castra ")]

    def say(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [fact for fact in self.told if fact.get("event") == event]

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        while not any(fact.get("done", 0) >= step for fact in self.told):
            time.sleep(0.01)


class Nursery:
    """The test's side of the forking process."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, question: dict[str, Any]) -> Any:
        """Put a question to the forking process and return its answer."""
        question_pipe, answer_pipe = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        print(json.dumps(question), file=question_pipe, flush=True)
        return json.loads(answer_pipe.readline())

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
        log = job.parent / f"log-{time.monotonic_ns()}"
        log.touch()
        pids = self.ask({"program": program, "job": str(job), "places": places, "log": str(log)})
        return Run(self, pids, log)

    def run(self, job: Path, ranks: int = 1, program: str = "training.run") -> tuple[list[int], Run]:
        """Start a job and wait for its end: exit codes and what it said."""
        run = self.start(job, ranks, program)
        return run.wait(), run

    def close(self) -> None:
        """End the forking process; what it forked dies with it."""
        cast("IO[str]", self._process.stdin).close()
        cast("IO[str]", self._process.stdout).close()
        self._process.wait()


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


def _serve(questions: Iterable[str]) -> None:
    for line in questions:
        question = json.loads(line)
        if "wait" in question:
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in question["wait"]]
        else:
            answer = [_fork(question, place) for place in question["places"]]
        print(json.dumps(answer), flush=True)


def _fork(question: dict[str, Any], place: dict[str, str]) -> int:
    child = os.fork()
    if not child:
        _be_a_rank(question, place)
    return child


def _be_a_rank(question: dict[str, Any], place: dict[str, str]) -> NoReturn:
    log = os.open(question["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(place)
    sys.argv = [question["program"], question["job"]]
    from training import ranks
    from training.checks.network import prove
    from training.run import train

    ranks.run({"training.run": train, "training.checks.network": prove}[question["program"]])


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  # here, so that no forked rank has to

    import training.checks.network
    import training.parallel.zero
    import training.run  # noqa: F401

    _serve(sys.stdin)
    os._exit(0)
