"""The nodes of a job as processes of this machine, started as a cluster would, told their places as Kubernetes does."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusters.base import Job
from clusters.payload import deliver, pack
from store import open_store
from tests.clusters.yard import Yard
from training.node import _free_port

PROGRAM = """
import json, os, runpy, sys
spec = json.load(open(sys.argv[1]))["spec"]
if spec.get("follow"):
    from training.process import follow_parent
    follow_parent()
if "pid" in spec:
    open(spec["pid"] + os.environ["JOB_COMPLETION_INDEX"], "w").write(str(os.getpid()))
runpy.run_module("conduct", run_name="__main__")
"""
"""What `tests.clusters.yard` does not do."""
NO_ENV: Mapping[str, str] = {}
PLATFORMS = ("SLURM_", "AWS_BATCH_", "PET_", "CASTRA_", "JOB_", "TRAINING_")


@dataclass
class Hosts:
    """Starts the node programs of jobs; whatever still runs at the end is killed."""

    folder: Path
    started: list["Gang"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.yard = Yard(self.folder)
        (self.folder / "perform.py").write_text(PROGRAM)

    def job(self, name: str = "job", **told: Any) -> Job:
        """A job that conducts itself, see `tests.clusters.yard`; Job's own fields are told apart from its spec's."""
        job = {field: told.pop(field) for field in ("nodes", "processes_per_node", "timeout_s") if field in told}
        return replace(self.yard.job(name, **told), module="perform", **job)

    def start(
        self,
        job: Job,
        store: str = "",
        grace_s: float = 1.0,
        only: range | None = None,
        env: Mapping[str, str] = NO_ENV,
    ) -> "Gang":
        """Start the nodes of a job (or `only` some), each with a scratch folder of its own."""
        url = store or str(self.folder / "store")
        payload = pack(job, url, python=sys.executable, grace_s=grace_s)
        deliver(payload, open_store(url))
        gang = Gang(
            self.folder / f"{job.name}-{time.monotonic_ns()}", job, payload.command, dict(env) | dict(payload.env)
        )
        gang.folder.mkdir()
        self.started.append(gang)
        for rank in only or range(job.nodes):
            gang.start(rank, self.folder / f"scratch{rank}")
        return gang

    def close(self) -> None:
        """Kill what is left."""
        for gang in self.started:
            for process in gang.processes.values():
                process.kill()
                process.wait()


@dataclass
class Gang:
    """One attempt of a job."""

    folder: Path
    job: Job
    command: tuple[str, ...]
    env: dict[str, str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = field(default_factory=_free_port)

    def start(self, rank: int, scratch: Path) -> None:
        """Start one node."""
        place = {"JOB_COMPLETION_INDEX": str(rank), "CASTRA_NODES": str(self.job.nodes), "MASTER_ADDR": "127.0.0.1"}
        here = {name: told for name, told in os.environ.items() if not name.startswith(PLATFORMS)}
        own = {"MASTER_PORT": str(self.port), "CASTRA_SCRATCH": str(scratch), "TMPDIR": str(self.folder)}
        with (self.folder / f"log{rank}").open("wb") as log:
            self.processes[rank] = subprocess.Popen(
                self.command, env=here | {"OMP_NUM_THREADS": "1"} | place | own | self.env, stdout=log, stderr=log
            )

    def wait(self, patience_s: float = 60.0) -> list[int]:
        """The exit codes of all nodes, by rank."""
        return [process.wait(patience_s) for _, process in sorted(self.processes.items())]

    def log(self, rank: int = 0) -> str:
        """What a node said."""
        return (self.folder / f"log{rank}").read_text()

    def say(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """The events of one kind that a node told."""
        told = [json.loads(line.partition("@castra ")[2]) for line in self.log(rank).splitlines() if "@castra " in line]
        return [fact for fact in told if fact.get("event") == event]

    def ready(self) -> None:
        """Wait until every node's program has come to its point."""
        until = time.monotonic() + 60
        while not all("ready" in self.log(rank).replace("gang-ready", "") for rank in self.processes):
            assert time.monotonic() < until, [self.log(rank) for rank in self.processes]
            time.sleep(0.02)
