"""Hosts in network namespaces that run a check together, one rank each, and what can be done to one of them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from emulator import guests
from emulator.guests import NamespaceGuest, Pool
from tests.clusters.yard import ROOT

CPU = Path("/sys/fs/cgroup/cpu")
PORT = 29500
PATIENCE_S = 150


class Cluster:
    """Hosts `node0`, `node1`, …; the folder is shared by all."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.pool = folder, Pool([folder])
        self.nodes = [cast("NamespaceGuest", self.pool.boot(f"node{number}")) for number in range(nodes)]
        self._runs = 0

    def run(self, program: str, spec: dict[str, Any] | None = None, throttled: int | None = None) -> dict[str, Any]:
        """Run a check on all hosts and return its result.json; `throttled` gets 2 % of a CPU once it measures."""
        self._runs += 1
        job = self.folder / f"job{self._runs}.json"
        output = self.folder / f"out{self._runs}"
        job.write_text(json.dumps({"spec": spec or {}, "inputs": {}, "output": str(output)}))
        told = self.folder / f"log{self._runs}"
        with told.open("wb") as log:
            started = [
                guest.start([sys.executable, "-m", program, str(job)], self._env(rank), log.fileno(), str(ROOT))
                for rank, guest in enumerate(self.nodes)
            ]
            slowed = contextlib.nullcontext() if throttled is None else starved(started[throttled], told)
            try:
                with slowed:
                    codes = [process.wait(PATIENCE_S) for process in started]
            finally:
                for process in started:
                    process.kill()
        assert not any(codes), told.read_text()[-4000:]
        return cast("dict[str, Any]", json.loads((output / "result.json").read_text()))

    def limit(self, number: int, rate: str | None, to: int | None = None) -> None:
        """Limit what a host sends to a rate, as tc spells it (to one other host if told); None takes it off."""
        device = ["dev", "eth0"]
        self._tc(number, "qdisc", "del", *device, "root", check=False)
        if rate is None:
            return
        bucket = ["burst", "64kb", "latency", "100ms"]
        if to is None:
            self._tc(number, "qdisc", "add", *device, "root", "tbf", "rate", rate, *bucket)
            return
        self._tc(number, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "2")
        self._tc(number, "class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", rate)
        self._tc(number, "class", "add", *device, "parent", "1:", "classid", "1:2", "htb", "rate", "40gbit")
        address = f"{self.nodes[to].address}/32"
        match = ["u32", "match", "ip", "dst", address, "flowid", "1:1"]
        self._tc(number, "filter", "add", *device, "parent", "1:", "protocol", "ip", *match)

    def close(self) -> None:
        """End all hosts."""
        self.pool.close()

    def _tc(self, number: int, *words: str, check: bool = True) -> None:
        enter = ["nsenter", "--target", str(self.nodes[number].pid), "--net", "tc"]
        subprocess.run([*enter, *words], check=check, capture_output=True)

    def _env(self, rank: int) -> dict[str, str]:
        count = str(len(self.nodes))
        place = {"RANK": str(rank), "GROUP_RANK": str(rank), "WORLD_SIZE": count, "GROUP_WORLD_SIZE": count}
        meeting = {"MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": str(PORT), "LOCAL_RANK": "0"}
        own = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        return own | place | meeting


@contextmanager
def starved(process: subprocess.Popen[bytes], log: Path, share: float = 0.02) -> Iterator[None]:
    """Give a process a small share of one CPU from its first measurement on, as if something else had the rest."""
    place = CPU / f"castra-starved-{process.pid}"
    place.mkdir()
    (place / "cpu.cfs_period_us").write_text("100000")
    (place / "cpu.cfs_quota_us").write_text(str(round(share * 100_000)))
    done = threading.Event()

    def hold() -> None:
        while not done.is_set() and "measuring" not in log.read_text():
            done.wait(0.005)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            (place / "cgroup.procs").write_text(child)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        process.wait()
        place.rmdir()


def possible() -> bool:
    """Whether hosts can be had here, and a process be starved."""
    return guests.possible() and (CPU / "cpu.cfs_quota_us").exists()
