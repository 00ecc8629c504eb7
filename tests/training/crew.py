"""Ranks that do anything, in milliseconds: a process that has imported torch once forks them, joined by gloo.

crew.start("tests.training.test_x:work", 2, folder, key=value)    # each rank calls work(world, folder, key=value)
"""

import importlib
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

ROOT = Path(__file__).parents[2]


@dataclass
class Ranks:
    """The processes of one run and what they said."""

    crew: "Crew"
    pids: list[int]
    log: Path

    def wait(self) -> list[int]:
        """Return every rank's exit code (negative: the signal that killed it)."""
        return cast("list[int]", self.crew.ask({"wait": self.pids}))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all ranks that are left."""
        for pid in self.pids:
            os.kill(pid, number)

    def say(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind that were told so far."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("@castra ") and line[-1] == "}"]
        return [told for line in lines if (told := json.loads(line[8:])).get("event") == event]

    def hear(self, event: str, times: int = 1, within_s: float = 30) -> list[dict[str, Any]]:
        """Wait until an event was told so often."""
        until = time.monotonic() + within_s
        while len(told := self.say(event)) < times:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.005)
        return told


class Crew:
    """The test's side of the forking process."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CASTRA_COMM_TIMEOUT_S": "60"}
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

    def start(
        self, work: str, ranks: int, folder: Path, env: dict[str, str] | None = None, nodes: int = 1, **told: Any
    ) -> Ranks:
        """Start the ranks of a run, on so many nodes."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"log-{time.monotonic_ns()}"
        log.touch()
        rendezvous = folder / f".store-{time.monotonic_ns()}"
        per_node = ranks // nodes
        places = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_node),
                "GROUP_RANK": str(rank // per_node),
                "WORLD_SIZE": str(ranks),
                "GROUP_WORLD_SIZE": str(nodes),
            }
            | (env or {})
            for rank in range(ranks)
        ]
        question = {"work": work, "folder": str(folder), "told": told, "places": places, "store": str(rendezvous)}
        return Ranks(self, self.ask(question | {"log": str(log)}), log)

    def run(self, work: str, ranks: int, folder: Path, **told: Any) -> tuple[list[int], Ranks]:
        """Start ranks and wait for their end: exit codes and what they said."""
        started = self.start(work, ranks, folder, **told)
        return started.wait(), started

    def close(self) -> None:
        """End the forking process; what it forked dies with it."""
        cast("IO[str]", self._process.stdin).close()
        cast("IO[str]", self._process.stdout).close()
        self._process.wait()


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
    from training.job import say
    from training.process import FAILED, REFUSED, JobError, follow_parent, leave

    log = os.open(question["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(place)
    follow_parent()
    code = FAILED
    try:
        world = _join(question["store"])
        module, _, name = question["work"].partition(":")
        getattr(importlib.import_module(module), name)(world, Path(question["folder"]), **question["told"])
        world.part()
        code = 0
    except JobError as problem:
        say("error", message=str(problem), rank=int(place["RANK"]))
        code = REFUSED
    except Exception:  # noqa: BLE001  told in the log, where the test shows it
        import traceback

        traceback.print_exc()
    leave(code)


def _join(store: str) -> Any:
    """Join the ranks through a file, so that no port is needed."""
    from datetime import timedelta

    import torch
    from torch import distributed
    from torch._C._distributed_c10d import FileStore, HashStore

    from training.ranks import World

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    rank, size, local, node, nodes = (int(os.environ[name]) for name in names)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = FileStore(store, size) if size > 1 else HashStore()
    distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return World(rank, size, local, node, nodes, torch.device("cpu"), os.environ.get("CASTRA_PRIVATE_OUTPUT") == "1")


if __name__ == "__main__":
    import pytest  # noqa: F401  # here, so that no forked rank has to: what they do is in test modules
    import torch.distributed

    import training.checkpoint
    import training.supervise  # noqa: F401

    torch.set_num_threads(1)
    _serve(sys.stdin)
    os._exit(0)
