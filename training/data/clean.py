"""Decide which documents are text worth learning from, and give every refusal a name."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt


class Dropped(StrEnum):
    """Why a document is left out; the names appear in dataset.json."""

    NOT_UTF8 = "not_utf8"
    BINARY = "binary"
    BROKEN = "broken_record"
    NO_TEXT = "no_text"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    MOSTLY_SYMBOLS = "mostly_symbols"
    NOT_CHOSEN = "beyond_max_documents"
    EXACT_DUPLICATE = "exact_duplicate"
    NEAR_DUPLICATE = "near_duplicate"


REASONS: Final = tuple(Dropped)
TRAIN: Final = 0
HELD_OUT: Final = 1
"""What becomes of a document, as a number: one of these, or `code` of why it is dropped."""

MIN_LETTERS: Final = 0.25
"""Share of the bytes other than white space that must be letters: tables of numbers and ASCII art stay out. Of the
standard library's files 99 % have more than 0.58, and the poorest has 0.37."""
MAX_CONTROLS: Final = 0.01
"""Share of control characters (terminal escapes apart) above which a file is called binary."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """The lengths a document may have, in characters."""

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Judged:
    """Some documents: of each what becomes of it (uint8 [documents]), and of those that stay text and UTF-8."""

    fates: npt.NDArray[np.uint8]
    texts: list[str]
    raws: list[bytes]


def code(reason: Dropped) -> int:
    """Return the number of a reason."""
    return 2 + REASONS.index(reason)


def decoded(raw: bytes) -> str | Dropped:
    """Return the text of a file, or why it is none."""
    if b"\0" in raw:
        return Dropped.BINARY
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Dropped.NOT_UTF8


def judge(found: Sequence[str | Dropped], limits: Limits) -> Judged:
    """Make line ends uniform, remove byte order marks, and drop what is no text or not of the lengths asked for."""
    fates = np.zeros(len(found), np.uint8)
    places: list[int] = []
    texts: list[str] = []
    raws: list[bytes] = []
    for i, one in enumerate(found):
        text = _of_length(one, limits)
        raw = text if isinstance(text, Dropped) else _encoded(text)
        if isinstance(text, Dropped) or isinstance(raw, Dropped):
            fates[i] = code(raw if isinstance(raw, Dropped) else Dropped.BROKEN)
        else:
            places.append(i)
            texts.append(text)
            raws.append(raw)
    reasons = _looked_at(raws)
    fates[places] = reasons
    if reasons.any():
        stay = [i for i, reason in enumerate(reasons.tolist()) if not reason]
        texts, raws = [texts[i] for i in stay], [raws[i] for i in stay]
    return Judged(fates, texts, raws)


def _of_length(text: str | Dropped, limits: Limits) -> str | Dropped:
    if isinstance(text, Dropped):
        return text
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.removeprefix("\ufeff")
    if len(text) < limits.shortest:
        return Dropped.TOO_SHORT
    return text if len(text) <= limits.longest else Dropped.TOO_LONG


def _encoded(text: str) -> bytes | Dropped:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        return Dropped.NOT_UTF8


def _looked_at(raws: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Return for each text 0, or the code of why its bytes are not text worth learning from."""
    flat = np.frombuffer(b"".join(raws), np.uint8)
    letters = ((flat | np.uint8(32)) - np.uint8(97) < 26) | (flat >= 128)
    spaces = (flat == 32) | (flat - np.uint8(9) < 5)
    controls = ((flat < 32) & ~spaces & (flat != 0x1B)) | (flat == 127)
    some_controls = bool(controls.any())
    reasons = np.zeros(len(raws), np.uint8)
    begin = 0
    for i, raw in enumerate(raws):
        end = begin + len(raw)
        if some_controls and (np.count_nonzero(controls[begin:end]) > MAX_CONTROLS * len(raw) or b"\0" in raw):
            reasons[i] = code(Dropped.BINARY)
        elif _count(letters, begin, end) < MIN_LETTERS * (len(raw) - _count(spaces, begin, end)):
            reasons[i] = code(Dropped.MOSTLY_SYMBOLS)
        begin = end
    return reasons


def _count(flags: Flags, begin: int, end: int) -> int:
    return int(np.count_nonzero(flags[begin:end]))
