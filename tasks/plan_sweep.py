"""The same training on other machines of the catalogue, each by what was learned there."""

from collections.abc import Sequence

from clusters import catalog
from clusters.base import Refused
from planner.offers import Offer, judged, planned, refusals
from recipes.cluster import LocalCluster, SlurmCluster
from recipes.spec import Parallel, Recipe
from tasks import learning
from tasks.machines import as_machine

NEAR = (0.25, 0.5, 1, 2, 4)
"""Multiples of a recipe's nodes that are compared where nobody says which."""


def sweep(recipe: Recipe, instances: Sequence[str], nodes: Sequence[int]) -> list[Offer]:
    """Plan the recipe's training on every instance type with every number of nodes, in the layout that is best there.

    Raises `Refused` if an instance type is unknown, or with every reason if none of them can run it.
    """
    found: list[Offer] = []
    for name in instances:
        machine = as_machine(catalog.find(name))
        found += judged(freed(recipe), machine, nodes, learning.lessons(moved(recipe, name, 1)).profiles)
    if not planned(found):
        raise Refused("\n".join(refusals(found)))
    return found


def freed(recipe: Recipe) -> Recipe:
    """The recipe with its layout left to the planner: what it prescribes was meant for its own machines."""
    return recipe.model_copy(update={"parallel": Parallel(software=recipe.parallel.software)})


def moved(recipe: Recipe, instance: str, nodes: int) -> Recipe:
    """The recipe on other machines of AWS's, its layout left to the planner."""
    cluster = SlurmCluster() if isinstance(recipe.cluster, LocalCluster) else recipe.cluster
    there = cluster.model_copy(update={"instance_type": instance, "alternatives": (), "nodes": nodes})
    return freed(recipe).model_copy(update={"cluster": there})


def neighbours(recipe: Recipe) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Instance types and numbers of nodes to compare a recipe's own with: on AWS half and twice as many, and so on.

    A recipe for this machine is compared with one instance of each type.
    """
    cluster = recipe.cluster
    if isinstance(cluster, LocalCluster):
        return tuple(catalog.load()), (1,)
    counts = {int(cluster.nodes * factor) for factor in NEAR} - {0}
    return (cluster.instance_type, *cluster.alternatives), tuple(sorted(counts))
