"""The dataset on disk: shards of packed token ids, what is learned of them, and dataset.json, which tells of both.

    dataset.json  tokenizer.json  held_out.jsonl
    train/00000.bin      token ids, little-endian uint16 or uint32: rows of length + 1 ids, one begins every `stride`
    train/00000.marks    one byte per id, where something is masked or documents are apart: TARGET and BEGINS, below
    train/00000.counts   beside marks: little-endian uint32 per row, its ids that are targets
    held_out/00000.bin   the same; always one stream (stride = length), its documents in the order of held_out.jsonl

With stride = length (packing concat) rows share their border id, and a shard begins with the id the one before it ended
with; the last shard may have up to length - 1 ids that fill no row. With stride = length + 1 (best-fit) a row is apart
from the next. A file takes its name when it is whole and on the disk; the .bin of a shard after its other files, and
dataset.json last of all: a shard whose .bin exists is done.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from training.data.sources import SourceError
from training.job import write_json

Ids = npt.NDArray[np.unsignedinteger[Any]]
Marks = npt.NDArray[np.uint8]

FORMAT: Final = 2
TARGET: Final = 1
"""Bit of a mark: this id is to be learned, from those before it in its row."""
BEGINS: Final = 2
"""Bit of a mark: a document begins at this id (so does what pads a row)."""
ROWS_AT_ONCE: Final = 4096
"""Rows whose targets are counted at a time: some tens of megabytes of marks."""
WRITTEN_BY: Final = "run preprocess again"
KEYS: Final = {
    "dtype": str,
    "sequence_length": int,
    "stride": int,
    "vocab_size": int,
    "eos_id": int,
    "documents_apart": bool,
    "marks": bool,
    "train": dict,
    "held_out": dict,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How ids lie in the shards of one part: the rows' length and stride in ids, their type, and whether marked."""

    length: int
    stride: int
    dtype: str
    marks: bool

    @property
    def kind(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The little-endian type of an id."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def shared(self) -> int:
        """Ids that a row, and a shard, shares with the one before: 1 in a stream, 0 where rows are apart."""
        return self.length + 1 - self.stride

    def rows(self, ids: int) -> int:
        """Return how many whole rows that many ids of one shard hold."""
        return max(0, (ids - self.shared) // self.stride)


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard as dataset.json tells of it: ids in the file, whole rows, targets in these, SHA-256 of its files."""

    name: str
    tokens: int
    sequences: int
    targets: int
    sha256: str
    marks_sha256: str | None = None


def layout_of(facts: Mapping[str, Any], part: str) -> Layout:
    """Return the layout of part "train" or "held_out" of a dataset; what is held out is always one stream."""
    length = int(facts["sequence_length"])
    stride = int(facts["stride"]) if part == "train" else length
    return Layout(length, stride, str(facts["dtype"]), bool(facts["marks"]))


class ShardWriter:
    """One shard being written: its files take their names at the end, together and whole, or never."""

    def __init__(self, folder: Path, part: str, index: int, layout: Layout) -> None:
        """Begin folder/part/0000index.bin, and its marks where the layout has them; an older try is overwritten."""
        self.name, self.layout, self.tokens = f"{part}/{index:05d}.bin", layout, 0
        self._path = folder / self.name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._ids = NewFile(self._path)
        self._marks = NewFile(self._path.with_suffix(".marks")) if layout.marks else None

    def write(self, ids: npt.NDArray[Any], marks: Marks | None = None) -> None:
        """Append ids, with a mark for each where the layout has marks. Raises ValueError where it must and has none."""
        if (marks is None) == self.layout.marks or (marks is not None and len(marks) != len(ids)):
            raise ValueError(f"{self.name}: {len(ids)} ids need {'as many' if self.layout.marks else 'no'} marks")
        self._ids.write(np.ascontiguousarray(ids, self.layout.kind))
        if self._marks is not None and marks is not None:
            self._marks.write(np.ascontiguousarray(marks, np.uint8))
        self.tokens += len(ids)

    def close(self) -> Shard:
        """Make the shard's files whole, durable and named, .bin last; return what dataset.json says of it."""
        rows = self.layout.rows(self.tokens)
        targets, marks_sha256 = rows * self.layout.length, None
        if self._marks is not None:
            counts = NewFile(self._path.with_suffix(".counts"))
            targets = _count(self._marks.flushed(), rows, self.layout, counts)
            counts.named()
            marks_sha256 = self._marks.named()
        return Shard(self.name, self.tokens, rows, targets, self._ids.named(), marks_sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in (self._ids, self._marks):
            if file is not None:
                file.drop()


class PartWriter:
    """A part being written in order, into shards of `rows` rows; how its ids come in pieces changes no byte.

    Whoever knows where each shard begins can write shards in any order, or many at once, with ShardWriter.
    """

    def __init__(self, folder: Path, part: str, layout: Layout, rows: int) -> None:
        """Begin part "train" or "held_out" under a folder."""
        self._at, self.layout = (folder, part), layout
        self._full = rows * layout.stride + layout.shared
        self._done: list[Shard] = []
        self._writer = ShardWriter(folder, part, 0, layout)
        self._border: tuple[npt.NDArray[Any], Marks | None]

    def write(self, ids: npt.NDArray[Any], marks: Marks | None = None) -> None:
        """Append ids of the stream, or whole rows where these are apart, with their marks where the layout has them."""
        while len(ids):
            if self._writer.tokens == self._full:
                self._done.append(self._writer.close())
                self._writer = ShardWriter(*self._at, len(self._done), self.layout)
                self._writer.write(*self._border)
            room = self._full - self._writer.tokens
            now, now_marks = ids[:room], None if marks is None else marks[:room]
            self._writer.write(now, now_marks)
            last = len(now) - self.layout.shared
            self._border = now[last:].copy(), None if now_marks is None else now_marks[last:].copy()
            ids, marks = ids[room:], None if marks is None else marks[room:]

    def close(self) -> list[Shard]:
        """Finish the last shard; return them all."""
        return [*self._done, self._writer.close()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, at)


def part_facts(shards: Sequence[Shard], tokens: int, documents: int, size: int) -> dict[str, Any]:
    """Return what dataset.json says of a part: `tokens` of its documents, without repeats and padding; `size` bytes."""
    return {
        "tokens": tokens,
        "documents": documents,
        "bytes": size,
        "targets": sum(shard.targets for shard in shards),
        "sequences": sum(shard.sequences for shard in shards),
        "shards": [asdict(shard) for shard in shards],
    }


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write dataset.json, which makes the folder a dataset: after every other file."""
    write_json(folder / "dataset.json", {"format": FORMAT} | dict(facts))


def read_facts(folder: Path) -> dict[str, Any]:
    """Return dataset.json of a folder. Raises SourceError when there is none, or not one of this format."""
    path = folder / "dataset.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise SourceError(f"{folder} holds no dataset (dataset.json cannot be read); run preprocess first") from problem
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise SourceError(f"{path} is not of format {FORMAT}, which this version reads; {WRITTEN_BY}")
    for key, kind in KEYS.items():
        if not isinstance(facts.get(key), kind):
            raise SourceError(f"{path} has no {key}, or not one of type {kind.__name__}; {WRITTEN_BY}")
    return facts


def shards_of(folder: Path, facts: Mapping[str, Any], part: str) -> list[Shard]:
    """Return a part's shards, whose files are there and of their sizes. Raises SourceError naming the one that is not.

    Sizes only are compared, so that this takes microseconds per shard; `verify` compares hashes.
    """
    try:
        shards = [Shard(**told) for told in facts[part]["shards"]]
    except (TypeError, KeyError) as problem:
        raise SourceError(f"{folder}/dataset.json does not tell the shards of {part}; {WRITTEN_BY}") from problem
    layout = layout_of(facts, part)
    for shard in shards:
        if shard.sequences != layout.rows(shard.tokens):
            raise SourceError(f"{folder}/dataset.json: {shard.name} cannot have {shard.sequences} rows; {WRITTEN_BY}")
        for path, size in _files(folder, shard, layout):
            _of_size(path, size)
    return shards


def open_shard(folder: Path, shard: Shard, layout: Layout) -> Ids:
    """Map a shard's ids, one dimension, without reading them."""
    return _mapped(folder / shard.name, layout.kind, shard.tokens)


def open_marks(folder: Path, shard: Shard) -> Marks:
    """Map a shard's marks, one per id."""
    return _mapped((folder / shard.name).with_suffix(".marks"), np.dtype(np.uint8), shard.tokens)


def open_counts(folder: Path, shard: Shard) -> npt.NDArray[np.uint32]:
    """Map a shard's counts of targets, one per row."""
    return _mapped((folder / shard.name).with_suffix(".counts"), np.dtype("<u4"), shard.sequences)


def ids_of(folder: Path, facts: Mapping[str, Any], part: str) -> Iterator[Ids]:
    """Yield a part's ids, shard by shard, none twice; padding of packing best-fit is among them (facts["pad_id"])."""
    layout = layout_of(facts, part)
    for i, shard in enumerate(shards_of(folder, facts, part)):
        yield open_shard(folder, shard, layout)[layout.shared if i else 0 :]


def held_out_tokens(folder: Path, facts: Mapping[str, Any]) -> Ids:
    """Return the ids of all held-out documents, one dimension, in the order of held_out.jsonl, each ended by eos_id."""
    found = list(ids_of(folder, facts, "held_out"))
    return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, layout_of(facts, "held_out").kind)])


