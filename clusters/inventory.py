"""What exists because of us, from the ledger and from the tags, and how it is taken down.

Neither source is enough: the ledger knows what was about to be made when a run was killed, the tags know what exists
when a ledger was lost. What belongs to another owner is never looked at twice.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from clusters import aws, builds, keeper, ledger, machine_images, once, parallelcluster
from clusters.aws import Site
from clusters.base import Cluster, ClusterError, Unreachable
from clusters.kinds import attach
from clusters.ledger import Entry
from clusters.stacks import deploy, watch
from store import Store

if TYPE_CHECKING:
    from mypy_boto3_cloudformation.type_defs import StackTypeDef

CANCEL_S = keeper.GRACE_S + 20


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that exists, or that the ledger says may exist."""

    kind: str
    name: str
    run: str
    owner: str
    state: str
    """The cluster's word for it (CREATE_COMPLETE, running), or `missing`: in the ledger, but not to be found."""
    expires: str
    kept: bool
    """Left standing on purpose, until it expires."""
    where: str


def inventory(store: Store, run: str | None = None, site: Site | None = None) -> list[Row]:
    """What carries our tags at `site` (None: only where the ledger says), and every open entry of the ledger.

    Raises `Unreachable` if a site does not answer, `Refused` if it does not let us look.
    """
    now = datetime.now(UTC)
    entries = _ours(store, run)
    rows = [_row(entry, _state(store, entry), now) for entry in entries]
    return rows + [_row(entry, state, now) for entry, state in _unrecorded(entries, run, site)]


def teardown(
    store: Store, run: str | None = None, site: Site | None = None, tell: Callable[[str], None] = print
) -> list[Row]:
    """Cancel jobs, delete stacks (last made first), close the ledger; returns the inventory afterwards.

    What is kept and has not expired is left. Everything is tried; then raises `Unreachable` or `ClusterError` for what
    could not be deleted, whose entries stay open.
    """
    now = datetime.now(UTC)
    return _take_down(store, run, site, tell, lambda entry: not _kept(entry, now))


def reap(store: Store, now: datetime, site: Site | None = None, tell: Callable[[str], None] = print) -> list[Row]:
    """`teardown` of everything that has expired, of every run; returns the inventory afterwards."""
    return _take_down(store, None, site, tell, lambda entry: _expired(entry, now))


def _take_down(
    store: Store, run: str | None, site: Site | None, tell: Callable[[str], None], due: Callable[[Entry], bool]
) -> list[Row]:
    entries = _ours(store, run)
    jobs = [entry for entry in reversed(entries) if entry.kind == "job"]
    grounds = [entry for entry in reversed(entries) if entry.kind != "job"]
    failed = [(entry, wrong) for entry in (*jobs, *grounds) if due(entry) and (wrong := _end(store, entry, tell))]
    failures = [wrong for entry, wrong in failed if not _gone_with_cluster(store, entry, tell)]
    if not failures:  # what only the tags know: its site is asked once all others have answered
        strays = [entry for entry, _ in _unrecorded(entries, run, site) if due(entry)]
        failures = [failure for entry in reversed(strays) if (failure := _end(store, entry, tell))]
    if failures:
        kind = Unreachable if all(isinstance(failure, Unreachable) for failure in failures) else ClusterError
        raise kind("; ".join(str(failure) for failure in failures))
    return inventory(store, run, site)


def _end(store: Store, entry: Entry, tell: Callable[[str], None]) -> ClusterError | None:
    """Make sure that one thing does not exist, then close its entry; returns what went wrong."""
    try:
        if entry.vanished:
            tell(f"{entry.kind} {entry.name}: gone together with its emulator")
        elif entry.kind == "stack":
            _delete_stack(entry, tell)
        elif entry.kind == "pcluster":
            parallelcluster.delete(Site(**entry.where), entry.name, tell)
        elif entry.kind == "build":
            tell(f"build of {entry.name}: removed {', '.join(builds.end(entry)) or 'nothing'}")
        else:
            _cancel_job(store, entry, tell)
    except ClusterError as error:
        return error
    if entry.state != "stray":
        ledger.gone(store, entry)
    return None


def _gone_with_cluster(store: Store, entry: Entry, tell: Callable[[str], None]) -> bool:
    """Close the entry of a job that cannot be asked after because nothing that its cluster was made of is left."""
    stands = any(one.kind != "job" for one in ledger.open_entries(store, entry.run))
    if entry.kind != "job" or stands or "kubeconfig" in entry.where:
        return False
    tell(f"job {entry.name}: gone together with its cluster")
    ledger.gone(store, entry)
    return True


