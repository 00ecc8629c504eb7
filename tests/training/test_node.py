"""The program of a node: one program started, signals heard, the time kept, nothing left, the right code."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.yard import ROOT, wait_until
from tests.training.hosts import Hosts

LOOPBACK = "0100007F"
LISTENING = "0A"


@pytest.mark.parametrize("code", [0, 1, 2, 7])
def test_it_ends_as_its_program_did(code: int, hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(say=["one", "two"], code=code))
    assert gang.wait() == [code]
    assert gang.log().splitlines() == ["one", "two", "ready"]


def test_a_killed_program_is_told_as_a_shell_would(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(sleep=60, pid=str(hosts.folder / "pid")))
    gang.ready()
    os.kill(int((hosts.folder / "pid0").read_text()), signal.SIGKILL)
    assert gang.wait() == [137]


def test_sigterm_stops_the_program_and_all_it_started(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(sleep=60, daemons=True), grace_s=10)
    gang.ready()
    gang.processes[0].send_signal(signal.SIGTERM)
    assert gang.wait(8) == [143]
    assert hosts.yard.processes() == []


def test_who_does_not_stop_is_killed_after_the_grace(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(sleep=60, deaf=True), grace_s=0.5)
    gang.ready()
    gang.processes[0].send_signal(signal.SIGINT)
    assert gang.wait(8) == [137]


@pytest.mark.parametrize("deaf", [False, True])
def test_the_time_limit_is_kept(deaf: bool, hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(sleep=60, deaf=deaf, timeout_s=1), grace_s=0.3)
    assert gang.wait(20) == [124]
    assert gang.say("error") == [{"event": "error", "message": "the job reached its time limit of 1 s"}]
    assert hosts.yard.processes() == []


def test_every_line_of_every_node_is_whole_and_names_it(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(nodes=2, say=["x" * 3000, "ünï"], times=50))
    assert gang.wait() == [0, 0]
    for rank in range(2):
        lines = gang.log(rank).splitlines()
        own = [line for line in lines if "@castra" not in line]
        assert own == [f"[node{rank}] {'x' * 3000}", f"[node{rank}] ünï"] * 50 + [f"[node{rank}] ready"]
        assert all(line.startswith(f"[node{rank}] ") for line in lines)
    assert [fact["event"] for fact in gang.say("gang-ready")] == ["gang-ready"]


def test_ranks_of_two_nodes_find_each_other_on_loopback_only(hosts: Hosts) -> None:
    listens = hosts.folder / "listens"
    gang = hosts.start(
        hosts.job(nodes=2, processes_per_node=1, sleep=3), env={"PET_NNODES": "9", "RANK": "5", "WORLD_SIZE": "1"}
    )
    gang.ready()
    listens.write_text(Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text())
    assert gang.wait() == [0, 0], gang.log(0) + gang.log(1)
    ports = {f"{gang.port:04X}", f"{gang.port + 1:04X}"}
    local = [line.split()[1].split(":") for line in listens.read_text().splitlines() if f" {LISTENING} " in line]
    assert {port: address for address, port in local if port in ports} == dict.fromkeys(ports, LOOPBACK)


def test_ranks_that_stop_or_refuse_are_heard_through_torchrun(hosts: Hosts) -> None:
    assert hosts.start(hosts.job(processes_per_node=2, code=2)).wait() == [2]
    gang = hosts.start(hosts.job("stop", processes_per_node=2, sleep=60), grace_s=20)
    gang.ready()
    gang.processes[0].send_signal(signal.SIGTERM)
    assert gang.wait(20) == [143]
    assert "Traceback" not in gang.log()


def test_a_node_program_that_is_killed_takes_its_ranks_along(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(processes_per_node=1, sleep=60, follow=True))
    gang.ready()
    gang.processes[0].kill()
    wait_until(lambda: hosts.yard.processes() == [], 10)


def run(*words: str, **env: str) -> tuple[int, str]:
    """Run the node program by hand, as SageMaker would."""
    command = [sys.executable, "-m", "training.node", *words]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=30
    )
    return done.returncode, done.stdout + done.stderr


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    told = run(str(tmp_path / "job.json"))
    assert told[0] == 2
    assert "is not a job for a node" in told[1]
    assert told[1].count("\n") == 1
    assert "cannot be read: No such file" in run(str(tmp_path / "none.json"))[1]
    assert "takes one argument, the path of a job.json, and got 0" in run()[1]
    job = {"module": "m", "spec": {}, "inputs": {}, "output": "http://x", "name": "n", "processes_per_node": 0}
    (tmp_path / "job.json").write_text(json.dumps(job | {"timeout_s": 5, "grace_s": 1}))
    assert "does not tell AWS_BATCH_JOB_NODE_INDEX" in run(str(tmp_path / "job.json"), AWS_BATCH_JOB_NUM_NODES="2")[1]
    assert "are seconds: could not convert" in run(str(tmp_path / "job.json"), CASTRA_GANG_SILENCE_S="soon")[1]
    code, text = run(str(tmp_path / "job.json"))
    assert (code, text.count("\n")) == (2, 1)
    assert "http://x is neither s3://… nor a path" in json.loads(text.removeprefix("@castra "))["message"]


def test_it_starts_in_a_tenth_of_a_second_without_boto3_or_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import training.node"]
    told = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stderr
    assert not re.search(r"\| +(boto3|torch|numpy|asyncio|ssl)$", told, re.MULTILINE)


def test_time_passes_for_each_attempt_anew(hosts: Hosts) -> None:
    job = hosts.job(sleep=60, timeout_s=1)
    began = time.monotonic()
    assert [hosts.start(job, grace_s=0.3).wait(20) for _ in range(2)] == [[124], [124]]
    assert time.monotonic() - began > 2
    assert hosts.yard.runs("job") == 2
