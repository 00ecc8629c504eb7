"""The documents in files, read in units of work: which ones there are depends on the files alone, not on who works.

A unit is some whole files of one text each, a range of bytes of a file of lines, a compressed file, some row groups of
a Parquet file or some rows of an hf:// source. Within a unit a document is known by its number.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from training.data.clean import Dropped, decoded
from training.data.files import check_unchanged, line_number, lines, opened, whole
from training.data.sources import HUB, LINES, PARQUET, S3, Document, SourceError

UNIT_BYTES: Final = 32 << 20
"""Of a file of lines or a Parquet file; small enough that a killed run loses little, and many share the work."""
TEXTS: Final = 256
TEXT_BYTES: Final = 8 << 20
"""Whole files of a unit: at most so many, at most so many bytes (or one file)."""
HUB_ROWS: Final = 20_000
BATCH_CHARS: Final = 1 << 20
"""Text handed on at once, about: enough for a tokenizer to be quick, little enough to stay in the cache."""
BATCH_ROWS: Final = 256
BYTES_PER_CHAR: Final = 4
"""At most, in UTF-8."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of the input. `start` and `end` are bytes, row groups or rows, by the ending of its one document."""

    documents: tuple[Document, ...]
    start: int = 0
    end: int = 0

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        one = self.documents[0]
        return self.end - self.start if _is_cut(one) else sum(document.size for document in self.documents)


@dataclass(frozen=True, slots=True)
class Fields:
    """Where records keep what is wanted; `longest` is the most characters a document may have."""

    chat: bool
    text: str
    messages: str
    longest: int


@dataclass(slots=True)
class Batch:
    """Some documents in order: the text of each, or why there is none; of conversations also their turns."""

    texts: list[str | Dropped] = field(default_factory=list)
    turns: list[Any] = field(default_factory=list)
    """Of every conversation that is one."""
    trouble: str = ""
    """A sentence on the first record that is none."""
    chars: int = 0

    def add(self, found: str | Dropped) -> None:
        """Append a document."""
        self.texts.append(found)
        self.chars += len(found)


def units(listed: Sequence[Document]) -> list[Unit]:
    """Cut the input up. Raises SourceError for a Parquet file that is none."""
    found: list[Unit] = []
    texts: list[Document] = []
    size = 0
    for one in listed:
        full = len(texts) == TEXTS or size + one.size > TEXT_BYTES
        if texts and (one.ending or full or texts[0].source != one.source):
            found.append(Unit(tuple(texts)))
            texts, size = [], 0
        if one.ending:
            found += [Unit((one,), begin, end) for begin, end in _cuts(one)]
        else:
            texts.append(one)
            size += one.size
    return [*found, Unit(tuple(texts))] if texts else found


def batches(unit: Unit, fields: Fields) -> Iterator[Batch]:
    """Read a unit's documents. Raises SourceError, one sentence that names the file, and the line where it can."""
    one = unit.documents[0]
    if one.ending == "" and fields.chat:
        raise SourceError(f"data.kind chat reads conversations from JSONL or Parquet files, and {one.place} is neither")
    read = _rows if one.ending in (PARQUET, HUB) else _lines if one.ending in LINES else _texts
    good, trouble = False, ""
    for batch in read(unit, fields):
        good = good or any(found not in (Dropped.BROKEN, Dropped.NO_TEXT) for found in batch.texts)
        trouble = trouble or batch.trouble
        yield batch
    if trouble and not good:
        raise SourceError(f"data.source: {trouble}; none of its records can be used")


def _is_cut(document: Document) -> bool:
    return document.ending in LINES and not document.packed


def _cuts(document: Document) -> list[tuple[int, int]]:
    """Return where the units of one document begin and end."""
    if document.ending in LINES:
        step = UNIT_BYTES if not document.packed else max(1, document.size)
        return [(begin, min(begin + step, document.size)) for begin in range(0, document.size, step)]
    if document.ending == HUB:
        return [(begin, min(begin + HUB_ROWS, document.size)) for begin in range(0, document.size, HUB_ROWS)]
    with _Parquet(document) as table:
        sizes = [table.metadata.row_group(i).total_byte_size for i in range(table.metadata.num_row_groups)]
    cuts, begin, size = [], 0, 0
    for i, one in enumerate(sizes):
        size += one
        if size >= UNIT_BYTES or i + 1 == len(sizes):
            cuts.append((begin, i + 1))
            begin, size = i + 1, 0
    return cuts


def _texts(unit: Unit, fields: Fields) -> Iterator[Batch]:
    batch = Batch()
    longest = fields.longest * BYTES_PER_CHAR
    for document in unit.documents:
        raw = whole(document, longest)
        batch.add(Dropped.TOO_LONG if len(raw) > longest else decoded(raw))
        if not document.place.startswith(S3):
            check_unchanged(document)
        if batch.chars > BATCH_CHARS:
            yield batch
            batch = Batch()
    yield batch


