"""The bytes of a file: from here or from S3, whole or from some byte on, unpacked while they come."""

import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from training.data.sources import S3, Document, SourceError, unreadable, version_of

BLOCK: Final = 1 << 20
"""Bytes read at once."""
SLICE: Final = 1 << 16
"""Compressed bytes unpacked at once, which become 66 MB at the very most (gzip packs 1032 to 1)."""
LONGEST_LINE: Final = 256 << 20
"""Bytes of a line above which a file is no text by lines: it bounds what is held in memory."""


def opened(document: Document, start: int = 0, *, jumping: bool = False) -> IO[bytes]:
    """Open the very version that was listed, at byte `start`. Raises SourceError when it changed, or is not there."""
    if document.place.startswith(S3):
        from training.data import objects

        return objects.jumping(document) if jumping else io.BufferedReader(objects.Stream(document, start), BLOCK)
    check_unchanged(document)
    try:
        file = Path(document.place).open("rb")  # noqa: SIM115  # the caller closes it
    except OSError as problem:
        raise unreadable(document.place, problem) from problem
    file.seek(start)
    return file


def check_unchanged(document: Document) -> None:
    """Raise SourceError when a file on this machine is not the one that was listed."""
    if version_of(document.place) != (document.size, document.version):
        raise SourceError(f"{document.place} changed while it was being prepared; start again when it is still")


def blocks(document: Document, start: int = 0) -> Iterator[bytes]:
    """Yield a file's bytes from `start` on, unpacked where it is compressed as a whole. Raises SourceError."""
    with opened(document, start) as file:
        try:
            packed = iter(lambda: file.read(BLOCK), b"")
            yield from _unpacked(packed, document) if document.packed else packed
        except OSError as problem:
            raise unreadable(document.place, problem) from problem


def whole(document: Document, longest: int) -> bytes:
    """Return a file's bytes, or, where it has more than `longest`, some more than these. Raises SourceError."""
    if not document.packed and document.size <= longest and not document.place.startswith(S3):
        with opened(document) as file:
            return file.read()
    taken, size = [], 0
    for block in blocks(document):
        taken.append(block)
        size += len(block)
        if size > longest:
            break
    return b"".join(taken)


def lines(document: Document, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines, some at a time, and at which byte: those that begin at bytes `start` to `end`.

    Of a compressed file it yields all, and counts unpacked bytes. Raises SourceError.
    """
    at, rest = max(0, start - 1), b""
    if document.packed:
        end = sys.maxsize
    skipping = start > 0
    for block in blocks(document, at):
        data = rest + block
        if skipping:
            cut = data.find(b"\n") + 1
            at, data, skipping = at + (cut or len(data)), data[cut:] if cut else b"", not cut
        if at >= end:
            return
        last = data.find(b"\n", end - 1 - at) if at + len(data) >= end else -1
        cut = last + 1 or data.rfind(b"\n") + 1
        if cut:
            yield at, data[:cut]
        if last >= 0:
            return
        at, rest = at + cut, data[cut:]
        if len(rest) > LONGEST_LINE:
            raise SourceError(f"{document.place}, from byte {at}: a line of more than {LONGEST_LINE >> 20} MiB")
    if rest and at < end:
        yield at, rest


def line_number(document: Document, at: int) -> str:
    """Return which line begins at a byte, for people; what would have to be read again from S3 is told by its byte."""
    if document.place.startswith(S3):
        return f"the line at byte {at}"
    count, left = 1, at
    for block in blocks(document):
        count += block[:left].count(b"\n")
        left -= len(block)
        if left <= 0:
            break
    return f"line {count}"


def _unpacked(packed: Iterator[bytes], document: Document) -> Iterator[bytes]:
    """Unpack gzip or Zstandard, of several members too. Raises SourceError when the file is cut off or damaged."""
    unpacker: Any = None
    try:
        for left in (block[i : i + SLICE] for block in packed for i in range(0, len(block), SLICE)):
            while left:
                unpacker = unpacker or _unpacker(document)
                if found := unpacker.decompress(left):
                    yield found
                left, unpacker = (unpacker.unused_data, None) if unpacker.eof else (b"", unpacker)  # noqa: PLW2901
    except Exception as problem:
        if not isinstance(problem, zlib.error) and type(problem).__name__ != "ZstdError":
            raise
        raise SourceError(f"data.source: {document.place} is damaged ({problem}); bring it here again") from problem
    if unpacker is not None:
        raise SourceError(f"data.source: {document.place} is truncated: its compressed data have no end; get it again")


def _unpacker(document: Document) -> Any:
    if document.packed == ".gz":
        return zlib.decompressobj(wbits=31)
    try:
        import zstandard
    except ImportError as lacking:
        raise SourceError(f"data.source: {document.place} needs the library zstandard: install it") from lacking
    return zstandard.ZstdDecompressor().decompressobj()
