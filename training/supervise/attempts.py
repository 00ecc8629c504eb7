"""attempts.jsonl: one line per attempt of a run, and one per attempt that hung, with whom to blame."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Attempts:
    """The attempts of a run so far; rank 0 alone writes them."""

    def __init__(self, output: Path) -> None:
        self._path = output / "attempts.jsonl"
        self._told = _lines(self._path)

    @property
    def count(self) -> int:
        """How many were begun before this one."""
        return sum("hang" not in told for told in self._told)

    @property
    def hang(self) -> str:
        """What was said of the attempt before this one if it hung, else ""."""
        return str(self._told[-1].get("hang", "")) if self._told else ""

    def add(self, **facts: Any) -> None:
        """Append a line, and put it on the disk. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as out:
            began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            out.write("\n" * torn + json.dumps({"time": began, **facts}) + "\n")
            out.flush()
            os.fsync(out.fileno())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines; a crash may have torn one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
