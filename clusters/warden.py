"""The keeper's program, see `clusters.keeper`: run by its path, isolated, with the standard library only."""

import contextlib
import ctypes
import errno
import json
import os
import random
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PORT = "{port}"
"""Stands for a free port of this machine in a node's arguments and environment."""
OWNER_GONE = "the process that started it has ended"
"""The reason of a run that ended because its owner did."""
TICK_S = 0.2
LONGEST_LINE = 1 << 20
PORT_TRIES = 3
PORT_TAKEN = re.compile(rb"EADDRINUSE|address already in use", re.IGNORECASE)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
LINUX = sys.platform == "linux"


def read_json(path: Path) -> dict[str, Any] | None:
    """What a JSON file says, None if there is no such file."""
    try:
        told: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return told


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole and durably."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("w") as out:
        json.dump(value, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(path)


@dataclass(slots=True)
class _Output:
    """The output of one node, cut into whole lines."""

    prefix: bytes
    rest: bytearray = field(default_factory=bytearray)

    def lines(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` completes; `b""` is the end and completes the last one."""
        *whole, rest = data.split(b"\n")
        for line in whole:
            yield self._line(bytes(self.rest) + line)
            self.rest.clear()
        self.rest += rest
        if self.rest and (not data or len(self.rest) >= LONGEST_LINE):
            yield self._line(bytes(self.rest))
            self.rest.clear()

    def _line(self, line: bytes) -> bytes:
        return self.prefix + line.decode(errors="replace").encode() + b"\n"


class _Keeper:
    """One run of the nodes, from the first process to the last."""

    def __init__(self, folder: Path, plan: dict[str, Any], wakeup: int) -> None:
        self.folder, self.plan = folder, plan
        self.groups: set[int] = set()
        self.log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)
        self.port, self.port_taken = 0, False
        self.pids: dict[int, str] = {}
        self.living: set[int] = set()
        self.outcome: dict[str, Any] | None = None
        self.kill_at = float("inf")
        timeout_s = plan["timeout_s"]
        self.deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        self.inputs = selectors.DefaultSelector()
        self.inputs.register(wakeup, selectors.EVENT_READ, "signal")
        self.inputs.register(0, selectors.EVENT_READ, "owner")
        self.streams = 0

    def run(self) -> dict[str, Any]:
        """Run the plan, again on another port if that one was taken in the meantime; returns how it ended."""
        for attempt in range(1, PORT_TRIES + 1):
            self._look()
            if self.outcome is None:
                self._spawn()
            self._watch()
            assert self.outcome is not None
            if not (self.port_taken and self.outcome["by_node"]) or attempt == PORT_TRIES:
                break
            self._write(f"port {self.port} was taken in the meantime: starting again on another\n".encode())
            self.outcome, self.port_taken, self.kill_at = None, False, float("inf")
        assert self.outcome is not None
        return {key: self.outcome[key] for key in ("state", "reason", "exit_code")}

    def _spawn(self) -> None:
        self.port = free_port() if PORT in json.dumps(self.plan["nodes"]) else 0
        write_json(self.folder / "started.json", {"pid": os.getpid(), "port": self.port, "time": time.time()})
        several = len(self.plan["nodes"]) > 1
        for index, node in enumerate(self.plan["nodes"]):
            argv = [word.replace(PORT, str(self.port)) for word in node["argv"]]
            env = {key: value.replace(PORT, str(self.port)) for key, value in node["env"].items()}
            try:
                child = self._child(argv, env)
            except OSError as error:
                self._end("failed", f"cannot start {argv[0]}: {error.strerror}", exit_code=127)
                return
            self.pids[child.pid] = f"node{index}"
            self.living.add(child.pid)
            self.groups.add(child.pid)
            child.returncode = 0  # reaped by waitpid(-1) together with the orphans, not by its object
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            output = _Output(f"[node{index}] ".encode() if several else b"")
            self.inputs.register(child.stdout, selectors.EVENT_READ, output)
            self.streams += 1

    def _child(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            env=os.environ | env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  the keeper has one thread
        )

    def _watch(self) -> None:
        """Relay output and reap until nothing lives and nothing is left to read."""
        while True:
            for key, _ in self.inputs.select(TICK_S):
                self._read(key)
            self._reap()
            self._look()
            if self.outcome is None:
                continue
            others = [] if self.living and time.monotonic() < self.kill_at else kill_descendants(self.groups)
            if not self.living and not others and self.streams == 0:
                return

    def _read(self, key: selectors.SelectorKey) -> None:
        if key.data == "signal":
            with contextlib.suppress(BlockingIOError):
                caught = os.read(key.fd, 512)
                if signal.SIGTERM in caught or signal.SIGINT in caught:
                    self._end("cancelled", "cancelled")
                elif signal.SIGHUP in caught:
                    self._end("failed", OWNER_GONE)
        elif key.data == "owner":
            if not os.read(0, 512):
                self.inputs.unregister(0)
                self._look()
                self._end("failed", OWNER_GONE)
        else:
            self._relay(key)

    def _relay(self, key: selectors.SelectorKey) -> None:
        pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]  # registered by _spawn
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return
        for line in key.data.lines(data):
            self.port_taken = self.port_taken or bool(PORT_TAKEN.search(line))
            self._write(line)
        if not data:
            self.inputs.unregister(pipe)
            self.streams -= 1
            pipe.close()

    def _write(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self.log, line) :]
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = "the disk is full" if full else error.strerror
            self._end("failed", f"its log could not be written ({why}): free some space, then run again")

    def _reap(self) -> None:
        for pid, status in reaped():
            name = self.pids.pop(pid, None)
            if name is None:
                continue
            self.living.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code:
                self._end("failed", f"{name} {_how(code)}", exit_code=code if code > 0 else 128 - code, by_node=True)
            elif not self.living:
                self._end("succeeded", "", exit_code=0)

    def _look(self) -> None:
        """What no signal tells: a cancel file, a dead watch, the time limit."""
        if (self.folder / "cancel").exists():
            self._end("cancelled", "cancelled")
        elif os.getppid() != self.plan["watch"]:
            self._end("lost", "its keeper was killed")
        elif time.monotonic() > self.deadline:
            self._end("timed out", f"it ran past its time limit of {self.plan['timeout_s']:g} s")

    def _end(self, state: str, reason: str, *, exit_code: int | None = None, by_node: bool = False) -> None:
        if self.outcome is not None:
            return
        self.outcome = {"state": state, "reason": reason, "exit_code": exit_code, "by_node": by_node}
        self.kill_at = time.monotonic() + self.plan["grace_s"]
        for pid in self.living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)


def free_port() -> int:
    """A free TCP port of 127.0.0.1, below the range from which the system serves outgoing connections."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, "no free port between 20000 and 32000")


def kill_descendants(groups: set[int]) -> list[int]:
    """SIGKILL every living descendant of this process (without /proc: the process groups); returns who was left."""
    left = []
    for pid in _descendants() if LINUX else groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if LINUX else os.killpg)(pid, signal.SIGKILL)
            left.append(pid)
    return left


def reaped() -> Iterator[tuple[int, int]]:
    """The children that have ended, orphans included, and their wait status."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(place.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _how(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def _prctl(option: int, value: int) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with(parent: int) -> Any:
    def prepare() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the keeper died before the kernel was told

    return prepare


def _signals() -> int:
    """Turn the signals we care for into bytes on a pipe; returns its reading end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in CAUGHT:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
    return read


def _keep(folder: Path, plan: dict[str, Any]) -> None:
    keeper = _Keeper(folder, plan, _signals())
    outcome = keeper.run()
    with contextlib.suppress(OSError):
        os.fsync(keeper.log)
    write_json(folder / "status.json", outcome)


def _guard(folder: Path, keeper: int, owner: int) -> None:
    """The watch: hand on signals, tell the keeper when the owner is gone, clean up after a keeper that was killed."""
    wakeup, status = _signals(), None
    while status is None:
        select.select([wakeup], [], [], 1.0)
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(wakeup, 512):
                os.kill(keeper, signal.SIGTERM)
        if os.getppid() != owner:  # a fork of the owner may hold the pipe open
            os.kill(keeper, signal.SIGHUP)
        status = dict(reaped()).get(keeper)
    while kill_descendants(set()):
        time.sleep(0.01)
        list(reaped())
    if not (folder / "status.json").exists():
        reason = f"its keeper {_how(os.waitstatus_to_exitcode(status))}"
        write_json(folder / "status.json", {"state": "lost", "reason": reason, "exit_code": None})


def main(folder: Path) -> None:
    """Be the keeper of `folder`: fork, the parent becomes the watch."""
    os.setsid()
    plan = read_json(folder / "plan.json")
    assert plan is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    if os.getppid() != plan["owner"]:
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    watch = os.getpid()
    if child := os.fork():
        _guard(folder, child, plan["owner"])
    else:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit it
        _keep(folder, plan | {"watch": watch})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
