"""Results of pieces of work, each a file that is whole or absent: what a run that was killed finds done already.

A file is raw arrays, one after the other, in pages; its last bytes are an index of them in JSON and the index's length.
Arrays are mapped, not read: who needs one column of a page touches nothing else.
"""

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, overload

import numpy as np
import numpy.typing as npt

from training.process import JobError

Page = Mapping[str, npt.NDArray[Any]]

ALIGNED: Final = 64
SUFFIX: Final = ".part"
LOOK_S: Final = 1.0
"""Seconds between two looks at what is in S3."""


class Pages(Sequence[Page]):
    """The pages of a result, each mapped when it is asked for, so that only those in use count as memory."""

    def __init__(self, path: Path, told: Sequence[Mapping[str, Any]]) -> None:
        self._path, self._told = path, told

    def __len__(self) -> int:
        return len(self._told)

    @overload
    def __getitem__(self, index: int) -> Page: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Page]: ...
    def __getitem__(self, index: int | slice) -> Page | Sequence[Page]:
        if isinstance(index, slice):
            return Pages(self._path, self._told[index])
        page = {name: (np.dtype(kind), tuple(shape), at) for name, (kind, shape, at) in self._told[index].items()}
        ends = {name: at + math.prod(shape) * kind.itemsize for name, (kind, shape, at) in page.items()}
        begin, size = min(at for _, _, at in page.values()), max(ends.values())
        memory = np.memmap(self._path, np.uint8, "r", begin, (size - begin,)) if size > begin else np.empty(0, np.uint8)
        return {
            name: memory[at - begin : ends[name] - begin].view(kind).reshape(shape)
            for name, (kind, shape, at) in page.items()
        }


@dataclass(frozen=True, slots=True)
class Part:
    """One result: facts, and pages of named arrays."""

    facts: Mapping[str, Any]
    pages: Sequence[Page]


class PartFile:
    """A result being written."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._pages: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def add(self, page: Page) -> None:
        """Append a page."""
        told = {}
        for name, values in page.items():
            self._out.write(bytes(-self._out.tell() % ALIGNED))
            told[name] = [values.dtype.str, list(values.shape), self._out.tell()]
            self._out.write(np.ascontiguousarray(values).data)
        self._pages.append(told)

    def end(self) -> None:
        """Write the index."""
        index = json.dumps({"facts": self.facts, "pages": self._pages}).encode()
        self._out.write(index + len(index).to_bytes(8, "little"))


class Parts:
    """A folder of results that all nodes see; with `exchange`, an s3:// prefix, each has a copy of what it needs."""

    def __init__(self, folder: Path, exchange: str = "") -> None:
        self.folder = folder
        self._remote = _remote(exchange) if exchange else None
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return where a result lies on this node."""
        return self.folder / f"{name}{SUFFIX}"

    def has(self, name: str) -> bool:
        """Whether a piece of work is done, here or elsewhere."""
        if self.path(name).exists():
            return True
        return self._remote is not None and self._remote.has(self.path(name).name)

    @contextmanager
    def write(self, name: str) -> Iterator[PartFile]:
        """Write a result, which appears when it is whole and on the disk; two who write the same do no harm."""
        path = self.path(name)
        partial = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
        with partial.open("wb") as out:
            file = PartFile(out)
            yield file
            file.end()
            out.flush()
            os.fsync(out.fileno())
        if self._remote is not None:
            self._remote.upload(path.name, partial)
        partial.replace(path)

    def open(self, name: str) -> Part:
        """Return a result."""
        path = self.path(name)
        if self._remote is not None and not path.exists():
            self._remote.bring(path)
        return _read(path)

    def clear(self) -> None:
        """Remove all results."""
        if self._remote is not None:
            self._remote.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Exchange:
    """The results of all nodes in S3. Its troubles become JobErrors."""

    def __init__(self, url: str) -> None:
        from training.remote import Remote

        self._remote = Remote(url)
        self._seen: set[str] = set()
        self._looked = 0.0

    def has(self, name: str) -> bool:
        if name not in self._seen and time.monotonic() - self._looked > LOOK_S:
            with _sentences():
                self._seen = set(self._remote.found())
            self._looked = time.monotonic()
        return name in self._seen

    def upload(self, name: str, path: Path) -> None:
        with _sentences():
            self._remote.upload(name, path)

    def bring(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}-brought")
        with _sentences():
            partial.write_bytes(self._remote.read(path.name))
        partial.replace(path)

    def clear(self) -> None:
        with _sentences():
            self._remote.delete(sorted(self._remote.found()))


@contextmanager
def _sentences() -> Iterator[None]:
    from training.remote import Trouble

    try:
        yield
    except Trouble as problem:
        raise JobError(f"nodes cannot see one another's results: {problem}") from problem


@functools.lru_cache(maxsize=1)
def _remote(url: str) -> _Exchange:
    return _Exchange(url)


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> Part:
    """Read the index of a result, which never changes."""
    with path.open("rb") as file:
        end = file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(8), "little")
        file.seek(end - length)
        index = json.loads(file.read(length))
    return Part(index["facts"], Pages(path, index["pages"]))
