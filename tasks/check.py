"""Prove the cluster before it is paid to train: every rank there, sums right, bandwidth measured, bucket reachable."""

import os
import time
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from clusters import aws
from recipes import Recipe
from store.objects import state_folder
from tasks import phrases, report, stack
from tasks.ground import place_of
from tasks.job import Work, run
from tasks.lineage import Lineage
from tasks.machines import processes_per_node
from tasks.policy import PATIENT
from tasks.watch import Follower

PROBE_BYTES = 1 << 20


class NotAdmitted(Exception):
    """The cluster is not what the job needs; the text says what is missing."""


@dataclass(frozen=True)
class Proof:
    """What the check of a cluster found."""

    ranks: int
    busbw_gbps: float
    """Largest all-reduce bus bandwidth seen. Unit: GB/s."""


def network(lineage: Lineage) -> Proof:
    """Run the all-reduce sweep on all ranks; raises `NotAdmitted` if ranks are missing or a sum is wrong."""
    recipe = lineage.recipe
    ranks_per_node = processes_per_node(recipe)
    place = place_of(recipe)
    # Elsewhere the proof belongs to the cluster that stands, so that a run that was killed finds its own proof again.
    since = place.ground and "".join(filter(str.isalnum, place.ground.since))
    name = f"{recipe.name}-{since or flow_run.id or 'check'}"
    key = f"validate/{name}"
    output = place.output(key) if place.ground else str(state_folder() / "checks" / name)
    work = Work(
        "validate",
        key,
        "training.checks.network",
        recipe.model_dump(mode="json"),
        output,
        nodes=recipe.cluster.nodes,
        processes_per_node=ranks_per_node,
        timeout_s=900,
    )
    found = run(place, work, Follower("validate"))
    _show(found)
    wanted = recipe.cluster.nodes * ranks_per_node
    if found["ranks"] != wanted or not found["correct"]:
        raise NotAdmitted(
            f"the network check saw {found['ranks']} of {wanted} ranks, sums "
            f"{'right' if found['correct'] else 'WRONG'}: it is not fit to train on; see the artifact network-proof"
        )
    best = max(row["busbw_gbps"] for row in found["rows"])
    return Proof(wanted, best)


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


def _show(found: dict[str, Any]) -> None:
    from tasks import pictures  # matplotlib costs half a second that a skipped step need not pay

    points = [(float(row["bytes"]), float(row["busbw_gbps"])) for row in found["rows"]]
    picture = pictures.curve("all-reduce bus bandwidth", "bytes", "GB/s", points)
    told = f"{found['ranks']} ranks on {found['nodes']} nodes, {found['backend']}, sums correct: {found['correct']}"
    report.page("network-proof", f"{picture}\n\n{told}\n\n{phrases.grid(found['rows'])}", "All-reduce over all ranks")
