"""Where documents come from: the files of a folder, listed and fingerprinted the same way on every machine.

The control plane reads this module too (is there anything to train on? did it change?), so it needs the
standard library only and imports in milliseconds.
"""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from training.process import JobError

PYTHON_STDLIB = "python-stdlib"

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Installed packages and byte code are not the standard library, and no folder of text has them on purpose."""


class SourceError(JobError):
    """The source cannot be read as asked; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file: its name inside the source (with /), where it lies here, and its size in bytes."""

    name: str
    path: Path
    size: int


def documents(source: str, include: Sequence[str] = ("*",), max_documents: int | None = None) -> list[Document]:
    """List the source's files that match a pattern, sorted by name; `max_documents` are taken evenly over the list.

    `source` is "python-stdlib" or a folder. A pattern without a slash is compared with the file's name, one with a
    slash with its whole name inside the source. Hidden files and folders are left out. Raises SourceError.
    """
    root = _root(source)
    listed = list(_files(root, ""))
    found = sorted((one for one in listed if _matches(one.name, include)), key=lambda one: one.name)
    if not found:
        raise SourceError(_nothing_found(root, include, listed))
    if max_documents is None or max_documents >= len(found):
        return found
    return [found[i * len(found) // max_documents] for i in range(max_documents)]


def inventory(listed: Sequence[Document]) -> dict[str, Any]:
    """Return {"documents", "bytes", "digest"}: the digest is a SHA-256 over every name and content, in order.

    It depends neither on where the files lie nor on their times. Raises SourceError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    total = 0
    for one in listed:
        content = read(one)
        name = os.fsencode(one.name)
        digest.update(b"%d %d\n" % (len(name), len(content)) + name)
        digest.update(content)
        total += len(content)
    return {"documents": len(listed), "bytes": total, "digest": digest.hexdigest()}


def read(document: Document) -> bytes:
    """Return a document's bytes. Raises SourceError when the file is gone or closed to us."""
    try:
        return document.path.read_bytes()
    except OSError as problem:
        raise SourceError(
            f"data.source: {document.path} cannot be read ({problem.strerror}); "
            "make it readable or take it out of the folder"
        ) from problem


def _root(source: str) -> Path:
    if source == PYTHON_STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    if "://" in source:
        raise SourceError(
            f"data.source: {source} is an address, not a folder the nodes can read; "
            "copy it to a file system they share and name that folder"
        )
    root = Path(source).expanduser()
    if root.is_dir():
        return root
    if root.is_file():
        raise SourceError(
            f"data.source: {source} is a file; name its folder {root.parent} and put {root.name} under data.include"
        )
    raise SourceError(f"data.source: there is no folder {source}; {_nearest(root)}")


def _nearest(missing: Path) -> str:
    """Say which existing path comes closest to a missing one."""
    absolute = missing.absolute()
    depth = next(i for i, parent in enumerate(absolute.parents) if parent.is_dir())
    parent = absolute.parents[depth]
    wanted = absolute.relative_to(parent).parts[0]
    try:
        folders = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        folders = []
    close = get_close_matches(wanted, folders, n=1)
    return f"did you mean {parent / close[0]}?" if close else f"the nearest one that exists is {parent}"


def _files(folder: Path, prefix: str) -> Iterator[Document]:
    """Walk a folder; links to folders are not followed (they may loop), links to files are."""
    try:
        entries = list(os.scandir(folder))
    except OSError as problem:
        raise SourceError(
            f"data.source: the folder {folder} cannot be listed ({problem.strerror}); "
            "make it readable for the user who runs the job"
        ) from problem
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED_FOLDERS:
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield Document(prefix + entry.name, Path(entry.path), entry.stat().st_size)


def _matches(name: str, include: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in pattern else last, pattern) for pattern in include)


def _nothing_found(root: Path, include: Sequence[str], listed: list[Document]) -> str:
    said = f"data.include: no file under {root} matches {', '.join(include)}"
    endings = Counter(Path(one.name).suffix or "no ending" for one in listed).most_common(3)
    if not endings:
        return f"{said}; the folder has no files at all"
    return f"{said}; most files there end in {', '.join(f'{ending} ({count})' for ending, count in endings)}"
