"""Make a dataset of Megatron's files, so that what was tokenised for one program is learned from by another.

    python -m training.data.repack job.json

inputs: "megatron", the prefix of .bin and .idx, and "tokenizer", the tokenizer.json (or its folder) that made the ids.
One process, one pass; what it writes is what training.data.prepare writes with packing concat.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.alone import alone
from training.data import tokens
from training.data.format import Layout, PartWriter, Shard, file_sha256, part_facts, write_facts
from training.data.hashing import scrambled
from training.data.megatron import IDS_AT_ONCE, MegatronReader
from training.data.pack import STREAM_TOKENS, fresh
from training.data.sources import SourceError
from training.job import NodeJob, progress, say

PARTS: Final = ("train", "held_out")


@dataclass(slots=True)
class Sums:
    """What a part has so far."""

    tokens: int = 0
    documents: int = 0
    size: int = 0
    shards: list[Shard] = field(default_factory=list)

    def add(self, ids: list[npt.NDArray[Any]], texts: list[str]) -> None:
        """Count whole documents."""
        self.tokens += sum(map(len, ids))
        self.documents += len(ids)
        self.size += sum(len(text.encode()) for text in texts)


def repack(job: NodeJob) -> None:
    """Write tokenizer.json, the shards, held_out.jsonl, dataset.json and result.json under job.output.

    Raises SourceError for a damaged prefix, fewer than two documents, and ids that the tokenizer does not have.
    """
    data, output, prefix = job.spec["data"], job.output, job.inputs["megatron"]
    source, path = MegatronReader(prefix), tokens.found_at(job.inputs["tokenizer"])
    tokenizer = tokens.load(path, int(job.spec["model"]["vocab_size"]))
    size, length = tokens.size(tokenizer), int(data["sequence_length"])
    held_out = _held_out(source.documents, float(data["held_out"]), prefix)
    layout = Layout(length, length, tokens.kind_of(size).name, marks=False)
    output.mkdir(parents=True, exist_ok=True)
    with fresh(output / "tokenizer.json") as copy:
        copy.write(path.read_bytes())
    sums = _write(source, tokenizer, held_out, layout, output, prefix)
    parts = {name: part_facts(one.shards, one.tokens, one.documents, one.size) for name, one in sums.items()}
    total = {key: sum(part[key] for part in parts.values()) for key in ("documents", "tokens", "bytes")}
    facts = {
        "dtype": layout.dtype,
        "sequence_length": length,
        "stride": length,
        "vocab_size": size,
        "eos_id": tokens.end_id(tokenizer),
        "pad_id": tokens.pad_id(tokenizer),
        "bos_id": tokens.begin_id(tokenizer),
        "kind": "text",
        "packing": "concat",
        "documents_apart": bool(data.get("documents_apart", False)),
        "marks": False,
        "tokenizer_sha256": file_sha256(output / "tokenizer.json"),
        "sources": {prefix.name: total},
        "dropped": {},
    }
    write_facts(output, facts | parts)
    short = {name: {key: value for key, value in part.items() if key != "shards"} for name, part in parts.items()}
    job.finish(facts | short | total | {"bytes_per_token": round(total["bytes"] / total["tokens"], 4)})
    say("repacked", **total)


def _held_out(documents: int, share: float, prefix: Path) -> npt.NDArray[np.bool_]:
    """Choose the documents held out by a hash of their place; at least one is, and one is not."""
    if documents < 2:
        raise SourceError(f"{prefix} has {documents} documents, and training and scoring need one each; add data")
    rank = scrambled(np.arange(documents, dtype=np.uint64))
    count = min(max(1, int((rank < share * 2.0**64).sum())), documents - 1)
    chosen = np.zeros(documents, np.bool_)
    chosen[np.argsort(rank)[:count]] = True
    return chosen


def _write(
    source: MegatronReader, tokenizer: Any, held_out: npt.NDArray[np.bool_], layout: Layout, output: Path, prefix: Path
) -> dict[str, Sums]:
    """Write both parts, and the text of what is held out."""
    sums = {name: Sums() for name in PARTS}
    rows = max(1, STREAM_TOKENS // layout.length)
    with (
        PartWriter(output, "train", layout, rows) as train,
        PartWriter(output, "held_out", layout, rows) as held,
        fresh(output / "held_out.jsonl") as lines,
    ):
        done = 0
        for documents in _documents(source, tokens.size(tokenizer), tokens.end_id(tokenizer), prefix):
            texts = tokenizer.decode_batch([ids[:-1].tolist() for ids in documents])
            chosen = held_out[done : done + len(documents)].tolist()
            for name, writer, wanted in (("train", train, False), ("held_out", held, True)):
                mine = [i for i, one in enumerate(chosen) if one == wanted]
                sums[name].add([documents[i] for i in mine], [texts[i] for i in mine])
                for i in mine:
                    writer.write(documents[i])
                    if wanted:
                        lines.write(dumps({"name": f"{prefix.name}:{done + i}", "text": texts[i]}).encode() + b"\n")
            done += len(documents)
            progress(done, source.documents, "document")
        sums["train"].shards, sums["held_out"].shards = train.close(), held.close()
    return sums


def _documents(source: MegatronReader, size: int, end: int, prefix: Path) -> Iterator[list[npt.NDArray[Any]]]:
    """Yield documents, some at a time, each with its end token. Raises SourceError for an id that nobody knows."""
    for ids, lengths in source.pieces(IDS_AT_ONCE):
        if len(ids) and (int(ids.max()) >= size or int(ids.min()) < 0):
            raise SourceError(
                f"{prefix} has the id {int(ids.max())}, and the tokenizer {size}; name the one it is from"
            )
        edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        found = [ids[begin:stop] for begin, stop in pairwise(edges)]
        yield [one if len(one) and one[-1] == end else np.append(one, one.dtype.type(end)) for one in found]


if __name__ == "__main__":
    alone(repack)
