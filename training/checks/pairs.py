"""Find the slow node, by name: nodes measure their network in pairs, see `training.checks.search` for who with whom.

    torchrun --nproc-per-node 2 -m training.checks.pairs job.json

All ranks of a node send to and receive from their twins on the other node at once, so that every network card works.
"""

import os
import socket
import time
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, Final

from training import ranks
from training.checks.collectives import exchange
from training.checks.finding import Finding
from training.checks.search import Pair, Search
from training.job import NodeJob, progress, say
from training.ranks import World

SIZE: Final = {"cpu": 2 << 20, "cuda": 128 << 20}
"""Bytes of a message."""
SLOW_FACTOR: Final = {"cpu": 4.0, "cuda": 1.5}
"""gloo's speed varies with whatever else the CPUs do: threefold between healthy hosts on one busy machine."""
BATCHES: Final = 5
BATCH_S: Final = 0.08
MOST_PER_BATCH: Final = 200
SLOW_S: Final = 1.0
"""A message that takes so long is sent a few times only."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank, as all know it."""

    rank: int
    node: int
    local_rank: int
    host: str


def find(job: NodeJob, world: World) -> None:
    """Measure pairs until every node is cleared or accused, and write who is slow."""
    began = time.perf_counter()
    places = world.gather(Place(world.rank, world.node, world.local_rank, socket.gethostname()))
    if world.rank == 0:
        say("measuring", nodes=world.nodes, ranks=world.size)
    search = Search(world.nodes, SLOW_FACTOR[world.device.type])
    by_rank: list[dict[tuple[Pair, int], float]] = []
    while (pairs := search.next()) and world.nodes > 1:
        speeds = _round(pairs, places, world)
        by_rank.append(speeds)
        search.tell({pair: _of_node(pair, speeds) for pair in pairs})
        if world.rank == 0:
            now = search.rounds[-1].values()
            progress(len(search.rounds), len(search.rounds), "round", slowest_gbps=min(now), fastest_gbps=max(now))
    world.part()
    if world.rank == 0:
        found = _result(search, by_rank, places)
        for slow in found["slow"]:
            say("slow node", **slow)
        told = [asdict(finding) for finding in findings(found)]
        job.finish(found | {"findings": told, "seconds": time.perf_counter() - began})


def findings(result: dict[str, Any]) -> list[Finding]:
    """Say what a result.json of this program means."""
    found = [
        Finding(
            "refuse",
            f"it exchanges {slow['gbps']:.3g} GB/s with others, where {slow['typical_gbps']:.3g} is usual",
            node=slow["host"],
            device=", ".join(f"rank {number} of the node" for number in slow["devices"]),
            todo="replace the node",
            action="isolate",
        )
        for slow in result["slow"]
    ]
    for link in result["links"]:
        speeds = f"{link['gbps']:.3g} GB/s, where {link['typical_gbps']:.3g} is usual"
        what = f"the way between {' and '.join(link['hosts'])} carries {speeds}, and either is fast with others"
        found.append(Finding("refuse", what, node=link["hosts"][1], todo="place the nodes anew: one of the two goes"))
    return found


def _round(pairs: list[Pair], places: list[Place], world: World) -> dict[tuple[Pair, int], float]:
    """Measure these pairs at once; returns GB/s, one direction, by pair and local rank, the same on every rank."""
    twins = {(place.node, place.local_rank): place.rank for place in places}
    mine: tuple[Pair, int, float] | None = None
    world.barrier()
    for pair in pairs:
        if world.node in pair:
            other = pair[1] if world.node == pair[0] else pair[0]
            mine = pair, world.local_rank, _speed(twins[other, world.local_rank], world)
    speeds: dict[tuple[Pair, int], float] = {}
    for told in world.gather(mine):
        if told:  # by both ends, of which the slower one counts
            pair, local_rank, speed = told
            speeds[pair, local_rank] = min(speed, speeds.get((pair, local_rank), speed))
    return speeds


def _speed(peer: int, world: World) -> float:
    """Exchange messages with a rank; returns GB/s, one direction.

    All batches but the slowest count: one hiccup is nobody's fault, but who works by fits and starts is slow.
    """
    import torch

    sent = torch.ones(SIZE[world.device.type] // 4, device=world.device)
    got = torch.empty_like(sent)
    exchange(sent, peer, got, peer)  # connects
    once = _timed(sent, got, peer, 1, world)
    # both must send equally often: the lower rank's clock decides
    mine = torch.tensor([once], device=world.device)
    theirs = torch.empty_like(mine)
    exchange(mine, peer, theirs, peer)
    agreed = float(mine if world.rank < peer else theirs)
    repeats, batches = min(max(2, int(BATCH_S / agreed)), MOST_PER_BATCH), BATCHES
    if agreed > SLOW_S:
        repeats, batches = 1, 2
    times = sorted(_timed(sent, got, peer, repeats, world) for _ in range(batches))
    return sent.nbytes / mean(times[:-1]) / 1e9


def _timed(sent: Any, got: Any, peer: int, repeats: int, world: World) -> float:
    """Seconds of one exchange, the mean of some."""
    import torch

    began = time.perf_counter()
    for _ in range(repeats):
        exchange(sent, peer, got, peer)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return (time.perf_counter() - began) / repeats


def _of_node(pair: Pair, speeds: dict[tuple[Pair, int], float]) -> float:
    """What two nodes exchange, all their ranks together: the slowest rank decides when they are done."""
    own = [speed for (of, _), speed in speeds.items() if of == pair]
    return min(own) * len(own)


def _result(search: Search, by_rank: list[dict[tuple[Pair, int], float]], places: list[Place]) -> dict[str, Any]:
    verdict = search.verdict
    hosts = {place.node: place.host for place in places}
    typical = {"typical_gbps": verdict.typical}
    return {
        "nodes": search.nodes,
        "members": [asdict(place) for place in places],
        "hosts": [hosts[node] for node in sorted(hosts)],
        "rounds": [
            [{"nodes": list(pair), "gbps": speed} for pair, speed in measured.items()] for measured in search.rounds
        ],
        "slow": [
            {"node": node, "host": hosts[node], "gbps": speed, **typical, "devices": _slow_ranks(node, by_rank, search)}
            for node, speed in verdict.nodes.items()
        ],
        "links": [
            {"nodes": list(pair), "hosts": [hosts[node] for node in pair], "gbps": speed, **typical}
            for pair, speed in verdict.links.items()
        ],
        "unsettled": [hosts[node] for node in verdict.unsettled],
        **typical,
    }


def _slow_ranks(node: int, by_rank: list[dict[tuple[Pair, int], float]], search: Search) -> list[int]:
    """The local ranks that make a node slow; none if all are, as then it is not one device."""
    own: dict[int, list[float]] = {}
    for measured in by_rank:
        for (pair, local), speed in measured.items():
            if node in pair:
                own.setdefault(local, []).append(speed)
    usual = search.verdict.typical / max(1, len(own))
    slow = [local for local, speeds in sorted(own.items()) if median(speeds) * search.slow_factor < usual]
    return slow if len(slow) < len(own) else []


if __name__ == "__main__":
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    ranks.run(find)
