"""Weights on disk, whatever wrote them: which tensors there are, and any stretch of one of them read into memory.

A tensor is made of extents: runs of values that lie one after the other in a file. ZeRO's flat partitions, the boxes of
a DCP or of Castra's own checkpoints and the plain tensors of safetensors are all of this kind, so that one reader
serves them all and needs no memory but the caller's buffer.
"""

import json
import os
import resource
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from training.export.dtypes import NUMPY, WIDTHS, Array, values
from training.export.pickles import InFile
from training.process import JobError

SPARE_FILES: Final = 256
"""Files this process may have open besides the checkpoint's."""
LONGEST_HEADER: Final = 100_000_000
"""Bytes; what the safetensors library itself allows."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Runs of a tensor's values, one after the other in a file.

    `offset` is the file's byte where they begin; run i has the `count` values from `start + i * step` on, counted
    row-major in the tensor.
    """

    path: Path
    offset: int
    start: int
    count: int
    runs: int = 1
    step: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is stored: its type (safetensors' name), its shape, and where its values are."""

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @classmethod
    def whole(cls, place: InFile) -> "Stored":
        """Return a tensor that lies in one file as it is."""
        extent = Extent(place.path, place.offset, 0, values(place.shape))
        return cls(place.dtype, place.shape, (extent,))


class Source(Protocol):
    """Weights that can be read a stretch at a time, by several threads at once."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors by name."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that stand for another tensor of this source."""

    def read(self, name: str, first: int, out: Array) -> None:
        """Fill `out` (one dimension, of the stored type) with the tensor's values from `first` on, row-major.

        `first` and the length of `out` are multiples of a row, the values that share their place in dimension 0.
        """

    def files(self) -> Sequence[Path]:
        """Return the files that are read."""


class Files:
    """A source of tensors made of extents."""

    def __init__(self, tensors: Mapping[str, Stored], tied: Mapping[str, str] | None = None) -> None:
        """Check that every value of every tensor is somewhere. Raises JobError where some are not."""
        self.tensors, self.tied = dict(tensors), dict(tied or {})
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        for name, tensor in self.tensors.items():
            found = sum(extent.count * extent.runs for extent in tensor.extents)
            if found != values(tensor.shape):
                raise JobError(
                    f"{name} has {values(tensor.shape):,} values and the checkpoint's files hold {found:,} of them; "
                    "a rank's file is absent or of another save"
                )
        self._check_sizes()

    def read(self, name: str, first: int, out: Array) -> None:
        tensor, last = self.tensors[name], first + len(out)
        for extent in tensor.extents:
            if extent.runs > 1:
                self._scatter(extent, first, out)
            elif (begin := max(first, extent.start)) < (end := min(last, extent.start + extent.count)):
                place = extent.offset + (begin - extent.start) * out.itemsize
                self._fill(extent.path, place, out[begin - first : end - first])

    def files(self) -> Sequence[Path]:
        return sorted({extent.path for tensor in self.tensors.values() for extent in tensor.extents})

    def close(self) -> None:
        """Close the files that were opened."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _scatter(self, extent: Extent, first: int, out: Array) -> None:
        """Read the runs whose rows are asked for at once, then put each into its row."""
        low = max(0, (first - extent.start + extent.step - 1) // extent.step)
        high = min(extent.runs, -(-(first + len(out) - extent.start) // extent.step))
        if low >= high:
            return
        packed = np.empty((high - low, extent.count), out.dtype)
        self._fill(extent.path, extent.offset + low * extent.count * out.itemsize, packed.reshape(-1))
        begin = extent.start + low * extent.step - first
        column, row = begin % extent.step, begin // extent.step
        out.reshape(-1, extent.step)[row : row + high - low, column : column + extent.count] = packed

    def _fill(self, path: Path, offset: int, out: Array) -> None:
        view, done = memoryview(out.view(np.uint8).data), 0
        while done < len(view):
            got = os.preadv(self._handle(path), [view[done:]], offset + done)
            if not got:
                raise JobError(f"{path} ends before its tensors do; copy the checkpoint again")
            done += got

    def _handle(self, path: Path) -> int:
        handle = self._open.get(path)
        if handle is not None:
            return handle
        with self._lock:
            if path not in self._open:
                _allow_files(len(self._open) + SPARE_FILES)
                self._open[path] = os.open(path, os.O_RDONLY)
            return self._open[path]

    def _check_sizes(self) -> None:
        ends: dict[Path, int] = {}
        for tensor in self.tensors.values():
            for extent in tensor.extents:
                end = extent.offset + extent.runs * extent.count * WIDTHS[tensor.dtype]
                ends[extent.path] = max(ends.get(extent.path, 0), end)
        for path, end in ends.items():
            try:
                size = path.stat().st_size
            except OSError as problem:
                raise JobError(f"{path} is absent: the checkpoint is incomplete; copy it again, whole") from problem
            if size < end:
                raise JobError(f"{path} is truncated ({size:,} bytes, its tensors end at {end:,}); copy it again")


def box(place: Path, offset: int, shape: Sequence[int], origin: Sequence[int], size: Sequence[int]) -> list[Extent]:
    """Return the extents of a box of a tensor of `shape` whose values lie row-major in a file from `offset` on.

    The offset counts values here, not bytes: it is for `scaled` to make bytes of it.
    """
    whole = len(shape)
    while whole and (origin[whole - 1], size[whole - 1]) == (0, shape[whole - 1]):
        whole -= 1
    inner = values(tuple(shape[whole:]))
    if not whole:
        return [Extent(place, offset, 0, inner)]
    count, width = size[whole - 1] * inner, shape[whole - 1] * inner
    if whole == 1:
        return [Extent(place, offset, origin[0] * inner, count)]
    found, at = [], offset
    for lead in np.ndindex(*size[: whole - 2]):
        row = 0
        for axis, index in enumerate(lead):
            row = row * shape[axis] + origin[axis] + index
        row = row * shape[whole - 2] + origin[whole - 2]
        start = row * width + origin[whole - 1] * inner
        found.append(Extent(place, at, start, count, size[whole - 2], width))
        at += size[whole - 2] * count
    return found


def _allow_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def safetensors(folder: Path) -> Files:
    """Open the *.safetensors of a folder. Raises JobError when there are none, or one is damaged."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise JobError(f"{folder} holds no *.safetensors; give a Hugging Face folder")
    return Files({name: tensor for path in paths for name, tensor in header(path)})


def header(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a safetensors file. Raises JobError when it is damaged."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            told: dict[str, Any] = json.loads(file.read(length))
        for name, fact in told.items():
            if name != "__metadata__":
                shape, (begin, end) = tuple(fact["shape"]), fact["data_offsets"]
                if end - begin != values(shape) * WIDTHS[fact["dtype"]]:
                    raise ValueError(f"{name} does not fill its place")
                yield name, Stored(fact["dtype"], shape, (Extent(path, 8 + length + begin, 0, values(shape)),))
    except (OSError, struct.error, ValueError, KeyError, TypeError) as problem:
        raise JobError(f"{path} is not a whole safetensors file ({problem}); copy it again") from problem


def tensor(source: Source, name: str) -> Array:
    """Return a whole tensor in its stored type (bf16 as bits in uint16); for small ones."""
    stored = source.tensors[name]
    out = np.empty(values(stored.shape), NUMPY[stored.dtype])
    source.read(name, 0, out)
    return out.reshape(stored.shape)


class Layered:
    """A source over another one, which has what the first lacks; names that only the second knows are `others`."""

    def __init__(self, over: Source, under: Source, others: Mapping[str, str]) -> None:
        """Take from `under` the tensors that `others` gives a name, by their names there."""
        self._over, self._under, self._others = over, under, dict(others)
        self.tensors = {name: under.tensors[theirs] for name, theirs in others.items()} | dict(over.tensors)
        self.tied = over.tied

    def read(self, name: str, first: int, out: Array) -> None:
        if name in self._over.tensors:
            self._over.read(name, first, out)
        else:
            self._under.read(self._others[name], first, out)

    def files(self) -> Sequence[Path]:
        return [*self._over.files(), *self._under.files()]


class Memory:
    """Arrays as a source."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Take float32 arrays by their names."""
        self._arrays = dict(arrays)
        self.tensors = {name: Stored("F32", array.shape, ()) for name, array in arrays.items()}
        self.tied: dict[str, str] = {}

    def read(self, name: str, first: int, out: Array) -> None:
        out[:] = self._arrays[name].reshape(-1)[first : first + len(out)]

    def files(self) -> Sequence[Path]:
        return []
