"""mpirun over the nodes of a job, without ssh: a real Open MPI between two hosts, through the doors of the job."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from emulator import guests
from emulator.guests import Guest, Pool
from recipes.load import load
from tests.clusters.yard import ROOT, wait_until
from training.cases.mpi import Door, proof, read_line

TABLE = "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong"
PROGRAM = f"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {{
  int rank, ranks; char host[64] = {{0}}, hosts[64][64]; float data[1024], sum[1024];
  MPI_Init(&count, &words);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank); MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  gethostname(host, 63);
  MPI_Gather(host, 64, MPI_CHAR, hosts, 64, MPI_CHAR, 0, MPI_COMM_WORLD);
  if (!rank) {{
    for (int i = 0; i < ranks; i++)
      printf("#  Rank %2d Group  0 Pid %6d on %10s device %2d [0x10] CPU\\n", i, 1, hosts[i], i % 2);
    printf("{TABLE}\\n");
  }}
  for (int i = 0; i < 1024; i++) data[i] = rank + 1;
  for (int size = 1024; size <= 4096; size *= 2) {{
    double begun = MPI_Wtime();
    MPI_Allreduce(data, sum, size / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double us = (MPI_Wtime() - begun) * 1e6;
    int wrong = sum[0] != ranks * (ranks + 1) / 2;
    double speed = size / us / 1e3, bus = speed * 2 * (ranks - 1) / ranks;
    if (rank) continue;
    printf("%12d %12d     float     sum      -1", size, size / 4);
    for (int place = 0; place < 2; place++) printf(" %8.2f %7.4f %7.4f %6d", us, speed, bus, wrong);
    printf("\\n");
  }}
  fflush(stdout);
  if (getenv("LINGER")) sleep(600);
  MPI_Finalize();
}}
"""
"""Sums between all ranks and tells of it as nccl-tests do, which need GPUs."""

needed = all(map(shutil.which, ("mpirun", "mpicc"))) and guests.possible()
pytestmark = [
    pytest.mark.root,
    pytest.mark.torch,
    pytest.mark.skipif(
        not needed and not os.environ.get("CI"), reason="needs root, iproute2, openmpi-bin and libopenmpi-dev"
    ),
]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool([tmp_path])
    yield made
    made.close()


def compiled(folder: Path) -> Path:
    """A folder that looks like nccl-tests'."""
    (folder / "build").mkdir(parents=True)
    (folder / "sums.c").write_text(PROGRAM)
    subprocess.run(["mpicc", str(folder / "sums.c"), "-o", str(folder / "build" / "all_reduce_perf")], check=True)
    return folder


def start(
    pool: Pool, tmp_path: Path, env: Mapping[str, str], nodes: int = 2
) -> tuple[list[Guest], list[subprocess.Popen[bytes]]]:
    """Start a benchmark job's node programs on hosts of their own."""
    recipe = load(ROOT / "recipes" / "cases" / "nccl-tests.yaml", [f"case.folder={compiled(tmp_path / 'nccl-tests')}"])
    spec = recipe.model_dump(mode="json") | {"ranks_per_node": 2}
    spec["cluster"]["nodes"] = nodes
    spec["parallel"] |= {
        "strategy": "ddp",
        "micro_batch_size": 1,
        "shard": 1,
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "cp": 1,
        "ep": 1,
    }
    job: dict[str, Any] = {"name": "nccl", "module": "training.cases.run", "spec": spec, "inputs": {}}
    job |= {"output": str(tmp_path / "out"), "processes_per_node": 1, "timeout_s": 120.0, "grace_s": 2.0}
    (tmp_path / "job.json").write_text(json.dumps(job))
    up = [pool.boot(f"node{rank}") for rank in range(nodes)]
    started = []
    for rank, guest in enumerate(up):
        place = {"JOB_COMPLETION_INDEX": str(rank), "CASTRA_NODES": str(nodes), "MASTER_ADDR": up[0].address}
        told = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": "/tmp",
            "MARK": str(tmp_path),
            **place,
            **env,
        }
        with (tmp_path / f"log{rank}").open("wb") as log:
            words = [sys.executable, "-m", "training.node", str(tmp_path / "job.json")]
            started.append(guest.start(words, told, log, cwd=str(tmp_path)))
    return up, started


def logs(tmp_path: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("log*")))


