"""Prove the cluster before it is paid to train: its bucket, its nodes, its network; and replace the nodes that fail.

What is run, by `checks.level`, each a job of its own on the nodes:

    network   collectives over all ranks, which the gate judges
    quick     before that, every node's software, GPUs, EFA, disks and clock
    full      and pairs of nodes against each other, and the measurements that calibrate the planner

A node that fails is quarantined, at most `checks.replace` of them, and everything is proven anew without it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from clusters import aws, catalog
from clusters.base import Refused
from recipes import Recipe
from recipes.cluster import LocalCluster
from store.objects import state_folder
from tasks import check_pages, learning, report, stack
from tasks.ground import Place, place_of
from tasks.job import Work, quarantine, run
from tasks.lineage import Lineage
from tasks.machines import machine, processes_per_node
from tasks.policy import PATIENT
from tasks.watch import Follower
from training.checks import gate
from training.checks.finding import Finding

PROBE_BYTES = 1 << 20
PROGRAMS = {"nodes": "training.checks.node", "network": "training.checks.network", "pairs": "training.checks.pairs",
            "calibrate": "training.checks.calibrate"}  # fmt: skip
LEVELS = {"network": ("network",), "quick": ("nodes", "network"), "full": ("nodes", "network", "pairs", "calibrate")}
FEWEST_FOR_PAIRS = 3
"""Of two nodes neither can be told to be the slow one."""
TIMEOUT_S = {"nodes": 3600, "network": 900, "pairs": 900, "calibrate": 900}
"""DCGM's long diagnosis takes a quarter of an hour."""


class NotAdmitted(Exception):
    """The cluster is not what the job needs; the text says what is missing."""


@dataclass(frozen=True)
class Proof:
    """What the checks of a cluster found."""

    ranks: int
    busbw_gbps: float
    """Largest all-reduce bus bandwidth seen. Unit: GB/s."""
    replaced: int
    """Nodes that were quarantined on the way."""
    warnings: int


@dataclass(frozen=True)
class Stage:
    """One program on the nodes: what it was asked, and what it found."""

    name: str
    work: Work
    result: Mapping[str, Any]
    findings: Sequence[Finding]

    @property
    def refusals(self) -> list[Finding]:
        """What hinders a training."""
        return [one for one in self.findings if one.severity == "refuse"]

    def number(self, host: str) -> int | None:
        """Which node of its job a host was; None if it was none of them."""
        told = self.result.get("members") or self.result.get("nodes") or []
        return next((int(one["node"]) for one in told if one["host"] == host), None)


def prove(lineage: Lineage) -> Proof:
    """Run the checks of the recipe's level until they pass; raises `NotAdmitted` if they do not."""
    place, replaced = place_of(lineage.recipe), 0
    while True:
        stages: list[Stage] = []
        for name in _wanted(lineage.recipe):
            stages.append(_stage(lineage, place, name, replaced))
            if stages[-1].refusals:
                break
        failed = _accused(lineage, place, stages[-1], replaced) if stages[-1].refusals else None
        check_pages.show([*stages, failed] if failed and failed is not stages[-1] else stages)
        if failed is None:
            return _admitted(lineage, stages, replaced)
        replaced += _replace(place, failed, lineage.recipe.checks.replace - replaced)


def _wanted(recipe: Recipe) -> Iterator[str]:
    here = isinstance(recipe.cluster, LocalCluster)  # its nodes are one machine, and cannot differ
    for name in LEVELS[recipe.checks.level]:
        if not (here and name in ("nodes", "pairs")) and (name != "pairs" or recipe.cluster.nodes >= FEWEST_FOR_PAIRS):
            yield name


def _stage(lineage: Lineage, place: Place, name: str, number: int) -> Stage:
    """Run one program on the nodes, and judge what it found."""
    recipe = lineage.recipe
    # Elsewhere the proof belongs to the cluster that stands, so that a run that was killed finds its own proof again.
    since = place.ground and "".join(filter(str.isalnum, place.ground.since))
    key = f"validate/{recipe.name}-{since or flow_run.id or 'check'}-{name}-{number}"
    work = Work(
        f"validate-{name}",
        key,
        PROGRAMS[name],
        recipe.model_dump(mode="json") | {"expected": _expected(recipe, place)},
        place.output(key) if place.ground else str(state_folder() / "checks" / key.partition("/")[2]),
        nodes=recipe.cluster.nodes,
        processes_per_node=1 if name == "nodes" else processes_per_node(recipe),
        timeout_s=TIMEOUT_S[name],
    )
    found = run(place, work, Follower(work.step))
    if name == "network":
        return Stage(name, work, found, gate.judge(found["rows"], _gate(recipe, place), gate.Seen.of(found)))
    return Stage(name, work, found, [Finding(**one) for one in found.get("findings", [])])


