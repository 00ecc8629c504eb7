"""A folder in S3, as a node sees it: what is there, files down, files up. boto3 is imported when one is opened."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from training.job import write_json
from training.process import JobError

THREADS: Final = 8
"""Files on their way at once; each big one moves in parts of its own, ten at a time (boto3's default)."""
PART: Final = 64 << 20
"""Bytes of a part. 10,000 parts (S3's limit) hold 640 GB, and boto3 takes larger ones for larger files."""
PASSING: Final = ("RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeTooSkewed", "503")
"""Answers of S3 after which another try may help; so may one after any other 5xx."""


class Trouble(Exception):
    """S3 could not be used; the message is one sentence. `passing` says whether to try again."""

    def __init__(self, sentence: str, *, passing: bool) -> None:
        super().__init__(sentence)
        self.passing = passing


@dataclass(frozen=True, slots=True)
class Found:
    """An object: its size in bytes and its version."""

    size: int
    etag: str


class Remote:
    """The objects below `s3://bucket/prefix`, or the one object of that name. Methods raise `Trouble`."""

    def __init__(self, url: str) -> None:
        """Open it. Raises JobError without boto3."""
        place = urlsplit(url)
        self.url, self._bucket, self._prefix = url, place.netloc, unquote(place.path).strip("/")
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
            from botocore.config import Config
        except ImportError as lacking:
            raise JobError(
                f"{url} needs boto3 on the nodes: install it in the image, or use a store on a shared folder"
            ) from lacking
        self._config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)
        with self._sentences():
            self._s3 = boto3.client(
                "s3",
                region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
                config=Config(
                    retries={"mode": "adaptive", "total_max_attempts": 8},
                    connect_timeout=10,
                    read_timeout=60,
                    max_pool_connections=THREADS * 10,
                ),
            )

    def found(self, below: str = "") -> dict[str, Found]:
        """List what is there by relative name; the object that has exactly this name is `""`."""
        there = {}
        start = f"{self._prefix}/{below}" if below else self._prefix
        with self._sentences():
            for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start):
                for told in page.get("Contents", []):
                    rest = told["Key"][len(self._prefix) :]
                    if rest[:1] in ("", "/") and not rest.endswith("/"):
                        there[rest[1:]] = Found(told["Size"], told["ETag"])
        return there

    def read(self, name: str) -> bytes:
        """Return a small object's bytes."""
        with self._sentences():
            content: bytes = self._s3.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, at once and whole."""
        with self._sentences():
            self._s3.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def upload(self, name: str, path: Path) -> None:
        """Write an object from a file; it appears when it is whole."""
        with self._sentences():
            self._s3.upload_file(str(path), self._bucket, self._key(name), Config=self._config)

    def delete(self, names: list[str]) -> None:
        """Remove objects, in this order; fine where there are none."""
        for begin in range(0, len(names), 1000):  # as many as DeleteObjects takes
            doomed: list[Any] = [{"Key": self._key(name)} for name in names[begin : begin + 1000]]
            with self._sentences():
                self._s3.delete_objects(Bucket=self._bucket, Delete={"Objects": doomed, "Quiet": True})

    def fetch(self, wanted: Mapping[str, Found], folder: Path, index: Path, single: str = "") -> None:
        """Bring objects into a folder; what an earlier attempt brought, as `index` tells, is not brought again.

        A file has its name only when it is whole; `single` is that of the object "". Raises JobError if the disk has no
        room for them.
        """
        known = _read(index)
        places = {name: folder / (name or single) for name in wanted}
        todo = [name for name, found in wanted.items() if not _same(places[name], found, known.get(name))]
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = sum(wanted[name].size for name in todo), shutil.disk_usage(folder).free
        if needed > free:
            raise JobError(
                f"{self.url} needs {needed / 1e9:.1f} GB and the disk of {folder} has {free / 1e9:.1f} GB free; "
                "point CASTRA_SCRATCH at a larger disk"
            )
        with ThreadPoolExecutor(THREADS) as threads:
            for name, when in threads.map(lambda name: (name, self._download(name, places[name])), todo):
                known[name] = [wanted[name].size, when, wanted[name].etag]
        write_json(index, {name: known[name] for name in wanted})

    def _download(self, name: str, path: Path) -> int:
        """Bring one file and return its time of modification, ns."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.part")
        with self._sentences():
            self._s3.download_file(self._bucket, self._key(name), str(fresh), Config=self._config)
        fresh.replace(path)
        return path.stat().st_mtime_ns

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            told: Any = error.response
            code, status = told["Error"].get("Code", "?"), told["ResponseMetadata"].get("HTTPStatusCode", 0)
            passing = code in PASSING or "Throttl" in code or status >= 500
            raise Trouble(f"{self.url}: S3 answers {code} ({told['Error'].get('Message')})", passing=passing) from error
        except (BotoCoreError, Boto3Error) as error:
            cause = error.__cause__ or error.__context__
            inner: Any = getattr(cause, "response", {})
            status = inner.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            raise Trouble(f"{self.url}: {error}", passing=status >= 500) from error


def _read(index: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(index.read_text())
    except (OSError, ValueError):
        return {}
    return told


def _same(path: Path, found: Found, known: Any) -> bool:
    """Whether a file is still the one that was brought, and that is still what S3 has."""
    try:
        there = path.stat()
    except OSError:
        return False
    return bool(known == [found.size, there.st_mtime_ns, found.etag] and there.st_size == found.size)
