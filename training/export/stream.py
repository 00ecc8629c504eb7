"""From a source of weights to safetensors shards, block by block, in a few megabytes of memory per thread.

A shard is written beside its place and renamed when it is whole and on the disk; one that an earlier try finished is
kept, so that an export goes on where it was killed and gives the same bytes.
"""

import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from training.export.dtypes import DTYPES, FLOATS, NUMPY, WIDTHS, Array, converter, values
from training.export.source import Source, Stored
from training.process import JobError

BLOCK: Final = 2 << 20
"""Bytes read at a time: it stays in a core's cache while it is rounded."""
THREADS: Final = min(8, os.cpu_count() or 1)
"""More do not help one disk, and each has its buffers."""
INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor as it will be written: its type, its shape, and how a block of the source becomes one of it.

    `made` makes a function from whole rows of the tensor `source`, one dimension of its type, to the same rows of this
    one; every thread has it made for itself, so that it may keep buffers.
    """

    dtype: str
    shape: tuple[int, ...]
    source: str
    made: Callable[[], Callable[[Array], Array]]

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return values(self.shape) * WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the export: its name and the tensors it holds, in order."""

    name: str
    tensors: tuple[str, ...]


def targets(source: Source, names: Iterable[str], dtype: str) -> dict[str, Target]:
    """Return the named tensors as they are to be written in the recipe's `dtype`; integers stay as they are."""
    wanted = DTYPES[dtype]
    found = {}
    for name in names:
        stored = source.tensors[name]
        kind = wanted if stored.dtype in FLOATS else stored.dtype
        found[name] = Target(kind, stored.shape, name, _maker(name, stored.dtype, kind))
    return found


def shards(told: Mapping[str, Target], max_shard_mb: int, stem: str = "model") -> list[Shard]:
    """Divide tensors, in their order, into files of at most `max_shard_mb` MB (10^6 bytes), if each fits in one."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, target in told.items():
        if groups[-1] and size + target.size > max_shard_mb * 10**6:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += target.size
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", _aligned(groups[0], told))]
    return [
        Shard(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", _aligned(group, told))
        for number, group in enumerate(groups, 1)
    ]


def write(
    source: Source, told: Mapping[str, Target], files: Sequence[Shard], folder: Path, threads: int = THREADS
) -> None:
    """Write shards, and their index where there are several, into a folder; those that are there already stay.

    Raises JobError when a value does not fit or a source's file is cut short, OSError when the disk is full.
    """
    fresh = [_Out(folder, shard, told) for shard in files if not (folder / shard.name).exists()]
    work = _Work(source, told, fresh)
    try:
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(work.run) for _ in range(threads)]
            wait(running, return_when=FIRST_EXCEPTION)
            work.stop()
        for one in running:
            one.result()
    finally:
        for out in fresh:
            out.drop()
    if len(files) > 1:
        _write_index(told, files, folder)


class _Out:
    """A shard being written by several threads; its header and its length are made at once, when it is begun."""

    def __init__(self, folder: Path, shard: Shard, told: Mapping[str, Target]) -> None:
        self._path, self._beside = folder / shard.name, folder / f".{shard.name}.part"
        self.shard = shard
        self.places: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in shard.tensors:
            target = told[name]
            header[name] = {
                "dtype": target.dtype,
                "shape": list(target.shape),
                "data_offsets": [end, end + target.size],
            }
            self.places[name] = end
            end += target.size
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
        self._size = len(self._header) + end
        self._handle, self._left, self._lock = -1, 0, threading.Lock()

    def begin(self, blocks: int) -> None:
        """Open the file, take its room on the disk and expect so many blocks."""
        self._left = blocks
        self._handle = os.open(self._beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        _reserve(self._handle, self._size, self._beside)
        os.pwrite(self._handle, self._header, 0)
        if not blocks:
            self._name()

    def put(self, name: str, offset: int, block: Array) -> None:
        """Write a block of a tensor, `offset` bytes from its beginning; the last block makes the file whole."""
        view, place = memoryview(block.reshape(-1).view(np.uint8).data), len(self._header) + self.places[name] + offset
        while view:
            written = os.pwrite(self._handle, view, place)
            view, place = view[written:], place + written
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._name()

    def drop(self) -> None:
        """Close and remove the file if it is not whole."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._beside.unlink(missing_ok=True)

    def _name(self) -> None:
        os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1
        self._beside.rename(self._path)


