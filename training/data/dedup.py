"""What makes documents alike: the hash of a text, and a signature that tells how much of two texts is the same.

A document is the set of its runs of five words. MinHash (Broder 1997) estimates the Jaccard similarity of two such
sets from 128 minima each; locality-sensitive hashing (bands of rows, Indyk and Motwani 1998) finds the few pairs
worth comparing without looking at all of them (`training.data.join`).
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data.hashing import Unsigned, scrambled

Minima = npt.NDArray[np.uint16]

SHINGLE: Final = 5
"""Words per run: the usual choice for text and code (Lee et al. 2022 and The Stack, Kocetkov et al. 2022)."""
MINIMA: Final = 128
"""Length of a signature: the estimate's standard error is at most 0.044 (at similarity 0.5)."""
RECALL: Final = 0.99
"""Share of the pairs exactly at the threshold that the bands must bring together."""
CHUNK: Final = 4096
"""Shingles hashed at once, so that the table of CHUNK x MINIMA stays in the processor's cache."""
BYTES_AT_ONCE: Final = 1 << 15
"""Text whose words are hashed at once, for the same reason; a longer text is taken whole."""


def fingerprints(raws: Sequence[bytes]) -> Unsigned:
    """Return a 128-bit hash of each text: uint64 [texts, 2]. Two documents with the same one are the same."""
    joined = b"".join([hashlib.sha256(raw).digest()[:16] for raw in raws])
    return np.frombuffer(joined, "<u8").reshape(-1, 2)


