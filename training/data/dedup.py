"""Find documents that say what an earlier one said: exact copies by hash, near copies by MinHash.

A document is the set of its runs of five words. MinHash (Broder 1997) estimates the Jaccard similarity of two such
sets from 128 minima each; locality-sensitive hashing (bands of rows, Indyk and Motwani 1998) finds the few pairs
worth comparing without looking at all of them.
"""

import hashlib
from collections import defaultdict
from typing import Final

import numpy as np
import numpy.typing as npt

from training.data.clean import Dropped
from training.data.hashing import Unsigned, scrambled

Signature = npt.NDArray[np.uint32]

SHINGLE: Final = 5
"""Unsigned per run: the usual choice for text and code (Lee et al. 2022 and The Stack, Kocetkov et al. 2022)."""
MINIMA: Final = 128
"""Length of a signature: the estimate's standard error is at most 0.044 (at similarity 0.5)."""
RECALL: Final = 0.99
"""Share of the pairs exactly at the threshold that the bands must bring together."""
CHUNK: Final = 4096
"""Shingles hashed at once, so that the table of CHUNK x MINIMA stays in the processor's cache."""


class Seen:
    """The documents kept so far, asked one by one whether the next repeats any of them."""

    def __init__(self, threshold: float) -> None:
        """Take the similarity from which on a document counts as a copy; 1 looks for exact copies only."""
        self.threshold = threshold
        self.rows = _rows_per_band(threshold)
        self._exact: set[bytes] = set()
        self._bands: defaultdict[int, list[int]] = defaultdict(list)
        self._signatures: list[Signature] = []

    def refuse(self, text: str) -> Dropped | None:
        """Return why this document is a copy of one kept before; None keeps it."""
        digest = fingerprint(text)
        if digest in self._exact:
            return Dropped.EXACT_DUPLICATE
        self._exact.add(digest)
        if self.threshold < 1 and self._resembles(signature(text)):
            return Dropped.NEAR_DUPLICATE
        return None

    def _resembles(self, mine: Signature) -> bool:
        """Compare a signature with those that share a band with it; when it is new, remember it."""
        keys = _band_keys(mine, self.rows)
        others = sorted({other for key in keys for other in self._bands.get(key, ())})
        if others and np.max((np.stack([self._signatures[i] for i in others]) == mine).mean(1)) >= self.threshold:
            return True
        for key in keys:
            self._bands[key].append(len(self._signatures))
        self._signatures.append(mine)
        return False


def fingerprint(text: str) -> bytes:
    """Return a 128-bit hash of a text: two documents with the same one are the same."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def signature(text: str) -> Signature:
    """Return the 128 minima of a text's shingles under as many hash functions: uint32 [128]."""
    found = shingles(text)
    least = np.full(MINIMA, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(found), CHUNK):
        table = found[None, start : start + CHUNK] * _FACTORS
        table ^= table >> np.uint32(15)
        np.minimum(least, (table * _FACTORS[::-1]).min(axis=1), out=least)
    return least


def shingles(text: str) -> Signature:
    """Return the hashes of a text's runs of five words (of all its words, where it has fewer), repeats included."""
    words = _words(text.encode())
    size = max(1, min(SHINGLE, len(words)))
    count = len(words) - size + 1
    runs = np.zeros(max(0, count), np.uint64)
    for i in range(size if count > 0 else 0):
        runs += scrambled(words[i : i + count] + np.uint64(i))
    return (scrambled(runs) >> np.uint64(32)).astype(np.uint32)


def _words(raw: bytes) -> Unsigned:
    """Hash every word: a run of ASCII letters, digits and _, or one character outside ASCII with what follows it.

    The latter makes single words of Chinese or Japanese characters, which no spaces part.
    """
    letters = np.frombuffer(raw, np.uint8)
    kinds = _KINDS[letters]
    before = np.concatenate([np.zeros(1, np.uint8), kinds[:-1]])
    begins = (kinds == _LEAD) | ((kinds == _ASCII) & (before != _ASCII))
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.empty(0, np.uint64)
    word = np.maximum(np.cumsum(begins) - 1, 0)
    place = np.clip(np.arange(len(raw)) - starts[word], 0, len(_POWERS) - 1)
    return np.add.reduceat(_LETTERS[letters] * _POWERS[place], starts)


def _band_keys(mine: Signature, rows: int) -> list[int]:
    """Return one 64-bit key per band of a signature."""
    bands = MINIMA // rows
    table = mine[: bands * rows].reshape(bands, rows).astype(np.uint64)
    keys = np.arange(bands, dtype=np.uint64)
    for column in table.T:
        keys = scrambled(keys + column)
    return [int(key) for key in keys]


def _rows_per_band(threshold: float) -> int:
    """Return the most rows per band with which a pair at the threshold still meets with probability RECALL.

    It meets in at least one of 128 // rows bands with probability 1 - (1 - threshold^rows)^bands.
    """
    fitting = [rows for rows in range(1, 17) if 1 - (1 - threshold**rows) ** (MINIMA // rows) >= RECALL]
    return max(fitting, default=1)


def _kind(byte: int) -> int:
    if byte >= 0x80:
        return _LEAD if byte >= 0xC0 else _FOLLOWING
    return _ASCII if chr(byte).isalnum() or chr(byte) == "_" else 0


_ASCII, _LEAD, _FOLLOWING = 1, 2, 3
_KINDS = np.array([_kind(byte) for byte in range(256)], np.uint8)
_LETTERS = np.where(_KINDS > 0, scrambled(np.arange(256, dtype=np.uint64)), np.uint64(0))
_POWERS = scrambled(np.arange(1000, 1064, dtype=np.uint64)) | np.uint64(1)
_FACTORS = (scrambled(np.arange(5000, 5000 + MINIMA, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)[:, None] | 1
