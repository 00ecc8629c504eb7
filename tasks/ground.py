"""The cluster a recipe's jobs run on: what stands, how to reach it, how long its jobs may still run, where results are.

What was provisioned is written in the store (`camps/<recipe>.json`), so that every flow finds it, whichever process
provisioned it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from clusters import catalog, ledger, once
from clusters.aws import Site, vanished
from clusters.base import Address, Cluster, Job, Refused
from clusters.kinds import attach
from clusters.local import LocalCluster as LocalAdapter
from clusters.watcher import CALLS_PER_S, Watcher
from recipes import Recipe
from recipes import cluster as specification
from recipes.cluster import LocalCluster
from store import Store, open_store
from store.objects import state_folder

NEAR_PACE_S, FAR_PACE_S = 0.2, 10.0
"""Between two looks at a cluster: one that is emulated on this machine, and one on AWS. Unit: seconds."""
CLEAR_S = 300
"""What a job's time limit leaves of a budget, or of a capacity block, for saving and for striking the camp."""


@dataclass(frozen=True)
class Ground:
    """A cluster that stands for a recipe."""

    address: Address
    cluster: Mapping[str, Any]
    """The recipe's cluster, narrowed to the capacity that was got."""
    since: str
    """When its first resource was about to be made. UTC, ISO 8601, as is `until`."""
    until: str = ""
    """When its capacity ends (a capacity block); empty is never."""

    @property
    def usd_per_hour(self) -> float:
        """What the nodes cost on demand; 0 where no price is known."""
        price = catalog.find(self.cluster["instance_type"]).price_usd_per_hour or 0.0
        return price * int(self.cluster["nodes"])


def read(recipe: Recipe) -> Ground | None:
    """What stands for a recipe; None if nothing does, or did in an emulator that is gone."""
    found = open_store(recipe.store).get(_key(recipe))
    if found is None:
        return None
    ground = Ground(**json.loads(found.data))
    return None if vanished(Site.at(ground.address)) else ground


def write(recipe: Recipe, ground: Ground) -> None:
    """Write down what stands."""
    open_store(recipe.store).put(_key(recipe), json.dumps(asdict(ground), indent=1, sort_keys=True).encode())


def strike(recipe: Recipe) -> None:
    """Forget what stood."""
    open_store(recipe.store).delete(_key(recipe))


def settled(recipe: Recipe) -> Recipe:
    """The recipe with the very capacity that stands for it, on which the layout is planned."""
    if isinstance(recipe.cluster, LocalCluster) or (ground := read(recipe)) is None:
        return recipe
    narrowed: Any = TypeAdapter(specification.Cluster).validate_python(dict(ground.cluster))
    return recipe.model_copy(update={"cluster": narrowed})


@dataclass(frozen=True)
class Place:
    """Where the jobs of a recipe run, and where their files are as they see them."""

    recipe: Recipe
    store: Store
    cluster: Cluster
    watcher: Watcher
    ground: Ground | None = None
    """None is this machine."""

    def input(self, key: str) -> str:
        """Where a job finds a published result."""
        return self.store.address(key) if self.ground else str(self.store.fetch(key))

    def output(self, key: str) -> str:
        """Where a job writes."""
        return self.store.address(key) if self.ground else str(self.store.workspace(key))

    def result(self, key: str, output: str) -> dict[str, Any] | None:
        """What the result.json of a job says, None as long as there is none."""
        if self.ground:
            found = self.store.get(f"{key}/result.json")
            return dict(json.loads(found.data)) if found else None
        path = Path(output) / "result.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def submit(self, job: Job) -> tuple[str, "Place"]:
        """Start the job exactly once, or attach to it; returns its id and where it really is."""
        if self.ground is None:
            return self.cluster.submit(job), self
        expires = datetime.now(UTC) + timedelta(seconds=job.timeout_s) + timedelta(hours=1)
        claim = ledger.Claim(self.recipe.name, expires)
        job_id, address = once.submit(self.store, claim, self.cluster, job, self.ground.address)
        return job_id, _at(self.recipe, self.store, self.ground, address)

    def publish(self, key: str) -> None:
        """Make what a job wrote durable in the store, where the job did not do so itself."""
        if self.ground is None:
            self.store.publish(key)

    def time_limit_s(self, wanted_s: int) -> int:
        """How long a job may run: no longer than its capacity and what is left of the budget allow.

        Raises `Refused` if nothing is left.
        """
        if self.ground is None:
            return wanted_s
        now = datetime.now(UTC)
        limits = [float(wanted_s)]
        if self.ground.until:
            limits.append((datetime.fromisoformat(self.ground.until) - now).total_seconds() - CLEAR_S)
        most, rate = self.recipe.budget.max_usd, self.ground.usd_per_hour
        if most is not None and rate:
            spent = (now - datetime.fromisoformat(self.ground.since)).total_seconds() * rate / 3600
            limits.append((most - spent) / rate * 3600 - CLEAR_S)
        if min(limits) < 1:
            raise Refused(
                f"no time is left on the cluster of {self.recipe.name}: its capacity or budget.max_usd is used up; "
                "raise the budget, or tear it down"
            )
        return int(min(limits))


def place_of(recipe: Recipe) -> Place:
    """Where the jobs of a recipe run; raises `Refused` if no cluster stands for it."""
    store = open_store(recipe.store)
    if isinstance(recipe.cluster, LocalCluster):
        local = LocalAdapter(state_folder() / "jobs")
        return Place(recipe, store, local, Watcher(local, 0.0, 1e9))
    if (ground := read(recipe)) is None:
        raise Refused(f"no cluster stands for {recipe.name}: run `python -m flows.provision` first")
    return _at(recipe, store, ground, ground.address)


def _at(recipe: Recipe, store: Store, ground: Ground, address: Address) -> Place:
    key = (store.url, *sorted(address.items()))
    if key not in _watchers:
        near = bool(address.get("endpoint"))
        _watchers[key] = Watcher(attach(address, store), *((NEAR_PACE_S, 50.0) if near else (FAR_PACE_S, CALLS_PER_S)))
    return Place(recipe, store, _watchers[key].cluster, _watchers[key], ground)


_watchers: dict[tuple[object, ...], Watcher] = {}
"""By cluster and store: all jobs of this process on one cluster share one."""


def _key(recipe: Recipe) -> str:
    return f"camps/{recipe.name}.json"
