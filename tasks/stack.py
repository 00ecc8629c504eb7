"""The ground a run stands on: provisioned by change sets, written in the ledger first, struck with proof."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from prefect import task
from prefect.cache_policies import NO_CACHE

from clusters import aws, builds, ledger, parallelcluster, preflight
from clusters.base import ClusterError, NoCapacity, Refused
from clusters.inventory import Row, inventory
from clusters.inventory import reap as reap_expired
from clusters.inventory import teardown as tear_down
from clusters.kinds import address
from clusters.links import links
from clusters.stacks import architecture, camp, deploy, review
from clusters.stacks import store as storage
from clusters.stacks.watch import Event
from recipes import Recipe
from recipes.cluster import LocalCluster, SlurmCluster
from store import Store, open_store
from store.objects import in_s3
from tasks import capacity, ground, image_wanted, machines, report
from tasks.job import NO_CAPACITY
from tasks.lineage import trace
from tasks.policy import PATIENT

STANDS = timedelta(hours=24)
"""How long a camp may stand beyond the job's own time limit before the reaper takes it down."""


def needs_aws(recipe: Recipe, verb: str) -> bool:
    """Whether a flow of this name will talk to AWS: on this machine, a life with nothing left to do does not."""
    if not isinstance(recipe.cluster, LocalCluster) or recipe.store.startswith("s3://"):
        return True
    if verb in ("provision", "retrain"):
        return True
    if verb in ("lifecycle", "teardown") and ledger.open_entries(open_store(recipe.store), recipe.name):
        return True
    return verb == "lifecycle" and bool(trace(recipe).unfinished())


def any_expired(store_url: str) -> bool:
    """Whether the ledger of a store names something that has outlived its time, or the build of an image."""
    if store_url.startswith("s3://"):
        return True
    store = open_store(store_url)
    return bool(ledger.expired(store, datetime.now(UTC)) or builds.open_builds(store))


def climb(recipe: Recipe, zones: tuple[str, ...] = ()) -> dict[str, str]:
    """Provision on the first rung whose stacks come up; returns their outputs. Raises `NoCapacity` after the last.

    `zones` are those the network spans, by default all in which the recipe is tried.
    """
    located = capacity.located(image_wanted.settled(recipe))
    return capacity.climb(located, lambda rung: provision(rung, zones or capacity.zones(located)))


def ensure_store(recipe: Recipe) -> None:
    """Make the bucket of an s3:// store, where there is none; it is not part of any camp and never struck."""
    machines.check_launchable(recipe)  # every flow that creates anything begins here
    if (missing := missing_bucket(recipe)) is None:
        return
    bucket, site = missing
    _admit(recipe)
    report.say(f"store: making the bucket {bucket} in {site}, which will stay")
    template = storage.template(bucket, tls_only=not site.endpoint)
    wanted = deploy.Stack(storage.name(bucket), template, storage.tags(), site)
    _apply(deploy.propose(wanted), "store")


def missing_bucket(recipe: Recipe) -> tuple[str, aws.Site] | None:
    """The bucket of the recipe's store and where it would be made; None if it is there, or the store is a folder."""
    if (place := in_s3(recipe.store)) is None:
        return None
    bucket, _ = place
    site = aws.here(None if isinstance(recipe.cluster, LocalCluster) else recipe.cluster.region)
    return None if aws.bucket_exists(bucket, site) else (bucket, site)


def _admit(recipe: Recipe) -> None:
    """Raise what AWS has against a recipe, if it has something against every rung of its ladder."""
    against: list[str] = []
    for rung in capacity.every(capacity.located(recipe)):
        if isinstance(rung.cluster, LocalCluster):
            return
        try:
            preflight.check(rung, aws.here(rung.cluster.region))
        except NoCapacity as error:
            against.append(str(error))
        else:
            return
    raise Refused("; ".join(dict.fromkeys(against)))


@task(task_run_name="deploy {recipe.name}", cache_policy=NO_CACHE, **PATIENT)
def provision(recipe: Recipe, zones: tuple[str, ...]) -> dict[str, str]:
    """Deploy what the recipe's cluster stands on, or find it standing; returns the outputs of its stacks.

    A recipe for AWS must be narrowed to one rung of its capacity ladder. Raises `NoCapacity` if that has no instances.
    """
    if isinstance(recipe.cluster, LocalCluster):
        site = aws.here()
        return _deploy(recipe, architecture.needed(recipe, tls_only=not site.endpoint), site)
    site, since = aws.here(recipe.cluster.region), datetime.now(UTC)
    preflight.check(recipe, site)  # quota, zone, reservation: known before anything is created
    before, until = ground.read(recipe), capacity.awaited(recipe, site)
    rung = capacity.rung_of(recipe)
    if before and (last := capacity.rung_of(ground.settled(recipe))) != rung:
        _make_way(recipe, architecture.in_the_way(recipe, last, rung), site)
    wanted = architecture.needed(recipe, rung, zones, tls_only=not site.endpoint)
    outputs = _deploy(recipe, wanted, site)
    if isinstance(recipe.cluster, SlurmCluster) and recipe.cluster.flavour == "parallelcluster":
        outputs |= _parallelcluster(recipe, recipe.cluster, site, outputs, before)
    stands = ground.Ground(
        address(recipe, site, outputs),
        recipe.cluster.model_dump(mode="json"),
        since=before.since if before else since.isoformat(timespec="seconds"),
        until=until.isoformat(timespec="seconds") if until else "",
    )
    ground.write(recipe, stands)
    report.links(links(recipe, stands.address), recipe.name)
    return outputs


