"""Objects under a URL, on a file system or in S3, with the compare-and-swap that crash safety rests on.

open_store(".castra/store")      a folder
open_store("s3://bucket/prefix") a bucket; the endpoint and the credentials are boto3's own settings
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit


class StoreError(Exception):
    """The store cannot be used; the text is one sentence that says why and what to do."""


class Conflict(Exception):
    """Somebody else wrote the object first."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """An object's bytes and the version to name in a conditional write."""

    data: bytes
    etag: str


class Store(Protocol):
    """Objects under one URL. Keys are relative, '/'-separated. Every method raises `StoreError`."""

    url: str

    def get(self, key: str) -> Versioned | None:
        """The object, or None where there is none."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Write an object whole and durably, return its version.

        Raises `Conflict` if `if_absent` and it exists, or if `if_match` is not its version any more.
        """

    def delete(self, key: str) -> None:
        """Remove the object; fine where there is none."""

    def keys(self, prefix: str) -> list[str]:
        """The keys that start with `prefix`, sorted."""

    def workspace(self, place: str) -> Path:
        """A folder of this machine, made if absent, where work on the folder `place` of the store happens."""

    def publish(self, place: str) -> None:
        """Make the files of `workspace(place)` durable in the store."""

    def fetch(self, place: str) -> Path:
        """A folder of this machine that holds the published files of `place`."""

    def address(self, place: str) -> str:
        """Where jobs on other machines find `place`: a path if the store is a (shared) folder, else a URL."""

    def sizes(self, place: str) -> dict[str, int]:
        """Relative path → bytes of the published files of `place`; hidden ones are none."""


def open_store(url: str) -> Store:
    """Open the store at a folder's path, `file:///folder` or `s3://bucket/prefix`, and prove that it can be written.

    Raises `StoreError` with one sentence if the URL is of another kind, or the place cannot be written.
    """
    if place := in_s3(url):
        from store.s3 import S3Store  # boto3 costs 0.2 s that a file store need not pay

        return S3Store(*place)
    parts = urlsplit(url)
    if parts.scheme in ("", "file") and not parts.netloc:
        from store.files import FileStore

        return FileStore(Path(unquote(parts.path) if parts.scheme else url))
    raise StoreError(f"store {url!r} is neither a folder, file:///folder nor s3://bucket/prefix: fix `store`")


def in_s3(url: str) -> tuple[str, str] | None:
    """The bucket and the prefix (without slashes at its ends) of a store's URL; None for a folder."""
    parts = urlsplit(url)
    return (parts.netloc, parts.path.strip("/")) if parts.scheme == "s3" else None


def checked(key: str) -> str:
    """Return the key, or raise `StoreError` if it would leave the store."""
    if not re.fullmatch(r"[\w@.=+-]+(/[\w@.=+-]+)*/?", key) or ".." in key.split("/"):
        raise StoreError(f"{key!r} is not a key: letters, digits and '@.=+-_' between single slashes")
    return key


def state_folder() -> Path:
    """The folder of this machine where Castra keeps what is not a result: `CASTRA_STATE`, or `.castra`."""
    return Path(os.environ.get("CASTRA_STATE", ".castra")).absolute()
