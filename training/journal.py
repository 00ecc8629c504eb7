"""progress.jsonl: what every finished step measured, one line each, whatever crashed in between."""

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """The lines of a run's steps, in order, each step once."""

    def __init__(self, output: Path, start: int) -> None:
        """Open the journal of a run that stands at step `start`, forgetting what was told of later steps."""
        self._path = output / "progress.jsonl"
        kept = [record for record in self.records() if record["step"] <= start]
        fresh = self._path.with_suffix(".fresh")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in kept))
        fresh.replace(self._path)
        self._file = self._path.open("a")

    def add(self, record: dict[str, Any]) -> None:
        """Append one step."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Put all lines on the disk, so that no checkpoint knows a step the journal lost."""
        os.fsync(self._file.fileno())

    def records(self) -> list[dict[str, Any]]:
        """Return every whole line; a crash may have torn the last."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines() if line.endswith("}")]
