"""The folder in which one build works, and the quiet in which it is cleared up after."""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from clusters import builds, keeper, ledger
from clusters.base import ClusterError
from clusters.ledger import Entry
from store import Store
from store.objects import state_folder


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let nobody who is impatient interrupt the clearing up: some send their signal twice."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


@contextlib.contextmanager
def cleared(store: Store, entry: Entry) -> Iterator[None]:
    """Leave nothing of a build, however it ends; what cannot be cleared now stays in the ledger, for the reaper."""
    try:
        yield
    finally:
        with undisturbed(), contextlib.suppress(ClusterError):
            builds.end(entry)
            ledger.gone(store, entry)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder for one build; those of dead processes are removed.

    Its `tmp` leads to a folder with a short name, which is the `TMPDIR` of what works for the build.
    """
    above = state_folder() / "images"
    above.mkdir(parents=True, exist_ok=True)
    for left in above.iterdir():
        if not Path(f"/proc/{left.name.split('-')[1]}").exists() and not keeper.alive(left):
            _remove(left)
    folder = Path(tempfile.mkdtemp(prefix=f"build-{os.getpid()}-", dir=above))
    (folder / "tmp").symlink_to(tempfile.mkdtemp(prefix="castra-"))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a build's folder, and end what still works in it: Ansible's workers outlive all who were killed."""
    short = (folder / "tmp").resolve()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={short}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
    for place in (short, folder):
        shutil.rmtree(place, ignore_errors=True)
