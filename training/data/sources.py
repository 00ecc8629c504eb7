"""Where documents come from: files, listed and fingerprinted the same way on every machine.

The control plane reads this module too (is there anything to train on? did it change?), so it needs the standard
library only and imports in milliseconds; boto3 and datasets are imported where a source names s3:// or hf://.
"""

import contextlib
import hashlib
import os
import sqlite3
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from training.process import JobError

PYTHON_STDLIB: Final = "python-stdlib"
S3: Final = "s3://"
HUB: Final = "hf://"

SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Installed packages and byte code are not the standard library, and no folder of text has them on purpose."""
LINES: Final = (".jsonl", ".ndjson", ".json")
"""Endings of files with one JSON object on each line."""
PARQUET: Final = ".parquet"
PACKED: Final = (".gz", ".zst")
"""Endings of files that are compressed as a whole."""
SETTLED_NS: Final = 2_000_000_000
"""A file changed less than this long ago may change again within the clock's tick, so its digest is not remembered."""


class SourceError(JobError):
    """The source cannot be read as asked; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file of a source; of an hf:// source, the data set."""

    name: str
    """Inside its source, with /."""
    place: str
    """A path on this machine, s3://bucket/key or hf://name:split."""
    size: int
    """Bytes; of an hf:// source, rows."""
    source: str
    """As the recipe names it."""
    version: str
    """Another one is another content: the time of modification here (ns), the ETag in S3, the revision on a Hub."""

    @property
    def ending(self) -> str:
        """What it holds: one of LINES, PARQUET, HUB, or "" for one text."""
        if self.place.startswith(HUB):
            return HUB
        plain = self.name.removesuffix(self.packed)
        return next((one for one in (*LINES, PARQUET) if plain.endswith(one)), "")

    @property
    def packed(self) -> str:
        """How it is compressed: one of PACKED, or ""."""
        return next((one for one in PACKED if self.name.endswith(one)), "")


