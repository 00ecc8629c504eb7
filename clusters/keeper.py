"""Run processes and leave nothing behind, whoever dies first: the owner, a child, or the keeper itself.

The owner calls `start(folder, nodes)`. The keeper is a program of its own (`clusters.warden`), in a session of its own:

    owner ──pipe──▶ watch ──▶ keeper ──▶ node 0 ──▶ its children, and theirs
                                    └──▶ node 1 …

The owner's end of the pipe closes when the owner dies, however it dies, and the keeper then stops everything. Orphans
are handed to the keeper by the kernel (Linux: PR_SET_CHILD_SUBREAPER), so it finds every descendant, daemons included.
If the keeper is killed, the watch inherits its orphans and ends them; if the watch is killed, the keeper stops.
Without /proc and prctl (macOS) the guarantee shrinks to the nodes' process groups.

Files in the folder, all written whole: `plan.json` (what to run), `started.json` (pid, port: from here on it counts as
run), `log` (whole lines, `[node0] ` before each if there are several nodes), `status.json` (how it ended, last).
A file `cancel` asks for the end, as SIGTERM does. `alive` is locked for as long as the keeper lives.
"""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusters import warden
from clusters.warden import LINUX, OWNER_GONE, PORT, free_port, read_json, write_json

__all__ = ["GRACE_S", "LINUX", "OWNER_GONE", "PORT", "Node", "alive", "ended", "free_port", "start", "started", "stop"]

GRACE_S = 8.0
"""From the polite request (SIGTERM) to the end (SIGKILL), seconds."""


@dataclass(frozen=True, slots=True)
class Node:
    """One command; `env` goes on top of the owner's environment, `PORT` is replaced in both."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


_owned: dict[int, int] = {}
"""Keepers of this process: pid → our end of the pipe, held until the keeper ends."""


def start(folder: Path, nodes: Sequence[Node], *, timeout_s: float | None = None, grace_s: float = GRACE_S) -> None:
    """Run the nodes in `folder`, tied to this process; returns at once. Waits for a keeper that still holds the folder.

    The run ends when every node has ended well, when one has failed, after `timeout_s` seconds, on `stop`, or with
    this process. Raises `OSError` if the folder cannot be written.
    """
    _reap_owned()
    plan = {"nodes": [{"argv": list(node.argv), "env": dict(node.env)} for node in nodes]}
    write_json(folder / "plan.json", plan | {"timeout_s": timeout_s, "grace_s": grace_s, "owner": os.getpid()})
    ours = os.open(folder / "alive", os.O_RDWR | os.O_CREAT, 0o644)
    read, write = os.pipe()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(ours, fcntl.LOCK_EX)  # the keeper inherits the lock: there is no moment without it
        places = [(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate((read, log, log, ours))]
        argv = [sys.executable, "-I", "-S", warden.__file__, str(folder)]
        pid = os.posix_spawn(
            sys.executable, argv, os.environ, file_actions=places, setsigmask=(), setsigdef=warden.CAUGHT
        )
        _owned[pid] = write
    finally:
        for fd in (ours, read, log):
            os.close(fd)


def alive(folder: Path) -> bool:
    """Whether a keeper works on this folder now."""
    _reap_owned()
    try:
        with (folder / "alive").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def started(folder: Path) -> dict[str, Any] | None:
    """`{"pid": …, "port": …}` of the run in this folder, None if no node was ever started."""
    return read_json(folder / "started.json")


def ended(folder: Path) -> dict[str, Any] | None:
    """`{"state": …, "reason": …, "exit_code": …}` of the run in this folder, None if it goes on or left no word."""
    return read_json(folder / "status.json")


def stop(folder: Path, wait_s: float = 0.0) -> bool:
    """Ask the run to end, wait up to `wait_s` seconds for it; returns whether it has ended."""
    if not folder.is_dir():
        return True
    (folder / "cancel").touch()
    until = time.monotonic() + wait_s
    while alive(folder):
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _reap_owned() -> None:
    for pid in list(_owned):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        if (pipe := _owned.pop(pid, None)) is not None:
            os.close(pipe)
