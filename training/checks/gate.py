"""Whether a cluster's network is what the job needs: measurements in, findings out. No torch, no AWS.

Nothing is taken on trust that the figures themselves can tell: the number of ranks follows from busbw / algbw. That is
how a published two-node result of P5 instances turns out to be one node's (awslabs/awsome-distributed-ai 95b939cd,
1.architectures/3.aws-batch: `mpirun -np 8 -N 8` on two nodes; 483.05 / 276.03 = 1.75, so 8 ranks).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from training.checks.bandwidth import Row, ranks_range, wire_rate
from training.checks.fabric import Fabric, common
from training.checks.finding import Finding

PROVEN_FROM: Final = 2 * 2**30
"""Smaller all-reduces say little of the line: 39 % of it at 128 MiB where 16 GiB reach 65 % (P5, two nodes)."""
LINE_FRACTION: Final = 0.5
"""Of the line that a healthy all-reduce reaches, where the catalogue says nothing else."""
WITH_MPI: Final = "build nccl-tests with MPI=1 (after make clean), so that its processes find each other"
TOO_FAST: Final = 1.05
"""Share of the line that no measurement can pass; the rest is clocks and rounding."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the job needs. None is not judged."""

    ranks: int | None
    nodes: int | None
    provider: str | None = None
    """What the traffic between nodes must go through: efa."""
    line_gb_per_s: float | None = None
    """Of one node, one direction. Unit: GB/s."""
    min_fraction: float | None = None
    """Of the line, that large all-reduces must reach; None: `LINE_FRACTION`."""
    nics: int | None = None
    """Network interfaces every node must use."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found besides the measurements."""

    ranks: int | None = None
    """Members that reported; None where nothing lists them."""
    hosts: tuple[str, ...] = ()
    fabrics: Mapping[str, Fabric] = field(default_factory=dict)
    """By host, the network it uses."""
    gaps: tuple[str, ...] = ()
    """What was to be measured and was not, each a part of a sentence."""
    given_up: tuple[str, ...] = ()
    """What the sweep had no time for, as it was too slow."""
    out_of_bounds: int = 0
    """Results that the program itself found wrong."""
    alone: int = 0
    """Processes that all call themselves the same rank: none knows of the others."""
    nodes: int | None = None
    """Where it is known better than by the hosts' names, of which several nodes on one machine have only one."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Self:
        """Read the result.json of `training.checks.network`."""
        fabrics = {host: Fabric(**told) for host, told in result["fabrics"].items()}
        slow = tuple(result["left_out"])
        return cls(result["ranks"], tuple(result["hosts"]), fabrics, given_up=slow, nodes=result["nodes"])


def judge(rows: Sequence[Row], expected: Expected, seen: Seen) -> list[Finding]:
    """Return all that speaks against training on this network; gravest first, none if it is as expected."""
    found = [
        *_ranks(rows, expected),
        *_members(expected, seen),
        *_sums(rows, seen),
        *_provider(expected, seen),
        *_interfaces(expected, seen),
        *_line(rows, expected),
        *(Finding("refuse", gap, todo="run it again, each run with a log of its own, to its end") for gap in seen.gaps),
        *(Finding("refuse", slow, todo="find out who is slow with training.checks.pairs") for slow in seen.given_up),
    ]
    return sorted(found, key=lambda finding: finding.gravity)


def counted(low: int, high: float) -> str:
    """Say how many ranks a range means."""
    number = f"{low}" if low == high else f"at least {low}" if high == math.inf else f"{low} to {high:.0f}"
    return f"{number} {'rank' if high == 1 else 'ranks'}"


def _ranks(rows: Sequence[Row], expected: Expected) -> Iterator[Finding]:
    """Compare the ranks that the bandwidths give away with the job's."""
    low, high = ranks_range(rows)
    if low > high:
        what = "no number of ranks gives these bandwidths: rows of different runs are mixed"
        yield Finding("refuse", what, todo="give each run a log of its own")
    elif expected.ranks is not None and not low <= expected.ranks <= high:
        what = (
            f"the bandwidths are those of {counted(low, high)}, not of {expected.ranks} (busbw / algbw gives it away)"
        )
        why, todo = _why(low, high, expected)
        yield Finding("refuse", f"{what}: {why}", todo=todo)
    elif expected.ranks is not None and (expected.nodes or 1) > 1 and low <= _per_node(expected):
        what = f"the bandwidths cannot tell {expected.ranks} ranks from those of one node"
        yield Finding("warn", what, todo="measure all-reduces of a GiB and more")


def _per_node(expected: Expected) -> int:
    return (expected.ranks or 0) // (expected.nodes or 1)


def _why(low: int, high: float, expected: Expected) -> tuple[str, str]:
    """Say what a wrong number of ranks means, and what to do."""
    nodes, per_node = expected.nodes or 1, _per_node(expected)
    if high == 1:
        return "every process measured itself alone", WITH_MPI
    if nodes > 1 and low <= per_node <= high:
        why = f"one node of {nodes} measured itself alone, and the network was not used"
        command = f"`mpirun -np {expected.ranks} -N {per_node}`"
        return why, f"start {expected.ranks} processes, {per_node} on each node, as {command} does"
    return "ranks are missing or too many", "see which nodes started, and how many processes on each"


