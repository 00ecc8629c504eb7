"""Measure what this very cluster reaches, for the planner: products, memory, links, disks, on all ranks at once.

    torchrun --nproc-per-node 2 -m training.checks.calibrate job.json

`spec["case"]["program"]` says what is measured; these are also the benchmarks of the `param` cases:

    gemm        matrix products: those of the recipe's own layers, and a sweep of squares and rectangles
    mlp         the recipe's MLP, forward and backward
    attention   the recipe's causal attention, forward and backward
    embedding   look-ups in the recipe's embedding
    memory      the sum of two large arrays; on GPUs copies from and to the host's pinned memory too
    disk        a file written until it is on the disk, and read back, where the output goes (one rank of each node)
    comms       all-reduce and send/receive, inside each node and between nodes
    (empty)     all of these; so it is where another framework's program trains (`spec["case"]["framework"]`)

In result.json a row is `what`, `shape`, `seconds` (the median of some), `gflops` or `gb_per_s`, `rank` and `node`. A
link's rate is what passes it, one direction: all-reduces of `bytes` send 2 (n-1)/n of them through each of n ranks of
a node, and through the network of each of n nodes, as `planner.links` counts. `summary` has the medians over ranks,
`slow` who is behind the others by more than `BEHIND`. All ranks measure at once, as they train, so that cores and
links that are shared are seen shared. It takes a few seconds on CPUs, half a minute on GPUs.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Final

from training import ranks
from training.checks import micro
from training.checks.links import Links
from training.job import NodeJob, progress, say
from training.process import JobError
from training.ranks import World

if TYPE_CHECKING:
    import torch

BEHIND: Final = 1.3
"""A rank that takes this many times as long as the median of all is named."""
MAKERS: Final[Mapping[str, tuple[Callable[[Mapping[str, Any], "torch.device"], Iterable[micro.Work]], ...]]] = {
    "gemm": (micro.gemms,),
    "mlp": (micro.mlps,),
    "attention": (micro.attentions,),
    "embedding": (micro.embeddings,),
    "memory": (micro.memories, micro.hosts),
}
"""What each rank measures by itself."""
PROGRAMS: Final = (*MAKERS, "disk", "comms")
Row = dict[str, Any]


def calibrate(job: NodeJob, world: World) -> None:
    """Measure what the spec's case asks for, and write result.json. Raises JobError."""
    began = time.perf_counter()
    case = job.spec.get("case", {})
    program = str(case.get("program", "")) if case.get("framework", "castra") == "castra" else ""
    if program not in ("", *PROGRAMS):
        known = ", ".join(PROGRAMS)
        raise JobError(f"case.program {program!r} is no measurement: take one of {known}, or leave it empty for all")
    rows: list[Row] = []
    measured = _measured(job, world, (program,) if program else PROGRAMS)
    for number, (what, shape, amounts) in enumerate(measured, 1):
        everyone = [one for one in world.gather(amounts) if one is not None]
        rows += [{"what": what, "shape": shape, **one} for one in everyone]
        if world.rank == 0:
            told = {name: value for name, value in everyone[0].items() if name not in ("rank", "node")}
            progress(number, max(number, _count(job, world, program)), "measurement", **told)
    members = world.gather({"rank": world.rank, "node": world.node, "host": socket.gethostname()})
    facts = _facts(job, world)
    world.part()
    if world.rank == 0:
        slow = behind(rows, members)
        for one in slow:
            say("slow", **one)
        seconds = round(time.perf_counter() - began, 2)
        told = {"program": program, "rows": rows, "summary": summary(rows), "slow": slow, "seconds": seconds}
        job.finish(facts | told | {"members": members})


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """The medians over ranks of each measurement's best shape, in gflops or GB/s, by what was measured."""
    by_shape: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        by_shape[row["what"], row["shape"]].append(row["gflops"] if "gflops" in row else row["gb_per_s"])
    best: dict[str, float] = {}
    for (what, _), rates in by_shape.items():
        best[what] = max(best.get(what, 0.0), median(rates))
    return best


def behind(rows: Iterable[Row], members: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Who takes more than `BEHIND` times as long as the median rank, over all shapes of a measurement, and how much."""
    hosts = {member["rank"]: (member["node"], member["host"]) for member in members}
    by_shape: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        by_shape[row["what"], row["shape"]][row["rank"]] = row["seconds"]
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (what, _), seconds in by_shape.items():
        usual = median_low(seconds.values())
        for rank, mine in seconds.items():
            times[what, rank].append(mine / usual)
    found = []
    for (what, rank), each in times.items():
        if (factor := median(each)) > BEHIND:
            node, host = hosts[rank]
            found.append({"what": what, "rank": rank, "node": node, "host": host, "times": round(factor, 2)})
    return sorted(found, key=lambda one: -one["times"])


def _measured(job: NodeJob, world: World, programs: Iterable[str]) -> Iterator[tuple[str, str, Row | None]]:
    """Every measurement on this rank, in the same order on all; None where this rank has no part in one."""
    here = {"rank": world.rank, "node": world.node}
    for program in programs:
        if program == "disk":
            yield from _disk(job, world, here)
        elif program == "comms":
            yield from ((what, shape, told and told | here) for what, shape, told in Links(world).measured())
        else:
            for work in _works(job, world, program):
                yield work.what, work.shape, _timed(work, world) | here


def _works(job: NodeJob, world: World, program: str) -> list[micro.Work]:
    return [work for maker in MAKERS[program] for work in maker(job.spec, world.device)]


def _timed(work: micro.Work, world: World) -> Row:
    go = work.prepare()
    world.barrier()
    seconds = micro.Clock(world.device).seconds(go)
    rate = {"gflops": work.flop / seconds / 1e9} if work.flop else {"gb_per_s": work.size / seconds / 1e9}
    return {"seconds": seconds, **rate}


def _disk(job: NodeJob, world: World, here: Row) -> Iterator[tuple[str, str, Row | None]]:
    size = micro.FILE_BYTES[world.device.type]
    world.barrier()
    found: tuple[float, float] | None = None
    with world.agreed():
        if world.local_rank == 0:
            try:
                found = micro.disk_seconds(job.output, size)
            except OSError as problem:
                raise JobError(
                    f"{job.output} on {socket.gethostname()} cannot be measured: {problem.strerror}; make room, or "
                    "make it writable"
                ) from problem
    for what, seconds in zip(("disk write", "disk read"), found or (None, None), strict=True):
        told = None if seconds is None else {"seconds": seconds, "gb_per_s": size / seconds / 1e9, **here}
        yield what, f"{size >> 20} MiB", told


def _count(job: NodeJob, world: World, program: str) -> int:
    """How many measurements there will be."""
    wanted = (program,) if program else PROGRAMS
    alone = sum(len(_works(job, world, one)) for one in wanted if one in MAKERS)
    return alone + 2 * ("disk" in wanted) + ("comms" in wanted) * Links.count(world)


def _facts(job: NodeJob, world: World) -> dict[str, Any]:
    """When and where it was measured, and with what."""
    import torch

    gpu = world.device.type == "cuda"
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": world.device.type,
        "accelerator": torch.cuda.get_device_name(world.device) if gpu else "",
        "cores": os.cpu_count() or 1,
        "precision": job.spec.get("train", {}).get("precision", "fp32"),
        "ranks": world.size,
        "nodes": world.nodes,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    ranks.run(calibrate)
