"""The held-out documents that are scored: their tokens, which of these are paid for, and their text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.format import BEGINS, TARGET, held_out_tokens, layout_of, open_marks, shards_of
from training.data.sources import SourceError

Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Documents, as the dataset holds them and as people wrote them."""

    documents: int
    tokens: Tokens
    """The ids of all documents, each followed by the end token."""
    texts: tuple[str, ...]
    """What is paid for, of each document: all of it, or what the assistant says."""
    learned: Flags | None = None
    """Which tokens are paid for; None: all."""
    begins: Flags | None = None
    """Where documents begin between which attention does not look; None: it looks everywhere."""

    @property
    def text(self) -> bytes:
        """All that is paid for, as UTF-8."""
        return "".join(self.texts).encode()


def choose(dataset: Path, facts: dict[str, Any], max_tokens: int) -> HeldOut:
    """Take whole held-out documents, from the first on, while they fit in `max_tokens`; always at least one.

    Raises SourceError when the dataset is damaged.
    """
    tokens = held_out_tokens(dataset, facts)
    marks = _marks(dataset, facts) if facts["marks"] else None
    ends = _ends(tokens, marks, facts["eos_id"])
    if not len(ends):
        raise SourceError(f"{dataset} holds out no whole document; raise data.held_out or add data")
    count = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
    chosen = slice(0, int(ends[count - 1]))
    learned = begins = None
    if marks is not None:
        if facts.get("kind") == "chat":
            learned = (marks[chosen] & TARGET) > 0
        if facts["documents_apart"]:
            begins = (marks[chosen] & BEGINS) > 0
    return HeldOut(count, tokens[chosen].astype(np.int64), tuple(islice(_texts(dataset), count)), learned, begins)


def _marks(dataset: Path, facts: dict[str, Any]) -> npt.NDArray[np.uint8]:
    layout = layout_of(facts, "held_out")
    parts = [
        open_marks(dataset, shard)[layout.shared if index else 0 :]
        for index, shard in enumerate(shards_of(dataset, facts, "held_out"))
    ]
    return np.concatenate([*parts, np.empty(0, np.uint8)])


def _ends(tokens: npt.NDArray[Any], marks: npt.NDArray[np.uint8] | None, eos_id: int) -> npt.NDArray[np.int64]:
    """Return the index after each document's last token."""
    if marks is None:
        return np.flatnonzero(tokens == eos_id) + 1
    return np.append(np.flatnonzero(marks & BEGINS)[1:], len(marks))


def _texts(dataset: Path) -> Iterator[str]:
    with (dataset / "held_out.jsonl").open() as lines:
        for line in lines:
            told = json.loads(line)
            if "messages" in told:
                yield "".join(turn["content"] for turn in told["messages"] if turn["role"] == "assistant")
            else:
                yield told["text"]
