"""Large objects in moto's S3 without copies of them: read in pieces from disk, put together from their parts on disk.

moto reads a whole object for every range of it that is asked for, and holds an upload three times when it is completed.
Everything else about S3, conditional writes included, stays moto's.
"""

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl, unquote

from emulator import memory

PIECE = 1 << 20
PLAIN_QUERY = {"versionId", "x-id"}
"""What may stand behind an object's address when it is its bytes that are asked for."""
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def read(moto: Application, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes] | None:
    """Answer a GET of an object; None for everything else, and for what moto should explain."""
    query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    bucket, _, key = unquote(environ.get("RAW_URI", "").partition("?")[0]).lstrip("/").partition("/")
    if environ["REQUEST_METHOD"] != "GET" or not key or set(query) - PLAIN_QUERY:
        return None
    told: list[Any] = []
    asked = {name: value for name, value in environ.items() if name != "HTTP_RANGE"} | {"REQUEST_METHOD": "HEAD"}
    for _ in moto(asked, lambda status, headers, *_: told.extend((status, headers))):
        pass
    found = _object(bucket, key, query.get("versionId")) if told and told[0].startswith("200") else None
    if found is None:
        return None
    headers = {name.lower(): value for name, value in told[1]}
    size = int(found.contentsize)
    first, last = _range(environ.get("HTTP_RANGE", ""), size)
    if headers.get("etag") != found.etag or first is None:  # overwritten at this moment; or a strange range
        return None
    if "HTTP_RANGE" in environ or found.checksum_type == "COMPOSITE":  # the checksum is not that of these bytes
        headers = {name: value for name, value in headers.items() if not name.startswith("x-amz-checksum")}
    if "HTTP_RANGE" in environ:
        headers["content-range"] = f"bytes {first}-{last}/{size}"
    headers["content-length"] = str(last - first + 1)
    start_response("206 Partial Content" if "HTTP_RANGE" in environ else "200 OK", list(headers.items()))
    return _pieces(found, first, last + 1)


@cache
def take_over() -> None:
    """Let moto put uploads together on disk."""
    from moto.s3 import models

    models.FakeMultipart.complete = _completed(models)
    models.FakeKey.value = property(models.FakeKey.value.fget, _set_value(models.FakeKey.value.fset))


class _Joined(bytes):
    """Stands for the bytes of a file where moto wants bytes."""

    file: BinaryIO
    size: int


def _completed(models: Any) -> Callable[..., Any]:
    before = models.FakeMultipart.complete

    def complete(self: Any, body: Iterable[tuple[int, str]]) -> Any:
        listed = list(body)
        parts = [self.parts.get(number) for number, _ in listed]
        kind = str(self.metadata.get("x-amz-checksum-type") or "COMPOSITE")
        if kind != "COMPOSITE" or not _fitting(parts, [etag for _, etag in listed], models.S3_UPLOAD_PART_MIN_SIZE):
            return before(self, iter(listed))
        joined, digest = _Joined(), hashlib.md5(usedforsecurity=False)
        joined.file, joined.size = cast("BinaryIO", tempfile.TemporaryFile()), 0  # noqa: SIM115  lives as long as the object
        checksums = models.MultipartChecksumBuilder(self.metadata.get("x-amz-checksum-algorithm") or "CRC32", kind)
        for part in parts:
            value = part.value
            joined.file.write(value)
            joined.size += len(value)
            digest.update(bytes.fromhex(part.etag.strip('"')))
            checksums.addPart(value)
            part.dispose()
        return joined, f"{digest.hexdigest()}-{len(parts)}", checksums.build()

    return complete


def _fitting(parts: list[Any], etags: list[str], smallest: int) -> bool:
    """Whether these are the parts of an upload, as large as all but the last must be."""
    if any(part is None for part in parts) or any(part.contentsize < smallest for part in parts[:-1]):
        return False
    return [part.etag.strip('"') for part in parts] == [etag.strip('"') for etag in etags]


def _set_value(before: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
    def put(self: Any, value: bytes) -> None:
        if isinstance(value, _Joined):
            self._value_buffer, self.contentsize = value.file, value.size
        else:
            before(self, value)

    return put


def _object(bucket: str, key: str, version: str | None) -> Any:
    from moto.s3.models import s3_backends

    return s3_backends[memory.ACCOUNT]["aws"].get_object(bucket, key, version_id=version)


def _range(told: str, size: int) -> tuple[int | None, int]:
    """First and last byte of a range; None for what is not one range within the object."""
    if not told:
        return 0, size - 1
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", told)
    if not found or found.groups() == ("", ""):
        return None, 0
    left, right = found.groups()
    first = int(left) if left else max(0, size - int(right))
    last = min(int(right), size - 1) if left and right else size - 1
    return (first, last) if first <= last else (None, 0)


def _pieces(found: Any, first: int, end: int) -> Iterator[bytes]:
    while first < end:
        with found.lock:
            found._value_buffer.seek(first)
            piece = found._value_buffer.read(min(PIECE, end - first))
        if not piece:
            return  # deleted at this moment: the reader sees a short body
        first += len(piece)
        yield piece
