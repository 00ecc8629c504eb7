"""Submit a job once, whoever is killed when: an intent in the ledger first, then the job, then its id in the ledger.

Most schedulers accept two jobs of one name and list a new one a moment late. So who finds a foreign intent without an
id looks for the job by its name until any request behind that intent must have landed, and only then takes over.
"""

import secrets
import time
from datetime import UTC, datetime

from clusters import ledger
from clusters.base import Address, Cluster, Job, Unreachable
from clusters.ledger import Claim, Entry
from store import Conflict, Store

GRACE_S = 60.0
"""Longer than the slowest submission with its retries, and than schedulers take to list a new job."""
NEAR_GRACE_S = 3.0
"""The same for an emulator or a scheduler on this machine, whose answers take milliseconds."""
LOOK_S = 0.5


def submit(store: Store, claim: Claim, cluster: Cluster, job: Job, address: Address) -> tuple[str, Address]:
    """Start the job, or attach to it; returns its id and the address of the cluster it is on.

    Raises `Unreachable` if somebody else is about to submit it, or this process was too slow to.
    """
    token = secrets.token_hex(16)
    entry = ledger.intend(store, claim, "job", job.name, address, token)
    if entry.id:
        return entry.id, entry.where
    if entry.token != token:
        if found := look(cluster, entry):
            return ledger.created(store, entry, found).id, entry.where
        entry = _take_over(store, entry)
    if _age_s(entry) > _grace_s(entry) / 3:  # somebody may take over from us any moment
        raise Unreachable(f"job {job.name}: this machine was too slow to submit it; trying again")
    return ledger.created(store, entry, cluster.submit(job)).id, entry.where


def look(cluster: Cluster, entry: Entry) -> str | None:
    """The id of the job behind an intent, as soon as it shows; None once it cannot show any more."""
    while True:
        found = entry.id or cluster.find(entry.name)
        if found or _age_s(entry) > _grace_s(entry):
            return found
        time.sleep(LOOK_S)


def _take_over(store: Store, entry: Entry) -> Entry:
    try:
        return ledger.renewed(store, entry)
    except Conflict:
        raise Unreachable(f"job {entry.name}: another run is submitting it at this moment; trying again") from None


def _grace_s(entry: Entry) -> float:
    return NEAR_GRACE_S if entry.where.get("endpoint") or entry.where.get("cluster") == "local" else GRACE_S


def _age_s(entry: Entry) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(entry.since)).total_seconds()
