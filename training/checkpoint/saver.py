"""Saving while the training goes on: the loop waits for a copy in memory only, a thread does the rest.

No rank's thread gives the checkpoint its name before all ranks' files are on the disk; they agree over a gloo group of
their own. A failure is told on all ranks alike, at the next save or wait, and no older checkpoint is touched by it.
"""

import errno
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from training.checkpoint.image import Image, type_name
from training.checkpoint.manifest import MANIFEST, Identity, Manifest
from training.checkpoint.piece import Piece
from training.checkpoint.places import discard, fresh_of, make_fresh, outdated, path_of, place_of, publish
from training.job import say
from training.process import JobError
from training.ranks import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
UPLOAD_POLL_S: Final = 0.2
PATIENCE: Final = timedelta(hours=1)
"""How much longer than the quickest rank the slowest may write."""
ADVICE: Final = {
    errno.ENOSPC: "; free space or lower train.keep_checkpoints",
    errno.EDQUOT: "; free space or lower train.keep_checkpoints",
    errno.EACCES: "; make the folder writable",
    errno.EPERM: "; make the folder writable",
    errno.EROFS: "; make the folder writable",
}


class Saver:
    """Writes a run's checkpoints and keeps the newest `keep` and the best. All ranks make it and call it alike.

    Where a node program uploads what is written here, it names in the folder CASTRA_UPLOADED what of this node it has
    uploaded: before that a checkpoint is not deleted, and the next one waits, so that one gets there in the end.
    """

    def __init__(self, output: Path, identity: Identity, world: World, keep: int) -> None:
        from torch import distributed

        self._output, self._identity, self._world, self._keep = output, identity, world, keep
        self._group: ProcessGroup | None = None
        if world.size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._image: Image | None = None
        self._tensors: dict[str, dict[str, Any]] = {}
        self._needed = 0
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._hurry = False
        self._saved: int | None = None
        self.seconds: list[float] = []
        """From the beginning of each save until it was complete on the disk."""

    def prepare(self, pieces: Iterable[Piece]) -> None:
        """Take the memory that saves need, so that the first is as quick as the others. Raises JobError."""
        mine = list(pieces)
        with self._world.agreed():
            self._image = Image(mine, pinned=self._world.device.type == "cuda")
        assert self._image is not None
        parts = [
            (piece.name, piece.shape, type_name(piece.local.dtype), piece.local.numel())
            for piece in mine
            if piece.owner
        ]
        every = self._gather((self._world.node, self._image.size, parts))
        nodes = {self._world.node} if self._world.private else {node for node, _, _ in every}
        self._needed = sum(size for node, size, _ in every if node in nodes)
        self._tensors = _agreed_tensors([part for _, _, parts in every for part in parts])

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        extra: dict[str, Any],
        *,
        best: bool = False,
        tidy: bool = True,
    ) -> None:
        """Begin to save a step's pieces and rank 0's `extra`, which is JSON; they may change as soon as this returns.

        `best` protects it until a better one comes. `tidy` deletes old ones, which may have to wait for uploads; where
        there is no time for that, it is left out, of the save before too. Raises the JobError of the save before.
        """
        self._hurry = not tidy
        self.wait()
        if step == self._saved:
            return
        began = time.perf_counter()
        if self._image is None:
            pieces = list(pieces)
            self.prepare(pieces)
        assert self._image is not None
        failure: JobError | None = None
        try:
            self._image.fill(pieces)
        except JobError as refusal:  # the threads tell the other ranks, so that the loop need not wait for them here
            failure = refusal
        manifest = Manifest(step, self._identity, extra, self._tensors, {}, best)
        work = (self._image, manifest, failure, began, tidy)
        self._thread = threading.Thread(target=self._work, args=work, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save that was begun is complete on the disk, on all ranks. Raises JobError if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Wait, and let go of the ranks' group; call it before the ranks part. Raises JobError like `wait`."""
        try:
            self.wait()
        finally:
            self._group, self._image = None, None

    def _work(self, image: Image, manifest: Manifest, failure: JobError | None, began: float, tidy: bool) -> None:
        try:
            self._write(image, manifest, failure)
            self._saved = manifest.step
            self.seconds.append(time.perf_counter() - began)
            if self._world.rank == 0:
                name = path_of(self._output, manifest.step).name
                say("checkpoint", step=manifest.step, name=name, seconds=round(self.seconds[-1], 3))
            if tidy:
                self._prune()
        except BaseException as problem:  # noqa: BLE001  raised where the loop can hear it
            self._problem = problem

    def _write(self, image: Image, manifest: Manifest, unfilled: JobError | None) -> None:
        output, step, keeper = self._output, manifest.step, self._world.keeper
        failure = f"the checkpoint of step {step} cannot be written to"
        fresh, name = fresh_of(output, step), f"rank-{self._world.rank:05d}.safetensors"
        try:
            self._together(failure, lambda: self._begin(step, unfilled))
            told = self._together(failure, lambda: {name: image.write(fresh / name)} if image.size else {})
            manifest.files.update({name: facts for part in told for name, facts in part.items()})
            self._together(failure, lambda: _complete(fresh, manifest, path_of(output, step)) if keeper else None)
        except JobError:
            if keeper:
                shutil.rmtree(fresh, ignore_errors=True)
            raise

    def _begin(self, step: int, unfilled: JobError | None) -> None:
        """Make the folder, if this rank's staging memory has what it should."""
        if unfilled is not None:
            raise unfilled
        if self._world.keeper:
            make_fresh(self._output, step, self._needed)

    def _prune(self) -> None:
        """Delete what is outdated, once it is uploaded where it has to be; not if there is a hurry meanwhile."""
        old = outdated(self._output, self._keep) if self._world.keeper else []
        if uploaded := os.environ.get("CASTRA_UPLOADED"):
            marks = [Path(uploaded) / checkpoint.name for checkpoint in old if (checkpoint / MANIFEST).exists()]
            while True:
                told = self._gather((all(mark.exists() for mark in marks), self._hurry))
                if all(done for done, _ in told):
                    break
                if any(hurry for _, hurry in told):
                    return
                time.sleep(UPLOAD_POLL_S)
        self._together("old checkpoints cannot be deleted from", lambda: discard(old))

    def _together(self, failure: str, work: Callable[[], T]) -> list[T]:
        """Do something on every rank and return what each returned; any rank's failure is a JobError on all."""
        mine: T | None = None
        problem: str | None = None
        try:
            mine = work()
        except JobError as refusal:
            problem = str(refusal)
        except Exception as refusal:  # noqa: BLE001  the other ranks wait to hear of it, whatever it is
            problem = f"{failure} {place_of(self._output)} on {socket.gethostname()}: {_reason(refusal)}"
        every = self._gather((mine, problem))
        sentence = next((told for _, told in every if told is not None), None)
        if sentence is not None:
            raise JobError(sentence)
        return [cast("T", done) for done, _ in every]

    def _gather(self, mine: T) -> list[T]:
        """Return every rank's value, by rank, over the group of the savers alone."""
        if self._group is None:
            return [mine]
        from torch import distributed

        every: list[Any] = [None] * self._world.size
        distributed.all_gather_object(every, mine, group=self._group)
        return every


def _reason(refusal: Exception) -> str:
    if not isinstance(refusal, OSError):
        return repr(refusal)
    return f"{refusal.strerror}{ADVICE.get(refusal.errno or 0, '')}; the checkpoints before it are kept"


def _complete(fresh: Path, manifest: Manifest, final: Path) -> None:
    """Write the manifest beside files that are on the disk, and give the folder its name."""
    manifest.write(fresh)
    publish(fresh, final)


def _agreed_tensors(parts: list[tuple[str, tuple[int, ...], str, int]]) -> dict[str, dict[str, Any]]:
    """Return shape and type of every tensor, if all ranks tell the same and own each value exactly once."""
    tensors: dict[str, dict[str, Any]] = {}
    owned: dict[str, int] = {}
    for name, shape, kind, size in parts:
        facts: dict[str, Any] = {"shape": list(shape), "dtype": kind}
        if tensors.setdefault(name, facts) != facts:
            raise JobError(f"the ranks do not agree what {name} is: {tensors[name]} and {facts}")
        owned[name] = owned.get(name, 0) + size
    for name, facts in tensors.items():
        if owned[name] != (size := math.prod(facts["shape"])):
            raise JobError(f"the ranks own {owned[name]} values of {name}, which has {size}")
    return tensors
