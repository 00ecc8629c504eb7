"""Guests: hosts of their own on this machine, which end when they are told to, and with their owner."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from emulator import guests
from emulator.guests import Guest, NamespaceGuest, Pool
from tests.clusters.yard import ROOT, wait_until

ENV = {"PATH": os.environ["PATH"]}
needs_namespaces = pytest.mark.skipif(
    not guests.possible() and not os.environ.get("CI"), reason="needs root, iproute2 and util-linux"
)
real = [pytest.mark.root, needs_namespaces]


@pytest.fixture(params=[pytest.param(True, marks=real, id="namespaces"), pytest.param(False, id="plain")])
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    if not request.param:
        monkeypatch.setattr(guests, "possible", lambda: False)
    made = Pool([tmp_path])
    yield made
    made.close()


def told(guest: Guest, folder: Path, command: str) -> str:
    """What a command says in a guest."""
    with (folder / "told").open("wb") as log:
        assert guest.start(["bash", "-c", command], ENV, log).wait(20) == 0, (folder / "told").read_text()
    return (folder / "told").read_text().strip()


def running(mark: str) -> list[str]:
    """The processes, seen from outside, whose environment has the mark."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                found.append(place.name)
        except OSError:
            continue
    return found


def test_a_program_runs_with_its_environment_alone_and_tells_how_it_ended(pool: Pool, tmp_path: Path) -> None:
    words = ["python", "-c", "import os, sys; print(os.environ['SEEN'], 'HOME' in os.environ); sys.exit(7)"]
    with (tmp_path / "log").open("wb") as log:
        assert pool.boot("one").start(words, {**ENV, "SEEN": "yes"}, log, cwd=str(tmp_path)).wait(20) == 7
    assert (tmp_path / "log").read_text() == "yes False\n"


@pytest.mark.parametrize("how", ["stop", "power_off"])
def test_whatever_runs_in_a_guest_ends_with_it(pool: Pool, tmp_path: Path, how: str) -> None:
    guest, mark = pool.boot("one"), f"CASTRA_TEST_MARK={tmp_path}"
    env = {**ENV, "CASTRA_TEST_MARK": str(tmp_path)}
    guest.start(["bash", "-c", "sleep 600 & sleep 600"], env, subprocess.DEVNULL)
    wait_until(lambda: len(running(mark)) >= 3)
    getattr(guest, how)()
    assert not guest.alive
    wait_until(lambda: not running(mark), 5)
    with pytest.raises(ProcessLookupError, match="off"):
        guest.start(["true"], ENV, subprocess.DEVNULL)
    assert pool.boot("one").alive, "a name can be used again"


def test_a_signal_reaches_the_program(pool: Pool, tmp_path: Path) -> None:
    guest = pool.boot("one")
    polite = f"trap 'touch {tmp_path}/said; exit 5' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    process = guest.start(["bash", "-c", polite], ENV, subprocess.DEVNULL)
    wait_until((tmp_path / "up").exists)
    process.terminate()
    assert process.wait(10) == 5
    assert (tmp_path / "said").exists()
    other = guest.start(["sleep", "600"], ENV, subprocess.DEVNULL)
    other.kill()
    assert other.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("pool", [pytest.param(True, marks=real)], indirect=True)
