"""The gang watch, with real node programs: all start, stop and fail together, and nobody waits for the dead."""

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clusters.yard import wait_until
from tests.training.hosts import NO_ENV, Gang, Hosts
from training import gang as watch
from training.contract import Node

QUICK = {"CASTRA_GANG_SILENCE_S": "1.5"}
LIMIT_S = 30.0
"""Far more than a gang's end takes, far less than a collective's time limit."""


def started(hosts: Hosts, env: Mapping[str, str] = NO_ENV) -> Gang:
    """Three nodes whose programs would take a minute and tell their process ids."""
    gang = hosts.start(hosts.job(nodes=3, sleep=60, pid=str(hosts.folder / "pid"), timeout_s=50), env=env)
    gang.ready()
    return gang


def test_nobody_starts_before_all_are_there(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(nodes=2), only=range(1, 2))
    time.sleep(1.0)
    assert hosts.yard.runs("job") == 0
    gang.start(0, hosts.folder / "scratch0")
    assert gang.wait() == [0, 0]
    assert gang.say("gang-ready")[0]["hosts"] == [socket.gethostname()] * 2


@pytest.mark.parametrize("there", [0, 1])
def test_who_does_not_come_is_named(there: int, hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(nodes=3), only=range(there, there + 1), env=QUICK | {"CASTRA_GANG_START_S": "1"})
    assert gang.wait(LIMIT_S) == [1]
    (told,) = gang.say("error", there)
    if there:
        assert "node 0 at 127.0.0.1 port" in told["message"]
        assert "was not joined within 1 s" in told["message"]
    else:
        assert told["message"] == "of 3 nodes, number 1, 2 did not arrive within 1 s"
    assert hosts.yard.runs("job") == 0


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_node_ends_all(rank: int, hosts: Hosts) -> None:
    gang = started(hosts)
    os.kill(int((hosts.folder / f"pid{rank}").read_text()), signal.SIGSTOP)  # so that only its node program is gone
    gang.processes[rank].kill()
    codes = gang.wait(LIMIT_S)
    assert codes[rank] == -signal.SIGKILL
    assert [code for node, code in enumerate(codes) if node != rank] == [1, 1]
    teller = 0 if rank else 1
    (lost,) = gang.say("node-lost", teller)
    assert lost["message"].startswith(f"node {rank} (")
    os.kill(int((hosts.folder / f"pid{rank}").read_text()), signal.SIGKILL)  # a cluster would have


@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_node_ends_all(rank: int, hosts: Hosts) -> None:
    gang = started(hosts, QUICK)
    gang.processes[rank].send_signal(signal.SIGSTOP)
    others = [gang.processes[other] for other in range(3) if other != rank]
    assert [process.wait(LIMIT_S) for process in others] == [1, 1]
    (lost,) = gang.say("node-lost", 0 if rank else 1)
    assert "it was silent for 1.5 s" in lost["message"]
    gang.processes[rank].send_signal(signal.SIGCONT)
    assert gang.processes[rank].wait(LIMIT_S) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_program_ends_all(rank: int, hosts: Hosts) -> None:
    gang = started(hosts)
    os.kill(int((hosts.folder / f"pid{rank}").read_text()), signal.SIGKILL)
    codes = gang.wait(LIMIT_S)
    assert codes == [137 if node == rank else 1 for node in range(3)]
    (failed,) = gang.say("node-failed")
    assert (failed["node"], failed["host"]) == (rank, socket.gethostname())
    assert failed["message"].endswith("ended with exit code 137")
    assert hosts.yard.processes() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_node_stops_all(rank: int, hosts: Hosts) -> None:
    gang = started(hosts)
    gang.processes[rank].send_signal(signal.SIGTERM)
    assert gang.wait(LIMIT_S) == [143, 143, 143]
    assert not gang.say("node-failed")


def test_a_refusal_is_everybody_s(hosts: Hosts) -> None:
    assert hosts.start(hosts.job(nodes=2, code=2)).wait(LIMIT_S) == [2, 2]


def test_the_time_limit_is_everybody_s(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(nodes=2, sleep=60, timeout_s=4))
    assert gang.wait(LIMIT_S) == [124, 124]


def test_sigterm_while_others_are_awaited(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(nodes=2), only=range(1))
    wait_until(lambda: listens(gang.port + 1))
    gang.processes[0].send_signal(signal.SIGTERM)
    assert gang.wait(LIMIT_S) == [143]


def test_strangers_are_refused_and_do_no_harm(hosts: Hosts) -> None:
    job = hosts.job(nodes=2)
    gang = hosts.start(job, only=range(1), env=QUICK)
    wait_until(lambda: listens(gang.port + 1))
    right = watch.token(Node("kubernetes", 2, 1, "127.0.0.1", "job", 1), "job")
    assert "another job" in say_hello(gang.port + 1, {"hello": 1, "token": "guess", "host": "stranger"})
    other = watch.token(Node("kubernetes", 2, 1, "127.0.0.1", "job", 2), "job")
    assert "another attempt" in say_hello(gang.port + 1, {"hello": 1, "token": other, "host": "late"})
    assert "does not expect a node 2" in say_hello(gang.port + 1, {"hello": 2, "token": right, "host": "too many"})
    assert say_hello(gang.port + 1, ["GET / HTTP/1.1"]) == ""
    with socket.create_connection(("127.0.0.1", gang.port + 1)) as noise:
        noise.sendall(b"\0" * 100_000)
        gang.start(1, hosts.folder / "scratch1")
        assert gang.wait() == [0, 0]


def test_one_node_needs_no_network(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(sleep=60))
    gang.ready()
    assert not listens(gang.port + 1)
    (worker,) = [path for path in Path("/proc").glob("[0-9]*") if path.name == str(gang.processes[0].pid)]
    assert not [link for link in (worker / "fd").iterdir() if str(link.readlink()).startswith("socket:")]
    gang.processes[0].terminate()
    assert gang.wait(LIMIT_S) == [143]


def test_a_taken_port_is_told(hosts: Hosts) -> None:
    job = hosts.job(nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1] - 1)
        gang = hosts.start(job, only=range(1), env={"MASTER_PORT": port})
        assert gang.wait(LIMIT_S) == [1]
    assert "set MASTER_PORT in the job's env" in gang.say("error")[0]["message"]


def listens(port: int) -> bool:
    """Whether somebody listens on a port of 127.0.0.1."""
    return f"0100007F:{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


def say_hello(port: int, hello: object) -> str:
    """What the leader answers to a first line: why it refuses."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line, line.makefile("rwb") as talk:
        talk.write(json.dumps(hello).encode() + b"\n")
        talk.flush()
        answer = talk.readline()
    return str(json.loads(answer)["refused"]) if answer else ""