def _delete_stack(entry: Entry, tell: Callable[[str], None]) -> None:
    site = Site(**entry.where)
    events = list(deploy.delete(entry.name, site, entry.owner, entry.token))
    deleted = sum(event.status == "DELETE_COMPLETE" for event in events if event.type != watch.STACK)
    tell(f"stack {entry.name}: deleted with {deleted} resources" if events else f"stack {entry.name}: not there")


def _cancel_job(store: Store, entry: Entry, tell: Callable[[str], None]) -> None:
    """Make a job end, then make its cluster forget it. One whose submission was interrupted may show late."""
    cluster = attach(entry.where, store)
    if (job := once.look(cluster, entry)) is None:
        cluster.forget(entry.name)  # what was made on the way to a submission that did not happen
        tell(f"job {entry.name}: never submitted")
        return
    if cluster.status(job).state.done:
        tell(f"job {entry.name}: had ended")
    else:
        _await_end(cluster, job, entry.name)
        tell(f"job {entry.name}: cancelled")
    cluster.forget(job)


def _await_end(cluster: Cluster, job: str, name: str) -> None:
    cluster.cancel(job)
    until = time.monotonic() + CANCEL_S
    while not cluster.status(job).state.done:
        if time.monotonic() > until:
            raise ClusterError(f"job {name} still runs {CANCEL_S:.0f} s after it was cancelled; look at its log")
        time.sleep(0.1)


def _state(store: Store, entry: Entry) -> str:
    if entry.vanished:
        return "missing"
    if entry.kind == "job":
        cluster = attach(entry.where, store)
        job = entry.id or cluster.find(entry.name)
        return str(cluster.status(job).state) if job else "missing"
    site = Site(**entry.where)
    if entry.kind == "pcluster":
        described = parallelcluster.describe(site, entry.name)
        return str(described["clusterStatus"]) if described else "missing"
    if entry.kind == "build":
        return "running" if machine_images.standing(site, entry.token) else "missing"
    with aws.sentences(site, f"stack {entry.name}"):
        there = watch.look(entry.name, site)
    return there["StackStatus"] if there else "missing"


def _unrecorded(entries: list[Entry], run: str | None, site: Site | None) -> Iterator[tuple[Entry, str]]:
    """The stacks that carry our tags and have no open entry, told as entries, oldest first; and their status."""
    recorded = {(Site(**entry.where), entry.name) for entry in entries if entry.kind != "job"}
    sites = {place for place, _ in recorded} | ({site} if site else set())
    for place in sorted(sites, key=str):
        if aws.vanished(place):
            continue
        with aws.sentences(place, "list the stacks"):
            pages = aws.cloudformation(place).get_paginator("describe_stacks").paginate()
            found = [stack for page in pages for stack in page["Stacks"]]
        for stack in sorted(found, key=lambda stack: stack["CreationTime"]):
            entry = _stray(stack, place)
            known = (place, entry.name) in recorded
            if entry.owner == ledger.owner() and run in (None, entry.run) and not known:
                yield entry, stack["StackStatus"]


def _stray(stack: "StackTypeDef", site: Site) -> Entry:
    tags = {tag["Key"]: tag["Value"] for tag in stack.get("Tags", [])}
    where = {"region": site.region, "endpoint": site.endpoint, "memory": site.memory}
    return Entry(
        run=tags.get("castra:run", ""),
        kind="stack",
        name=stack["StackName"],
        where=where,
        owner=tags.get("castra:owner", ""),
        token="stray",  # noqa: S106  the client token of its deletion
        expires=tags.get("castra:expires", ""),
        keep=tags.get("castra:keep") == "true",
        state="stray",
    )


def _ours(store: Store, run: str | None) -> list[Entry]:
    return [entry for entry in ledger.open_entries(store, run) if entry.owner == ledger.owner()]


def _kept(entry: Entry, now: datetime) -> bool:
    return entry.keep and not _expired(entry, now)


def _expired(entry: Entry, now: datetime) -> bool:
    """Whether its time is over; what says nothing sensible about it has no time."""
    try:
        return datetime.fromisoformat(entry.expires) <= now
    except (ValueError, TypeError):
        return False


def _row(entry: Entry, state: str, now: datetime) -> Row:
    kept = _kept(entry, now)
    return Row(entry.kind, entry.name, entry.run, entry.owner, state, entry.expires, kept, entry.place)
