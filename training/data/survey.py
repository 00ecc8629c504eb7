"""What is done to each unit of the input, by whichever process: read, clean, hash, sign, encode."""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from os import fsencode
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data import dedup
from training.data.clean import Dropped, Judged, Limits, judge
from training.data.hashing import Unsigned
from training.data.parts import Part, PartFile, Parts
from training.data.records import Batch, Fields, Unit, batches
from training.data.sources import SourceError
from training.data.tokens import Encoder, Frame

PAGE_BYTES: Final = 4 << 20
"""Text of a page of results, which is the most that is held in memory at once."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How text becomes ids: the tokenizer and, of conversations, the template."""

    tokenizer: Path
    frame: Frame
    fast: bool
    template: str = ""
    """Of kind chat."""


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that a process must know to do any unit."""

    units: tuple[Unit, ...]
    fields: Fields
    limits: Limits
    threshold: float
    """Of near duplicates; 1 looks for exact copies only."""
    held_out: float
    folder: Path
    exchange: str = ""
    """s3:// prefix by which nodes that share no folder see one another's results."""
    scheme: Scheme | None = None
    """None until the tokenizer is there."""
    surveyed: bool = False
    """Whether units are encoded after they were looked at, because the tokenizer was learned from them."""

    @property
    def parts(self) -> Parts:
        """The results so far."""
        return Parts(self.folder, self.exchange)

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer lies on this node once there is one."""
        return self.folder / "tokenizer" / "tokenizer.json"

    def looked_at(self, number: int) -> Part:
        """Return what the survey found in a unit."""
        return self.parts.open(f"survey-{number:06d}")

    def encoded(self, number: int) -> Part:
        """Return a unit's ids: pages of ids, lengths (0 where a document has none) and, of chats, learned."""
        return self.parts.open(f"{'encoded' if self.surveyed else 'survey'}-{number:06d}")


@dataclass(slots=True)
class _Page:
    """Columns that grow by batches."""

    columns: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    bytes: int = 0
    documents: int = 0

    def add(self, **found: npt.NDArray[Any]) -> None:
        for name, values in found.items():
            self.columns.setdefault(name, []).append(values)

    def joined(self) -> dict[str, npt.NDArray[Any]]:
        axis = {"bands": 1}
        return {name: np.concatenate(some, axis=axis.get(name, 0)) for name, some in self.columns.items()}


def survey(work: Work, number: int) -> None:
    """Look at a unit: what becomes of each document, its hash, rank and signature; its ids where that is possible."""
    unit = work.units[number]
    names = _ranks(unit)
    total, trouble = 0, ""
    with work.parts.write(f"survey-{number:06d}") as out:
        page = _Page()
        for batch in batches(unit, work.fields):
            _add(page, work, batch, names[total : total + len(batch.texts)])
            total += len(batch.texts)
            trouble = trouble or batch.trouble
            if page.bytes >= PAGE_BYTES:
                _flush(out, page)
                page = _Page()
        _flush(out, page)
        out.facts = {"documents": total, "trouble": trouble}


def encode(work: Work, number: int) -> None:
    """Encode those documents of a unit that stay."""
    fates = work.parts.open("selected").pages[1 + number]["fates"]
    with work.parts.write(f"encoded-{number:06d}") as out:
        begin = 0
        source = _judged(work, number)
        for told in work.looked_at(number).pages:
            count = len(told["fates"])
            _encode_page(work, out, source, fates[begin : begin + count])
            begin += count


def texts(work: Work, number: int, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[int, str, Any]]:
    """Yield number, text and turns (None of a text) of those documents of a unit that a mask picks."""
    begin = 0
    for judged, turns in _judged(work, number):
        stay = np.flatnonzero(judged.fates == 0)
        for i, place in enumerate(stay.tolist()):
            if wanted[begin + place]:
                yield begin + place, judged.texts[i], turns[i] if turns else None
        begin += len(judged.fates)


def _judged(work: Work, number: int) -> Iterator[tuple[Judged, list[Any]]]:
    for batch in batches(work.units[number], work.fields):
        judged = judge(batch.texts, work.limits)
        yield judged, _turns(batch, judged)


def _turns(batch: Batch, judged: Judged) -> list[Any]:
    """Return the turns of the conversations that stay."""
    if not batch.turns:
        return []
    found = iter(batch.turns)
    told = [None if isinstance(text, Dropped) else next(found) for text in batch.texts]
    return [turns for turns, fate in zip(told, judged.fates.tolist(), strict=True) if not fate]


