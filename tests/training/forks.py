"""Ranks in milliseconds: a process that has imported what they need forks them, each with its place and its log.

A module of this folder is both sides: its `Forks` starts the module itself, whose main part ends with `serve`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """The ranks of one run: their process ids and what they said."""

    forks: "Forks"
    pids: list[int]
    log: Path

    def wait(self) -> list[int]:
        """Return every rank's exit code (negative: the signal that killed it)."""
        return cast("list[int]", self.forks.ask({"wait": self.pids}))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all ranks that are left."""
        for pid in self.pids:
            os.kill(pid, number)

    @property
    def told(self) -> list[dict[str, Any]]:
        """What was said on the whole lines that are for the control plane."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line[8:]) for line in lines if line.startswith("@castra ") and line.endswith("}")]

    def say(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind that were told so far."""
        return [fact for fact in self.told if fact.get("event") == event]

    def hear(self, event: str, times: int = 1, within_s: float = 30) -> list[dict[str, Any]]:
        """Wait until an event was told so often."""
        until = time.monotonic() + within_s
        while len(told := self.say(event)) < times:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.005)
        return told

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        while not any(fact.get("done", 0) >= step for fact in self.told):
            time.sleep(0.01)


class Forks:
    """The test's side of a forking process."""

    def __init__(self, module: str, **env: str) -> None:
        """Start the process: `module` is the file of the side that forks."""
        self._process = subprocess.Popen(
            [sys.executable, module],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env,
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

    def fork(self, beside: Path, places: Sequence[Mapping[str, str]], **told: Any) -> Run:
        """Fork a rank for each place, which is its environment; the log is in the folder `beside`."""
        log = beside / f"log-{time.monotonic_ns()}"
        log.touch()
        return Run(self, self.ask({"places": places, "log": str(log), **told}), log)

    def close(self) -> None:
        """End the forking process; what it forked dies with it."""
        cast("IO[str]", self._process.stdin).close()
        cast("IO[str]", self._process.stdout).close()
        self._process.wait()


def serve(be_a_rank: Callable[[dict[str, Any]], NoReturn]) -> NoReturn:
    """Fork what is asked for on standard input, until that ends; each rank gets the question it is forked for."""
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in question["wait"]]
        else:
            answer = [os.fork() or _begin(be_a_rank, question, place) for place in question["places"]]
        print(json.dumps(answer), flush=True)
    os._exit(0)


def _begin(
    be_a_rank: Callable[[dict[str, Any]], NoReturn], question: dict[str, Any], place: dict[str, str]
) -> NoReturn:
    log = os.open(question["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(place)
    be_a_rank(question)
