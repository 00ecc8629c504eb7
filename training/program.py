"""The program on a node: its output in whole lines, its whole family of processes, its end."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from training.job import MARK

LONGEST_LINE: Final = 1 << 20
"""Bytes after which a line is cut, so that a program that never ends its line cannot fill the memory."""
PR_SET_CHILD_SUBREAPER: Final = 36
"""From linux/prctl.h."""


class Log:
    """Standard output, written in whole lines that begin with `prefix`; safe to share between threads."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix.encode()
        self._one_at_a_time = threading.Lock()
        self.listener: Callable[[bytes], None] | None = None
        """Is told every line, as it was given; must not raise."""

    def write(self, line: bytes) -> None:
        """Write one line, given without its end; what is not UTF-8 is replaced. Nobody reading is no error."""
        whole = memoryview(self._prefix + line.decode(errors="replace").encode() + b"\n")
        with self._one_at_a_time, contextlib.suppress(OSError):
            while whole:
                whole = whole[os.write(1, whole) :]
        if self.listener is not None:
            self.listener(line)

    def say(self, event: str, **facts: Any) -> None:
        """Tell an event, as `training.job.say` does."""
        self.write((MARK + json.dumps({"event": event, **facts})).encode())


class Program:
    """A child process in a session of its own; whatever it starts is found and ended with it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Log) -> None:
        """Start it. Raises OSError when there is no such program."""
        self._child = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._relay, args=(log,), daemon=True)
        self._pump.start()

    def ask_to_stop(self, launcher: bool) -> None:
        """Send SIGTERM: to the child or, if it is only the launcher of ranks, to these, which then end it."""
        ranks = _children().get(self._child.pid, []) if launcher else []
        for pid in ranks or [self._child.pid]:
            _signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the whole family."""
        for pid in _family(self._child.pid):
            _signal(pid, signal.SIGKILL)

    def ended(self) -> int | None:
        """Return the exit code (128 + the signal that killed it) once nothing of the family is left, else None."""
        for pid, status in _reaped():
            if pid == self._child.pid:
                self._child.returncode = os.waitstatus_to_exitcode(status)
        code = self._child.returncode
        if code is None:
            return None
        if left := _family(self._child.pid):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            return None
        self._pump.join()  # all writers are gone
        return code if code >= 0 else 128 - code

    def _relay(self, log: Log) -> None:
        assert self._child.stdout is not None
        rest = b""
        while data := os.read(self._child.stdout.fileno(), 1 << 16):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                log.write(line)
            if len(rest) > LONGEST_LINE:
                log.write(rest)
                rest = b""
        if rest:
            log.write(rest)


def adopt_orphans() -> None:
    """Have the processes below this one whose parent ends become its children (Linux), so that none escapes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _family(group: int) -> list[int]:
    """Return all living processes below this one; without /proc, the process group if anything is left of it."""
    children = _children()
    if not children:
        with contextlib.suppress(OSError):
            os.killpg(group, 0)
            return [-group]
        return []
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _children() -> dict[int, list[int]]:
    """Return who is whose child, of the processes that are no zombies."""
    found: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                found.setdefault(int(parent), []).append(int(place.name))
    return found


def _reaped() -> Iterator[tuple[int, int]]:
    """Return the children that have ended, adopted ones included, and their wait status."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
