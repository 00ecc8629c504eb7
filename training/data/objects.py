"""Text that lies in S3: listed, and read as a stream or in ranges, never held whole. boto3 is imported when asked."""

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import IO, Any, Final
from urllib.parse import urlsplit

from training.data.sources import S3, Document, SourceError

TRIES: Final = 5
"""How often a stream that breaks off is taken up again where it broke."""
AHEAD: Final = 1 << 20
"""Bytes that a reader who jumps about asks for at least."""


def listed(source: str) -> Iterator[Document]:
    """Yield the objects below s3://bucket/prefix, or the one of that name. Raises SourceError."""
    place = urlsplit(source)
    bucket, prefix = place.netloc, place.path.strip("/")
    with _sentences(source):
        for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for told in page.get("Contents", []):
                key, rest = told["Key"], told["Key"][len(prefix) :]
                name = rest.strip("/") or key.rpartition("/")[2]
                hidden = any(part.startswith(".") for part in name.split("/"))
                if (not prefix or rest[:1] in ("", "/")) and told["Size"] and not hidden:
                    etag = told["ETag"].strip('"')
                    yield Document(name, f"{S3}{bucket}/{key}", told["Size"], source, etag)


class Stream(io.RawIOBase):
    """An object's bytes from `start` on, as they come; taken up again where the connection breaks."""

    def __init__(self, document: Document, start: int = 0) -> None:
        self._document, self._at = document, start
        self._body: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is something. Raises SourceError."""
        if self._at >= self._document.size:
            return 0
        for tries_left in reversed(range(TRIES)):
            try:
                self._body = self._body or _get(self._document, f"bytes={self._at}-")
                found = self._body.read(len(buffer))
            except OSError as problem:  # of the connection: what botocore says itself is a sentence already
                found = b""
                if not tries_left:
                    raise SourceError(f"{self._document.place} cannot be read to its end: {problem}") from problem
            if found:
                break
            self._drop()
        if not found:
            raise SourceError(f"{self._document.place} ends before its {self._document.size} bytes")
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._body is not None:
            self._body.close()
        self._body = None


class Ranges(io.RawIOBase):
    """An object as a file in which a reader jumps about: each read is a range of its own."""

    def __init__(self, document: Document) -> None:
        self._document, self._at = document, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._document.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._document.size)
        if end <= self._at:
            return 0
        with Stream(self._document, self._at) as stream:
            found = stream.read(end - self._at)
        count = len(found) if found else 0
        buffer[:count] = found
        self._at += count
        return count


def jumping(document: Document) -> IO[bytes]:
    """Return an object as a file to jump about in, small reads made larger."""
    return io.BufferedReader(Ranges(document), AHEAD)


@functools.cache
def client() -> Any:
    """Return the S3 client of this process; AWS_ENDPOINT_URL and the usual credentials apply. Raises SourceError."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as lacking:
        raise SourceError("data.source: s3:// needs boto3: install it, or name a folder") from lacking
    with _sentences("data.source"):
        return boto3.client("s3", config=Config(retries={"mode": "adaptive", "total_max_attempts": 8}))


def _get(document: Document, what: str) -> Any:
    """Ask for a range of the very version that was listed."""
    place = urlsplit(document.place)
    with _sentences(document.place):
        return client().get_object(
            Bucket=place.netloc, Key=place.path[1:], Range=what, IfMatch=f'"{document.version}"'
        )["Body"]


@contextlib.contextmanager
def _sentences(place: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        told: Any = error.response["Error"]
        code = str(told.get("Code", "?"))
        if code in ("PreconditionFailed", "412"):
            raise SourceError(f"{place} changed while it was being prepared; start again when it is still") from error
        raise SourceError(f"data.source: {place} cannot be read, S3 answers {code} ({told.get('Message')})") from error
    except BotoCoreError as error:
        raise SourceError(f"data.source: {place} cannot be read: {error}") from error