class _Work:
    """All blocks of all shards, for threads to take in order."""

    def __init__(self, source: Source, told: Mapping[str, Target], outs: Sequence[_Out]) -> None:
        self._source, self._told = source, told
        self._blocks = self._all(outs)
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Let the threads end after the block they are at."""
        self._stopped = True

    def run(self) -> None:
        """Do blocks until there are none left."""
        buffer, name = np.empty(BLOCK, np.uint8), ""
        convert: Callable[[Array], Array] = _nothing
        while not self._stopped:
            with self._lock:
                block = next(self._blocks, None)
            if block is None:
                return
            out, written, first, count = block
            target = self._told[written]
            if written != name:
                name, convert = written, target.made()
            stored = self._stored(written)
            kind = NUMPY[stored.dtype]
            if buffer.size < count * kind.itemsize:
                buffer = np.empty(count * kind.itemsize, np.uint8)
            whole = buffer[: count * kind.itemsize].view(kind)
            self._source.read(target.source, first, whole)
            out.put(written, first * target.size // values(stored.shape), convert(whole))

    def _all(self, outs: Sequence[_Out]) -> Iterator[tuple[_Out, str, int, int]]:
        """Yield every block: its file, its tensor, its first value and how many; whole rows of the tensor."""
        for out in outs:
            steps = {name: self._step(name) for name in out.shard.tensors}
            totals = {name: values(self._stored(name).shape) for name in out.shard.tensors}
            out.begin(sum(-(-totals[name] // steps[name]) for name in steps))
            for name, step in steps.items():
                for first in range(0, totals[name], step):
                    yield out, name, first, min(step, totals[name] - first)

    def _step(self, name: str) -> int:
        stored = self._stored(name)
        row = max(1, values(stored.shape[1:]))
        return row * max(1, BLOCK // (row * WIDTHS[stored.dtype]))

    def _stored(self, name: str) -> Stored:
        return self._source.tensors[self._told[name].source]


def fits(told: Mapping[str, Target], files: Iterable[Shard], folder: Path) -> None:
    """Raise JobError unless the disk of a folder has room for the shards that are not there yet."""
    needed = sum(told[name].size for file in files if not (folder / file.name).exists() for name in file.tensors)
    place = os.statvfs(folder)
    free = place.f_bavail * place.f_frsize
    if needed > free:
        raise JobError(
            f"the weights need {needed / 1e6:,.1f} MB and the disk of {folder} has {free / 1e6:,.1f} MB free; make room"
        )


def _reserve(handle: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from problem


def _write_index(told: Mapping[str, Target], files: Sequence[Shard], folder: Path) -> None:
    places = {name: file.name for file in files for name in file.tensors}
    sizes = {
        "total_parameters": sum(values(told[name].shape) for name in places),
        "total_size": sum(told[name].size for name in places),
    }
    beside = folder / f".{INDEX}.part"
    with beside.open("w") as out:
        json.dump({"metadata": sizes, "weight_map": places}, out, indent=2, sort_keys=True)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    beside.rename(folder / INDEX)


def _aligned(names: Sequence[str], told: Mapping[str, Target]) -> tuple[str, ...]:
    """Order the tensors of a file by falling width of their values, so that each lies at a multiple of it."""
    return tuple(sorted(names, key=lambda name: -WIDTHS[told[name].dtype]))


def _maker(name: str, stored: str, wanted: str) -> Callable[[], Callable[[Array], Array]]:
    return lambda: converter(name, stored, wanted)


def _nothing(array: Array) -> Array:
    return array