def _make_way(recipe: Recipe, names: list[str], site: aws.Site) -> None:
    """Delete the stacks of another rung that cannot be changed in place."""
    store = open_store(recipe.store)
    for name in names:
        entry = ledger.intend(store, _claim(recipe), "stack", name, asdict(site))
        for event in deploy.delete(name, site, entry.owner, entry.token):
            report.relay([_line(event)])
        ledger.gone(store, entry)


def _deploy(recipe: Recipe, wanted: Iterable[architecture.Wanted], site: aws.Site) -> dict[str, str]:
    """Bring up stacks, each after those it stands on; returns all of their outputs."""
    store, rows = open_store(recipe.store), []
    outputs: dict[str, str] = {}
    for one in wanted:
        if wrong := review.problems(one.template):
            raise Refused(f"stack {one.name}: {'; '.join(wrong)}")
        entry = ledger.intend(store, _claim(recipe), "stack", one.name, asdict(site))
        proposal = deploy.propose(deploy.Stack(entry.name, one.template, entry.tags, site))
        rows += [{"stack": one.name, **asdict(change)} for change in proposal.changes]
        report.table("change-set", rows, f"What deploying {recipe.name} changes")
        _apply(proposal, entry.token)
        ledger.created(store, entry, entry.name)
        outputs |= deploy.outputs(entry.name, site)
    return outputs


def _parallelcluster(
    recipe: Recipe, cluster: SlurmCluster, site: aws.Site, outputs: dict[str, str], before: ground.Ground | None
) -> dict[str, str]:
    """Bring the cluster of ParallelCluster to the recipe, unless it stands so; returns how to reach it."""
    store, name = open_store(recipe.store), parallelcluster.cluster_name(recipe.name)
    entry = ledger.intend(store, _claim(recipe), "pcluster", name, asdict(site))
    rung = capacity.rung_of(recipe)
    config = parallelcluster.configuration(recipe, cluster, rung, outputs, tags=entry.tags)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
    there = parallelcluster.describe(site, name)
    if before and there and before.address.get("configuration") == digest:
        return {name: before.address[name] for name in before.address if name not in outputs}
    if cluster.containers:
        start = parallelcluster.START.encode()
        aws.s3(site).put_object(Bucket=outputs["Bucket"], Key=parallelcluster.START_SCRIPT, Body=start)
    change = parallelcluster.update if there and entry.state == "created" else parallelcluster.create
    try:
        described = change(site, name, config, lambda line: report.relay([line]))
    except ClusterError as error:
        raise _sorted(error) from error
    ledger.created(store, entry, name)
    return parallelcluster.outputs(described, cluster, recipe.name) | {"configuration": digest}


def _claim(recipe: Recipe) -> ledger.Claim:
    return ledger.Claim(
        recipe.name, datetime.now(UTC) + timedelta(hours=recipe.train.timeout_hours) + STANDS, recipe.keep
    )


def _sorted(error: ClusterError) -> ClusterError:
    """The error, as `NoCapacity` if that is what it says."""
    return NoCapacity(str(error)) if NO_CAPACITY.search(str(error)) else error


def _apply(proposal: deploy.Proposal, token: str) -> None:
    try:
        for event in deploy.apply(proposal, token):
            report.relay([_line(event)])
    except ClusterError as error:
        raise _sorted(error) from error


def _line(event: Event) -> str:
    return f"{event.logical_id} ({event.type}) {event.status} {event.reason}".strip()


def bucket(recipe: Recipe) -> tuple[aws.Site, str] | None:
    """Where the scratch bucket of the recipe's camp is, and its name; None if no camp stands."""
    for entry in ledger.open_entries(open_store(recipe.store), recipe.name):
        if entry.kind == "stack" and entry.state == "created" and entry.name == camp.name(recipe.name):
            site = aws.Site(**entry.where)
            return site, deploy.outputs(entry.name, site)["Bucket"]
    return None


def strike(recipe: Recipe) -> list[Row]:
    """Take down everything of the recipe; returns what is left, which is what was kept on purpose."""
    store = open_store(recipe.store)
    if not ledger.open_entries(store, recipe.name):
        return []
    left = tear_down(store, recipe.name, tell=lambda line: report.relay([line]))
    if not any(row.kept for row in left):
        ground.strike(recipe)
    return left


@task(name="strike", task_run_name="strike camp", cache_policy=NO_CACHE, **PATIENT)
def strike_task(recipe: Recipe) -> list[Row]:
    """`strike` as a step that is tried again, with the inventory afterwards for people to see."""
    return _prove(strike(recipe), f"everything of {recipe.name}")


@task(name="reap", task_run_name="reap what has expired", cache_policy=NO_CACHE, **PATIENT)
def reap(store_url: str) -> list[Row]:
    """Take down whatever has outlived its time, of every run in a store; returns what still stands."""
    store = open_store(store_url)
    builds.sweep(store, lambda line: report.relay([line]))
    if not ledger.expired(store, datetime.now(UTC)):
        return _show(_standing(store))
    return _show(reap_expired(store, datetime.now(UTC), tell=lambda line: report.relay([line])))


def _standing(store: Store) -> list[Row]:
    return inventory(store) if ledger.open_entries(store) else []


def _prove(rows: list[Row], what: str) -> list[Row]:
    _show(rows)
    if left := [row for row in rows if not row.kept]:
        names = ", ".join(f"{row.kind} {row.name} ({row.state})" for row in left)
        raise ClusterError(f"teardown of {what} left {names}: run `python -m flows.teardown` again")
    return rows


def _show(rows: list[Row]) -> list[Row]:
    listed = [asdict(row) for row in rows] or [{"kind": "–", "name": "nothing", "state": "empty inventory"}]
    report.table("inventory", listed, "What exists because of Castra")
    return rows
