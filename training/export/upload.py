"""Bring an exported folder to S3 or to a Hugging Face Hub; a second time nothing moves that is there already.

    python -m training.export.upload FOLDER s3://bucket/prefix
    HF_TOKEN=… python -m training.export.upload FOLDER hf://organisation/name

In S3 a ledger tells size, SHA-256 and version of every object: what is there as it was sent is not sent again. The
files without which nothing loads come last, so that who sees them sees all. A Hub compares content itself and makes one
commit.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from training.process import REFUSED, JobError
from training.remote import Remote, Trouble

LEDGER: Final = ".castra-upload.json"
LAST: Final = ("config.json", "model.safetensors.index.json")
THREADS: Final = 4
"""Files on their way at once, each in parts of its own."""


def push(folder: Path, target: str) -> dict[str, Any]:
    """Upload a folder to s3://bucket/prefix or hf://name. Returns {"target", "sent", "kept"}: numbers of files.

    A Hub's library may have been told that it is offline, so it runs in a process of its own. Raises JobError.
    """
    if target.startswith("s3://"):
        return to_s3(folder, target)
    if not target.startswith("hf://"):
        raise JobError(f"export.push_to: {target} is neither s3://bucket/prefix nor hf://name")
    if not os.environ.get("HF_TOKEN"):
        raise JobError(f"{target} needs a token: put one with write access into the environment variable HF_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "training.export.upload", str(folder), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word of it"]
        raise JobError(lines[-1])
    count = sum(1 for path in folder.rglob("*") if path.is_file())
    return {"target": target, "sent": count, "kept": 0}


def to_s3(folder: Path, target: str) -> dict[str, Any]:
    """Upload a folder's files below s3://bucket/prefix. Raises JobError when S3 refuses or cannot be reached."""
    if not urlsplit(target).netloc:
        raise JobError(f"export.push_to: {target} names no bucket; write s3://bucket/prefix")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    try:
        shelf = _Shelf(Remote(target.rstrip("/")))
        first = [path for path in files if path.name not in LAST]
        last = [folder / name for name in LAST if folder / name in files]
        with ThreadPoolExecutor(THREADS) as threads:
            sent = sum(threads.map(lambda path: shelf.put(path, path.relative_to(folder).as_posix()), first))
        sent += sum(shelf.put(path, path.name) for path in last)
        shelf.note()
    except Trouble as problem:
        raise JobError(f"{problem}; the export itself is whole, start again to upload it") from problem
    return {"target": target, "sent": sent, "kept": len(files) - sent}


class _Shelf:
    """The objects below a prefix of a bucket, and the ledger there of what was uploaded: size, SHA-256, version."""

    def __init__(self, remote: Remote) -> None:
        self._remote, self._lock = remote, threading.Lock()
        self._there = remote.found()
        self._ledger: dict[str, list[Any]] = {}
        if LEDGER in self._there:
            with contextlib.suppress(ValueError):
                self._ledger = dict(json.loads(remote.read(LEDGER)))

    def put(self, path: Path, name: str) -> bool:
        """Upload a file unless the same is there; returns whether it was sent."""
        with path.open("rb") as file:
            same = [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
        there = self._there.get(name)
        if there and self._ledger.get(name) == [*same, there.etag] and there.size == same[0]:
            return False
        self._remote.upload(name, path)
        now = self._remote.found(name)[name]
        with self._lock:
            self._ledger[name] = [*same, now.etag]
        self.note()
        return True

    def note(self) -> None:
        """Write the ledger, so that an upload that is killed does not begin anew."""
        with self._lock:
            self._remote.write(LEDGER, json.dumps(self._ledger, sort_keys=True).encode())


def to_hub(folder: Path, target: str) -> None:
    """Upload a folder to a Hub as one commit, making a private repository where there is none. Raises JobError."""
    try:
        from huggingface_hub import HfApi
    except ImportError as lacking:
        raise JobError(f"{target} needs huggingface_hub on the nodes: install it in the image") from lacking
    name = target.removeprefix("hf://")
    api = HfApi(token=os.environ.get("HF_TOKEN"))
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export by Castra")
    except Exception as problem:  # its HTTP client, which changes with its version, raises its own
        raise JobError(f"{target}: {_said(problem)}; the export itself is whole, start again to upload it") from problem


def _said(problem: BaseException) -> str:
    """Return the first line of what a library says."""
    text = str(problem).strip().splitlines()
    return text[0].rstrip(".") if text else type(problem).__name__


def main(words: Sequence[str]) -> int:
    """Upload what the command line names and return the exit code: 0 done, 2 refused with one sentence."""
    if len(words) != 2:
        print("this program takes two arguments: a folder and s3://bucket/prefix or hf://name", file=sys.stderr)
        return REFUSED
    folder, target = Path(words[0]), words[1]
    try:
        if not folder.is_dir():
            raise JobError(f"{folder} is no folder")
        if target.startswith("hf://"):
            to_hub(folder, target)
        else:
            print(push(folder, target))
    except JobError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
