"""The disks a job needs: that they are there, may be written, have room, and are not worn out."""

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from training.checks.finding import Finding
from training.checks.machine import Hung, Machine, within

ROOM: Final = 1 << 30
"""Bytes that must be free where a job writes: less does not hold the checkpoint of any model worth a cluster."""
SCARCE: Final = 0.05
"""Share of a disk below which it is soon full."""
PROBE: Final = 1 << 20
"""Bytes that are written, and removed, to see whether a disk can be written."""
PATIENCE_S: Final = 10.0
"""For what a local disk does in microseconds: a network's file system that hangs is found."""
CRITICAL: Final = {
    0: "its spare is used up", 1: "it is too hot", 2: "it is unreliable", 3: "it is read-only now",
    4: "its backup of memory failed",
}  # fmt: skip
"""Bits of an NVMe disk's critical warning (NVM Express base specification 2.0, figure 207)."""


@dataclass(slots=True)
class Disk:
    """A mounted file system, by a path a job uses."""

    path: str
    folder: str
    """The path, or the nearest folder above it that is there."""
    mount: str
    kind: str
    """`ext4`, `lustre`, ..."""
    total: int
    """Bytes; so is `free`, for this user."""
    free: int
    read_only: bool
    to_write: bool
    problem: str = ""
    """Why it cannot be written, or read, though it should."""

    def told(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def look(machine: Machine, writable: Iterable[str], readable: Iterable[str] = ("/",)) -> list[Disk]:
    """Look at the disks of paths, each once; into those that are to be `writable`, something is written."""
    mounts = _mounts(machine)
    seen: dict[str, Disk] = {}
    for paths, write in ((writable, True), (readable, False)):
        for path in paths:
            disk = _look(path, mounts, write=write)
            seen.setdefault(disk.mount, disk)
    return list(seen.values())


def judge(disks: Iterable[Disk], lustre: str = "") -> list[Finding]:
    """Judge disks; `lustre` is the path that must be a Lustre file system."""
    return [finding for disk in disks for finding in _judge(disk, must_be_lustre=bool(lustre) and disk.path == lustre)]


def judge_nvme(machine: Machine) -> list[Finding]:
    """Ask NVMe disks how they are, where nvme-cli is installed and this user may."""
    found = []
    for name in machine.names("/dev", "nvme[0-9]") + machine.names("/dev", "nvme[0-9][0-9]"):
        told = machine.text("nvme", "smart-log", f"/dev/{name}", "--output-format=json")
        found += read_smart(told, name) if told else []
    return found


def read_smart(told: str, name: str) -> list[Finding]:
    """Judge what `nvme smart-log --output-format=json` says."""
    try:
        log = json.loads(told)
    except ValueError:
        return []
    warning = log.get("critical_warning", 0)
    # nvme-cli 2 tells the bits apart: {"value": 1, "available_spare": 1, ...}
    bits = int(warning.get("value", 0) if isinstance(warning, dict) else warning)
    found = [
        Finding("refuse", f"the disk says: {text}", device=name, todo="replace the node", action="isolate")
        for bit, text in CRITICAL.items()
        if bits >> bit & 1
    ]
    if errors := int(log.get("media_errors", 0)):
        what = f"{errors} errors of its media"
        found.append(Finding("warn", what, device=name, todo="replace the node if it grows", action="monitor"))
    if (used := int(log.get("percent_used", 0))) >= 100:
        what = f"{used} % of its life is used"
        found.append(Finding("warn", what, device=name, todo="expect it to fail", action="monitor"))
    return found


def _judge(disk: Disk, *, must_be_lustre: bool) -> Iterable[Finding]:
    if must_be_lustre and disk.kind != "lustre":
        what = f"it is {disk.kind or 'nothing'} at {disk.mount or '-'}, not a Lustre file system"
        yield Finding("refuse", what, device=disk.path, todo="mount the file system; see the security group's port 988")
        return
    if disk.problem:
        yield Finding("refuse", disk.problem, device=disk.path, todo=_todo(disk), action=_action(disk))
    elif disk.read_only and disk.to_write:
        what = f"{disk.mount} is mounted read-only"
        yield Finding("refuse", what, device=disk.path, todo="reboot, or replace the node", action="reboot")
    elif disk.to_write and disk.free < ROOM:
        what = f"{disk.free / 1e6:.0f} MB are free of {disk.total / 1e9:.1f} GB, {ROOM / 1e9:.1f} GB are needed"
        yield Finding("refuse", what, device=disk.path, todo=_todo(disk))
    elif not disk.read_only and disk.free < SCARCE * disk.total:
        what = f"{disk.free / 1e9:.1f} GB are free of {disk.total / 1e9:.1f} GB"
        yield Finding("warn", what, device=disk.path, todo="make room", action="monitor")


def _todo(disk: Disk) -> str:
    if disk.kind == "lustre":
        return "see the health of the Lustre file system"
    return "make room, or let CASTRA_SCRATCH point at a larger disk"


def _action(disk: Disk) -> Any:
    return "reboot" if disk.read_only or "did not answer" in disk.problem else ""


def _look(path: str, mounts: dict[str, tuple[str, bool]], *, write: bool) -> Disk:
    disk = Disk(path, path, *_mount(Path(path), mounts), write)
    try:
        place = within(PATIENCE_S, f"the file system of {path}", lambda: _existing(Path(path)))
        disk = Disk(path, str(place), *_mount(place, mounts), write)
        room = within(PATIENCE_S, f"the file system of {path}", lambda: os.statvfs(place))
        disk.total, disk.free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
        if write and not disk.read_only:
            within(PATIENCE_S, f"the file system of {path}", lambda: _write(place))
    except Hung as problem:
        disk.problem = str(problem)
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        disk.problem = "it is full" if full else f"it cannot be used: {problem.strerror}"
    return disk


def _mount(place: Path, mounts: dict[str, tuple[str, bool]]) -> tuple[str, str, int, int, bool]:
    """Mount point, kind, bytes yet unknown, and whether it is read-only."""
    mount = next(name for name in (str(place), *map(str, place.parents)) if name in mounts or name in ("/", "."))
    kind, read_only = mounts.get(mount, ("", False))
    return mount, kind, 0, 0, read_only


def _write(folder: Path) -> None:
    """Write and sync something, and remove it."""
    handle, name = tempfile.mkstemp(prefix=".castra-probe-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(handle)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above that is there."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path.resolve()


def _mounts(machine: Machine) -> dict[str, tuple[str, bool]]:
    """Mount points: kind, and whether read-only; of several at one place the last, which covers the others."""
    found = {}
    for line in machine.read("/proc/self/mounts").splitlines():
        _, place, kind, options, *_ = line.split()
        found[place.replace("\\040", " ")] = (kind, "ro" in options.split(","))
    return found