def left(tmp_path: Path) -> list[str]:
    """The processes of the job, seen from outside."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={tmp_path}\0".encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_nccl_tests_shape_runs_on_all_ranks_of_two_hosts_without_ssh(pool: Pool, tmp_path: Path) -> None:
    # mpirun must not take itself for a part of Slurm, which would start its daemons by srun
    slurm = {"SLURM_JOBID": "1", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2(x2)"}
    _, started = start(pool, tmp_path, slurm)
    assert [node.wait(100) for node in started] == [0, 0], logs(tmp_path)
    told = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (told["framework"], told["version"], told["world_size"]) == ("nccl-tests", "v2.18.3", 4)
    assert [row["bytes"] for row in told["rows"]] == [1024, 2048, 4096]
    assert all(row["seconds"] > 0 for row in told["rows"])
    members = re.findall(r"Rank +\d+ Group +0 Pid +1 on +(\S+) device", logs(tmp_path))
    assert members == ["node0", "node0", "node1", "node1"], "mpirun placed two ranks on each host"
    assert not left(tmp_path)


@pytest.mark.parametrize("side", [0, 1])
def test_a_killed_side_leaves_nothing_on_the_other(pool: Pool, tmp_path: Path, side: int) -> None:
    _, started = start(pool, tmp_path, {"LINGER": "1"})
    wait_until(lambda: sum("all_reduce_perf" in line for line in left(tmp_path)) >= 5, 60)  # mpirun's words name it too
    victim = next(pid for pid in pids(tmp_path, "training.cases.run") if host_of(pid) == f"node{side}")
    os.kill(victim, signal.SIGKILL)
    assert all(node.wait(60) for node in started), logs(tmp_path)
    wait_until(lambda: not left(tmp_path), 10)
    assert not (tmp_path / "out" / "result.json").exists()


def pids(tmp_path: Path, word: str) -> list[int]:
    """Processes of the job whose own words begin with a Python that runs a module."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"MARK={tmp_path}\0".encode() in (place / "environ").read_bytes()
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine and word.encode() in words and b"training.launch" not in words:
            found.append(int(place.name))
    return found


def host_of(pid: int) -> str:
    asked = ["nsenter", "-t", str(pid), "-u", "hostname"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


class TestDoor:
    """Who may have something started."""

    def ask(self, door: Door, secret: str, command: str) -> str:
        with socket.create_connection(door.place, timeout=10) as guest:
            shown = proof(secret, read_line(guest).strip(), command)
            guest.sendall(json.dumps({"command": command, "proof": shown}).encode() + b"\n")
            return read_line(guest).strip()

    @pytest.fixture
    def door(self) -> Iterator[Door]:
        made = Door("127.0.0.1", "secret", dict(os.environ))
        yield made
        made.close()

    def test_it_runs_what_the_secrets_holder_asks_and_tells_how_it_ended(self, door: Door, tmp_path: Path) -> None:
        assert self.ask(door, "secret", f"touch {tmp_path}/there; exit 7") == "7"
        assert (tmp_path / "there").exists()

    def test_it_runs_nothing_for_anybody_else(self, door: Door, tmp_path: Path) -> None:
        with pytest.raises(ConnectionError):
            self.ask(door, "guess", f"touch {tmp_path}/there")
        with socket.create_connection(door.place, timeout=10) as guest:
            read_line(guest)
            guest.sendall(b"not json\n")
            assert guest.recv(10) == b""
        assert not (tmp_path / "there").exists()

    def test_a_proof_is_good_for_one_connection_only(self, door: Door) -> None:
        with socket.create_connection(door.place, timeout=10) as first:
            old = proof("secret", read_line(first).strip(), "true")
        with socket.create_connection(door.place, timeout=10) as second:
            read_line(second)
            second.sendall(json.dumps({"command": "true", "proof": old}).encode() + b"\n")
            assert second.recv(10) == b""

    def test_a_command_ends_with_who_asked_for_it(self, door: Door, tmp_path: Path) -> None:
        command = f"echo $$ > {tmp_path}/pid; sleep 600"
        with socket.create_connection(door.place, timeout=10) as guest:
            shown = proof("secret", read_line(guest).strip(), command)
            guest.sendall(json.dumps({"command": command, "proof": shown}).encode() + b"\n")
            wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "", 10)
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10)

    def test_closing_it_ends_what_it_started(self, door: Door, tmp_path: Path) -> None:
        with socket.create_connection(door.place, timeout=10) as guest:
            command = f"touch {tmp_path}/up; sleep 600"
            shown = proof("secret", read_line(guest).strip(), command)
            guest.sendall(json.dumps({"command": command, "proof": shown}).encode() + b"\n")
            wait_until((tmp_path / "up").exists, 10)
            begun = time.monotonic()
            door.close()
            assert read_line(guest).strip() == "-9"
            assert time.monotonic() - begun < 10
