"""One recipe, five schedulers: the same recipe on another kind of cluster."""

from typing import Any, get_args

from recipes.cluster import AwsCluster, Cluster, LocalCluster
from recipes.load import RecipeError
from recipes.spec import Image, Recipe

KINDS: tuple[str, ...] = tuple(one.model_fields["kind"].default for one in get_args(get_args(Cluster)[0]))
SMALLEST = "p5.4xlarge"
"""One accelerator and one EFA interface: on an emulated cluster every node is one process on this machine."""
MOST_HERE = 2
"""Nodes of a cloud's recipe on this machine."""
ANY_CONTAINER = "castra-rehearsal"
"""The container of a rehearsal: an emulated node runs the Python that runs the emulator, whatever it is called."""


def on(recipe: Recipe, kind: str, *, small: bool = False) -> Recipe:
    """The recipe on a cluster of that kind, with the shared settings it has; a store on S3 where the kind needs it.

    `small` makes it fit an emulated cluster on this machine. Raises `RecipeError` for an unknown kind.
    """
    if kind not in KINDS:
        raise RecipeError([f"{kind!r} is not a kind of cluster: choose {', '.join(KINDS)}"])
    if recipe.cluster.kind == kind:
        return recipe
    cluster = _cluster(recipe.cluster, kind) | ({"instance_type": SMALLEST} if small and kind != "local" else {})
    changes: dict[str, Any] = {"cluster": {"kind": kind, **cluster}}
    if kind != "local" and not recipe.store.startswith("s3://"):
        changes["store"] = f"s3://castra-{recipe.name}"
    if kind != "local" and small:
        changes["image"] = Image(container=ANY_CONTAINER).model_dump()
    return Recipe.model_validate(recipe.model_dump() | changes)


def _cluster(before: LocalCluster | AwsCluster, kind: str) -> dict[str, Any]:
    """What the new cluster has of the old one: all that is common, and of the ladder the rungs that suit it."""
    if kind == "local":
        return {"nodes": min(before.nodes, MOST_HERE)}
    if not isinstance(before, AwsCluster):
        return {"instance_type": SMALLEST, "nodes": before.nodes * before.processes_per_node}
    shared = before.model_dump(include=set(AwsCluster.model_fields))
    suits = [one for one in before.capacity if _suits(one.partition(":")[0], kind, before.nodes)]
    return shared | {"capacity": suits or ["on-demand"]}


def _suits(market: str, kind: str, nodes: int) -> bool:
    if market == "spot":
        return kind != "batch" or nodes == 1
    return market == "on-demand" or (market == "plan") == (kind == "sagemaker")
