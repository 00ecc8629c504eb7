"""One recipe, five schedulers: the same recipe on another kind of cluster."""

from typing import Any, get_args

from recipes.load import RecipeError
from recipes.spec import (
    AwsCluster,
    BatchCluster,
    Cluster,
    EksCluster,
    Image,
    LocalCluster,
    Recipe,
    SageMakerCluster,
    SlurmCluster,
)

CLASSES: dict[str, type[LocalCluster | SlurmCluster | BatchCluster | EksCluster | SageMakerCluster]] = {
    one.model_fields["kind"].default: one for one in get_args(get_args(Cluster)[0])
}
KINDS = tuple(CLASSES)
SMALLEST = "p5.4xlarge"
"""One accelerator and one EFA interface: on an emulated cluster every node is one process on this machine."""
ANY_CONTAINER = "castra-rehearsal"
"""The container of a rehearsal: an emulated node runs the Python that runs the emulator, whatever it is called."""


def on(recipe: Recipe, kind: str, *, small: bool = False) -> Recipe:
    """The recipe on a cluster of that kind, with the shared settings it has; a store on S3 where the kind needs it.

    `small` makes it fit an emulated cluster on this machine. Raises `RecipeError` for an unknown kind.
    """
    if kind not in CLASSES:
        raise RecipeError(f"{kind!r} is not a kind of cluster: choose {', '.join(KINDS)}")
    if recipe.cluster.kind == kind:
        return recipe
    if kind == "local":
        cluster: dict[str, Any] = {"nodes": min(recipe.cluster.nodes, 16)}
    else:
        cluster = _shared(recipe.cluster) | ({"instance_type": SMALLEST} if small else {})
    changes: dict[str, Any] = {"cluster": {"kind": kind, **cluster}}
    if kind != "local" and not recipe.store.startswith("s3://"):
        changes["store"] = f"s3://castra-{recipe.name}"
    if kind != "local" and small:
        changes["image"] = Image(container=ANY_CONTAINER).model_dump()
    return Recipe.model_validate(recipe.model_dump() | changes)


def _shared(cluster: LocalCluster | AwsCluster) -> dict[str, Any]:
    """What all AWS kinds have in common."""
    common = set(AwsCluster.model_fields) & set(type(cluster).model_fields)
    return cluster.model_dump(include=common)
