"""This machine as a cluster: each node is a torchrun of its own, all of them under a keeper that ends with us.

A job's name is its id and its folder, `<workdir>/<name>/`: `job.json` (what the nodes read), `log`, and the keeper's
files. Nothing of a job outlives the process that submitted it; who comes back later finds the folder, what was
logged, and how the job ended.
"""

import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusters import keeper
from clusters.base import ClusterError, Job, Refused, State, Status

ROOT = Path(__file__).parents[1]
"""Where `python -m training.…` is found, installed or not."""


class LocalCluster:
    """Runs jobs on this machine.

    `threads_per_process` is OMP_NUM_THREADS; None shares the cores among the ranks. A job that is asked to stop has
    `grace_s` seconds to do so before it is killed.
    """

    def __init__(self, workdir: Path, threads_per_process: int | None = None, grace_s: float = keeper.GRACE_S) -> None:
        self.workdir = workdir.absolute()
        self.threads_per_process, self.grace_s = threads_per_process, grace_s

    def render(self, job: Job) -> dict[str, Any]:
        """The nodes' commands and environments; `{port}` is chosen when they start. Raises `Refused`."""
        _check(job)
        env = self._env(job)
        return {
            "name": job.name,
            "folder": str(self._folder(job.name)),
            "config": dict(job.config),
            "nodes": [{"argv": self._argv(job, rank), "env": env} for rank in range(job.nodes)],
            "timeout_s": job.timeout_s,
        }

    def submit(self, job: Job) -> str:
        """Start the job, or attach to the one of its name, running or ended; returns its name, which is its id."""
        told = self.render(job)
        folder = self._folder(job.name)
        with _sentences(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                if self.find(job.name) is None:
                    _write(folder / "job.json", json.dumps(told["config"], indent=1, sort_keys=True))
                    nodes = [keeper.Node(**node) for node in told["nodes"]]
                    keeper.start(folder, nodes, timeout_s=job.timeout_s, grace_s=self.grace_s)
        return job.name

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        return {job_id: self.status(job_id) for job_id in job_ids}

    def status(self, job_id: str) -> Status:
        """How the job stands; a job that nobody knows, or whose keeper left no word, is lost."""
        folder = self._folder(job_id)
        alive = keeper.alive(folder)  # first: between the two the keeper may write its last word and end
        if told := keeper.ended(folder):
            return Status(State(told["state"]), told["reason"], told["exit_code"])
        if alive:
            return Status(State.RUNNING if keeper.started(folder) else State.QUEUED)
        if keeper.started(folder):
            return Status(State.LOST, f"{job_id} left no word: the machine was restarted, or the disk is full")
        return Status(State.LOST, f"no job {job_id} was ever started under {self.workdir}")

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        """The whole lines from byte `after` of the log on, and the byte to go on from."""
        begin = int(after or 0)
        try:
            with (self._folder(job_id) / "log").open("rb") as log:
                log.seek(begin)
                data = log.read()
        except FileNotFoundError:
            return [], after
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode(errors="replace").split("\n")[:-1], str(begin + len(whole))

    def cancel(self, job_id: str) -> None:
        """Ask the nodes to stop (SIGTERM); whoever is left after `grace_s` seconds is killed."""
        with _sentences(self._folder(job_id)):
            keeper.stop(self._folder(job_id))

    def find(self, name: str) -> str | None:
        """The name itself if such a job runs or has run."""
        folder = self._folder(name)
        known = keeper.alive(folder) or keeper.ended(folder) or keeper.started(folder)
        return name if known else None

    def quarantine(self, job_id: str, node: int, why: str) -> str:
        """There is no other machine."""
        raise Refused(f"node {node} of {job_id} is this machine ({why}): nothing can take its place")

    def forget(self, job_id: str) -> None:
        """Nothing: the folder is the record of what happened."""

    def _folder(self, name: str) -> Path:
        return self.workdir / name

    def _argv(self, job: Job, rank: int) -> list[str]:
        program = ["-m", job.module, str(self._folder(job.name) / "job.json")]
        if not job.processes_per_node:
            return [sys.executable, *program]
        launcher = {
            "nnodes": job.nodes,
            "node-rank": rank,
            "nproc-per-node": job.processes_per_node,
            "max-restarts": 0,  # a failed job starts again as a whole, from its checkpoint
            "master-addr": "127.0.0.1",
            "master-port": keeper.PORT,
        }
        flags = [f"--{name}={value}" for name, value in launcher.items()]
        return [sys.executable, "-m", "training.launch", *flags, *program]

    def _env(self, job: Job) -> dict[str, str]:
        ranks = job.nodes * max(1, job.processes_per_node)
        threads = self.threads_per_process or max(1, _cores() // ranks)
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "GLOO_SOCKET_IFNAME": "lo" if keeper.LINUX else "lo0",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            **job.env,
        }


def _check(job: Job) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,199}", job.name):
        raise Refused(f"{job.name!r} cannot name a job: use letters, digits, '.', '_' and '-', at most 200")
    if job.nodes > 1 and not job.processes_per_node:
        raise Refused(
            f"job {job.name}: processes_per_node 0 is a program of one process; give it 1 node, not {job.nodes}"
        )
    if job.nodes < 1 or job.processes_per_node < 0 or job.timeout_s <= 0:
        raise Refused(f"job {job.name}: nodes and timeout_s must be positive, processes_per_node must not be negative")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if keeper.LINUX else os.cpu_count() or 1


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of several submitters of one name, one at a time."""
    with (folder / "submit").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _sentences(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = f"job folder {folder}: {error.strerror}; free some space or choose another folder"
        raise ClusterError(told) from error


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
