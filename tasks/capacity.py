"""Ways to get the instances, tried one after another: narrow a recipe to a rung, wait for its time to come."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from clusters import aws, preflight
from clusters.base import NoCapacity
from clusters.capacity import Rung, ladder
from recipes import Recipe
from recipes.cluster import LocalCluster
from tasks import ground, report

T = TypeVar("T")

ENDS_EARLY = timedelta(minutes=35)
"""Instances of a capacity block begin to be terminated 30 minutes before its end (AWS, EC2 Capacity Blocks)."""


def located(recipe: Recipe) -> Recipe:
    """The recipe with the zones that are tried: those it names, or all of the region that offer one of its types."""
    cluster = recipe.cluster
    if isinstance(cluster, LocalCluster) or cluster.zones:
        return recipe
    site = aws.here(cluster.region)
    kinds = (cluster.instance_type, *cluster.alternatives)
    zones = tuple(dict.fromkeys(zone for kind in kinds for zone in preflight.offered(kind, site)))
    return recipe.model_copy(update={"cluster": cluster.model_copy(update={"zones": zones})})


def every(recipe: Recipe) -> list[Recipe]:
    """The recipe narrowed to each way to get its instances, in order; this machine has a single one."""
    if isinstance(recipe.cluster, LocalCluster):
        return [recipe]
    return [narrowed(recipe, rung) for rung in ladder(recipe.cluster)]


def rungs(recipe: Recipe) -> list[Recipe]:
    """The ways to get the instances that are left to try: from the one that stands on."""
    left, standing = every(recipe), ground.settled(recipe)
    return left[left.index(standing) :] if standing in left else left


def climb(recipe: Recipe, attempt: Callable[[Recipe], T]) -> T:
    """What the attempt on the first rung with instances returns; raises `NoCapacity` with every rung's reason."""
    missed: list[str] = []
    for rung in rungs(recipe):
        if missed:
            report.warn(f"{missed[-1]}: trying {rung_of(rung)}")
        try:
            return attempt(rung)
        except NoCapacity as error:
            missed.append(str(error))
    raise NoCapacity("; ".join(missed))


def narrowed(recipe: Recipe, rung: Rung) -> Recipe:
    """The recipe on one rung alone."""
    told = {"instance_type": rung.instance_type, "alternatives": (), "capacity": (rung.capacity,)}
    zones = {"zones": (rung.zone,)} if rung.zone else {}
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=told | zones)})


def rung_of(recipe: Recipe) -> Rung:
    """The first rung of a recipe's ladder: the only one if it is narrowed."""
    assert not isinstance(recipe.cluster, LocalCluster)
    return ladder(recipe.cluster)[0]


def zones(recipe: Recipe) -> tuple[str, ...]:
    """The zones a recipe is tried in."""
    return () if isinstance(recipe.cluster, LocalCluster) else recipe.cluster.zones


def awaited(recipe: Recipe, site: aws.Site) -> datetime | None:
    """Wait until the capacity of a narrowed recipe begins; returns when it must be left, None if never.

    Raises `NoCapacity` if its time is over, or it does not exist.
    """
    rung = rung_of(recipe)
    if (told := preflight.window(rung, site)) is None:
        return None
    begins, ends = told
    with report.progress("capacity") as bar:
        began = datetime.now(UTC)
        while (now := datetime.now(UTC)) < begins:
            left = (begins - now).total_seconds()
            bar.update((now - began).total_seconds(), (begins - began).total_seconds(), f"{rung} begins at {begins}")
            time.sleep(min(left, 30.0))
    if ends is None:
        return None
    if datetime.now(UTC) >= ends - ENDS_EARLY:
        raise NoCapacity(f"{rung} ends at {ends:%Y-%m-%d %H:%M} UTC: too late to start on it")
    return ends - ENDS_EARLY
