"""Many hands: the processes of this node, and the other nodes of a job array, share pieces of work without speaking.

Every piece is a file of `training.data.parts` that is there or not. A node does its share of the pieces (one in so
many), then waits until the others' are there; a node that was killed is started again and finds what it had done.
"""

import functools
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from training.data.parts import Parts
from training.job import progress
from training.process import JobError, follow_parent

SAID_EVERY: Final = 0.5
"""Seconds between two lines of progress."""
LOOK_S: Final = 0.2
"""Seconds between two looks for what other nodes do."""
AHEAD: Final = 3
"""Pieces that each process has waiting, so that it never does."""

Function = Callable[..., None]


@dataclass
class Team:
    """This node's processes, and its place among the nodes."""

    parts: Parts
    workers: int
    node: int = 0
    nodes: int = 1
    last: Function | None = None
    """What is done last of all: for the others' part in it only the first node waits, which then clears up."""
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)

    def __enter__(self) -> "Team":
        self._problem(self.node).unlink(missing_ok=True)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()) if error else ():
                process.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, JobError) and self.nodes > 1:
            self._problem(self.node).write_text(str(error))

    def every(self, function: Function, names: Sequence[str], work: Any, unit: str, sizes: Sequence[int] = ()) -> None:
        """Have function(work, i) done for every i of the names' results that are not there; return when all are.

        Progress is told in pieces, or in MB where their sizes are given (bytes). Raises JobError of whichever node.
        """
        weights = list(sizes) or [1] * len(names)
        scale = 1_000_000 if sizes else 1
        missing = [i for i, name in enumerate(names) if not self.parts.has(name)]
        done, total, said = sum(weights) - sum(weights[i] for i in missing), sum(weights), 0.0
        for i in self._done(function, [i for i in missing if i % self.nodes == self.node], work, names):
            done += weights[i]
            if time.monotonic() - said > SAID_EVERY:
                progress(done // scale, max(1, total // scale), unit)
                said = time.monotonic()
        if missing:
            progress(max(1, total // scale), max(1, total // scale), unit)

    def once(self, function: Function, name: str, *arguments: Any) -> None:
        """Have the first node do a piece that cannot be parted; the others wait for it."""
        if not self.parts.has(name):
            if self.node == 0:
                function(*arguments)
            else:
                list(self._others([name]))

    def _done(self, function: Function, mine: Sequence[int], work: Any, names: Sequence[str]) -> Iterator[int]:
        """Yield what is done, as it is."""
        if self.workers > 1 and len(mine) > 1:
            yield from self._by_pool(function, mine, work)
        else:
            for i in mine:
                function(work, i)
                yield i
        if self.nodes > 1 and not (self.node and function is self.last):
            yield from self._others(names, {i for i in range(len(names)) if i % self.nodes == self.node})

    def _by_pool(self, function: Function, mine: Sequence[int], work: Any) -> Iterator[int]:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, spawn, _begin, (os.getpid(),))
        told = self.parts.folder / f".work-{os.uname().nodename}-{os.getpid()}"
        told.write_bytes(pickle.dumps(work))  # once, and not with each of perhaps 30,000 pieces
        running: dict[Future[None], int] = {}
        waiting = iter(mine)
        try:
            while True:
                while len(running) < AHEAD * self.workers and (i := next(waiting, None)) is not None:
                    running[self._pool.submit(_do, function, told, told.stat().st_mtime_ns, i)] = i
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    yield running.pop(future)
        except BrokenProcessPool as problem:
            raise JobError(
                "a process that prepared data was killed, most likely for want of memory; lower data.workers and start "
                "again, what is done is kept"
            ) from problem

    def _others(self, names: Sequence[str], known: set[int] | frozenset[int] = frozenset()) -> Iterator[int]:
        """Yield what other nodes have done, until they have done all."""
        left = [i for i in range(len(names)) if i not in known]
        while left:
            self._hear()
            there = [i for i in left if self.parts.has(names[i])]
            yield from there
            left = sorted(set(left) - set(there))
            if left:
                time.sleep(LOOK_S)

    def _hear(self) -> None:
        """Raise the JobError of another node, where all share a folder; elsewhere the gang ends together."""
        for other in range(self.nodes):
            if other != self.node and self._problem(other).exists():
                raise JobError(f"node {other} stopped: {self._problem(other).read_text()}")

    def _problem(self, node: int) -> Path:
        return self.parts.folder / f"problem-{node}"


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _do(function: Function, told: Path, version: int, i: int) -> None:
    function(_work(told, version), i)


@functools.lru_cache(maxsize=1)
def _work(told: Path, version: int) -> Any:
    """Return what a phase is about; `version` tells one phase from the next."""
    del version
    return pickle.loads(told.read_bytes())  # noqa: S301  # this program's own, of a moment ago


def _begin(parent: int) -> None:
    """Start a process of the pool: it dies with its parent, and does not share its one processor with threads."""
    follow_parent()
    if os.getppid() != parent:  # which died before it could be followed
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
