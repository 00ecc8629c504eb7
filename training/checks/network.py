"""Prove the network: every rank reports, five collectives of growing size are timed, and every result is checked.

    torchrun --nproc-per-node 2 -m training.checks.network job.json

result.json holds who is there, what the network is, and the rows that `training.checks.gate` judges;
collectives.csv beside it the same rows. Sizes double from 4 KiB to `checks.largest_mib` of the spec.
"""

import csv
import io
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from training import ranks
from training.checks import bandwidth, fabric
from training.checks.bandwidth import Row
from training.checks.collectives import ITEM, Trial, possible, trial
from training.job import NodeJob, progress, say
from training.process import JobError
from training.ranks import World

SMALLEST: Final = 4096
LARGEST_MIB: Final = {"cpu": 16, "cuda": 2048}
WARM_UPS: Final = 2
BATCHES: Final = 5
FEW_BATCHES: Final = 3
"""Where one operation takes a second or more."""
BATCH_S: Final = 0.01
MOST_PER_BATCH: Final = 50
LIMIT_S: Final = {"cpu": 60.0, "cuda": 300.0}
"""For the whole sweep. A collective that would not end in its part of it is left at the size it has come to."""


def prove(job: NodeJob, world: World) -> None:
    """Measure the collectives on all ranks. Raises JobError when a result is wrong."""
    from torch import distributed

    began = time.perf_counter()
    members = world.gather({"rank": world.rank, "node": world.node, "host": socket.gethostname(), "pid": os.getpid()})
    if world.rank == 0:
        for member in members:
            say("rank", **member)
    sweep = Sweep(world, sizes(job.spec.get("checks", {}).get("largest_mib", "auto"), world))
    rows = list(sweep.rows())
    network = _network(world)
    backend = distributed.get_backend()
    world.part()
    if world.rank == 0:
        _write_csv(job.output / "collectives.csv", rows)
        job.finish(
            {
                "ranks": world.size,
                "nodes": len({member["node"] for member in members}),
                "hosts": sorted({member["host"] for member in members}),
                "members": members,
                "backend": backend,
                **network,
                "rows": rows,
                "left_out": sweep.left_out,
                "seconds": time.perf_counter() - began,
                "correct": True,
            }
        )


def sizes(largest_mib: int | str, world: World) -> list[int]:
    """Return the sizes to measure, in bytes; those without an element for every rank are left out."""
    largest = (LARGEST_MIB[world.device.type] if largest_mib == "auto" else int(largest_mib)) << 20
    doubled = [SMALLEST << power for power in range(max(1, (largest // SMALLEST).bit_length()))]
    return [size for size in doubled if size >= ITEM * world.size]


class Sweep:
    """All collectives over all sizes; every rank must walk through `rows`."""

    def __init__(self, world: World, sizes: list[int]) -> None:
        self.left_out: list[str] = []
        """Sentences on what there was no time for."""
        self._world, self._sizes = world, sizes
        self._ends = time.perf_counter()

    def rows(self) -> Iterator[Row]:
        """Yield what was measured, the all-reduces first; the same on every rank."""
        names = possible(self._world)
        for number, collective in enumerate(names):
            self._ends = time.perf_counter() + LIMIT_S[self._world.device.type] / len(names)
            for done, row in enumerate(self._collective(collective), number * len(self._sizes) + 1):
                if self._world.rank == 0:
                    told = {name: row[name] for name in ("bytes", "seconds", "algbw_gbps", "busbw_gbps")}
                    progress(done, len(names) * len(self._sizes), collective, **told)
                yield row

    def _collective(self, collective: str) -> Iterator[Row]:
        for place, size in enumerate(self._sizes):
            ready = trial(collective, size, self._world)
            row, left_s = self._measure(collective, ready)
            yield row
            # the next is twice the size; what is needed at least is its check, warm-ups and few repeats
            if place + 1 < len(self._sizes) and 2 * row["seconds"] * (1 + WARM_UPS + FEW_BATCHES) > left_s:
                self._leave(f"{collective} was given up after {size:,} bytes, which took {row['seconds']:.2g} s")
                return

    def _measure(self, collective: str, ready: Trial) -> tuple[Row, float]:
        """Return the row, by the slowest rank, and the seconds that are left for this collective."""
        ready.run()
        with self._world.agreed():
            self._check(collective, ready)
        ready.forget()
        once = max(self._world.gather(self._timed(ready, WARM_UPS)))
        batches = FEW_BATCHES if once > 1 else BATCHES
        repeats = min(max(1, int(BATCH_S / once)), MOST_PER_BATCH)
        self._world.barrier()
        mine = [self._timed(ready, repeats) for _ in range(batches)]
        told = self._world.gather((mine, self._ends - time.perf_counter()))
        # the slowest rank of each batch counts; the median of the batches, as a shared machine has hiccups
        seconds = median(max(batch) for batch in zip(*(times for times, _ in told), strict=True))
        return bandwidth.row(collective, ready.size, seconds, self._world.size), min(left for _, left in told)

    def _check(self, collective: str, ready: Trial) -> None:
        if wrong := ready.wrong():
            raise JobError(
                f"the {collective} of {ready.size} bytes gave {wrong} wrong values on rank {self._world.rank} "
                f"({socket.gethostname()}); take that node out of the cluster"
            )

    def _timed(self, ready: Trial, repeats: int) -> float:
        """Seconds of one run, the mean of some."""
        _wait(self._world)
        began = time.perf_counter()
        for _ in range(repeats):
            ready.run()
        _wait(self._world)
        return (time.perf_counter() - began) / repeats

    def _leave(self, sentence: str) -> None:
        self.left_out.append(sentence)
        if self._world.rank == 0:
            say("left out", what=sentence)


def overhear() -> Path:
    """Have NCCL write what it does to a file of this process, before it is initialised; return the file."""
    path = Path(tempfile.gettempdir()) / f"castra-nccl-{os.getpid()}.log"
    os.environ["NCCL_DEBUG_FILE"] = str(path)
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    return path


def _network(world: World) -> dict[str, Any]:
    """Return what carries the traffic: gloo's is TCP, NCCL's what it wrote that it chose."""
    if world.device.type == "cpu":
        return {"provider": "tcp", "fabrics": {}}
    path = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    said = path.read_text(errors="replace") if path.is_file() else ""
    if said:
        path.unlink(missing_ok=True)
    found = fabric.fabrics("\n".join(world.gather(fabric.telling(said))))
    return {
        "provider": fabric.common(found.values()),
        "fabrics": {host: asdict(of_host) for host, of_host in found.items()},
    }


def _write_csv(path: Path, rows: list[Row]) -> None:
    """Write the rows as a table, whole or not at all."""
    table = io.StringIO()
    writer = csv.DictWriter(table, ["collective", "bytes", "seconds", "algbw_gbps", "busbw_gbps"])
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(table.getvalue())
    fresh.replace(path)


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize(world.device)


if __name__ == "__main__":
    overhear()
    ranks.run(prove)
