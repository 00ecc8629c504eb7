"""Plant a slow node among hosts in network namespaces, again and again, and count how often it is found by name.

    python -m benchmarks.slow_node                       # 10 runs of each: healthy, slow link, slow process, slow way
    python -m benchmarks.slow_node --runs 3 --nodes 4 --rate 200mbit
    python -m benchmarks.slow_node --runs 0 --sweep 3    # only what the collective sweep costs

Needs root. A link is limited with tc (tbf of a host, htb for one way), a process gets 2 % of a CPU (cgroups of
version 1).
Exit code 1 unless every planted one is found every time, and nobody is accused where all is well.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training.checks.namespaces import Cluster, possible


def main() -> int:
    """Run it; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=10)
    options.add_argument("--sweep", type=int, default=1, help="collective sweeps to time")
    options.add_argument("--nodes", type=int, default=4)
    options.add_argument("--rate", default="100mbit", help="of the slow link, as tc spells it")
    options.add_argument("--only", choices=["healthy", "link", "process", "way"])
    told = options.parse_args()
    if not possible():
        print("this needs root, iproute2 and util-linux", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="castra-slow-") as place:
        cluster = Cluster(Path(place), told.nodes)
        try:
            _sweeps(cluster, told.sweep)
            return int(not _trials(cluster, told))
        finally:
            cluster.close()


def _trials(cluster: Cluster, told: argparse.Namespace) -> bool:
    """All the trials; whether every one came out right."""
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "healthy": lambda _: cluster.run("training.checks.pairs"),
        "link": lambda slow: _limited(cluster, slow, told.rate, None),
        "process": lambda slow: cluster.run("training.checks.pairs", throttled=slow),
        "way": lambda slow: _limited(cluster, slow, told.rate, (slow + 1) % told.nodes),
    }
    well = True
    for kind, run in kinds.items():
        if told.only in (None, kind):
            right = sum(_one(kind, run, number, told.nodes) for number in range(told.runs))
            print(f"{kind}: right {right} of {told.runs}", flush=True)
            well = well and right == told.runs
    return well


def _one(kind: str, run: Callable[[int], dict[str, Any]], number: int, nodes: int) -> bool:
    """One trial, told on a line; whether it came out right."""
    slow, begun = number % nodes, time.monotonic()
    found = run(slow)
    accused = [one["host"] for one in found["slow"]]
    ways = [sorted(one["hosts"]) for one in found["links"]]
    other = f"node{(slow + 1) % nodes}"
    right = {
        "healthy": not accused and not ways,
        "way": not accused and ways == [sorted([f"node{slow}", other])],
    }.get(kind, accused == [f"node{slow}"] and not ways)
    speeds = [measured["gbps"] for made in found["rounds"] for measured in made]
    print(
        f"  {kind} {slow}: nodes {accused}, ways {ways}; typical {found['typical_gbps']:.3f}, {min(speeds):.4f} to "
        f"{max(speeds):.3f} GB/s; {len(found['rounds'])} rounds, {found['seconds']:.1f} s of measuring, "
        f"{time.monotonic() - begun:.1f} s in all{'' if right else '  WRONG'}",
        flush=True,
    )
    return right


def _limited(cluster: Cluster, slow: int, rate: str, to: int | None) -> dict[str, Any]:
    cluster.limit(slow, rate, to)
    try:
        return cluster.run("training.checks.pairs")
    finally:
        cluster.limit(slow, None)


def _sweeps(cluster: Cluster, runs: int) -> None:
    """Time the sweep of collectives."""
    for _ in range(runs):
        begun = time.monotonic()
        found = cluster.run("training.checks.network")
        best = max(row["busbw_gbps"] for row in found["rows"] if row["collective"] == "all_reduce")
        print(
            f"sweep: {len(found['rows'])} rows in {found['seconds']:.1f} s, {time.monotonic() - begun:.1f} s in all, "
            f"best all-reduce {best:.2f} GB/s, left out {found['left_out']}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