def documents(
    source: str | Sequence[str], include: Sequence[str] = ("*",), max_documents: int | None = None
) -> list[Document]:
    """List the files of a source, or of several, that match a pattern: source by source, sorted by name.

    A source is "python-stdlib", a folder, a file (which need not match), s3://bucket/prefix or hf://name[:split]. A
    pattern without a slash is compared with the file's name, one with a slash with its whole name inside the source.
    Hidden files and folders are left out. Where every file is one text, `max_documents` of them are taken evenly over
    the list; where files have rows, `training.data.join` takes rows. Raises SourceError.
    """
    sources = [source] if isinstance(source, str) else list(source)
    found = [one for name in sources for one in _listed(name, include)]
    if max_documents is None or max_documents >= len(found) or any(one.ending for one in found):
        return found
    return [found[i * len(found) // max_documents] for i in range(max_documents)]


def inventory(listed: Sequence[Document], cache: Path | None = None) -> dict[str, Any]:
    """Return {"documents", "bytes", "digest"}: the digest is a SHA-256 over every name and content, in order.

    It depends neither on where the files lie nor on their times. `cache` is a file that remembers the digests of files
    by path, size and time, so that a second call reads none of them. What lies in S3 or on a Hub is not read: its
    version stands for its content. Raises SourceError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    with _Digests(cache) as known:
        for one in listed:
            name = os.fsencode(one.name)
            digest.update(b"%d %d\n" % (len(name), one.size) + name + known.of(one).encode())
    return {
        "documents": len(listed),
        "bytes": sum(one.size for one in listed if one.ending != HUB),
        "digest": digest.hexdigest(),
    }


def unreadable(place: str, problem: OSError) -> SourceError:
    """Return the sentence for a file that is gone or closed to us."""
    return SourceError(
        f"data.source: {place} cannot be read ({problem.strerror or problem}); "
        "make it readable or take it out of the folder"
    )


def version_of(path: str | Path) -> tuple[int, str]:
    """Return a local file's size and version. Raises SourceError."""
    try:
        there = os.stat(path)  # noqa: PTH116  # a third of the time of Path.stat, for each of a million files
    except OSError as problem:
        raise unreadable(str(path), problem) from problem
    return there.st_size, str(there.st_mtime_ns)


class _Digests:
    """SHA-256 of contents, remembered in a file (SQLite) where one is named."""

    def __init__(self, cache: Path | None) -> None:
        self._known: sqlite3.Connection | None = None
        if cache is None:
            return
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            self._known = sqlite3.connect(cache, timeout=30)
            self._known.execute("create table if not exists files (path primary key, size, version, digest)")
        except (OSError, sqlite3.Error):
            self._known = None  # a cache that cannot be used costs time, nothing else

    def __enter__(self) -> "_Digests":
        return self

    def __exit__(self, *_: object) -> None:
        if self._known is not None:
            with contextlib.suppress(sqlite3.Error):
                self._known.commit()
            self._known.close()

    def of(self, document: Document) -> str:
        if document.place.startswith((S3, HUB)):
            return document.version
        path = str(Path(document.place).absolute())
        size, version = version_of(path)
        if (size, version) != (document.size, document.version):
            raise SourceError(f"{path} changed while it was being listed; start again when it is still")
        return self._asked(path, size, version) or self._told(path, size, version)

    def _asked(self, path: str, size: int, version: str) -> str | None:
        if self._known is None:
            return None
        with contextlib.suppress(sqlite3.Error):
            same = "select digest from files where path = ? and size = ? and version = ?"
            found = self._known.execute(same, (path, size, version)).fetchone()
            return str(found[0]) if found else None
        return None

    def _told(self, path: str, size: int, version: str) -> str:
        try:
            with Path(path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise unreadable(path, problem) from problem
        if self._known is not None and time.time_ns() - int(version) > SETTLED_NS:
            with contextlib.suppress(sqlite3.Error):
                self._known.execute("insert or replace into files values (?, ?, ?, ?)", (path, size, version, digest))
        return digest


def _listed(source: str, include: Sequence[str]) -> list[Document]:
    """Return one source's files, sorted by name."""
    if source.startswith(HUB):
        from training.data.hub import dataset

        return [dataset(source)]
    if source.startswith(S3):
        from training.data.objects import listed

        found = list(listed(source))
    elif Path(source).expanduser().is_file():
        return [_file(Path(source).expanduser(), source)]
    else:
        root = _root(source)
        found = [replace(one, source=source) for one in _files(root, "")]
    matching = [one for one in found if _matches(one.name, include)]
    if not matching:
        raise SourceError(_nothing_found(source, include, found))
    return sorted(matching, key=lambda one: one.name)


def _file(path: Path, source: str) -> Document:
    size, version = version_of(path)
    return Document(path.name, str(path), size, source, version)


def _root(source: str) -> Path:
    if source == PYTHON_STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    if "://" in source:
        raise SourceError(f"data.source: {source} is no address that can be read; give s3://, hf:// or a folder")
    root = Path(source).expanduser()
    if root.is_dir():
        return root
    raise SourceError(f"data.source: there is no folder or file {source}; {_nearest(root)}")


def _nearest(missing: Path) -> str:
    """Say which existing path comes closest to a missing one."""
    absolute = missing.absolute()
    depth = next(i for i, parent in enumerate(absolute.parents) if parent.is_dir())
    parent = absolute.parents[depth]
    wanted = absolute.relative_to(parent).parts[0]
    try:
        names = [entry.name for entry in os.scandir(parent)]
    except OSError:
        names = []
    close = get_close_matches(wanted, names, n=1)
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
            there = entry.stat()
            yield Document(prefix + entry.name, entry.path, there.st_size, "", str(there.st_mtime_ns))


def _matches(name: str, include: Iterable[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in pattern else last, pattern) for pattern in include)


def _nothing_found(source: str, include: Sequence[str], listed: Sequence[Document]) -> str:
    said = f"data.include: no file under {source} matches {', '.join(include)}"
    endings = Counter(Path(one.name).suffix or "no ending" for one in listed).most_common(3)
    if not endings:
        return f"{said}; there are no files at all"
    return f"{said}; most files there end in {', '.join(f'{ending} ({count})' for ending, count in endings)}"