def verify(folder: Path) -> dict[str, Any]:
    """Read a whole dataset and compare its hashes; return its facts. Raises SourceError naming the first wrong file."""
    facts = read_facts(folder)
    for part in ("train", "held_out"):
        for shard in shards_of(folder, facts, part):
            path = folder / shard.name
            for file, told in ((path, shard.sha256), (path.with_suffix(".marks"), shard.marks_sha256)):
                if told is not None and file_sha256(file) != told:
                    raise SourceError(f"{file} is not what was written there (its SHA-256 differs); {WRITTEN_BY}")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file() or file_sha256(tokenizer) != facts.get("tokenizer_sha256"):
        raise SourceError(f"{tokenizer} is not the one that made these tokens; {WRITTEN_BY}")
    return facts


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class NewFile:
    """A file that is hashed while it is written and takes its name when it is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._file = self._partial.open("wb")
        self._digest = hashlib.sha256()

    def write(self, values: npt.NDArray[Any]) -> None:
        self._file.write(values.data)
        self._digest.update(values.data)

    def flushed(self) -> Path:
        """Return where the bytes written so far can be read."""
        self._file.flush()
        return self._partial

    def named(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        return self._digest.hexdigest()

    def drop(self) -> None:
        """Remove what was not finished; nothing where it was."""
        if not self._file.closed:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def _count(marks: Path, rows: int, layout: Layout, counts: NewFile) -> int:
    """Write how many targets each row has (the first id of a row is only read), and return their sum."""
    table = windows(_mapped(marks, np.dtype(np.uint8), marks.stat().st_size), rows, layout)
    total = 0
    for start in range(0, rows, ROWS_AT_ONCE):
        found = (table[start : start + ROWS_AT_ONCE, 1:] & TARGET).sum(axis=1, dtype="<u4")
        counts.write(found)
        total += int(found.sum())
    return total


def windows(flat: npt.NDArray[Any], rows: int, layout: Layout) -> npt.NDArray[Any]:
    """View a shard's ids or marks as its rows, [rows, length + 1], without copying."""
    return np.lib.stride_tricks.as_strided(
        flat, (rows, layout.length + 1), (layout.stride * flat.itemsize, flat.itemsize), writeable=False
    )


def _files(folder: Path, shard: Shard, layout: Layout) -> Iterator[tuple[Path, int]]:
    """Yield the files of a shard and the bytes each must have."""
    path = folder / shard.name
    yield path, shard.tokens * layout.kind.itemsize
    if layout.marks:
        yield path.with_suffix(".marks"), shard.tokens
        yield path.with_suffix(".counts"), shard.sequences * 4


def _of_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as problem:
        raise SourceError(f"{path} cannot be read ({problem.strerror}); {WRITTEN_BY}") from problem
    if found != size:
        short = "is truncated: it" if found < size else ""
        raise SourceError(f"{path} {short} has {found} bytes, and dataset.json tells {size}; {WRITTEN_BY}")


def _mapped(path: Path, kind: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=kind, mode="r", shape=(count,)) if count else np.empty(0, kind)