def _members(expected: Expected, seen: Seen) -> Iterator[Finding]:
    """Compare who reported with who should."""
    if seen.alone:
        yield Finding("refuse", f"{seen.alone} processes are all the same rank: each is alone", todo=WITH_MPI)
    if expected.ranks is not None and seen.ranks not in (None, expected.ranks):
        what = f"{seen.ranks} ranks reported and the job has {expected.ranks}"
        yield Finding("refuse", what, todo="see which nodes started, and how many processes on each")
    nodes = len(seen.hosts) or None if seen.nodes is None else seen.nodes
    if expected.nodes is not None and nodes is not None and nodes < expected.nodes:
        what = f"the ranks are on {nodes} nodes ({', '.join(seen.hosts[:3])}) and the job has {expected.nodes}"
        yield Finding("refuse", what, todo="see that every node got its share of the processes")


def _sums(rows: Sequence[Row], seen: Seen) -> Iterator[Finding]:
    """Refuse wrong values."""
    wrong = [row for row in rows if row.get("wrong")]
    todo = "take the nodes out one by one until it is right; the culprit's memory, GPU or link is broken"
    if wrong:
        worst = max(wrong, key=lambda row: row.get("wrong") or 0)
        what = f"{worst['wrong']} values of an {worst['collective']} of {worst['bytes']:,} bytes are wrong"
        yield Finding("refuse", what, todo=todo)
    elif seen.out_of_bounds:
        yield Finding("refuse", f"{seen.out_of_bounds} results are out of bounds", todo=todo)


def _provider(expected: Expected, seen: Seen) -> Iterator[Finding]:
    """Refuse any other network than the one expected, by host."""
    if expected.provider is None or expected.nodes == 1:
        return
    todo = (
        "see that NCCL finds its plugin (aws-ofi-nccl), that a container has /dev/infiniband, "
        f"and that `fi_info -p {expected.provider}` lists interfaces"
    )
    for host, fabric in sorted(seen.fabrics.items()):
        if fabric.provider == "libfabric" != expected.provider:
            yield Finding("warn", "which provider libfabric has here, nothing says", node=host, todo="see NCCL's log")
        elif fabric.provider not in (None, expected.provider):
            warned = f" (NCCL warns: {fabric.warnings[0]})" if fabric.warnings else ""
            what = f"NCCL uses {fabric.provider} and not {expected.provider}{warned}"
            yield Finding("refuse", what, node=host, todo=todo)
    if common(seen.fabrics.values()) is None:
        what = f"nothing says that NCCL uses {expected.provider}"
        yield Finding("refuse", what, todo="run it with NCCL_DEBUG=INFO")


def _interfaces(expected: Expected, seen: Seen) -> Iterator[Finding]:
    """Refuse a node with fewer interfaces than it must have, or than the others; say which, if the others tell."""
    counted = {host: fabric.nics for host, fabric in sorted(seen.fabrics.items()) if fabric.nics is not None}
    usual = expected.nics or max(counted.values(), default=0)
    known = {device for fabric in seen.fabrics.values() for device in fabric.devices}
    for host, nics in counted.items():
        if nics < usual:
            own = set(seen.fabrics[host].devices)
            yield Finding(
                "refuse",
                f"NCCL found {nics} network interfaces of {usual}",
                node=host,
                device=", ".join(sorted(known - own)) if own else "",
                todo="see that the container asks for all of them; if it does, replace the node",
                action="isolate" if max(counted.values()) == usual else "",
            )


def _line(rows: Sequence[Row], expected: Expected) -> Iterator[Finding]:
    """Compare the best large all-reduce with what the line can carry."""
    if expected.line_gb_per_s is None or expected.nodes is None or expected.nodes < 2:
        return
    reduced = [row for row in rows if row["collective"] == "all_reduce"]
    best = max((row for row in reduced if row["bytes"] >= PROVEN_FROM), key=lambda row: row["algbw_gbps"], default=None)
    if best is None:
        what = f"no all-reduce of {PROVEN_FROM // 2**30} GiB was measured, so the bandwidth is not proven"
        yield Finding("warn", what, todo="set checks.largest_mib to 2048 or more")
        return
    rate, least = wire_rate(best, expected.nodes), expected.min_fraction or LINE_FRACTION
    share = rate / expected.line_gb_per_s
    line = f"{share:.0%} of the line's {expected.line_gb_per_s:g}"
    what = f"an all-reduce of {best['bytes'] / 2**30:g} GiB moves {rate:.0f} GB/s per node, {line}"
    if share > TOO_FAST:
        yield Finding("refuse", f"{what}: it did not go through the network", todo="count the nodes that took part")
    elif share < least:
        todo = "find the slow node with training.checks.pairs; see provider, interfaces and placement"
        yield Finding("refuse", f"{what}, and {least:.0%} are needed", todo=todo)
