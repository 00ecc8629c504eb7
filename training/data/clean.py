"""Decide which documents are text worth learning from, and give every refusal a name."""

from dataclasses import dataclass
from enum import StrEnum


class Dropped(StrEnum):
    """Why a document is left out; the names appear in dataset.json."""

    NOT_UTF8 = "not_utf8"
    BINARY = "binary"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    MOSTLY_SYMBOLS = "mostly_symbols"
    EXACT_DUPLICATE = "exact_duplicate"
    NEAR_DUPLICATE = "near_duplicate"


LETTERS = bytes(byte for byte in range(256) if byte >= 0x80 or chr(byte).isalpha())
SPACES = b" \t\n\r\f\v"
CONTROLS = bytes(byte for byte in range(32) if byte not in SPACES and byte != 0x1B) + b"\x7f"

MIN_LETTERS = 0.25
"""Share of the bytes other than white space that must be letters: tables of numbers and ASCII art stay out. Of the
standard library's files 99 % have more than 0.58, and the poorest has 0.37."""
MAX_CONTROLS = 0.01
"""Share of control characters (terminal escapes apart) above which a file is called binary."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The lengths a document may have, in characters."""

    shortest: int
    longest: int


def clean(raw: bytes, limits: Limits) -> str | Dropped:
    """Return the document's text, line ends made uniform and a byte order mark removed, or why it is dropped."""
    if b"\0" in raw or _count(raw, CONTROLS) > MAX_CONTROLS * len(raw):
        return Dropped.BINARY
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Dropped.NOT_UTF8
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if len(text) < limits.shortest:
        return Dropped.TOO_SHORT
    if len(text) > limits.longest:
        return Dropped.TOO_LONG
    if _count(raw, LETTERS) < MIN_LETTERS * (len(raw) - _count(raw, SPACES)):
        return Dropped.MOSTLY_SYMBOLS
    return text


def _count(raw: bytes, which: bytes) -> int:
    return len(raw) - len(raw.translate(None, which))