class TestNamespaces:
    def test_guests_share_a_network_and_a_folder_and_nothing_else(self, pool: Pool, tmp_path: Path) -> None:
        one, two = pool.boot("one"), pool.boot("two")
        assert told(one, tmp_path, "hostname") == "one"
        assert told(one, tmp_path, "getent hosts two").split() == [two.address, "two"]
        told(
            one,
            tmp_path,
            f"echo > /tmp/mine; echo > /etc/mine; echo there > {tmp_path}/ours; sleep 600 >/dev/null 2>&1 &",
        )
        assert told(two, tmp_path, f"ls /tmp/mine /etc/mine 2>/dev/null; cat {tmp_path}/ours") == "there"
        assert told(two, tmp_path, "ps -e -o comm= | grep -c sleep || true") == "0"
        assert "Read-only" in told(two, tmp_path, f"touch {ROOT}/mark 2>&1 || true")
        assert not Path("/etc/mine").exists()

    def test_groups_may_use_the_same_names(self, pool: Pool, tmp_path: Path) -> None:
        first, second = pool.boot("algo-1", "a"), pool.boot("algo-1", "b")
        assert first.address != second.address
        assert told(first, tmp_path, "getent hosts algo-1").split()[0] == first.address
        with pytest.raises(ValueError, match="up already"):
            pool.boot("algo-1", "a")

    def test_a_peer_hears_nothing_of_a_pulled_plug(self, pool: Pool, tmp_path: Path) -> None:
        one, two = pool.boot("one"), pool.boot("two")
        serve = f"""
import pathlib, socket
server = socket.create_server(("", 700))
pathlib.Path({str(tmp_path)!r}, "up").touch()
server.accept()[0].recv(1)
"""
        one.start(["python", "-c", serve], ENV, subprocess.DEVNULL)
        wait_until((tmp_path / "up").exists)
        read = f"""
import socket
line = socket.create_connection(("{one.address}", 700), 5)
print("connected", flush=True)
line.settimeout(1)
try:
    print("heard", line.recv(1))
except TimeoutError:
    print("silence")
"""
        with (tmp_path / "log").open("wb") as log:
            reader = two.start(["python", "-c", read], ENV, log)
            wait_until(lambda: "connected" in (tmp_path / "log").read_text())
            one.power_off()
            assert reader.wait(10) == 0
        assert (tmp_path / "log").read_text().split() == ["connected", "silence"]

    def test_a_server_outside_is_reached_on_its_own_port(self, pool: Pool, tmp_path: Path) -> None:
        with HTTPServer(("127.0.0.1", 0), Echo) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            pool.ports = (server.server_port,)
            ask = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{server.server_port}/').read().decode())"
            with (tmp_path / "log").open("wb") as log:
                pool.boot("one").start(["python", "-c", ask], ENV, log).wait(20)
            server.shutdown()
        assert (tmp_path / "log").read_text() == "from outside\n"

    @pytest.mark.usefixtures("pool")
    def test_guests_end_with_their_owner_however_it_ends(self, tmp_path: Path) -> None:
        owner = f"""
import subprocess, sys, time
sys.path[:0] = [{str(ROOT)!r}]
from emulator.guests import Pool
mark = {{"CASTRA_TEST_MARK": {str(tmp_path)!r}}}
Pool([{str(tmp_path)!r}]).boot("one").start(["sleep", "600"], mark, subprocess.DEVNULL)
print("up", flush=True)
time.sleep(600)
"""
        process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            assert running(f"CASTRA_TEST_MARK={tmp_path}")
            process.kill()
        wait_until(lambda: not running(f"CASTRA_TEST_MARK={tmp_path}"), 5)
        Pool()
        assert not list(guests.CGROUPS.glob(f"freezer/castra-{process.pid}-*"))

    @pytest.mark.skipif(not guests.has_cgroups(), reason="needs cgroups of version 1")
    def test_the_end_of_a_guest_takes_nothing_from_another_pool_of_the_process(self, pool: Pool) -> None:
        stays, other = pool.boot("one"), Pool()
        assert isinstance(stays, NamespaceGuest)
        other.boot("one")
        other.close()
        assert Path(f"/proc/{stays.pid}/root/sys/fs/cgroup/freezer/cgroup.procs").exists()

    def test_its_own_files_can_be_written_from_outside(self, pool: Pool, tmp_path: Path) -> None:
        guest = pool.boot("one")
        assert isinstance(guest, NamespaceGuest)
        guest.write("/etc/some/where", "text", 0o600)
        assert told(guest, tmp_path, "stat -c %a /etc/some/where; cat /etc/some/where") == "600\ntext"


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from outside")

    def log_message(self, *_: object) -> None:
        pass