def signatures(raws: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return the 128 minima of each text's shingles under as many hash functions: uint32 [texts, 128]."""
    out = np.full((len(raws), MINIMA), np.iinfo(np.uint32).max, np.uint32)
    begin, size = 0, 0
    for i, raw in enumerate(raws):
        size += len(raw)
        if size >= BYTES_AT_ONCE or i + 1 == len(raws):
            _minima(*shingles(raws[begin : i + 1]), out[begin : i + 1])
            begin, size = i + 1, 0
    return out


def kept(signature: npt.NDArray[np.uint32]) -> Minima:
    """Return what is kept of signatures to compare them: half their bits, by which strangers agree once in 65,536."""
    return signature.astype(np.uint16)


def band_keys(signature: npt.NDArray[np.uint32], rows: int) -> Unsigned:
    """Return one 64-bit key per band and signature: uint64 [bands, texts]."""
    bands = MINIMA // rows
    table = signature[:, : bands * rows].reshape(-1, bands, rows).astype(np.uint64)
    keys = np.repeat(np.arange(bands, dtype=np.uint64)[None], len(signature), axis=0)
    for column in range(rows):
        keys = scrambled(keys + table[:, :, column])
    return np.ascontiguousarray(keys.T)


def rows_per_band(threshold: float) -> int:
    """Return the most rows per band with which a pair at the threshold still meets with probability RECALL.

    It meets in at least one of 128 // rows bands with probability 1 - (1 - threshold^rows)^bands.
    """
    fitting = [rows for rows in range(1, 17) if 1 - (1 - threshold**rows) ** (MINIMA // rows) >= RECALL]
    return max(fitting, default=1)


def shingles(raws: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Return the hashes of the texts' runs of five words, repeats included, and where each text's begin.

    A text with fewer words has one run, of all its words; one without words has none.
    uint32 [runs], int64 [texts + 1].
    """
    words, offsets = _words(raws)
    count = np.diff(offsets)
    runs = np.where(count > 0, np.maximum(1, count - SHINGLE + 1), 0)
    begins = np.concatenate([[0], np.cumsum(runs)])
    padded = np.concatenate([words, np.zeros(SHINGLE, np.uint64)])
    whole = padded[: len(words)].copy()
    for i in range(1, SHINGLE):
        whole *= _STEP
        whole += padded[i : len(words) + i]
    first = np.repeat(offsets[:-1] - begins[:-1], runs) + np.arange(begins[-1])
    found = whole[first]
    for text in np.flatnonzero((count > 0) & (count < SHINGLE)).tolist():
        found[begins[text]] = np.bitwise_xor.reduce(
            scrambled(words[offsets[text] : offsets[text + 1]] + np.arange(count[text], dtype=np.uint64))
        )
    return (scrambled(found) >> np.uint64(32)).astype(np.uint32), begins


def _minima(found: npt.NDArray[np.uint32], begins: npt.NDArray[np.int64], out: npt.NDArray[np.uint32]) -> None:
    """Put into `out` the least of each text's shingles under every hash function."""
    inner = begins[1:-1]
    for start in range(0, len(found), CHUNK):
        end = min(start + CHUNK, len(found))
        table, shifted = (one[:, : end - start] for one in _TABLES)
        np.multiply(found[None, start:end], _FACTORS, out=table)
        np.right_shift(table, np.uint32(15), out=shifted)
        table ^= shifted
        table *= _FACTORS[::-1]
        first = int(np.searchsorted(begins, start, side="right")) - 1
        cuts = np.unique(inner[(inner > start) & (inner < end)])
        texts = np.concatenate([[first], np.searchsorted(begins, cuts, side="right") - 1])
        least = np.minimum.reduceat(table, np.concatenate([[0], cuts - start]), axis=1)
        out[texts] = np.minimum(out[texts], least.T)


def _words(raws: Sequence[bytes]) -> tuple[Unsigned, npt.NDArray[np.int64]]:
    """Hash every word: a run of ASCII letters, digits and _, or one character outside ASCII with what follows it.

    The latter makes single words of Chinese or Japanese characters, which no spaces part. Returns the words of all
    texts, and where each text's begin. A word's hash is a polynomial of its letters' random numbers, taken out of the
    text's by a product with the inverse of the power that its place gives it.
    """
    letters = np.frombuffer(b"\0".join(raws) + b"\0", np.uint8)
    kinds = _KINDS[letters]
    begins = kinds == _LEAD
    begins[0] |= kinds[0] == _ASCII
    begins[1:] |= (kinds[1:] == _ASCII) & (kinds[:-1] != _ASCII)
    starts = np.flatnonzero(begins)
    powers, inverse = _powers(len(letters))
    ends = np.cumsum([len(raw) + 1 for raw in raws])
    offsets = np.concatenate([[0], np.searchsorted(starts, ends)])
    if not len(starts):
        return np.empty(0, np.uint64), offsets
    values = _LETTERS[letters]
    values *= powers[: len(letters)]
    words = np.add.reduceat(values, starts)
    words *= inverse[starts]
    return scrambled(words), offsets


def _powers(count: int) -> tuple[Unsigned, Unsigned]:
    """Return at least so many powers of an odd number modulo 2^64, and their inverses."""
    if len(_POWERS["up"]) < count:
        size = 1 << (count - 1).bit_length()
        for name, base in (("up", _BASE), ("down", pow(_BASE, -1, 1 << 64))):
            found = np.full(size, base, np.uint64)
            found[0] = 1
            _POWERS[name] = np.multiply.accumulate(found)
    return _POWERS["up"], _POWERS["down"]


def _kind(byte: int) -> int:
    if byte >= 0x80:
        return _LEAD if byte >= 0xC0 else _FOLLOWING
    return _ASCII if chr(byte).isalnum() or chr(byte) == "_" else 0


_ASCII, _LEAD, _FOLLOWING = 1, 2, 3
_KINDS = np.array([_kind(byte) for byte in range(256)], np.uint8)
_LETTERS = np.where(_KINDS > 0, scrambled(np.arange(256, dtype=np.uint64)), np.uint64(0))
_BASE: Final = 0x9E3779B97F4A7C15
_STEP: Final = np.uint64(0xD6E8FEB86659FD93)
_POWERS: dict[str, Any] = {"up": np.empty(0, np.uint64), "down": np.empty(0, np.uint64)}
_FACTORS = (scrambled(np.arange(5000, 5000 + MINIMA, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)[:, None] | 1
_TABLES = np.empty((2, MINIMA, CHUNK), np.uint32)
"""Kept, because making such tables anew for every chunk takes as long as filling them."""
