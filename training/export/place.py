"""A folder that appears whole or not at all, and whose making goes on where a crash ended it.

Beside OUT, `.OUT.fresh` is what is being written and `.OUT.plan` says of what: files of another plan are thrown away.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from training.job import sync, write_json

FORMAT: Final = 1
"""Goes up when the same plan gives other bytes."""


def digest_of(files: Iterable[Path], plan: dict[str, Any]) -> str:
    """Return what tells one plan from another: files by name, size and time of modification, and what is made of them.

    The content is not read: whoever changes it in place, with the same size and time, is not seen.
    """
    seen = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    text = json.dumps([FORMAT, seen, plan], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def begin(out: Path, digest: str) -> Path:
    """Return the folder to write to: empty, or with the whole files of an earlier try of the same plan."""
    fresh, plan = _beside(out)
    if _read(plan) != digest:
        shutil.rmtree(fresh, ignore_errors=True)
        write_json(plan, {"digest": digest})
    elif out.exists() and not fresh.exists():
        out.rename(fresh)
    fresh.mkdir(parents=True, exist_ok=True)
    return fresh


def publish(out: Path) -> None:
    """Bring the finished folder to the disk and give it its name, in place of what had it."""
    fresh, _ = _beside(out)
    for path in [*fresh.rglob("*"), fresh]:
        sync(path)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    sync(out.parent)


def end(out: Path) -> None:
    """Forget the plan: all that had to be done with the folder is done."""
    _beside(out)[1].unlink(missing_ok=True)


def _beside(out: Path) -> tuple[Path, Path]:
    return out.with_name(f".{out.name}.fresh"), out.with_name(f".{out.name}.plan")


def _read(plan: Path) -> str | None:
    try:
        told: dict[str, Any] = json.loads(plan.read_text())
    except (OSError, ValueError):
        return None
    return told.get("digest")
