"""The store in S3: conditional writes by If-None-Match and If-Match, folders staged on this machine."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from store.objects import Conflict, StoreError, Versioned, checked, state_folder

LOST_RACES = ("PreconditionFailed", "ConditionalRequestConflict")
ABSENT = ("NoSuchKey", "404")
PART = 64 << 20
"""Bytes of a part: files of this size and above go up in parts of it, and have an ETag made of theirs."""
PARTS = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)


class S3Store:
    """Objects under a prefix of a bucket; the version of an object is its ETag."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._staging = state_folder() / "staging" / hashlib.sha256(self.url.encode()).hexdigest()[:12]
        with self._sentences():
            config = Config(retries={"mode": "adaptive", "total_max_attempts": 8}, connect_timeout=10)
            self._s3 = boto3.client("s3", config=config)
            self._s3.put_object(Bucket=bucket, Key=f"{self.prefix}.castra", Body=b"")

    def get(self, key: str) -> Versioned | None:
        with self._sentences():
            try:
                reply = self._s3.get_object(Bucket=self.bucket, Key=self._key(key))
            except ClientError as error:
                if error.response["Error"]["Code"] in ABSENT:
                    return None
                raise
            return Versioned(reply["Body"].read(), reply["ETag"])

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        with self._sentences():
            try:
                reply = self._s3.put_object(Bucket=self.bucket, Key=self._key(key), Body=data, **condition)
            except ClientError as error:
                # S3 answers 404 to If-Match on an object that somebody deleted meanwhile.
                if error.response["Error"]["Code"] in (*LOST_RACES, *(ABSENT if if_match else ())):
                    raise Conflict(key) from None
                raise
        return reply["ETag"]

    def delete(self, key: str) -> None:
        with self._sentences():
            self._s3.delete_object(Bucket=self.bucket, Key=self._key(key))

    def keys(self, prefix: str) -> list[str]:
        start = len(self.prefix)
        return sorted(found["Key"][start:] for found in self._found(prefix))

    def _found(self, prefix: str) -> Iterator[Any]:
        with self._sentences():
            pages = self._s3.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix):
                yield from page.get("Contents", [])

    def workspace(self, place: str) -> Path:
        path = self._staging / checked(place)
        with self._sentences():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, place: str) -> None:
        """Upload what differs. A run that was killed may have left other files of the same names and sizes there."""
        there = {found["Key"]: found for found in self._found(f"{place}/")}
        folder = self.workspace(place)
        with self._sentences():
            for path in sorted(folder.rglob("*")):
                key = self._key(f"{place}/{path.relative_to(folder).as_posix()}")
                if path.is_file() and not path.name.startswith(".") and not _same(path, there.get(key)):
                    self._s3.upload_file(str(path), self.bucket, key, Config=PARTS)

    def fetch(self, place: str) -> Path:
        folder = self.workspace(place)
        start = len(self._key(place)) + 1
        for found in self._found(f"{place}/"):
            path = folder / found["Key"][start:]
            with self._sentences():
                if not _same(path, found):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    fresh = path.with_name(f".{path.name}.part")
                    self._s3.download_file(self.bucket, found["Key"], str(fresh), Config=PARTS)
                    fresh.replace(path)
        return folder

    def address(self, place: str) -> str:
        return f"{self.url}/{checked(place)}"

    def sizes(self, place: str) -> dict[str, int]:
        start = len(self._key(place)) + 1
        found = {one["Key"][start:]: one["Size"] for one in self._found(f"{place}/")}
        return {name: size for name, size in found.items() if not name.rpartition("/")[2].startswith(".")}

    def _key(self, key: str) -> str:
        return self.prefix + checked(key)

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            told = error.response["Error"]
            raise StoreError(
                f"store {self.url}: S3 answers {told.get('Code')} ({told.get('Message')}); "
                "check the bucket's name, its region and your permissions"
            ) from error
        except (BotoCoreError, Boto3Error) as error:
            raise StoreError(f"store {self.url}: {error}; check AWS_PROFILE, AWS_REGION and the network") from error
        except OSError as error:
            raise StoreError(
                f"store {self.url}: {self._staging} cannot be used ({error.strerror}); "
                "free some space or point CASTRA_STATE elsewhere, then run again"
            ) from error


def _same(path: Path, found: Any) -> bool:
    """Whether a file is what S3 holds, by size and ETag; where the ETag is no MD5 (KMS) nothing is the same."""
    if not found or not path.is_file() or path.stat().st_size != found["Size"]:
        return False
    with path.open("rb") as data:
        parts = [hashlib.md5(part, usedforsecurity=False).digest() for part in iter(lambda: data.read(PART), b"")]
    if found["Size"] < PART:
        return bool(found["ETag"].strip('"') == b"".join(parts or [hashlib.md5(usedforsecurity=False).digest()]).hex())
    whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return bool(found["ETag"].strip('"') == f"{whole}-{len(parts)}")
