"""The store on a file system: every write is a whole new file under a lock, so readers never see half of one."""

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from store.objects import Conflict, StoreError, Versioned, checked

LOCK = ".lock"


class FileStore:
    """Objects as files under a folder; the version of an object is the hash of its bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.url = self.root.as_uri()
        with self._sentences():
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as probe:
                probe.write(b"x" * 4096)
                probe.flush()

    def get(self, key: str) -> Versioned | None:
        with self._sentences():
            try:
                data = self._path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Versioned(data, _etag(data))

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        path = self._path(key)
        with self._sentences():
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                if if_absent or if_match is not None:
                    self._compare(key, None if if_absent else if_match)
                _replace(path, data)
        return _etag(data)

    def _compare(self, key: str, wanted: str | None) -> None:
        there = self.get(key)
        if (there.etag if there else None) != wanted:
            raise Conflict(key)

    def delete(self, key: str) -> None:
        with self._sentences(), self._alone():
            self._path(key).unlink(missing_ok=True)

    def keys(self, prefix: str) -> list[str]:
        top = self.root / prefix.rpartition("/")[0]
        files = (path for path in top.rglob("*") if path.is_file() and not path.name.startswith("."))
        return sorted(key for path in files if (key := path.relative_to(self.root).as_posix()).startswith(prefix))

    def workspace(self, place: str) -> Path:
        path = self._path(place)
        with self._sentences():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, place: str) -> None:
        """Flush what was written in place, files and folders, so that the manifest never outlives them."""
        with self._sentences():
            for path in (self._path(place), *self._path(place).rglob("*")):
                _flush(path)

    def fetch(self, place: str) -> Path:
        return self._path(place)

    def address(self, place: str) -> str:
        return str(self._path(place))

    def sizes(self, place: str) -> dict[str, int]:
        root = self._path(place)
        with self._sentences():
            files = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
            return {path.relative_to(root).as_posix(): path.stat().st_size for path in files}

    def _path(self, key: str) -> Path:
        return self.root / checked(key)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.root / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(_sentence(self.root, error)) from error


def _sentence(root: Path, error: OSError) -> str:
    place = f"store {root}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}: the disk is full; free some space or point `store` elsewhere, then run again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{place} cannot be written ({error.strerror}); point `store` at a folder you may write to"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{place} is not a folder; point `store` at a folder"
    return f"{place}: {error.strerror or error}"


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    handle, fresh = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
