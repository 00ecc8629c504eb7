"""Reading a checkpoint without torch and without much memory: any box of any tensor, whatever layout wrote it."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from training.checkpoint.manifest import Manifest
from training.checkpoint.piece import Box, common, volume, whole
from training.process import JobError

Array = NDArray[Any]
TYPES: Final = {
    "F32": "<f4",
    "BF16": "<u2",
    "F16": "<f2",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "BOOL": "?",
}
"""NumPy's types by safetensors' names; bfloat16, which NumPy has not, comes as its bits."""
BLOCK: Final = 8 << 20
"""Bytes read at once where only parts of them are wanted."""
LONG: Final = 32 << 10
"""Bytes in a row from which on a read of their own is cheaper than reading what lies between too."""


class Reader:
    """The tensors of a complete checkpoint. Raises JobError, one sentence, if files of it are missing or cut short.

    It holds the files' headers in memory and, while it reads, at most `BLOCK` bytes besides what it returns.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.manifest = Manifest.read(folder)
            files = [folder / name for name in sorted(self.manifest.files) if (folder / name).exists()]
            self._handles = [os.open(path, os.O_RDONLY) for path in files]
            self._stored: dict[str, list[_Stored]] = {}
            for handle in self._handles:
                for name, stored in _stored(handle):
                    self._stored.setdefault(name, []).append(stored)
        except (OSError, ValueError, KeyError) as problem:
            raise JobError(f"{folder} is no complete checkpoint ({problem})") from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._handles:
            os.close(self._handles.pop())

    def names(self) -> list[str]:
        """Return the tensors' names, sorted."""
        return sorted(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises JobError for one that is not there."""
        return tuple(self._told(name)["shape"])

    def dtype(self, name: str) -> str:
        """Return a tensor's type by safetensors' name: F32, BF16, … Raises JobError for one that is not there."""
        return str(self._told(name)["dtype"])

    def read(self, name: str, box: Box | None = None, out: Array | None = None) -> Array:
        """Return a box of a tensor, or all of it; written into `out`, of the box's shape and type, where one is given.

        Raises JobError.
        """
        wanted = whole(self.shape(name)) if box is None else box
        kind = np.dtype(TYPES[self.dtype(name)])
        target = np.empty([end - begin for begin, end in wanted], kind) if out is None else out
        found = 0
        for stored in self._stored.get(name, ()):
            both = common(stored.box, wanted)
            if both is not None:
                found += volume(both)
                stored.read(both, target[_within(both, wanted)] if both else target, self._folder)
        if found != volume(wanted):
            raise JobError(f"{self._folder} has not all of {name}: {found} of {volume(wanted)} values wanted")
        return target

    def _told(self, name: str) -> dict[str, Any]:
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise JobError(f"{self._folder} has no tensor {name}") from None


class _Stored:
    """A box, and where its values lie in a file."""

    def __init__(self, handle: int, box: Box, begin: int) -> None:
        self.box, self._handle, self._begin = box, handle, begin

    def read(self, part: Box, out: Array, folder: Path) -> None:
        """Read a part of the box into an array of that part's shape."""
        shape = [end - begin for begin, end in self.box]
        self._read(self._begin, shape, _within(part, self.box), out, folder)

    def _read(self, place: int, shape: list[int], part: tuple[slice, ...], out: Array, folder: Path) -> None:
        """Read part of a row-major array of `shape` that begins at byte `place` of the file."""
        row = math.prod(shape[1:]) * out.itemsize
        span = slice(part[0].start, part[0].stop) if part else slice(0, 1)
        rest_whole = all(cut.stop - cut.start == size for cut, size in zip(part[1:], shape[1:], strict=True))
        place += span.start * row
        if rest_whole and out.flags.c_contiguous:
            self._fill(place, out, folder)
        elif row > BLOCK or (not rest_whole and _run(part, shape) * out.itemsize >= LONG):
            for index in range(span.stop - span.start):
                self._read(place + index * row, shape[1:], part[1:], out[index], folder)
        else:
            step = min(max(1, BLOCK // row), len(out))
            block = np.empty([step, *shape[1:]], out.dtype)
            for index in range(0, span.stop - span.start, step):
                rows = out[index : index + step]
                self._fill(place + index * row, block[: len(rows)], folder)
                rows[...] = block[(slice(len(rows)), *part[1:])]

    def _fill(self, place: int, out: Array, folder: Path) -> None:
        target = out.reshape(-1).view(np.uint8).data
        while target:
            count = os.preadv(self._handle, [target[: 1 << 30]], place)
            if not count:
                raise JobError(f"a file of {folder} is cut short")
            target, place = target[count:], place + count


def _run(part: tuple[slice, ...], shape: list[int]) -> int:
    """Return how many values of a part lie in a row."""
    length = 1
    for cut, size in zip(reversed(part), reversed(shape), strict=True):
        length *= cut.stop - cut.start
        if cut.stop - cut.start < size:
            break
    return length


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    """Return where a part lies, counted from the box's beginning."""
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(part, box, strict=True))


def _stored(handle: int) -> Iterator[tuple[str, _Stored]]:
    """Read a data file's header. Raises ValueError, KeyError, OSError."""
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    header = json.loads(os.pread(handle, min(length, os.fstat(handle).st_size), 8))
    header.pop("__metadata__", None)
    for key, told in header.items():
        name, _, offset = key.rpartition("@")
        first = [int(begin) for begin in offset.split(",") if begin]
        box = tuple((begin, begin + size) for begin, size in zip(first, told["shape"], strict=True))
        yield name, _Stored(handle, box, 8 + length + told["data_offsets"][0])