def _add(page: _Page, work: Work, batch: Batch, named: Unsigned) -> None:
    """Append to a page what is found in a batch."""
    judged = judge(batch.texts, work.limits)
    stay = judged.fates == 0
    prints = np.zeros((len(stay), 2), np.uint64)
    prints[stay] = dedup.fingerprints(judged.raws)
    ranks = named if len(named) else prints[:, 1]
    sizes = np.zeros(len(stay), np.uint32)
    sizes[stay] = [len(raw) for raw in judged.raws]
    page.add(fates=judged.fates, prints=prints, ranks=ranks, sizes=sizes)
    if work.threshold < 1:
        minima = dedup.signatures(judged.raws)
        keys = dedup.band_keys(minima, dedup.rows_per_band(work.threshold))
        page.add(minima=dedup.kept(minima), bands=keys)
    turns = _turns(batch, judged)
    held = np.flatnonzero(ranks[stay] < np.uint64(int(work.held_out * 2**64)))
    told = [_told(judged.texts[i], turns[i] if turns else None) for i in held.tolist()]
    page.add(
        held=(np.flatnonzero(stay)[held] + page.documents).astype(np.int64),
        held_sizes=np.array([len(one) for one in told], np.int64),
        held_bytes=np.frombuffer(b"".join(told), np.uint8),
    )
    if work.scheme is not None:
        page.add(**_coded(work.scheme, judged.texts, turns, stay))
    page.bytes += int(sizes.sum())
    page.documents += len(stay)


def _told(text: str, turns: Any) -> bytes:
    """Return how a held-out document is kept until held_out.jsonl is written."""
    return json.dumps({"text": text} if turns is None else {"messages": turns}).encode()


def _flush(out: PartFile, page: _Page) -> None:
    if page.documents:
        out.add(page.joined())


def _encode_page(
    work: Work, out: PartFile, source: Iterator[tuple[Judged, list[Any]]], fates: npt.NDArray[np.uint8]
) -> None:
    """Encode the batches that make up one page of the survey."""
    scheme, page, done = work.scheme, _Page(), 0
    assert scheme is not None
    while done < len(fates):
        judged, turns = next(source)
        count = len(judged.fates)
        stay = fates[done : done + count] < 2
        kept = np.flatnonzero(stay[judged.fates == 0]).tolist()
        chosen = [judged.texts[i] for i in kept]
        page.add(**_coded(scheme, chosen, [turns[i] for i in kept] if turns else [], stay))
        done += count
    out.add(page.joined())


def _coded(
    scheme: Scheme, chosen: Sequence[str], turns: Sequence[Any], stay: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of ids of the documents in a mask."""
    lengths = np.zeros(len(stay), np.uint32)
    if not scheme.template:
        ids, found = encoder_of(scheme).encode(chosen)
        lengths[stay] = found
        return {"ids": ids, "lengths": lengths}
    pieces = [_conversation(scheme, one) for one in turns]
    lengths[stay] = [len(ids) for ids, _ in pieces]
    none: npt.NDArray[Any] = np.empty(0, scheme.frame.dtype)
    ids = np.concatenate([none, *(ids for ids, _ in pieces)])
    learned = np.concatenate([np.empty(0, np.uint8), *(learned for _, learned in pieces)])
    return {"ids": ids, "lengths": lengths, "learned": learned}


def _conversation(scheme: Scheme, turns: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Return a conversation's ids, ended, and which are learned; none where the template cannot tell it."""
    try:
        ids, learned = chat_of(scheme).encode(turns, "")
    except SourceError:
        return np.empty(0, scheme.frame.dtype), np.empty(0, np.uint8)
    if not len(ids) or ids[-1] != scheme.frame.eos:
        ids, learned = np.append(ids, scheme.frame.eos), np.append(learned, False)
    return ids.astype(scheme.frame.dtype), learned.astype(np.uint8)


@functools.lru_cache(maxsize=1)
def encoder_of(scheme: Scheme) -> Encoder:
    """Return this process's encoder."""
    return Encoder(scheme.tokenizer, scheme.frame, fast=scheme.fast)


@functools.lru_cache(maxsize=1)
def chat_of(scheme: Scheme) -> Any:
    """Return this process's chat template. Raises SourceError where the tokenizer does not go with it."""
    from tokenizers import Tokenizer

    from training.data import chat

    return chat.chat_of(scheme.template, Tokenizer.from_file(str(scheme.tokenizer)), scheme.tokenizer.parent)


def _ranks(unit: Unit) -> Unsigned:
    """Return a hash of each document's name, for files that are one text each; rows are ranked by their content."""
    if unit.documents[0].ending:
        return np.empty(0, np.uint64)
    hashes = [blake2b(fsencode(one.name), digest_size=8).digest() for one in unit.documents]
    return np.array([int.from_bytes(one, "big") for one in hashes], np.uint64)
