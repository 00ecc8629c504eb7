"""Hosts on one Linux machine: each a set of namespaces with a disk, a name, an address and a process tree of its own.

    pool = guests.pool()                        # one per process; it ends with the process, however that ends
    main, child = pool.boot("main"), pool.boot("child")
    main.start(["python", "-m", "training.node", "job.json"], env, log)
    child.power_off()                           # as if the plug were pulled: the peers hear nothing

Guests share nothing but the folders named in CASTRA_EMULATOR_SHARE. They cannot reach the network; 127.0.0.1:<port> of
each endpoint in AWS_ENDPOINT_URL* is relayed to the endpoint. Needs root, iproute2 and util-linux; without them a guest
is a name for plain processes at 127.0.0.1.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urlsplit

from emulator.relay import Relay, listen_in

ROOT = Path(__file__).parents[1]
INIT = Path(__file__).with_name("guest.sh")
SWITCH = "ip link set lo up; ip link add br0 type bridge; ip link set br0 up; echo ready; read -r _"
SHARE = "CASTRA_EMULATOR_SHARE"
SYSTEM = "/usr"
"""Where Python is the system's own, an image has it too."""
CONTROLLERS = ("freezer", "memory", "cpuacct")
CGROUPS = Path("/sys/fs/cgroup")
NUMBERS = itertools.count(1)
"""Of guests, one count for all pools of a process: their cgroups have no other name."""
END_S = 10.0


class Guest(Protocol):
    """One host."""

    name: str
    address: str

    @property
    def alive(self) -> bool:
        """Whether it is up."""

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes] | int, cwd: str = "/"
    ) -> subprocess.Popen[bytes]:
        """Run a program in it; `env` is all of its environment, `log` takes what it prints.

        Signals sent through the answer reach the program. `python` and `python3` are this Python, as a container
        brings its own.
        """

    def stop(self) -> None:
        """End everything in it and free it; fine twice."""

    def power_off(self) -> None:
        """As `stop`, but without a word to whoever is connected to it."""


