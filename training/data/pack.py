"""From the ids of units to shards: each shard knows which part of the stream it holds, so any process may write it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from training.data.clean import HELD_OUT, TRAIN, Dropped
from training.data.format import Layout, Marks, PartWriter, Shard, ShardWriter
from training.data.megatron import MegatronWriter
from training.data.packing import best_fit, filled, stream_marks
from training.data.sources import SourceError
from training.data.survey import Work, texts

Integers = npt.NDArray[np.int64]

STREAM_TOKENS: Final = 1 << 25
"""Tokens of a shard of a stream, about: 67 or 134 MB."""
BLOCK_TOKENS: Final = 1 << 23
"""Tokens whose documents are packed together by best-fit, about: one shard, held in memory."""
HELD: Final = "held"
MEGATRON: Final = "megatron"
"""Pieces of work that one process does."""
CELLS: Final = 1 << 19
"""Ids of rows filled at once."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How tokens become shards."""

    work: Work
    output: Path
    layout: Layout
    pad_id: int
    megatron: int = 0
    """The vocabulary's size where Megatron's files are asked for."""

    @property
    def stream(self) -> bool:
        """Whether documents follow one another and are cut everywhere; otherwise rows are apart."""
        return self.layout.shared == 1

    @property
    def held_layout(self) -> Layout:
        """The layout of what is held out, which is always a stream."""
        return Layout(self.layout.length, self.layout.length, self.layout.dtype, self.layout.marks)


@dataclass(frozen=True, slots=True)
class Run:
    """Documents that follow one another: their ids, how many each has, and what is learned of them (None: all)."""

    ids: npt.NDArray[Any]
    lengths: Integers
    learned: npt.NDArray[np.bool_] | None


def count(work: Work) -> None:
    """Write the token ledger: of each unit and part, documents, tokens and bytes; and why documents were dropped."""
    ledger = np.zeros((len(work.units), 2, 3), np.int64)
    reasons = dict(work.parts.open("selected").facts["dropped"])
    lost = 0
    for unit in range(len(work.units)):
        for fates, sizes, lengths in _columns(work, unit):
            for part in (TRAIN, HELD_OUT):
                there = (fates == part) & (lengths > 0)
                lost += int(((fates == part) & (lengths == 0)).sum())
                counted = there.sum(), lengths[there].sum(), sizes[there].sum(dtype=np.int64)
                ledger[unit, part] += np.array(counted, np.int64)
    if lost:
        reasons[Dropped.BROKEN.value] = reasons.get(Dropped.BROKEN.value, 0) + lost
    for part, name in ((TRAIN, "train"), (HELD_OUT, "held-out")):
        if not ledger[:, part, 0].sum():
            raise SourceError(f"no {name} conversation can be told by data.chat_template; look at data.messages_field")
    with work.parts.write("ledger") as out:
        out.add({"ledger": ledger})
        out.facts = {"dropped": dict(sorted(reasons.items()))}