def _accused(lineage: Lineage, place: Place, failed: Stage, number: int) -> Stage:
    """Who is to blame: where the whole network is unfit, pairs of nodes tell which node makes it so."""
    named = any(one.node for one in failed.refusals)
    if failed.name != "network" or named or lineage.recipe.cluster.nodes < FEWEST_FOR_PAIRS:
        return failed
    pairs = _stage(lineage, place, "pairs", number)
    return pairs if pairs.refusals else failed


def _replace(place: Place, failed: Stage, most: int) -> int:
    """Quarantine the nodes that failed; returns how many. Raises `NotAdmitted` where that is not to be."""
    told = "; ".join(_sentence(one) for one in failed.refusals)
    hosts = sorted({one.node for one in failed.refusals if one.node})
    numbers = [failed.number(host) for host in hosts]
    everywhere = len(hosts) == failed.work.nodes  # then it is not the machines: others would have it, too
    if place.ground is None or not hosts or None in numbers or len(hosts) > most or everywhere:
        raise NotAdmitted(f"the cluster is not fit to train on: {told}; see the artifact findings")
    for host, number in zip(hosts, numbers, strict=True):
        assert number is not None
        why = next(one.what for one in failed.refusals if one.node == host)
        try:
            done = quarantine(place, failed.work, number, why)
        except Refused as refusal:
            raise NotAdmitted(f"{told}; and it cannot be replaced: {refusal}") from None
        report.warn(f"{host}: {why}; {done}")
    return len(hosts)


def _sentence(finding: Finding) -> str:
    device = "" if finding.what.startswith(finding.device) else finding.device
    where = " ".join(filter(None, (finding.node, device)))
    return f"{where}: {finding.what}" if where else finding.what


def _admitted(lineage: Lineage, stages: Sequence[Stage], replaced: int) -> Proof:
    recipe, by_name = lineage.recipe, {one.name: one for one in stages}
    if "calibrate" in by_name:
        learning.calibrate(lineage.recipe, by_name["calibrate"].result, machine(recipe))
    rows = by_name["network"].result["rows"]
    warnings = [one for stage in stages for one in stage.findings]
    for one in warnings:
        report.warn(_sentence(one))
    best = max((row["busbw_gbps"] for row in rows if row["collective"] == "all_reduce"), default=0.0)
    return Proof(recipe.cluster.nodes * processes_per_node(recipe), best, replaced, len(warnings))


def _emulated(place: Place) -> bool:
    return place.ground is None or bool(place.ground.address.get("endpoint"))


def _expected(recipe: Recipe, place: Place) -> dict[str, Any]:
    """What a node of that type has; nothing where nodes are processes of this machine."""
    if isinstance(recipe.cluster, LocalCluster) or _emulated(place):
        return {}
    instance = asdict(catalog.find(recipe.cluster.instance_type))
    storage = {
        "lustre": "/fsx" * bool(recipe.cluster.lustre_gib),
        "s3": recipe.store * recipe.store.startswith("s3://"),
    }
    return {name: instance[name] for name in ("accelerator", "accelerators", "efa_interfaces")} | storage


def _gate(recipe: Recipe, place: Place) -> gate.Expected:
    cluster = recipe.cluster
    ranks = cluster.nodes * processes_per_node(recipe)
    if isinstance(cluster, LocalCluster) or _emulated(place):
        return gate.Expected(ranks, None)  # which may be processes of one host
    instance = catalog.find(cluster.instance_type)
    return gate.Expected(
        ranks,
        cluster.nodes,
        provider="efa" if instance.efa_interfaces and cluster.nodes > 1 else None,
        line_gb_per_s=instance.network_gbps / 8 if cluster.nodes > 1 else None,
        nics=instance.efa_interfaces or None,
        min_fraction=recipe.checks.min_line_fraction or instance.healthy_line_fraction,
    )


@task(name="bucket", task_run_name="bucket there and back", cache_policy=NO_CACHE, **PATIENT)
def bucket(recipe: Recipe) -> str:
    """Send bytes to the camp's bucket and fetch them back; raises `NotAdmitted` if they are not the same."""
    if (found := stack.bucket(recipe)) is None:
        return "no camp stands, so no bucket was tried"
    site, name = found
    sent, key = os.urandom(PROBE_BYTES), f"checks/{flow_run.id}"
    begun = time.perf_counter()
    with aws.sentences(site, f"bucket {name}"):
        aws.s3(site).put_object(Bucket=name, Key=key, Body=sent)
        got = aws.s3(site).get_object(Bucket=name, Key=key)["Body"].read()
        aws.s3(site).delete_object(Bucket=name, Key=key)
    if got != sent:
        raise NotAdmitted(f"bucket {name} returned other bytes than were sent: do not trust it with a checkpoint")
    return f"bucket returns what it is sent ({2 * PROBE_BYTES / (time.perf_counter() - begun) / 1e6:.0f} MB/s)"
