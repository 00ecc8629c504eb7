"""Servers in milliseconds: a process that has imported what serving needs forks every rank that the tests ask for."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from tests.training.nursery import ROOT, free_port


@dataclass
class Ranks:
    """The processes of one server, and what they said."""

    kitchen: "Kitchen"
    pids: list[int]
    log: Path

    def said(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        lines = [json.loads(line[8:]) for line in self.log.read_text().splitlines() if line.startswith("@castra ")]
        return [line for line in lines if line.get("event") == event]

    def wait(self) -> list[int]:
        """Return every rank's exit code (negative: the signal that killed it)."""
        return cast("list[int]", self.kitchen.ask({"wait": self.pids}))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank."""
        for pid in self.pids:
            os.kill(pid, number)


class Kitchen:
    """The test's side of the forking process."""

    def __init__(self) -> None:
        small = {"OMP_NUM_THREADS": "1", "CASTRA_LISTEN": "127.0.0.1:0", "CASTRA_SLOTS": "4"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | small | {"PYTHONPATH": str(ROOT)},
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

    def start(self, job: Path, ranks: int = 1, program: str = "training.serve.__main__") -> Ranks:
        """Start the ranks of a program, as torchrun would on one node."""
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
        log = job.with_name(f"log-{time.monotonic_ns()}")
        log.touch()
        return Ranks(self, self.ask({"program": program, "job": str(job), "places": places, "log": str(log)}), log)

    def close(self) -> None:
        """End the forking process; what it forked dies with it."""
        cast("IO[str]", self._process.stdin).close()
        cast("IO[str]", self._process.stdout).close()
        self._process.wait()


def _cook(questions: Iterable[str]) -> None:
    for line in questions:
        question = json.loads(line)
        if "wait" in question:
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in question["wait"]]
        else:
            answer = [os.fork() or _be_a_rank(question, place) for place in question["places"]]
        print(json.dumps(answer), flush=True)


def _be_a_rank(question: dict[str, Any], place: dict[str, str]) -> NoReturn:
    log = os.open(question["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(place)
    sys.argv = [question["program"], question["job"]]
    from training import ranks
    from training.serve import __main__ as server
    from training.serve import batch

    ranks.run({"training.serve.__main__": server.serve, "training.serve.batch": batch.answer_file}[question["program"]])


if __name__ == "__main__":
    from transformers.models.gemma import modeling_gemma  # noqa: F401  # here, so that no forked rank has to
    from transformers.models.llama import modeling_llama  # noqa: F401

    import training.serve.batch  # noqa: F401

    _cook(sys.stdin)
    os._exit(0)
