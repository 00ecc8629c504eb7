"""The ground a run stands on: provisioned by change set, written in the ledger first, struck with proof."""

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from prefect import task
from prefect.cache_policies import NO_CACHE

from clusters import aws, ledger
from clusters.base import ClusterError
from clusters.inventory import Row, inventory
from clusters.inventory import reap as reap_expired
from clusters.inventory import teardown as tear_down
from clusters.stacks import camp, deploy
from clusters.stacks.watch import Event
from recipes import Recipe
from store import Store, open_store
from tasks import report
from tasks.job import cluster_of
from tasks.lineage import trace
from tasks.policy import PATIENT

STANDS = timedelta(hours=24)
"""How long a camp may stand beyond the job's own time limit before the reaper takes it down."""


def needs_aws(recipe: Recipe, verb: str) -> bool:
    """Whether a flow of this name will talk to AWS: a life with nothing left to do does not."""
    if verb in ("provision", "retrain"):
        return True
    if verb in ("lifecycle", "teardown") and ledger.open_entries(open_store(recipe.store), recipe.name):
        return True
    return verb == "lifecycle" and bool(trace(recipe).unfinished())


def any_expired(store_url: str) -> bool:
    """Whether the ledger of a store names something that has outlived its time."""
    return bool(ledger.expired(open_store(store_url), datetime.now(UTC)))


@task(task_run_name="deploy camp", cache_policy=NO_CACHE, **PATIENT)
def provision(recipe: Recipe) -> dict[str, str]:
    """Deploy the recipe's camp, or find it standing; returns the stack's outputs."""
    cluster_of(recipe)  # nothing is created for a cluster that cannot be driven
    store, site = open_store(recipe.store), aws.here()
    expires = datetime.now(UTC) + timedelta(hours=recipe.train.timeout_hours) + STANDS
    claim = ledger.Claim(recipe.name, expires, recipe.keep)
    entry = ledger.intend(store, claim, "stack", camp.name(recipe.name), asdict(site))
    proposal = deploy.propose(camp.stack(entry))
    report.table("change-set", [asdict(change) for change in proposal.changes], f"What deploying {entry.name} changes")
    _tell(deploy.apply(proposal, entry.token))
    ledger.created(store, entry, entry.name)
    return deploy.outputs(entry.name, site)


def _tell(events: Iterable[Event]) -> None:
    for event in events:
        report.relay([f"{event.logical_id} ({event.type}) {event.status} {event.reason}".strip()])


def bucket(recipe: Recipe) -> tuple[aws.Site, str] | None:
    """Where the scratch bucket of the recipe's camp is, and its name; None if no camp stands."""
    for entry in ledger.open_entries(open_store(recipe.store), recipe.name):
        if entry.kind == "stack" and entry.state == "created":
            site = aws.Site(**entry.where)
            return site, deploy.outputs(entry.name, site)["Bucket"]
    return None


def strike(recipe: Recipe) -> list[Row]:
    """Take down everything of the recipe; returns what is left, which is what was kept on purpose."""
    store = open_store(recipe.store)
    if not ledger.open_entries(store, recipe.name):
        return []
    return tear_down(store, recipe.name, tell=lambda line: report.relay([line]))


@task(name="strike", task_run_name="strike camp", cache_policy=NO_CACHE, **PATIENT)
def strike_task(recipe: Recipe) -> list[Row]:
    """`strike` as a step that is tried again, with the inventory afterwards for people to see."""
    return _prove(strike(recipe), f"everything of {recipe.name}")


@task(name="reap", task_run_name="reap what has expired", cache_policy=NO_CACHE, **PATIENT)
def reap(store_url: str) -> list[Row]:
    """Take down whatever has outlived its time, of every run in a store; returns what still stands."""
    store = open_store(store_url)
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
