"""How fast a node writes and reads files and S3, in a few seconds and bytes, of which nothing is left behind."""

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from training.checks.finding import Finding
from training.process import JobError
from training.remote import THREADS, Remote, Trouble

SECONDS: Final = 4.0
"""For each of writing and reading."""
MOST: Final = 1 << 30
"""Bytes of a file at most."""
BLOCK: Final = 4 << 20
OBJECT: Final = 8 << 20
OBJECTS: Final = 64
"""At most, so that S3 has 512 MiB for the moment."""
SLOW: Final = 0.5
"""Share of the nodes' middle speed below which a node is slow."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of a folder or of a place in S3."""

    where: str
    write_mb_per_s: float
    read_mb_per_s: float
    bytes: int
    problem: str = ""

    def told(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def folder(path: str, most: int = MOST, seconds: float = SECONDS) -> Speed:
    """Write a file, to the disk and not only to memory, and read it from there."""
    try:
        handle, name = tempfile.mkstemp(prefix=".castra-speed-", dir=path)
    except OSError as problem:
        return Speed(path, 0, 0, 0, f"it cannot be written: {problem.strerror}")
    try:
        written, write_s = _write(handle, most, seconds)
        # what is in memory is not read from the disk
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        read, read_s = _read(handle, seconds)
    except OSError as problem:
        return Speed(path, 0, 0, 0, f"it cannot be used: {problem.strerror}")
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)
    return Speed(path, written / write_s / 1e6, read / read_s / 1e6, written)


def s3(url: str, size: int = OBJECT, seconds: float = SECONDS) -> Speed:
    """Write objects of `size` bytes below `s3://bucket/prefix`, several at once, read them, remove them."""
    names = [f"castra-speed-{uuid.uuid4().hex}/{number}" for number in range(OBJECTS)]
    done: list[str] = []
    try:
        remote = Remote(url)
        try:
            content = os.urandom(size)
            write_s = _all(names, lambda name: remote.write(name, content), seconds, done)
            written = list(done)
            read: list[str] = []
            read_s = _all(written, remote.read, seconds, read)
        finally:
            remote.delete(names)  # and those whose writing was on its way
    except (JobError, Trouble) as problem:
        return Speed(url, 0, 0, 0, str(problem))
    return Speed(url, len(written) * size / write_s / 1e6, len(read) * size / read_s / 1e6, len(written) * size)


def judge(speeds: dict[str, list[Speed]]) -> list[Finding]:
    """Judge the nodes' speeds, by node: what did not work, and who is much slower than most."""
    found = [
        Finding("refuse", speed.problem, node, speed.where, "see the mount, or the role's rights to the bucket")
        for node, told in speeds.items()
        for speed in told
        if speed.problem
    ]
    for where in sorted({speed.where for told in speeds.values() for speed in told}):
        mine = {node: speed for node, told in speeds.items() for speed in told if speed.where == where}
        working = {node: speed for node, speed in mine.items() if not speed.problem}
        found += _slow(where, {node: speed.write_mb_per_s for node, speed in working.items()}, "writes")
        found += _slow(where, {node: speed.read_mb_per_s for node, speed in working.items()}, "reads")
    return found


def _slow(where: str, speeds: dict[str, float], verb: str) -> Iterator[Finding]:
    if len(speeds) < 3:
        return
    middle = median(speeds.values())
    for node, speed in speeds.items():
        if speed < SLOW * middle:
            what = f"it {verb} {speed:.0f} MB/s where most do {middle:.0f} MB/s"
            yield Finding("warn", what, node, where, "measure it again; replace the node if it stays", "monitor")


def _write(handle: int, most: int, seconds: float) -> tuple[int, float]:
    block, done, began = os.urandom(BLOCK), 0, time.perf_counter()
    while done < most and time.perf_counter() - began < seconds:
        done += os.write(handle, block[: most - done])
    os.fsync(handle)
    return done, time.perf_counter() - began


def _read(handle: int, seconds: float) -> tuple[int, float]:
    os.lseek(handle, 0, os.SEEK_SET)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds and (block := os.read(handle, BLOCK)):
        done += len(block)
    return done, time.perf_counter() - began


def _all(names: list[str], work: Callable[[str], object], seconds: float, done: list[str]) -> float:
    """Do something with names until the time is up; what was done is added to `done`. Returns the time it took."""
    began = time.perf_counter()

    def one(name: str) -> None:
        if time.perf_counter() - began < seconds:
            work(name)
            done.append(name)

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(one, names):
            pass
    return time.perf_counter() - began