def _lines(unit: Unit, fields: Fields) -> Iterator[Batch]:
    """Read JSON by lines: a batch at once, one by one where one of them is broken."""
    document, number = unit.documents[0], 0
    loads = _loads()
    for at, chunk in lines(document, unit.start, unit.end):
        found = chunk.split(b"\n")
        batch = None if fields.chat else _quick(found, fields.text, loads)
        if batch is None:
            batch = Batch()
            for line in found:
                if line and not line.isspace():
                    _add(batch, _parsed(line), fields, _Place(document, at, number + len(batch.texts)))
                at += len(line) + 1  # noqa: PLW2901
        number += len(batch.texts)
        yield batch


def _quick(found: Sequence[bytes], name: str, loads: Any) -> Batch | None:
    """Return the texts of lines that all have one; None where any does not."""
    try:
        texts = [loads(line)[name] for line in found if line]
        return Batch(texts, chars=len("".join(texts)))
    except (ValueError, KeyError, TypeError):
        return None


def _rows(unit: Unit, fields: Fields) -> Iterator[Batch]:
    """Read a table's rows: of texts one column, of conversations the columns that tell them."""
    document, number = unit.documents[0], 0
    for rows in _read_rows(unit, fields):
        batch = Batch()
        for i, row in enumerate(rows):
            _add(batch, row, fields, _Place(document, 0, number + i))
        number += len(rows)
        yield batch


def _read_rows(unit: Unit, fields: Fields) -> Iterator[list[dict[str, Any]]]:
    document = unit.documents[0]
    if document.ending == HUB:
        from training.data.hub import columns, rows

        yield from rows(document.place, _columns(columns(document.place), fields, document), unit.start, unit.end)
        return
    with _Parquet(document) as table:
        wanted = _columns(table.schema_arrow.names, fields, document)
        groups = list(range(unit.start, unit.end))
        for some in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=wanted, use_threads=False):
            yield some.to_pylist()


def _columns(have: Sequence[str], fields: Fields, document: Document) -> list[str]:
    """Return the columns that are read. Raises SourceError where they are not there."""
    if fields.chat and fields.messages not in have and {"prompt", "completion"} <= set(have):
        return ["prompt", "completion"]
    wanted, option = (fields.messages, "messages_field") if fields.chat else (fields.text, "text_field")
    if wanted not in have:
        known = ", ".join(have)
        raise SourceError(f"data.source: {document.place} has no column {wanted!r} but {known}; set data.{option}")
    return [wanted]


class _Parquet:
    """A Parquet file, opened, whose reader's problems become sentences."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def __enter__(self) -> Any:
        if self._document.packed:
            raise SourceError(f"data.source: {self._document.place}: a Parquet file is compressed inside; unpack it")
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as lacking:
            raise SourceError(f"data.source: {self._document.place} needs the library pyarrow: install it") from lacking
        self._file = opened(self._document, jumping=True)
        try:
            return parquet.ParquetFile(self._file, pre_buffer=False)
        except Exception as problem:
            self._file.close()
            raise self._sentence(problem) from problem

    def __exit__(self, kind: Any, problem: BaseException | None, at: Any) -> None:
        self._file.close()
        if isinstance(problem, OSError | ValueError):
            raise self._sentence(problem) from problem

    def _sentence(self, problem: BaseException) -> SourceError:
        if isinstance(problem, SourceError):
            return problem
        why = str(problem).splitlines()[0].rstrip(".")
        return SourceError(f"data.source: {self._document.place} is no whole Parquet file ({why}); get it again")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record is: in a file of lines by its byte, elsewhere the `number`th of its unit."""

    document: Document
    at: int
    number: int

    def __str__(self) -> str:
        if _is_cut(self.document):
            return f"{self.document.place}, {line_number(self.document, self.at)}"
        return f"{self.document.place}, record {self.number + 1}"


def _add(batch: Batch, record: Any, fields: Fields, where: _Place) -> None:
    """Append what a record says, or why it says nothing."""
    if not isinstance(record, Mapping):
        batch.add(Dropped.BROKEN)
        batch.trouble = batch.trouble or f"{where} is not a JSON object"
        return
    if fields.chat:
        _add_conversation(batch, record, fields, where)
        return
    text = record.get(fields.text)
    batch.add(text if isinstance(text, str) else Dropped.NO_TEXT)
    if not isinstance(text, str) and not batch.trouble:
        have = ", ".join(map(str, record)) or "nothing"
        batch.trouble = f"{where} has no text in {fields.text!r} (it has {have}): set data.text_field"


def _add_conversation(batch: Batch, record: Mapping[str, Any], fields: Fields, where: _Place) -> None:
    from training.data.chat import conversation

    try:
        turns = conversation(record, fields.messages, "")
    except SourceError as problem:
        batch.add(Dropped.BROKEN)
        batch.trouble = batch.trouble or f"{where}{problem}"
        return
    batch.turns.append(turns)
    batch.add("\n\n".join(turn["content"] for turn in turns))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _loads() -> Any:
    """Return the faster reader of JSON, where it is installed."""
    try:
        import orjson
    except ImportError:
        return json.loads
    return orjson.loads
