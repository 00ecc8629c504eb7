"""Programs for jobs of the tests, and who of them is left in /proc."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clusters.base import Cluster, Job, State, Status

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, signal, sys, time
spec = json.load(open(sys.argv[1]))["spec"]
with open(spec["ran"], "a") as ran:
    ran.write("x")
if spec.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if spec.get("daemons"):  # leave the parent, the session and the group, as a real daemon does
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            os._exit(0)
for line in spec.get("say", []) * spec.get("times", 1):
    print(line)
print("ready", flush=True)
rank = os.environ.get("RANK", "0")
code = spec.get("codes", {}).get(rank, spec.get("code", 0))
if not (code and "codes" in spec):
    starts = os.path.getsize(spec["ran"]) - 1
    naps = spec.get("sleeps") or [spec.get("sleep", 0)]
    time.sleep(naps[min(starts // int(os.environ.get("WORLD_SIZE", "1")), len(naps) - 1)])
sys.exit(code)
"""


class Yard:
    """A place for jobs whose processes can be told from all others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"CASTRA_TEST_YARD={folder}"
        (folder / "conduct.py").write_text(PROGRAM)

    def job(self, name: str, timeout_s: int = 60, **spec: object) -> Job:
        """A job that conducts itself as `spec` says."""
        config = {"spec": spec | {"ran": str(self.folder / f"{name}.ran")}, "output": str(self.folder / name)}
        env = {"CASTRA_TEST_YARD": str(self.folder), "PYTHONPATH": str(self.folder)}
        return Job(name, "conduct", config, env=env, timeout_s=timeout_s)

    def runs(self, name: str) -> int:
        """How often the job's program was started."""
        ran = self.folder / f"{name}.ran"
        return len(ran.read_text()) if ran.exists() else 0

    def processes(self) -> list[str]:
        """The command lines of the processes of all jobs here."""
        found = []
        for place in Path("/proc").iterdir():
            try:
                if place.name.isdigit() and self.mark.encode() in (place / "environ").read_bytes():
                    found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def owner(self, text: str) -> list[str]:
        """The command line of a process that runs `text`, with `yard`, `cluster` and `keeper` at hand."""
        head = (
            f"import sys, time, os; sys.path[:0] = [{str(ROOT)!r}]\n"
            "from pathlib import Path; from tests.clusters.yard import Yard; from clusters import keeper\n"
            "from clusters.local import LocalCluster\n"
            f"yard = Yard(Path({str(self.folder)!r})); cluster = LocalCluster(yard.folder / 'jobs', grace_s=0.5)\n"
        )
        return [sys.executable, "-c", head + text]


def wait_until(true: Callable[[], object], patience_s: float = 20.0) -> None:
    """Wait for something to become true; fails if it does not."""
    until = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def finished(cluster: Cluster, job_id: str, patience_s: float = 30.0) -> Status:
    """How a job ended."""
    wait_until(lambda: cluster.status(job_id).state.done, patience_s)
    return cluster.status(job_id)


def ready(cluster: Cluster, job_id: str) -> None:
    """Wait until the job's program has come to its point."""
    wait_until(lambda: any("ready" in line for line in cluster.logs(job_id)[0]))
    assert cluster.status(job_id).state is State.RUNNING


def gone(pid: int) -> bool:
    """Whether there is no such process, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
