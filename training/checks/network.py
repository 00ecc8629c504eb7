"""Prove the network: every rank reports, all-reduces of growing size are timed, and their sums are checked.

    torchrun --nproc-per-node 2 -m training.checks.network job.json

Bandwidths as NCCL tests define them (nccl-tests, doc/PERFORMANCE.md): algbw = bytes / seconds, and
busbw = algbw * 2 (n - 1) / n, which is what the slowest link carries whatever the number of ranks n.
"""

import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from training import ranks
from training.job import NodeJob, progress, say
from training.process import JobError
from training.ranks import World

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST: Final = 4096
LARGEST: Final = {"cpu": 16 * 2**20, "cuda": 2 * 2**30}
WARM_UPS: Final = 2
REPEATS: Final = 5


def prove(job: NodeJob, world: World) -> None:
    """Measure all-reduce from 4 KiB to `network.max_bytes` of the spec. Raises JobError when a sum is wrong."""
    from torch import distributed

    largest = job.spec.get("network", {}).get("max_bytes", LARGEST[world.device.type])
    members = world.gather({"rank": world.rank, "node": world.node, "host": socket.gethostname(), "pid": os.getpid()})
    if world.rank == 0:
        for member in members:
            say("rank", **member)
    sizes = [SMALLEST << power for power in range(max(1, (largest // SMALLEST).bit_length()))]
    rows: list[dict[str, float]] = []
    for size in sizes:
        rows.append(_measure(size, world))
        if world.rank == 0:
            progress(len(rows), len(sizes), "size", **rows[-1])
    backend = distributed.get_backend()
    world.part()
    if world.rank == 0:
        job.finish(_result(members, rows, backend))


def _measure(size: int, world: World) -> dict[str, float]:
    """Time the all-reduce of `size` bytes: the slowest rank's mean over the repeats, in seconds and GB/s."""
    import torch
    from torch import distributed

    pattern = torch.arange(size // 4, dtype=torch.float32, device=world.device).remainder_(97)
    with world.agreed():
        _check(pattern, world)
    buffer = torch.zeros_like(pattern)
    for _ in range(WARM_UPS):
        distributed.all_reduce(buffer)
    world.barrier()
    _wait(world)
    began = time.perf_counter()
    for _ in range(REPEATS):
        distributed.all_reduce(buffer)
    _wait(world)
    seconds = max(world.gather((time.perf_counter() - began) / REPEATS))
    speed = size / seconds / 1e9
    return {
        "bytes": size,
        "seconds": seconds,
        "algbw_gbps": speed,
        "busbw_gbps": speed * 2 * (world.size - 1) / world.size,
    }


def _check(pattern: "Tensor", world: World) -> None:
    """Sum `pattern + rank` over the ranks: small whole numbers, exact in fp32, different at every place."""
    from torch import distributed

    total = pattern + world.rank
    distributed.all_reduce(total)
    wrong = int((total != pattern * world.size + world.size * (world.size - 1) / 2).sum())
    if wrong:
        raise JobError(
            f"the all-reduce of {pattern.nbytes} bytes gave {wrong} wrong sums on rank {world.rank} "
            f"({socket.gethostname()}); take that node out of the cluster"
        )


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize(world.device)


def _result(members: list[dict[str, Any]], rows: list[dict[str, float]], backend: str) -> dict[str, Any]:
    return {
        "ranks": len(members),
        "nodes": len({member["node"] for member in members}),
        "hosts": sorted({member["host"] for member in members}),
        "members": members,
        "backend": backend,
        "rows": rows,
        "correct": True,
    }


if __name__ == "__main__":
    ranks.run(prove)