def shards(packing: Packing) -> int:
    """Return how many shards the training part has."""
    return len(_blocks(packing)) if not packing.stream else max(1, -(-(_total(packing) - 1) // _step(packing.layout)))


def names(packing: Packing) -> list[str]:
    """Return the pieces of work of packing; what one process must do alone comes first."""
    alone = [HELD, MEGATRON] if packing.megatron else [HELD]
    return alone + [f"train-{i:05d}" for i in range(shards(packing))]


def pack(packing: Packing, index: int) -> None:
    """Do one of the pieces of work."""
    name = names(packing)[index]
    if name == HELD:
        held_out(packing)
    elif name == MEGATRON:
        megatron(packing)
    else:
        train(packing, int(name.rpartition("-")[2]))


def train(packing: Packing, index: int) -> None:
    """Write one shard of the training part."""
    with ShardWriter(packing.output, "train", index, packing.layout) as shard:
        if packing.stream:
            _write_stream(packing, index, shard)
        else:
            _write_rows(packing, _blocks(packing)[index], shard)
        _noted(packing.work, f"train-{index:05d}", [shard.close()])


def megatron(packing: Packing) -> None:
    """Write the training documents as megatron/train.bin and .idx."""
    writer = MegatronWriter(packing.output / "megatron" / "train", packing.megatron)
    for unit in range(len(packing.work.units)):
        for run in _runs(packing.work, unit):
            writer.write(run.ids, run.lengths)
    writer.close()
    _noted(packing.work, MEGATRON, [])


def held_out(packing: Packing) -> None:
    """Write what is held out: its shards, and its texts or turns to held_out.jsonl."""
    work, layout = packing.work, packing.held_layout
    rows = max(1, STREAM_TOKENS // layout.length)
    lines_path = packing.output / "held_out.jsonl"
    with PartWriter(packing.output, "held_out", layout, rows) as out, fresh(lines_path) as lines:
        for name, run, told in _held_out(work):
            out.write(run.ids, _marks(packing, run))
            lines.write(json.dumps({"name": name} | told).encode() + b"\n")
        done = out.close()
    _noted(work, HELD, done)


def noted(work: Work, name: str) -> list[Shard]:
    """Return the shards that a piece of work wrote."""
    return [Shard(**told) for told in work.parts.open(name).facts["shards"]]


@contextmanager
def fresh(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name only when it is whole and on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


def _noted(work: Work, name: str, done: list[Shard]) -> None:
    with work.parts.write(name) as out:
        out.facts = {"shards": [asdict(one) for one in done]}


def _write_stream(packing: Packing, index: int, shard: ShardWriter) -> None:
    """Write ids of the stream from the shard's first to its last, one of which the next shard begins with."""
    step = _step(packing.layout)
    ends = np.cumsum(_tokens(packing.work))
    begin, end = index * step, min((index + 1) * step + 1, int(ends[-1]))
    unit = int(np.searchsorted(ends, begin, side="right"))
    at = int(ends[unit - 1]) if unit else 0
    while at < end:
        for run in _runs(packing.work, unit):
            low, high = max(0, begin - at), min(len(run.ids), end - at)
            if low < high:
                marks = _marks(packing, run)
                shard.write(run.ids[low:high], None if marks is None else marks[low:high])
            at += len(run.ids)
        unit += 1


def _write_rows(packing: Packing, units: range, shard: ShardWriter) -> None:
    """Write the rows that best-fit makes of the documents of some units."""
    runs = [run for unit in units for run in _runs(packing.work, unit)]
    lengths = np.concatenate([run.lengths for run in runs])
    ids = np.concatenate([run.ids for run in runs])
    marks = None
    if any(run.learned is not None for run in runs):
        marks = np.concatenate([stream_marks(run.lengths, run.learned) for run in runs])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = best_fit(lengths, packing.layout.stride)
    some = max(1, CELLS // packing.layout.stride)
    for begin in range(0, len(rows), some):
        part = rows.between(begin, min(begin + some, len(rows)))
        found, found_marks = filled(part, ids, offsets, marks, packing.pad_id)
        shard.write(found.reshape(-1), found_marks.reshape(-1))


def _blocks(packing: Packing) -> list[range]:
    """Return units that follow one another, so many that each block has about BLOCK_TOKENS."""
    found: list[range] = []
    begin = size = 0
    tokens = _tokens(packing.work).tolist()
    for unit, more in enumerate(tokens):
        size += more
        if size >= BLOCK_TOKENS or unit + 1 == len(tokens):
            if size or not found:
                found.append(range(begin, unit + 1))
            begin, size = unit + 1, 0
    return found


def _step(layout: Layout) -> int:
    """Return after how many ids of a stream the next shard begins."""
    return max(1, STREAM_TOKENS // layout.length) * layout.length


def _tokens(work: Work) -> Integers:
    found: Integers = work.parts.open("ledger").pages[0]["ledger"][:, TRAIN, 1]
    return found


def _total(packing: Packing) -> int:
    return int(_tokens(packing.work).sum())


def _columns(work: Work, unit: int) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[Any], Integers]]:
    """Yield, page by page, what becomes of a unit's documents, their bytes and their tokens."""
    fates = work.parts.open("selected").pages[1 + unit]["fates"]
    begin = 0
    for looked, coded in zip(work.looked_at(unit).pages, work.encoded(unit).pages, strict=True):
        lengths = coded["lengths"].astype(np.int64)
        yield fates[begin : begin + len(lengths)], looked["sizes"], lengths
        begin += len(lengths)


def _runs(work: Work, unit: int, part: int = TRAIN) -> Iterator[Run]:
    """Yield a unit's documents of one part, page by page."""
    for (fates, _, lengths), coded in zip(_columns(work, unit), work.encoded(unit).pages, strict=True):
        there = fates == part
        ids, learned = coded["ids"], coded.get("learned")
        if not there[lengths > 0].all():
            inside = np.repeat(there, lengths)
            ids, learned = ids[inside], None if learned is None else learned[inside]
        kept = lengths[there & (lengths > 0)]
        yield Run(ids, kept, None if learned is None else learned.astype(np.bool_))


def _marks(packing: Packing, run: Run) -> Marks | None:
    return stream_marks(run.lengths, run.learned) if packing.layout.marks else None


def _held_out(work: Work) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    """Yield the held-out documents in their order: name, ids, and text or turns."""
    begins = work.parts.open("exact").pages[0]["begins"]
    names = _Names(work, begins)
    for number in work.parts.open("selected").pages[0]["held"].tolist():
        unit = int(np.searchsorted(begins, number, side="right")) - 1
        place, told = number - int(begins[unit]), None
        for looked, coded in zip(work.looked_at(unit).pages, work.encoded(unit).pages, strict=True):
            if place < len(looked["fates"]):
                run = _one(coded, place)
                told = _kept_text(looked, place) or _text_again(work, unit, number - int(begins[unit]))
                break
            place -= len(looked["fates"])
        if told is not None and len(run.ids):
            yield names.of(unit, number), run, told


def _one(coded: Any, place: int) -> Run:
    """Return one document of a page."""
    lengths = coded["lengths"]
    begin = int(lengths[:place].sum(dtype=np.int64))
    inside = slice(begin, begin + int(lengths[place]))
    learned = coded["learned"][inside].astype(np.bool_) if "learned" in coded else None
    return Run(coded["ids"][inside], lengths[place : place + 1].astype(np.int64), learned)


def _kept_text(looked: Any, place: int) -> dict[str, Any] | None:
    """Return what the survey kept of a document that might be held out."""
    at = int(np.searchsorted(looked["held"], place))
    if at == len(looked["held"]) or int(looked["held"][at]) != place:
        return None
    end = int(looked["held_sizes"][: at + 1].sum())
    begin = end - int(looked["held_sizes"][at])
    told: dict[str, Any] = json.loads(looked["held_bytes"][begin:end].tobytes())
    return told


def _text_again(work: Work, unit: int, place: int) -> dict[str, Any]:
    """Read a document again: the one that is held out because no rank was below the share."""
    wanted = np.zeros(int(work.looked_at(unit).facts["documents"]), np.bool_)
    wanted[place] = True
    _, text, turns = next(texts(work, unit, wanted))
    return {"text": text} if turns is None else {"messages": turns}


class _Names:
    """What documents are called: as their file, and by their number within it where it has rows."""

    def __init__(self, work: Work, begins: Integers) -> None:
        self._work = work
        self._firsts: dict[str, int] = {}
        for unit, begin in zip(work.units, begins.tolist(), strict=False):
            self._firsts.setdefault(unit.documents[0].place, begin)
        self._begins = begins

    def of(self, unit: int, number: int) -> str:
        documents = self._work.units[unit].documents
        if not documents[0].ending:
            return documents[number - int(self._begins[unit])].name
        return f"{documents[0].name}:{number - self._firsts[documents[0].place] + 1}"
