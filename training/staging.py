"""What a job reads and writes, where the nodes share no folder: inputs from S3 to this node's disk, output back to S3.

    $CASTRA_SCRATCH/<job>/node<rank>/inputs/<name>/…    as in S3; of a training run's output only the newest checkpoint
    $CASTRA_SCRATCH/<job>/node<rank>/output/…           begins as what S3 has, goes on to be mirrored there; of the
                                                        checkpoints the newest and the best
    $CASTRA_SCRATCH/<job>/node<rank>/uploaded/step-…    says that this node's files of a checkpoint are in S3

A path, or a file:// URL, is on a file system all nodes share and is used as it is.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from training.contract import Node
from training.mirror import CHECKPOINTS, MANIFEST, RESULT, Mirror, step_of
from training.process import JobError
from training.remote import Found, Remote, Trouble

SCRATCH: Final = Path(tempfile.gettempdir(), f"castra-{os.getuid()}")
"""Of this user's, for on a cluster's node others have theirs."""
TRIES: Final = 5
"""How often the last upload is tried; the pause before another try doubles, from a second on."""
HURRY_S: Final = 5.0
"""How long an upload may go on once the job has failed."""


class Stage:
    """A job's inputs and output on this node.

    `uploaded` is called with the name of each checkpoint whose files of this node are in S3; `trouble` with a sentence,
    and whether there is no use in going on.
    """

    def __init__(self, job: str, node: Node, uploaded: Callable[[str], None], trouble: Callable[[str, bool], None]):
        self._node, self._uploaded, self._trouble = node, uploaded, trouble
        self._scratch = Path(os.environ.get("CASTRA_SCRATCH", SCRATCH)) / job / f"node{node.rank}"
        self._mirror: Mirror | None = None
        self._url = ""

    def bring(self, inputs: Mapping[str, str], output: str) -> tuple[dict[str, str], str]:
        """Bring everything here and return the paths of inputs and output.

        Raises JobError for what is not there or cannot be reached, `Trouble` when S3 does not answer.
        """
        self._url = output
        places = {name: str(self._input(name, url)) for name, url in inputs.items()}
        return places, str(self._begin_with(output) if output.startswith("s3://") else _path(output))

    def env(self) -> dict[str, str]:
        """What the program has to know: that nobody else sees its output folder, where it goes, and what is there."""
        if self._mirror:
            uploaded = str(self._scratch / "uploaded")
            return {"CASTRA_PRIVATE_OUTPUT": "1", "CASTRA_OUTPUT_URL": self._url, "CASTRA_UPLOADED": uploaded}
        if self._node.platform == "sagemaker" and self._node.nodes > 1:  # which copies each node's folder to S3 itself
            return {"CASTRA_PRIVATE_OUTPUT": "1"}
        return {}

    def begin(self) -> None:
        """The program starts to write."""
        if self._mirror:
            self._mirror.begin()

    def heard(self, rank: int, step: str) -> None:
        """A node's files of a checkpoint are in S3."""
        if self._mirror:
            self._mirror.heard(rank, step)

    def finish(self, *, hurry: bool) -> str:
        """Send what this node has not sent yet; in a `hurry` only what goes at once. Returns why that failed, or ""."""
        mirror = self._mirror
        if mirror is None or (not mirror.rest(HURRY_S if hurry else None)):
            return ""
        return _persistently(lambda: mirror.send(last=not hurry), 1 if hurry else TRIES)

    def publish(self, *, whole: bool) -> str:
        """On rank 0, after all nodes: make complete what is complete, `whole` the job's result too."""
        mirror = self._mirror
        if mirror is None:
            return ""
        return _persistently(mirror.seal, TRIES) or (_persistently(mirror.crown, TRIES) if whole else "")

    def clear(self) -> None:
        """Remove this node's copies of a finished job."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._scratch.parent.rmdir()

    def _input(self, name: str, url: str) -> Path:
        if not url.startswith("s3://"):
            return _path(url)
        remote, folder = Remote(url), self._scratch / "inputs" / name
        there = remote.found()
        if not there:
            raise JobError(f"the input {name!r} is not at {url}: nothing is there")
        index = self._scratch / f"input-{name}.json"
        if "" in there:
            single = url.rstrip("/").rpartition("/")[2]
            remote.fetch({"": there[""]}, folder, index, single)
            return folder / single
        remote.fetch(_needed(remote, there), folder, index)
        return folder

    def _begin_with(self, output: str) -> Path:
        """Make the output folder what S3 has of it, and nothing else."""
        remote, folder = Remote(output), self._scratch / "output"
        there = remote.found()
        needed = {RESULT: there[RESULT]} if RESULT in there else _needed(remote, there, best=True)
        for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif path.relative_to(folder).as_posix() not in needed:
                path.unlink()
        shutil.rmtree(self._scratch / "uploaded", ignore_errors=True)
        remote.fetch(needed, folder, self._scratch / "output.json")
        place = (self._node.rank, self._node.nodes)
        marks = self._scratch / "uploaded"
        self._mirror = Mirror(remote, folder, marks, place, self._uploaded, self._trouble)
        self._mirror.know(there)
        return folder


def _needed(remote: Remote, there: Mapping[str, Found], *, best: bool = False) -> dict[str, Found]:
    """Return what of a folder a program needs: all of it, but of the checkpoints only the newest complete one.

    A run that goes on needs the `best` one too: what is not on this disk will be deleted in S3.
    """
    wanted, newest = {""}, ""
    for step in sorted({step for name in there if (step := step_of(name))}, reverse=True):
        told = _manifest(remote, there, f"{CHECKPOINTS}/{step}")
        if told is not None and (not newest or told.get("best")):
            wanted.add(step)
            newest = newest or step
            if told.get("best"):
                break
        if newest and not best:
            break
    return {name: found for name, found in there.items() if step_of(name) in wanted}


def _manifest(remote: Remote, there: Mapping[str, Found], checkpoint: str) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint that is complete in S3, or None."""
    if f"{checkpoint}/{MANIFEST}" not in there:
        return None
    told: dict[str, Any] = json.loads(remote.read(f"{checkpoint}/{MANIFEST}"))
    sizes = {name: there[f"{checkpoint}/{name}"].size for name in told["files"] if f"{checkpoint}/{name}" in there}
    return told if sizes == {name: size for name, (size, _) in told["files"].items()} else None


def _persistently(work: Callable[[], None], tries: int) -> str:
    """Do it, again if S3 has passing trouble; returns why it failed in the end, or ""."""
    for pause in range(tries):
        try:
            work()
        except Trouble as problem:
            why = str(problem)
            if problem.passing and pause + 1 < tries:
                time.sleep(2**pause)
                continue
            return f"what this node wrote could not be saved: {why}; start the job again, it resumes from what is there"
        break
    return ""


def _path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        raise JobError(f"{url} is neither s3://… nor a path on a file system that all nodes share")
    return Path(unquote(parts.path) if parts.scheme else url)
