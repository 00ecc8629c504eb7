"""A rank's sign of life in a file of its node, where the node's program reads it for its metrics.

A file, since it outlives the rank: of one that is stopped, or stuck in C code, it gets older and is still there.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.supervise.beat import Beat

if TYPE_CHECKING:
    import torch

VARIABLE: Final = "CASTRA_BEATS"
"""Names the folder; none is left without."""


def leave_mark(beat: Beat, done: int, device: "torch.device") -> None:
    """Write what a rank is doing, `done` being its last whole step; a disk that is full or gone is no error."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    place = Path(folder) / f"rank-{beat.rank}.json"
    told = {"rank": beat.rank, "phase": beat.phase, "age_s": beat.age_s, "done": done, "at": time.monotonic()}
    with contextlib.suppress(OSError):
        fresh = place.with_suffix(".new")
        fresh.write_text(json.dumps(told | {"memory_bytes": _memory_bytes(device)}))
        fresh.replace(place)


def _memory_bytes(device: "torch.device") -> int:
    """What this process holds now: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_reserved(device)
    with contextlib.suppress(OSError, ValueError):  # no /proc
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
