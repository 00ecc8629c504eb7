"""Turn a folder of files into packed tokens: read, clean, deduplicate, split, train a tokenizer, encode.

    python -m training.data.prepare job.json

The same documents give the same bytes, whatever the machine and its number of cores. Documents are read again for
every pass instead of being held in memory. Every file appears under its name only when it is whole, dataset.json after
the others, result.json last: a run that was killed is simply started again.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from tokenizers import Tokenizer

from training.alone import alone
from training.data import tokens
from training.data.clean import Dropped, Limits, clean
from training.data.dedup import Seen, fingerprint
from training.data.sources import Document, SourceError, documents, inventory, read
from training.job import NodeJob, progress, say, write_json

TOKENIZER_BYTES: Final = 10_000_000
"""The tokenizer learns from about this much, taken evenly over the training documents: on the standard library three
times as much makes the text 0.9 % shorter and takes two and a half times as long."""
SAID_EVERY: Final = 0.5
"""Seconds between two lines of progress."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Kept:
    """A document that passed, and the hash of its clean text."""

    document: Document
    digest: bytes


def prepare(job: NodeJob) -> None:
    """Write tokenizer.json, train.bin, held_out.bin, held_out.jsonl, dataset.json and result.json under job.output.

    Raises SourceError for a source, tokenizer or split that cannot be used.
    """
    began = time.monotonic()
    data, output = job.spec["data"], job.output
    output.mkdir(parents=True, exist_ok=True)
    limits = Limits(data["min_chars"], data["max_chars"])
    listed = documents(data["source"], data["include"], data["max_documents"])
    _same_text(listed, data)
    kept, dropped = select(listed, limits, data["near_duplicate"])
    train, held_out = split(kept, data["held_out"])
    say("selected", train=len(train), held_out=len(held_out), dropped=dropped)
    tokenizer = _tokenizer(job, train, limits)
    facts = {
        "dtype": tokens.kind_of(tokens.size(tokenizer)).name,
        "sequence_length": data["sequence_length"],
        "vocab_size": tokens.size(tokenizer),
        "eos_id": tokens.end_id(tokenizer),
        "dropped": dropped,
        "train": pack(tokenizer, texts(train, limits, "train document encoded"), output / "train.bin"),
        "held_out": pack(tokenizer, texts(held_out, limits, "held-out document encoded"), output / "held_out.bin"),
    }
    with fresh(output / "held_out.jsonl") as out:
        for one, text in zip(held_out, texts(held_out, limits, "held-out document written"), strict=True):
            out.write(json.dumps({"name": one.document.name, "text": text}).encode() + b"\n")
    write_json(output / "dataset.json", facts)
    result = _summary(facts)
    job.finish(result)
    say("prepared", seconds=round(time.monotonic() - began, 1), **result)


def _same_text(listed: Sequence[Document], data: Mapping[str, Any]) -> None:
    """Refuse text that is not what the control plane named this dataset after, where it told its digest."""
    wanted = data.get("digest")
    if wanted and wanted != (found := str(inventory(listed)["digest"])):
        raise SourceError(
            f"data.source {data['source']!r} holds other text on this node (digest {found[:12]}) than where the run "
            f"was started ({wanted[:12]}): put the same files, or the same Python, on both"
        )


def select(listed: Sequence[Document], limits: Limits, threshold: float) -> tuple[list[Kept], dict[str, int]]:
    """Clean and deduplicate: return what stays, in order, and how many documents were dropped for which reason."""
    seen, kept, dropped = Seen(threshold), [], Counter[str]()
    for document in told(listed, "document read"):
        text = clean(read(document), limits)
        refused = text if isinstance(text, Dropped) else seen.refuse(text)
        if refused is None:
            kept.append(Kept(document, fingerprint(text)))
        else:
            dropped[refused.value] += 1
    if len(kept) < 2:
        raise SourceError(
            f"of {len(listed)} documents {len(kept)} passed ({_reasons(dropped)}), and training and scoring need one "
            "each; loosen data.min_chars, data.max_chars or data.near_duplicate, or add data"
        )
    return kept, dict(sorted(dropped.items()))


def split(kept: Sequence[Kept], share: float) -> tuple[list[Kept], list[Kept]]:
    """Part the documents into (train, held out) by a hash of their names, so that new files move no old one.

    Held-out documents come in the order of their hash: any first part of them is a fair sample. Each side gets at
    least one document.
    """
    ranked = sorted(kept, key=lambda one: _rank(one.document.name))
    count = sum(_rank(one.document.name) < share * 2**64 for one in ranked)
    held_out = ranked[: min(max(1, count), len(ranked) - 1)]
    names = {one.document.name for one in held_out}
    return [one for one in kept if one.document.name not in names], held_out


def texts(wanted: Sequence[Kept], limits: Limits, unit: str) -> Iterator[str]:
    """Read documents again and yield their clean texts. Raises SourceError when one has changed meanwhile."""
    for one in told(wanted, unit):
        text = clean(read(one.document), limits)
        if isinstance(text, Dropped) or fingerprint(text) != one.digest:
            raise SourceError(f"{one.document.path} changed while it was being prepared; start again when it is still")
        yield text


def pack(tokenizer: Tokenizer, source: Iterable[str], path: Path) -> dict[str, int]:
    """Write the ids of all texts, each followed by the end token; return {"documents", "bytes", "tokens"}."""
    total = {"documents": 0, "bytes": 0, "tokens": 0}

    def counted() -> Iterator[str]:
        for text in source:
            total["bytes"] += len(text.encode())
            yield text

    with fresh(path) as out:
        for ids in tokens.encode(tokenizer, counted()):
            out.write(ids.tobytes())
            total["documents"] += 1
            total["tokens"] += len(ids)
    return total


@contextmanager
def fresh(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name only when it is whole and on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


def told(items: Sequence[Item], unit: str) -> Iterator[Item]:
    """Yield the items and tell, now and then and at the end, how many are done."""
    last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if done == len(items) or time.monotonic() - last > SAID_EVERY:
            progress(done, len(items), unit)
            last = time.monotonic()


def _tokenizer(job: NodeJob, train: Sequence[Kept], limits: Limits) -> Tokenizer:
    """Load the tokenizer the job names, or learn one, and write tokenizer.json."""
    vocab_size, told_path = int(job.spec["model"]["vocab_size"]), job.spec["data"]["tokenizer"]
    path = job.inputs.get("tokenizer") or (None if told_path == "train" else Path(told_path).expanduser())
    if path is not None:
        tokenizer = tokens.load(path, vocab_size)
    else:
        sample = tokens.spread(train, [one.document.size for one in train], TOKENIZER_BYTES)
        tokenizer = tokens.train(texts(sample, limits, "document learned from"), vocab_size)
    with fresh(job.output / "tokenizer.json") as out:
        out.write(tokenizer.to_str().encode())
    return tokenizer


def _summary(facts: dict[str, Any]) -> dict[str, Any]:
    """Return result.json: the dataset's facts and their sums."""
    total = {key: facts["train"][key] + facts["held_out"][key] for key in ("documents", "bytes", "tokens")}
    return facts | total | {"bytes_per_token": round(total["bytes"] / total["tokens"], 4)}


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "big")


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(dropped.items())) or "nothing was dropped"


if __name__ == "__main__":
    alone(prepare)
