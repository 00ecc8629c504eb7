"""Examine every node: software, accelerators, EFA, disks, clock, and what makes one node differ from the others.

    torchrun --nproc-per-node 1 … -m training.checks.node job.json
    python -m training.checks.node --here          # this machine alone, as a table; exit code 1 if training is refused

One process per node, over gloo: no GPU is used, for a broken one must be told, and not hang who tells it. What is
expected comes as spec["expected"], see `Expected`; how thorough it is, as spec["checks"]["level"]: quick takes seconds;
full adds DCGM's diagnosis (a quarter of an hour where there are GPUs) and the speed of disks and S3.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Final

from training import ranks
from training.checks import clock, differences, efa, host, software, storage
from training.checks.clock import Skew
from training.checks.machine import HIDDEN
from training.checks.report import Examination, Report, scratch
from training.checks.table import table
from training.job import NodeJob, say
from training.ranks import World

ONE: Final = (*software.ONE, "accelerators")
"""What all nodes must have alike."""


def prove(job: NodeJob, world: World) -> None:
    """Examine all nodes and write result.json. Raises JobError for expectations that are none."""
    with world.agreed():
        examination = Examination.of(job, world.nodes)
    skews = clock.measure(world)
    # of several ranks of a node, one tells
    mine = examination.make() if world.local_rank == 0 else None
    reports = _gathered(mine, world, examination.patience_s)
    world.part()
    if world.rank == 0:
        told = [(report, skew) for report, skew in zip(reports, skews, strict=True) if report]
        result = judge([report for report, _ in told], [skew for _, skew in told])
        for finding in result["findings"]:
            say("finding", **finding)
        job.finish(result)


def judge(reports: list[Report], skews: list[Skew]) -> dict[str, Any]:
    """Compare the nodes' reports and clocks, in the order of the nodes, and return result.json."""
    labels = _labels([report.host for report in reports])
    every = dict(zip(labels, reports, strict=True))
    clocks = dict(zip(labels, skews, strict=True)) if skews else {}
    found = differences.differences({label: report.alike for label, report in every.items()})
    together = [
        *differences.judge(found, ONE),
        *efa.lost({label: report.cards for label, report in every.items()}),
        *clock.judge(clocks),
        *storage.judge({label: report.speeds for label, report in every.items()}),
        *host.twins({label: (report.host, report.boot) for label, report in every.items()}),
    ]
    alone = [replace(finding, node=label) for label, report in every.items() for finding in report.findings]
    findings = sorted(together + alone, key=lambda finding: finding.gravity)
    return {
        "nodes": [
            report.told(number, clocks.get(label), [finding for finding in findings if finding.node == label])
            for number, (label, report) in enumerate(every.items())
        ],
        "differences": [asdict(one) for one in found],
        "findings": [asdict(finding) for finding in findings],
    }


def _labels(hosts: list[str]) -> list[str]:
    """What findings call nodes: their hosts, with a number where two have one name."""
    times = Counter(hosts)
    return [host if times[host] == 1 else f"{host} (node {number})" for number, host in enumerate(hosts)]


def here(words: list[str]) -> int:
    """Examine this machine and print what was found. Returns the exit code."""
    unknown = set(words) - {"--full", "--json"}
    if unknown:
        print(f"unknown: {' '.join(sorted(unknown))}; there are --full and --json", file=sys.stderr)
        return 2
    report = Examination(full="--full" in words, writable=(scratch(),)).make()
    result = judge([report], [])
    print(json.dumps(result, indent=1) if "--json" in words else table(result["nodes"][0]))
    return int(any(finding["severity"] == "refuse" for finding in result["findings"]))


def _gathered(mine: Report | None, world: World, patience_s: float) -> list[Report | None]:
    """Gather the reports by rank, with more patience than a collective of a training run has."""
    from torch import distributed

    group = distributed.new_group(timeout=timedelta(seconds=patience_s), backend="gloo")
    every: list[Report | None] = [None] * world.size
    distributed.all_gather_object(every, mine, group=group)
    return every


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        sys.exit(here(sys.argv[2:]))
    os.environ[HIDDEN] = ""
    ranks.run(prove)
