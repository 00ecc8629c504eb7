"""Batches of packed tokens, shuffled without memory: which sequences step s reads is a pure function of (seed, s).

Every sample a run will ever read has one number, its place in the global order; an epoch is a permutation of the
dataset computed on the fly. So a run resumes at any step, on any number of ranks, with exactly the batches it would
have had: nothing about the data order is saved in a checkpoint.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data.format import (
    BEGINS,
    TARGET,
    Layout,
    Marks,
    Shard,
    layout_of,
    open_counts,
    open_marks,
    open_shard,
    read_facts,
    shards_of,
    windows,
)
from training.data.hashing import Unsigned, scrambled
from training.data.sources import SourceError

Integers = npt.NDArray[np.int64]

ROUNDS: Final = 8
"""Half-rounds of the permutation; from 6 on, pairs of neighbours look uniform (tests/training/test_data_loader.py)."""
BLOCK: Final = 4096
"""Samples whose places are computed at once: NumPy's cost per call is then spread thin."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's rows of a step's global batch.

    tokens: int64 [rows, L + 1]; columns 0..L-1 are the inputs, 1..L the targets.
    mask: bool [rows, L], which of the targets are learned; None: all are.
    documents: int64 [rows, L], the number of each input's document within its row; None: attention need not know.
    targets: how many targets of the whole global batch, over all ranks, are learned; 0 is possible with a mask.
    """

    tokens: Integers
    mask: npt.NDArray[np.bool_] | None
    documents: Integers | None
    targets: int


class TokenBatches:
    """A part of a dataset (`training.data.format`) as batches of token ids."""

    def __init__(self, folder: Path, global_batch_size: int, seed: int, part: str = "train") -> None:
        """Open the dataset without reading it. Raises SourceError when it is absent, damaged or too small."""
        self.facts = read_facts(folder)
        self.sequence_length = int(self.facts["sequence_length"])
        self.vocab_size = int(self.facts["vocab_size"])
        layout = layout_of(self.facts, part)
        self._shards = [_Rows(folder, shard, layout) for shard in shards_of(folder, self.facts, part)]
        self._ends = np.cumsum([rows.shard.sequences for rows in self._shards])
        self.sequences = int(self._ends[-1]) if self._shards else 0
        if self.sequences < global_batch_size:
            raise SourceError(
                f"the dataset in {folder} has {self.sequences} sequences of {self.sequence_length} tokens, fewer than "
                f"one batch of {global_batch_size}; lower train.global_batch_size or data.sequence_length, or add data"
            )
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._marked, self._apart, self._end = layout.marks, self.facts["documents_apart"], self.facts["eos_id"]
        self._block_steps = max(1, BLOCK // global_batch_size)
        self._block: tuple[int, Integers] = (-1, np.empty(0, np.int64))

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return this rank's part of step's global batch: global_batch_size / world rows.

        Over the ranks it is the same global batch for every world size: rank r of w has its rows r, r + w, … Raises
        ValueError when world does not divide the global batch.
        """
        if self.global_batch_size % world:
            raise ValueError(f"train.global_batch_size ({self.global_batch_size}) must be a multiple of {world} ranks")
        everywhere = self._located(self.places(step))
        tokens = np.empty((self.global_batch_size // world, self.sequence_length + 1), np.int64)
        marks = np.empty(tokens.shape, np.uint8) if self._marked else None
        for i, (rows, row) in enumerate(everywhere[rank::world]):
            tokens[i] = rows.ids[row]
            if marks is not None:
                marks[i] = rows.marks[row]
        mask = None if marks is None else (marks[:, 1:] & TARGET).view(np.bool_)
        return Batch(tokens, mask, self._documents(tokens, marks) if self._apart else None, self._targets(everywhere))

    def places(self, step: int) -> Integers:
        """Return which of the part's sequences step's global batch holds: int64 [global_batch_size]."""
        block, within = divmod(step, self._block_steps)
        if self._block[0] != block:
            first = block * self._block_steps * self.global_batch_size
            numbers = np.arange(first, first + self._block_steps * self.global_batch_size, dtype=np.int64)
            self._block = (block, shuffled(numbers, self.sequences, self.seed))
        start = within * self.global_batch_size
        return self._block[1][start : start + self.global_batch_size]

    def _located(self, places: Integers) -> list[tuple["_Rows", int]]:
        """Return the shard and the row within it of each sequence."""
        which = np.searchsorted(self._ends, places, side="right")
        starts = np.concatenate([[0], self._ends])[which]
        return [(self._shards[i], row) for i, row in zip(which.tolist(), (places - starts).tolist(), strict=True)]

    def _targets(self, everywhere: list[tuple["_Rows", int]]) -> int:
        if not self._marked:
            return self.global_batch_size * self.sequence_length
        return sum(int(rows.counts[row]) for rows, row in everywhere)

    def _documents(self, tokens: Integers, marks: Marks | None) -> Integers:
        """Number the documents of each row: one begins where a mark says so, or after the end of the one before."""
        if marks is not None:
            return np.cumsum((marks[:, :-1] & BEGINS) > 0, axis=1, dtype=np.int64)
        begins = np.zeros((len(tokens), self.sequence_length), np.bool_)
        np.equal(tokens[:, :-2], self._end, out=begins[:, 1:])
        return np.cumsum(begins, axis=1, dtype=np.int64)


class _Rows:
    """A shard whose files are mapped when the first row of it is asked for."""

    def __init__(self, folder: Path, shard: Shard, layout: Layout) -> None:
        self._folder, self.shard, self._layout = folder, shard, layout

    @cached_property
    def ids(self) -> npt.NDArray[Any]:
        """Token ids [rows, L + 1]."""
        return windows(open_shard(self._folder, self.shard, self._layout), self.shard.sequences, self._layout)

    @cached_property
    def marks(self) -> npt.NDArray[Any]:
        """Marks [rows, L + 1]."""
        return windows(open_marks(self._folder, self.shard), self.shard.sequences, self._layout)

    @cached_property
    def counts(self) -> npt.NDArray[np.uint32]:
        """Learned targets [rows]."""
        return open_counts(self._folder, self.shard)


def shuffled(numbers: Integers, size: int, seed: int) -> Integers:
    """Map global sample numbers to places in a dataset of `size`: number // size is the epoch, each a permutation.

    A generalised Feistel network over Z_a x Z_b with a * b just above size, walked until the result lies below size
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Integer arithmetic only: the order never
    changes with a library's version, unlike a random generator's.
    """
    count = np.uint64(size)
    epoch, place = np.divmod(numbers.astype(np.uint64), count)
    key = scrambled(epoch + scrambled(np.full_like(epoch, seed)))
    place = _feistel(place, key, size)
    while (outside := np.flatnonzero(place >= count)).size:
        place[outside] = _feistel(place[outside], key[outside], size)
    return place.astype(np.int64)


def _feistel(place: Unsigned, key: Unsigned, size: int) -> Unsigned:
    side = math.isqrt(size - 1) + 1 if size > 1 else 1
    high_size, low_size = np.uint64(side), np.uint64(-(-size // side))
    high, low = np.divmod(place, low_size)
    for turn in range(0, ROUNDS, 2):  # a half is below 2^32, so that no two turns scramble the same number
        high = (high + scrambled(low ^ (key + np.uint64(turn << 32))) % high_size) % high_size
        low = (low + scrambled(high ^ (key + np.uint64((turn + 1) << 32))) % low_size) % low_size
    return high * low_size + low
