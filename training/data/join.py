"""Which documents stay: what needs to know all units at once, in pieces that are bounded in memory.

Every document has a number, its place in the whole input. Copies are found by sorting: documents with the same hash,
and pairs that share a band of their signatures. Each is cut by the leading bits of what is sorted into passes of at
most PASS documents, so that memory stays the same for any input; one byte per document says what becomes of it, the
only thing that grows (1 GB for a thousand million documents). The result depends on the input alone, not on who works.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.data.clean import HELD_OUT, REASONS, TRAIN, Dropped, code
from training.data.dedup import MINIMA, rows_per_band
from training.data.hashing import Unsigned
from training.data.sources import SourceError
from training.data.survey import Work

Fates = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

PASS: Final = 1 << 21
"""Documents sorted at once: about 100 MB."""
NEIGHBOURS: Final = 8
"""In a band's group of equal keys a document is compared with so many before it, and with the group's first."""
PAIRS_AT_ONCE: Final = 1 << 14
"""Pairs whose signatures are compared at once: 8 MB."""
DOCUMENTS_PER_PIECE: Final = 100_000
"""Documents whose pairs are compared by one process at a time."""


def begins_of(work: Work) -> Integers:
    """Return the number of each unit's first document, and how many there are: int64 [units + 1]."""
    counts = [int(work.looked_at(i).facts["documents"]) for i in range(len(work.units))]
    return np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64)


def exact(work: Work, max_documents: int | None) -> None:
    """Find exact copies, and what is beyond max_documents (of rows), and write what becomes of each document."""
    begins = begins_of(work)
    total = int(begins[-1])
    fates = np.empty(total, np.uint8)
    for first, page in _pages(work, begins):
        fates[first : first + len(page["fates"])] = page["fates"]
    if max_documents is not None and max_documents < total:
        chosen = np.zeros(total, np.bool_)
        chosen[np.arange(max_documents, dtype=np.int64) * total // max_documents] = True
        fates[~chosen] = code(Dropped.NOT_CHOSEN)
    bits = passes(total)
    for turn in range(1 << bits):
        numbers, prints = _alike(work, begins, (bits, turn), fates)
        order = np.lexsort((prints[:, 1], prints[:, 0]))
        again = np.flatnonzero((prints[order[1:]] == prints[order[:-1]]).all(axis=1)) + 1
        fates[numbers[order[again]]] = code(Dropped.EXACT_DUPLICATE)
    with work.parts.write("exact") as out:
        out.add({"fates": fates, "begins": begins})


def band(work: Work, number: int) -> None:
    """Write the pairs of documents that share one band: uint64, the later one's number in the upper half, sorted."""
    page = work.parts.open("exact").pages[0]
    fates, begins = page["fates"], page["begins"]
    bits = passes(len(fates))
    found = []
    for turn in range(1 << bits):
        numbers, keys = _alike(work, begins, (bits, turn), fates, number)
        order = np.argsort(keys, kind="stable")
        found.append(_pairs(keys[order], numbers[order].astype(np.uint64)))
    with work.parts.write(f"band-{number:03d}") as out:
        out.add({"pairs": np.unique(np.concatenate(found))})


def bands(threshold: float) -> int:
    """Return how many bands a signature has."""
    return MINIMA // rows_per_band(threshold)


def pieces(work: Work) -> int:
    """Return how many pieces the comparison of all pairs has."""
    return 1 + int(begins_of(work)[-1]) // DOCUMENTS_PER_PIECE


def compare(work: Work, piece: int) -> None:
    """Write which of the pairs of some later documents are alike indeed."""
    begins = work.parts.open("exact").pages[0]["begins"]
    low, high = (np.uint64((piece + i) * DOCUMENTS_PER_PIECE) << np.uint64(32) for i in range(2))
    some = []
    for number in range(bands(work.threshold)):
        pairs = work.parts.open(f"band-{number:03d}").pages[0]["pairs"]
        some.append(np.array(pairs[slice(*np.searchsorted(pairs, [low, high]))]))
    wanted = np.unique(np.concatenate(some))
    alike = []
    for start in range(0, len(wanted), PAIRS_AT_ONCE):
        now = wanted[start : start + PAIRS_AT_ONCE]
        alike.append(now[_similarity(work, begins, now) >= work.threshold])
    with work.parts.write(f"alike-{piece:04d}") as out:
        out.add({"pairs": np.concatenate([np.empty(0, np.uint64), *alike])})


def select(work: Work) -> None:
    """Decide what becomes of each document, and write it: one page of the held-out ones in order, then one per unit.

    A document is dropped when it is like an earlier one that stays. Held out are those whose rank is below the share,
    in the order of their ranks, so that any first part is a fair sample; each side has at least one.
    Raises SourceError where too few stay.
    """
    page = work.parts.open("exact").pages[0]
    fates, begins = np.array(page["fates"]), page["begins"]
    if work.threshold < 1:
        for piece in range(pieces(work)):
            _drop_alike(fates, work.parts.open(f"alike-{piece:04d}").pages[0]["pairs"])
    held = _held_out(work, begins, fates)
    fates[held] = HELD_OUT
    with work.parts.write("selected") as out:
        out.add({"held": held})
        for i in range(len(work.units)):
            out.add({"fates": fates[begins[i] : begins[i + 1]]})
        out.facts = {
            "train": int((fates == TRAIN).sum()),
            "held_out": len(held),
            "dropped": dropped(fates),
            "bytes": _train_bytes(work, begins, fates),
        }


def dropped(fates: Fates) -> dict[str, int]:
    """Return how many documents were dropped for which reason."""
    counts = np.bincount(fates, minlength=2 + len(REASONS)).tolist()[2:]
    named = Counter({reason.value: count for reason, count in zip(REASONS, counts, strict=True) if count})
    return dict(sorted(named.items()))


def passes(documents: int) -> int:
    """Return how many leading bits cut sorting into passes of at most about PASS documents."""
    return max(0, (documents - 1) // PASS).bit_length()


def _pages(work: Work, begins: Integers) -> Iterator[tuple[int, Any]]:
    """Yield every page of the survey and the number of its first document."""
    for i in range(len(work.units)):
        first = int(begins[i])
        for page in work.looked_at(i).pages:
            yield first, page
            first += len(page["fates"])


def _alike(
    work: Work, begins: Integers, leading: tuple[int, int], fates: Fates, row: int | None = None
) -> tuple[Integers, Unsigned]:
    """Return numbers and values of the documents that still stay and whose values begin with certain bits.

    The values are the keys of a band, or without one the hashes of texts; `leading` is how many bits, and these.
    """
    bits, turn = leading
    numbers, values = [np.empty(0, np.int64)], []
    for first, page in _pages(work, begins):
        stay = np.flatnonzero(page["fates"] == 0)
        found = page["prints"][stay] if row is None else page["bands"][row]
        mask = fates[first + stay] == 0
        if bits:
            keys = found[:, 0] if row is None else found
            mask &= keys >> np.uint64(64 - bits) == np.uint64(turn)
        numbers.append(first + stay[mask])
        values.append(found[mask])
    none = np.empty((0, 2) if row is None else 0, np.uint64)
    return np.concatenate(numbers), np.concatenate([none, *values])


def _pairs(keys: Unsigned, numbers: Unsigned) -> Unsigned:
    """Return the pairs worth comparing among documents sorted by key, then number."""
    found = [np.empty(0, np.uint64)]
    for distance in range(1, NEIGHBOURS + 1):
        same = np.flatnonzero(keys[distance:] == keys[:-distance])
        if not len(same):
            break
        found.append(_packed(numbers[same + distance], numbers[same]))
    if len(keys):
        new = np.concatenate([[True], keys[1:] != keys[:-1]])
        first = np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))
        later = np.flatnonzero(~new)
        found.append(_packed(numbers[later], numbers[first[later]]))
    return np.unique(np.concatenate(found))