class Process(subprocess.Popen[bytes]):
    """A program in a guest, reached through `nsenter`, which does not pass signals on."""

    def send_signal(self, sig: int) -> None:
        """Signal the program itself."""
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self._inner() or self.pid, sig)

    def _inner(self) -> int | None:
        """The program's process id; it takes nsenter a moment to start it."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if children := Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                    return int(children[0])
            time.sleep(0.005)
        return None


@dataclass(eq=False)
class NamespaceGuest:
    """A host made of namespaces. Its first process reads a pipe that we hold, so that it ends with us."""

    name: str
    address: str
    group: str
    _pool: "Pool"
    _port: str
    """Its network cable, as the switch calls it; also its cgroup's name."""
    _binds: list[str]
    _lower: str = "/"
    """The layers of its disk, as overlayfs takes them: this machine's, or those of an image."""
    _first: subprocess.Popen[bytes] | None = None
    pid: int = 0
    """Of its first process, seen from outside."""
    _relays: list[Relay] = field(default_factory=list)
    _processes: list[Process] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether its first process is there."""
        return self._first is not None and self._first.poll() is None

    def enter(self, cwd: str = "/") -> list[str]:
        """The words before a command that make it run in here."""
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return [str(shutil.which("nsenter")), "--target", str(self.pid), *namespaces, f"--wdns={cwd}"]

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes] | int, cwd: str = "/"
    ) -> subprocess.Popen[bytes]:
        """See `Guest`; raises `ProcessLookupError` if the guest is off."""
        if not self.alive:
            raise ProcessLookupError(f"guest {self.name} is off")
        process = Process(
            [*self.enter(cwd), *_program(argv)], env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        self._processes = [one for one in self._processes if one.poll() is None] + [process]
        return process

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file on its disk."""
        place = Path(f"/proc/{self.pid}/root{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def stop(self) -> None:
        self._end(politely=True)

    def power_off(self) -> None:
        self._end(politely=False)

    def boot(self) -> None:
        """Start it; raises `RuntimeError` with what went wrong."""
        cgroup = self._pool.cgroup(self._port)
        namespaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
        told = [self.name, self.address, self._port, str(self._pool.switch), cgroup, self._lower, *self._binds]
        self._first = subprocess.Popen(
            ["unshare", *namespaces, "bash", str(INIT), *told], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._first.stdout is not None
        word, _, pid = self._first.stdout.readline().decode().partition(" ")
        if word != "ready":
            assert self._first.stderr is not None
            raise RuntimeError(f"guest {self.name} does not start: {self._first.stderr.read().decode().strip()}")
        self.pid = int(pid)
        for port in self._pool.ports:
            self._relays.append(Relay(listen_in(self.pid, port), ("127.0.0.1", port)))

    def _end(self, politely: bool) -> None:
        first, self._first = self._first, None
        if first is None:
            return
        if not politely and self.pid:
            self._pool.cable(f"link set {self._port} down")  # first, so that no goodbye reaches the peers
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for relay in self._relays:
            relay.close()
        self._relays.clear()
        _reap(first)
        for process in self._processes:
            process.wait(END_S)
        # orphaned connections keep a dead network for many seconds: its cable is pulled by hand
        self._pool.cable(f"link del {self._port}")
        _sweep_cgroup(self._port)


@dataclass(eq=False)
class PlainGuest:
    """A name for processes of this machine, where there are no namespaces to be had."""

    name: str
    address: str = "127.0.0.1"
    alive: bool = True
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes] | int, cwd: str = "/"
    ) -> subprocess.Popen[bytes]:
        if not self.alive:
            raise ProcessLookupError(f"guest {self.name} is off")
        process = subprocess.Popen(
            _program(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """End what it started, with the groups of these processes; daemons are left to the emulator's keeper."""
        self.alive = False
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)
        self._processes.clear()

    def power_off(self) -> None:
        self.stop()


class Pool:
    """The guests of one process and the switch between them, which is a namespace too: nothing shows outside."""

    def __init__(self, share: Iterable[str | Path] = (), ports: Iterable[int] = ()) -> None:
        """`share` are folders that all guests write, at the same paths; `ports` of 127.0.0.1 are relayed to outside."""
        self.namespaces = possible()
        self.ports = tuple(ports)
        self.guests: dict[tuple[str, str], Guest] = {}
        self._addresses: dict[tuple[str, str], str] = {}
        self._lock = threading.RLock()
        read = sorted({str(path) for path in (sys.base_prefix, sys.prefix, ROOT)})
        # what is written comes last: it may lie in a folder that is only read
        self.binds = [f"ro:{path}" for path in read] + _written(share)
        self._switch: subprocess.Popen[bytes] | None = None
        if self.namespaces:
            _sweep_cgroups()

    @property
    def switch(self) -> int:
        """The process that holds the switch; the first call makes it."""
        with self._lock:
            if self._switch is None:
                self._switch = subprocess.Popen(
                    ["unshare", "--net", "bash", "-c", SWITCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                assert self._switch.stdout is not None
                self._switch.stdout.readline()
            return self._switch.pid

    def boot(self, name: str, group: str = "", share: Iterable[str | Path] = (), image: Sequence[Path] = ()) -> Guest:
        """A fresh host of that name, which must not be up; hosts of one group know each other by name.

        `share` are folders it writes beside those that all do; `image` are the layers of its disk, uppermost first, by
        default this machine's disk. A name keeps its address. Raises `ValueError` for a name that is taken,
        `RuntimeError` if it does not start.
        """
        with self._lock:
            if (there := self.guests.get((group, name))) and there.alive:
                raise ValueError(f"guest {name} is up already")
            if not self.namespaces:
                self.guests[group, name] = PlainGuest(name)
                return self.guests[group, name]
            number = next(NUMBERS)
            address = self._addresses.setdefault((group, name), f"10.77.{number // 250}.{number % 250 + 1}")
            binds = [one for one in self.binds if not (image and one == f"ro:{SYSTEM}")] + _written(share)
            lower = ":".join(map(str, image)) or "/"
            guest = NamespaceGuest(name, address, group, self, f"guest{number}", binds, lower)
            self.guests[group, name] = guest
        try:
            guest.boot()
        except BaseException:
            guest.stop()
            raise
        self._introduce(group)
        return guest

    def close(self) -> None:
        """Stop all guests and the switch."""
        for guest in list(self.guests.values()):
            guest.stop()
        if self._switch:
            _reap(self._switch)
            self._switch = None

    def cable(self, command: str) -> None:
        """Tell the switch something about a cable, which may be gone."""
        enter = ["nsenter", "--target", str(self.switch), "--net"]
        subprocess.run([*enter, "ip", *command.split()], capture_output=True, check=False)

    def cgroup(self, name: str) -> str:
        """Make a guest's cgroups and return their name; "" where version 1 is not mounted."""
        if not has_cgroups():
            return ""
        for controller in CONTROLLERS:
            (CGROUPS / controller / _cgroup_name(name)).mkdir(exist_ok=True)
        return _cgroup_name(name)

    def _introduce(self, group: str) -> None:
        """Tell every guest of a group where the others are."""
        with self._lock:
            known = {name: address for (of, name), address in self._addresses.items() if of == group}
            text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in known.items())
            for guest in self.guests.values():
                if isinstance(guest, NamespaceGuest) and guest.group == group and guest.alive and guest.pid:
                    guest.write("/etc/hosts", text)


@cache
def pool() -> Pool:
    """The pool of this process, as the environment describes it."""
    share = [path for path in os.environ.get(SHARE, "").split(os.pathsep) if path]
    told = [value for name, value in os.environ.items() if name.startswith("AWS_ENDPOINT_URL")]
    places = [place for value in told if (place := urlsplit(value)).hostname in ("127.0.0.1", "localhost")]
    return Pool(share, sorted({place.port for place in places if place.port}))


def possible() -> bool:
    """Whether namespaces are to be had here."""
    tools = all(map(shutil.which, ("ip", "unshare", "nsenter", "pivot_root")))
    return sys.platform == "linux" and os.geteuid() == 0 and tools


def has_cgroups() -> bool:
    """Whether the controllers that guests get a part of are mounted here, as version 1."""
    return all((CGROUPS / controller / "cgroup.procs").exists() for controller in CONTROLLERS)


def _written(folders: Iterable[str | Path]) -> list[str]:
    found = [Path(folder).resolve() for folder in folders]
    for folder in found:
        folder.mkdir(parents=True, exist_ok=True)
    return [f"rw:{folder}" for folder in found]


def _program(argv: Sequence[str]) -> list[str]:
    return [sys.executable, *argv[1:]] if argv[0] in ("python", "python3") else list(argv)


def _reap(first: subprocess.Popen[bytes]) -> None:
    """Close the pipe that a process waits for, and wait for its end."""
    for stream in (first.stdin, first.stdout, first.stderr):
        if stream:
            stream.close()
    try:
        first.wait(END_S)
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()


def _cgroup_name(port: str) -> str:
    return f"castra-{os.getpid()}-{port}"


def _sweep_cgroup(port: str) -> None:
    for controller in CONTROLLERS:
        _remove(CGROUPS / controller / _cgroup_name(port))


def _sweep_cgroups() -> None:
    """Remove the empty cgroups of pools whose process was killed; nothing else of theirs can be left."""
    for controller in CONTROLLERS:
        for place in (CGROUPS / controller).glob("castra-*-*"):
            if not Path(f"/proc/{place.name.split('-')[1]}").exists():
                _remove(place)


def _remove(cgroup: Path) -> None:
    inner = [path for path in cgroup.rglob("*") if path.is_dir()] if cgroup.exists() else []
    for place in [*sorted(inner, key=lambda path: -len(path.parts)), cgroup]:
        with contextlib.suppress(OSError):
            place.rmdir()
