"""The /opt/ml of a SageMaker training instance: what is put there, and what goes from there to S3 and back."""

import contextlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SYNC_S = 0.5
"""How often what is new in the checkpoints goes to S3."""
LAST = ("result.json", "manifest.json")
"""Files that say that the others are complete."""


class Disk:
    """The folder /opt/ml of one instance, as this process sees it."""

    def __init__(self, root: Path, s3: Any) -> None:
        self.root, self._s3 = root, s3
        self._sent: dict[Path, tuple[int, int]] = {}
        self._ended = threading.Event()
        for folder in ("input/config", "input/data", "model", "output/data", "checkpoints", "code"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def configure(self, files: Mapping[str, Any]) -> None:
        """Write the files of input/config."""
        for name, content in files.items():
            (self.root / "input/config" / f"{name}.json").write_text(json.dumps(content))

    def bring(self, channel: str, url: str) -> None:
        """Download what lies under an S3 prefix; raises `LookupError` if nothing does."""
        if not self._download(url, self.root / "input/data" / channel):
            told = f"No S3 objects found under S3 URL {json.dumps(url)} given in input data source"
            raise LookupError(f"ClientError: Data download failed:{told}. Please ensure that the bucket exists.")

    def restore(self, url: str) -> None:
        """Put the checkpoints of an earlier run back, before the program starts."""
        folder = self.root / "checkpoints"
        self._download(url.rstrip("/") + "/", folder)
        self._sent = {path: _mark(path) for path in _files(folder)}

    def follow(self, url: str) -> threading.Thread:
        """Send what appears in the checkpoints to S3, until `leave`."""
        thread = threading.Thread(target=self._follow, args=(url,), daemon=True)
        thread.start()
        return thread

    def leave(self) -> None:
        """Send no more."""
        self._ended.set()

    def send(self, url: str) -> None:
        """Send what is new in the checkpoints; what says that all is complete goes last."""
        folder = self.root / "checkpoints"
        for path in sorted(_files(folder), key=lambda path: (path.name in LAST, path)):
            with contextlib.suppress(FileNotFoundError):  # a temporary file
                if self._sent.get(path) != (mark := _mark(path)):
                    bucket, key = split(f"{url.rstrip('/')}/{path.relative_to(folder).as_posix()}")
                    self._s3.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
                    self._sent[path] = mark

    def archive(self, folder: str, url: str) -> None:
        """Upload a folder as a tar archive, if there is anything in it."""
        if not (files := list(_files(self.root / folder))):
            return
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w:gz") as archive:
            for path in files:
                archive.add(path, path.relative_to(self.root / folder))
        bucket, key = split(url)
        self._s3.put_object(Bucket=bucket, Key=key, Body=whole.getvalue())

    @property
    def failure(self) -> str:
        """What the program wrote about its failure, at most 1,024 characters."""
        with contextlib.suppress(OSError):
            return (self.root / "output/failure").read_text(errors="replace")[:1024]
        return ""

    def _follow(self, url: str) -> None:
        while not self._ended.wait(SYNC_S):
            with contextlib.suppress(OSError):  # the instance may vanish meanwhile
                self.send(url)

    def _download(self, url: str, folder: Path) -> int:
        bucket, prefix = split(url)
        folder.mkdir(parents=True, exist_ok=True)
        start, number = prefix.rfind("/") + 1, 0
        with _sentences(url):
            for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                for found in page.get("Contents", []):
                    path = folder / found["Key"][start:]
                    if not found["Key"].endswith("/"):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(self._s3.get_object(Bucket=bucket, Key=found["Key"])["Body"].read())
                        number += 1
        return number


def split(url: str) -> tuple[str, str]:
    """Bucket and key of an s3:// URL."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if path.is_file())


def _mark(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def _sentences(url: str) -> Iterator[None]:
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        told = f"{error.response['Error']['Code']} for {url}"
        raise LookupError(f"ClientError: Data download failed:{told}") from error