def _packed(later: Unsigned, earlier: Unsigned) -> Unsigned:
    return (later << np.uint64(32)) | earlier


def _similarity(work: Work, begins: Integers, pairs: Unsigned) -> npt.NDArray[np.float64]:
    """Return the estimated Jaccard similarity of pairs."""
    later, earlier = (pairs >> np.uint64(32)).astype(np.int64), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64)
    wanted = np.unique(np.concatenate([later, earlier]))
    table = np.empty((len(wanted), MINIMA), np.uint16)
    units = np.searchsorted(begins, wanted, side="right") - 1
    for unit in np.unique(units).tolist():
        first = int(begins[unit])
        for page in work.looked_at(unit).pages:
            here = slice(*np.searchsorted(wanted, [first, first + len(page["fates"])]))
            place = np.cumsum(page["fates"] == 0) - 1
            table[here] = page["minima"][place[wanted[here] - first]]
            first += len(page["fates"])
    one, other = np.searchsorted(wanted, later), np.searchsorted(wanted, earlier)
    same: npt.NDArray[np.float64] = (table[one] == table[other]).mean(axis=1)
    return same


def _drop_alike(fates: Fates, pairs: Unsigned) -> None:
    """Drop, in order, what is like an earlier document that stays."""
    near = code(Dropped.NEAR_DUPLICATE)
    for pair in pairs.tolist():
        if fates[pair & 0xFFFFFFFF] == 0:
            fates[pair >> 32] = near


def _held_out(work: Work, begins: Integers, fates: Fates) -> Integers:
    """Return the numbers of the held-out documents, by rank."""
    staying = int((fates == 0).sum())
    if staying < 2:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped(fates).items()) or "nothing was dropped"
        raise SourceError(
            f"of {len(fates)} documents {staying} passed ({reasons}), and training and scoring need one "
            "each; loosen data.min_chars, data.max_chars or data.near_duplicate, or add data"
        )
    below = np.uint64(int(work.held_out * 2**64))
    found = [(rank, number) for rank, number in _ranked(work, begins, fates, below)]
    if not found:
        found = heapq.nsmallest(1, _ranked(work, begins, fates, np.uint64(2**64 - 1)))
    return np.array([number for _, number in sorted(found)][: staying - 1], np.int64)


def _ranked(work: Work, begins: Integers, fates: Fates, below: np.uint64) -> Iterator[tuple[int, int]]:
    for first, page in _pages(work, begins):
        stay = fates[first : first + len(page["fates"])] == 0
        for place in np.flatnonzero(stay & (page["ranks"] < below)).tolist():
            yield int(page["ranks"][place]), first + place


def _train_bytes(work: Work, begins: Integers, fates: Fates) -> int:
    total = 0
    for first, page in _pages(work, begins):
        total += int(page["sizes"][fates[first : first + len(page["fates"])] == TRAIN].sum(dtype=np.int64))
    return total
