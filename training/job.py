"""The contract between the control plane and the nodes: one resolved job.json in, one result.json out.

    python -m training.run job.json                     # one process
    torchrun --nproc-per-node 2 -m training.run job.json

A program writes everything under `output`, `result.json` last and atomically: its presence means the work is done,
whatever the exit code says. Progress goes to standard output as lines that start with `MARK`, so that every kind of
cluster can follow a job by its log alone.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

MARK = "@castra "


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What one program is asked to do. Paths are as the nodes see them."""

    spec: dict[str, Any]
    output: Path
    inputs: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Load a job.json: `{"spec": {…}, "inputs": {"dataset": "/…"}, "output": "/…"}`."""
        told = json.loads(Path(path).read_text())
        inputs = {name: Path(place) for name, place in told.get("inputs", {}).items()}
        return cls(spec=told["spec"], output=Path(told["output"]), inputs=inputs)

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json, the sign that the work is complete."""
        write_json(self.output / "result.json", result)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half of it, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("w") as out:
        json.dump(value, out, indent=1, sort_keys=True, allow_nan=False)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(path)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def progress(done: int, total: int, unit: str, **metrics: float) -> None:
    """Tell whoever follows the log how far the work is: `done` of `total` `unit`s, and what was measured."""
    _tell({"done": done, "total": total, "unit": unit, "metrics": metrics})


def say(event: str, **facts: Any) -> None:
    """Tell whoever follows the log that something worth a line in the run's story happened."""
    _tell({"event": event, **facts})


def _tell(fact: dict[str, Any]) -> None:
    """Write a line together with its end: under torchrun nothing is buffered, and several ranks write."""
    print(f"{MARK}{json.dumps(fact)}\n", end="", flush=True)
