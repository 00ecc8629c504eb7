"""Megatron-LM's token files: PREFIX.bin holds the ids of all documents, PREFIX.idx where each begins.

Source of the layout: megatron/core/datasets/indexed_dataset.py of Megatron-LM. The index is a header (MMIDIDX, version,
the ids' type, how many sequences and document borders), then int32 lengths, int64 offsets in bytes, and int64 borders:
the sequence each document begins with, and their end. Here, as by its preprocess_data.py, a document is one sequence.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data.format import NewFile
from training.data.sources import SourceError

Integers = npt.NDArray[np.int64]

HEADER: Final = struct.Struct("<9sQBQQ")
MAGIC: Final = b"MMIDIDX\0\0"
VERSION: Final = 1
CODES: Final = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
"""Of its enumeration DType, the integers."""
SMALL: Final = 65_500
"""Vocabularies below this are stored as uint16 by Megatron, others as int32."""
IDS_AT_ONCE: Final = 2**22


class MegatronWriter:
    """A prefix being written; the index, which makes it readable, takes its name last."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        """Begin prefix.bin in the type that Megatron takes for a vocabulary of that size."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self.kind = np.dtype("<u2" if vocab_size < SMALL else "<i4")
        self._index = prefix.with_name(f"{prefix.name}.idx")
        self._index.unlink(missing_ok=True)
        self._ids = NewFile(prefix.with_name(f"{prefix.name}.bin"))
        self._lengths: list[npt.NDArray[np.int32]] = []

    def write(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Append the ids of whole documents, one after the other, and how many each has."""
        self._ids.write(np.ascontiguousarray(ids, self.kind))
        self._lengths.append(np.asarray(lengths, "<i4"))

    def close(self) -> None:
        """Make both files whole, durable and named."""
        self._ids.named()
        lengths = np.concatenate([np.empty(0, "<i4"), *self._lengths])
        size = lengths.astype("<i8") * self.kind.itemsize
        index = NewFile(self._index)
        code = CODES[self.kind.name]
        head = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
        index.write(np.frombuffer(head, np.uint8))
        index.write(lengths)
        index.write(np.cumsum(size) - size)
        index.write(np.arange(len(lengths) + 1, dtype="<i8"))
        index.named()


class MegatronReader:
    """A prefix that Megatron-LM, or MegatronWriter, wrote, mapped."""

    def __init__(self, prefix: Path) -> None:
        """Open both files. Raises SourceError when one is absent, no index of version 1, or not of its size."""
        self._path = prefix.with_name(f"{prefix.name}.bin")
        index = prefix.with_name(f"{prefix.name}.idx")
        try:
            raw = np.memmap(index, np.uint8, "r")
            size = self._path.stat().st_size
        except (OSError, ValueError) as problem:
            raise SourceError(f"{prefix}: {index.name} or {self._path.name} is absent or empty; name both") from problem
        self.kind, lengths, pointers, borders = _parts(index, raw)
        counted = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        if size != counted[-1] * self.kind.itemsize or not np.array_equal(pointers, counted[:-1] * self.kind.itemsize):
            raise SourceError(f"{self._path} is not what {index.name} tells of; write both again")
        self.offsets: Integers = counted[borders]
        """Where each document begins among all ids, and where the last ends: int64 [documents + 1]."""

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self.offsets) - 1

    @property
    def ids(self) -> npt.NDArray[Any]:
        """The ids of all documents, one dimension, mapped."""
        count = int(self.offsets[-1])
        return np.memmap(self._path, self.kind, "r", shape=(count,)) if count else np.empty(0, self.kind)

    def pieces(self, at_once: int = IDS_AT_ONCE) -> Iterator[tuple[npt.NDArray[Any], Integers]]:
        """Yield whole documents, about `at_once` ids at a time (at least one document), and how many ids each has."""
        first, ids = 0, self.ids
        while first < self.documents:
            fitting = int(np.searchsorted(self.offsets, self.offsets[first] + at_once, side="right")) - 1
            last = max(first + 1, fitting)
            yield ids[self.offsets[first] : self.offsets[last]], np.diff(self.offsets[first : last + 1])
            first = last


def _parts(index: Path, raw: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], Integers, Integers, Integers]:
    """Return an index's type of ids, lengths, offsets in bytes and document borders."""
    head = HEADER.unpack(raw[: HEADER.size].tobytes()) if len(raw) >= HEADER.size else (b"",)
    names = {code: name for name, code in CODES.items()}
    if head[0] != MAGIC or head[1] != VERSION or head[2] not in names:
        raise SourceError(f"{index} is not an index of Megatron-LM's version {VERSION} with integer ids")
    sequences, documents = head[3:]
    if len(raw) != HEADER.size + 12 * sequences + 8 * documents or not documents:
        raise SourceError(f"{index} is truncated: it has {len(raw)} bytes; write it again")
    lengths, rest = np.split(raw[HEADER.size :], [4 * sequences])
    pointers, borders = np.split(rest, [8 * sequences])
    found = lengths.view("<i4").astype(np.int64), pointers.view("<i8"), borders.view("<i8")
    if found[2][0] != 0 or found[2][-1] != sequences or (np.diff(found[2]) < 0).any():
        raise SourceError(f"{index} has document borders that are not in order; write it again")
    return np.dtype(names[head[2]]).newbyteorder("<"), *found
