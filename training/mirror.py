"""A job's output on its way from this node's disk to S3, while the program works, in an order that survives crashes.

A checkpoint becomes one by its manifest, so the manifest goes up last: by the node of rank 0, once every node has said
that its own files are there. The job is done once result.json exists, so that goes up after everything else. What the
program deletes is deleted in S3 too, a checkpoint only when a newer one is complete there.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from training.remote import Remote, Trouble

PERIOD_S: Final = 3.0
"""Between two passes; a checkpoint does not wait for the next one."""
LOOK_S: Final = 0.25
SMALL: Final = 8 << 20
"""Bytes up to which a file that grows is sent again and again; a bigger one waits until it has stopped growing."""
PATIENCE_S: Final = 600.0
"""How long S3 may fail before there is no use in going on."""
CHECKPOINTS, MANIFEST, RESULT = "checkpoints", "manifest.json", "result.json"
Version = tuple[int, int]
"""Size (bytes) and time of modification (ns) of a file."""


class Mirror:
    """Keeps a folder of S3 like a folder of this node's.

    `there` is what S3 has at the start, `known` the versions of those files that are on this disk, `uploaded` is called
    with each checkpoint whose files of this node are in S3, `trouble` with a sentence and whether to give up.
    """

    def __init__(
        self,
        remote: Remote,
        folder: Path,
        marks: Path,
        place: tuple[int, int],
        uploaded: Callable[[str], None],
        trouble: Callable[[str, bool], None],
    ) -> None:
        self._remote, self._folder, self._marks = remote, folder, marks
        self._rank, self._nodes = place
        self._uploaded, self._trouble = uploaded, trouble
        self._sent: dict[str, Version] = {}
        self._told: set[str] = set()
        self._heard: dict[str, set[int]] = {}
        self._remote_steps: set[str] = set()
        self._complete: set[str] = set()
        self._unsettled: dict[str, Version] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def know(self, there: Iterable[str]) -> None:
        """Take note, before the start, of what S3 has; the same files that are on this disk need not go up."""
        for name in there:
            if step := step_of(name):
                self._remote_steps.add(step)
            with contextlib.suppress(FileNotFoundError):
                self._sent[name] = _version(self._folder / name)
        for step in self._finished():
            self._told.add(step)
            self._complete.add(step)
            self._mark(step)

    def begin(self) -> None:
        """Start mirroring, every few seconds."""
        self._thread.start()

    def heard(self, rank: int, step: str) -> None:
        """A node's files of a checkpoint are in S3."""
        self._heard.setdefault(step, set()).add(rank)

    def rest(self, wait_s: float | None = None) -> bool:
        """Stop mirroring; returns whether the pass that was under way has ended."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def send(self, *, last: bool = False) -> None:
        """Do one pass; the `last` one of this node leaves no file behind. Raises `Trouble`."""
        finished = self._finished()  # first: what is sent after a manifest was seen is at least as new as that
        complete = last or any(step not in self._told for step in finished)  # its journal must be as new as itself
        for name in self._files():
            self._send(name, growing=complete)
        for step in finished:
            if step not in self._told:
                self._told.add(step)
                self._uploaded(step)
                if self._rank:
                    self._mark(step)
        if self._rank == 0:
            self.seal()

    def seal(self) -> None:
        """Make the checkpoints complete of which all nodes have sent their files, and clean up. Raises `Trouble`."""
        for step in self._finished():
            if step not in self._complete and self._is_sent(step):
                name = f"{CHECKPOINTS}/{step}/{MANIFEST}"
                with contextlib.suppress(FileNotFoundError):
                    self._remote.write(name, (self._folder / name).read_bytes())
                    self._complete.add(step)
                    self._mark(step)
        self._clean()

    def crown(self) -> None:
        """Send result.json, the sign that all is done. Raises `Trouble`."""
        with contextlib.suppress(FileNotFoundError):
            if self._sent.get(RESULT) != _version(self._folder / RESULT):
                self._remote.write(RESULT, (self._folder / RESULT).read_bytes())

    def _work(self) -> None:
        since, due = None, 0.0
        while not self._end.wait(LOOK_S):
            if time.monotonic() < due and (since or not self._news()):
                continue
            due = time.monotonic() + PERIOD_S
            try:
                self.send()
                since = None
            except Trouble as problem:
                first, since = since is None, since or time.monotonic()
                given_up = not problem.passing or time.monotonic() - since > PATIENCE_S
                if first or given_up:
                    self._trouble(str(problem), given_up)
                if given_up:
                    return

    def _news(self) -> bool:
        """Whether there is a checkpoint to send, or one that all nodes have sent."""
        for step in self._finished():
            if step not in self._told or (step not in self._complete and self._is_sent(step)):
                return True
        return False

    def _is_sent(self, step: str) -> bool:
        return self._rank == 0 and len(self._heard.get(step, ())) == self._nodes

    def _send(self, name: str, *, growing: bool) -> None:
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, and so the next pass deletes it there
            version = _version(path)
            if self._sent.get(name) == version:
                return
            if version[0] <= SMALL:
                self._remote.write(name, path.read_bytes())
            elif growing or step_of(name) or self._unsettled.get(name) == version:
                self._remote.upload(name, path)
            else:
                self._unsettled[name] = version
                return
            self._sent[name] = version
            if step := step_of(name):
                self._remote_steps.add(step)

    def _files(self) -> Iterator[str]:
        """What is to be sent by every pass: neither manifests nor result.json, nothing unfinished."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            step = step_of(name)
            if step:
                wanted = path.name != MANIFEST or name.count("/") > 2
            else:
                wanted = name != RESULT and not any(part.startswith(".") for part in name.split("/"))
            if wanted and path.is_file():
                yield name

    def _finished(self) -> list[str]:
        """The checkpoints on this disk, oldest first."""
        return sorted(path.parent.name for path in self._folder.glob(f"{CHECKPOINTS}/step-*/{MANIFEST}"))

    def _clean(self) -> None:
        newest = max(self._complete, default="")
        here = {path.name for path in self._folder.glob(f"{CHECKPOINTS}/step-*")}
        for step in sorted(self._remote_steps - here):
            if step < newest:
                names = sorted(
                    self._remote.found(f"{CHECKPOINTS}/{step}/"), key=lambda name: not name.endswith(MANIFEST)
                )
                self._remote.delete(names)
                self._remote_steps.discard(step)
                self._complete.discard(step)
        vanished = [name for name in self._sent if not (self._folder / name).exists()]
        self._remote.delete([name for name in vanished if not step_of(name)])
        for name in vanished:
            del self._sent[name]

    def _mark(self, step: str) -> None:
        self._marks.mkdir(parents=True, exist_ok=True)
        (self._marks / step).touch()


def step_of(name: str) -> str:
    """Return the checkpoint a relative name belongs to, "" if to none."""
    found = re.match(rf"{CHECKPOINTS}/(step-\d+)/", name)
    return found[1] if found else ""


def _version(path: Path) -> Version:
    there = path.stat()
    return there.st_size, there.st_mtime_ns
