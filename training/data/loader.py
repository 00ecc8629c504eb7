"""Batches of packed tokens, shuffled without memory: which sequences step s reads is a pure function of (seed, s).

Every sample a run will ever read has one number, its place in the global order; an epoch is a permutation of the
dataset computed on the fly. So a run resumes at any step, on any number of ranks, with exactly the batches it would
have had: nothing about the data order is saved in a checkpoint.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data.hashing import Unsigned, scrambled
from training.data.sources import SourceError

Integers = npt.NDArray[np.int64]

ROUNDS: Final = 8
"""Half-rounds of the permutation; from 6 on, pairs of neighbours look uniform (tests/training/test_data_loader.py)."""
BLOCK: Final = 4096
"""Samples whose places are computed at once: NumPy's cost per call is then spread thin."""


class TokenBatches:
    """The training set of a folder that `training.data.prepare` wrote, as batches of token ids."""

    def __init__(self, folder: Path, global_batch_size: int, seed: int) -> None:
        """Open the dataset without reading it. Raises SourceError when it is absent, damaged or too small."""
        self.facts = read_facts(folder)
        self.sequence_length = int(self.facts["sequence_length"])
        self.vocab_size = int(self.facts["vocab_size"])
        tokens = open_tokens(folder, "train", self.facts)
        self.sequences = max(0, (len(tokens) - 1) // self.sequence_length)
        if self.sequences < global_batch_size:
            raise SourceError(
                f"the dataset in {folder} has {self.sequences} sequences of {self.sequence_length} tokens, fewer than "
                f"one batch of {global_batch_size}; lower train.global_batch_size or data.sequence_length, or add data"
            )
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._rows = _windows(tokens, self.sequences, self.sequence_length)
        self._block_steps = max(1, BLOCK // global_batch_size)
        self._block: tuple[int, Integers] = (-1, np.empty(0, np.int64))

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Integers:
        """Return this rank's part of step's global batch: int64 [global_batch_size / world, sequence_length + 1].

        Columns 0..L-1 are the inputs, 1..L the targets. Over the ranks it is the same global batch for every world
        size: rank r of w has its rows r, r + w, … Raises ValueError when world does not divide the global batch.
        """
        if self.global_batch_size % world:
            raise ValueError(f"train.global_batch_size ({self.global_batch_size}) must be a multiple of {world} ranks")
        return self._rows[self.places(step)[rank::world]].astype(np.int64)

    def places(self, step: int) -> Integers:
        """Return which training sequences step's global batch holds: int64 [global_batch_size]."""
        block, within = divmod(step, self._block_steps)
        if self._block[0] != block:
            first = block * self._block_steps * self.global_batch_size
            numbers = np.arange(first, first + self._block_steps * self.global_batch_size, dtype=np.int64)
            self._block = (block, shuffled(numbers, self.sequences, self.seed))
        start = within * self.global_batch_size
        return self._block[1][start : start + self.global_batch_size]


def read_facts(folder: Path) -> dict[str, Any]:
    """Return dataset.json of a folder. Raises SourceError when there is none."""
    try:
        facts: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    except (OSError, ValueError) as problem:
        raise SourceError(f"{folder} holds no dataset (dataset.json cannot be read); run preprocess first") from problem
    return facts


def open_tokens(folder: Path, part: str, facts: dict[str, Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Map the token ids of part "train" or "held_out", one dimension. Raises SourceError when the file is damaged."""
    path = folder / f"{part}.bin"
    kind = np.dtype(facts["dtype"]).newbyteorder("<")
    expected = int(facts[part]["tokens"]) * kind.itemsize
    if not path.is_file() or path.stat().st_size != expected:
        raise SourceError(f"{path} is absent or not of the {expected} bytes dataset.json tells; run preprocess again")
    return np.memmap(path, dtype=kind, mode="r") if expected else np.empty(0, kind)


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


def _windows(
    tokens: npt.NDArray[np.unsignedinteger[Any]], count: int, length: int
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """View packed tokens as rows of length + 1 that share their border token, without copying."""
    step = tokens.itemsize
    return np.lib.stride_tricks.as_strided(
        tokens[: count * length + 1], (count, length + 1), (length * step, step), writeable=False
    )
