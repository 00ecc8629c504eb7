"""Which stacks a recipe's cluster stands on, in the order in which they are deployed."""

from collections.abc import Sequence
from dataclasses import dataclass

from clusters.capacity import Rung
from clusters.stacks import batch, camp, eks, files, hyperpod, pcs, sagemaker
from clusters.stacks.nodes import Place
from clusters.stacks.parts import Part
from recipes.cluster import AwsCluster, BatchCluster, EksCluster, SageMakerCluster, SlurmCluster
from recipes.spec import Recipe

CONTROL_ZONES = 2
"""What an EKS control plane asks for. Which two must not change as long as it stands: the first by their letters."""
SECOND_ZONE = {"ap-northeast-1": "c", "sa-east-1": "c", "us-west-1": "c"}
"""Next to zone a, where it is not b."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One stack: its name, the part of the architecture it is, its template."""

    name: str
    part: str
    """camp, files, batch, eks, sagemaker, pcs, hyperpod."""
    template: Part


def stack_name(run: str, part: str) -> str:
    """`castra-<run>-<part>`: at most 56 of the 128 characters CloudFormation takes."""
    return f"castra-{run}-{part}"


def needed(
    recipe: Recipe, rung: Rung | None = None, zones: Sequence[str] = (), *, tls_only: bool = True
) -> list[Wanted]:
    """The stacks of a recipe for one rung of its ladder, each after those whose outputs it imports.

    The camp spans `zones` (all in which the ladder has rungs; by default `cluster.zones`), the rest stands in the
    rung's, so that trying the next zone moves nothing but the rest. Without a rung it is the small camp of a recipe for
    this machine. `tls_only` is the camp's. The output names of each part are told where it is built.
    """
    cluster, ground = recipe.cluster, camp.name(recipe.name)
    if not isinstance(cluster, AwsCluster) or rung is None:
        return [Wanted(ground, "camp", camp.template(tls_only=tls_only))]
    places = _zones(cluster, rung, zones)
    count = CONTROL_ZONES if isinstance(cluster, EksCluster) else 1
    told = camp.template(places, count=count, tls_only=tls_only, nat=True, fleet=True)
    home = isinstance(cluster, SlurmCluster) and cluster.flavour == "pcs"
    shared, subnet = stack_name(recipe.name, "files"), camp.subnet(rung.zone or next(iter(places), ""))
    control = tuple(map(camp.subnet, sorted(places)[:CONTROL_ZONES])) or camp.first_subnets(CONTROL_ZONES)
    place = Place(ground, subnet, shared if cluster.lustre_gib else "", shared if home else "", control)
    stacks = [Wanted(ground, "camp", told)]
    if place.fsx or place.home:
        stacks.append(_wanted(recipe, "files", files.template(recipe, cluster, place)))
    return stacks + _cluster(recipe, cluster, rung, place)


def in_the_way(recipe: Recipe, before: Rung, after: Rung) -> list[str]:
    """The stacks of one rung that must be deleted before another is deployed, in that order.

    In the same zone, Batch and EKS are changed in place. What stands in another zone is not: others import what would
    change. PCS and HyperPod have names of their own, under which AWS makes nothing anew.
    """
    cluster = recipe.cluster
    movable = isinstance(cluster, BatchCluster | SageMakerCluster) or (
        isinstance(cluster, EksCluster) and cluster.flavour == "nodegroup"
    )
    if before == after or (movable and before.zone == after.zone):
        return []
    return [one.name for one in reversed(needed(recipe, before)[1:])]


def _zones(cluster: AwsCluster, rung: Rung, given: Sequence[str]) -> tuple[str, ...]:
    """The camp's zones, that of the rung first; an EKS control plane wants a second one, whoever stands there."""
    zones = tuple(dict.fromkeys([*([rung.zone] if rung.zone else []), *(given or cluster.zones)]))
    if len(zones) != 1 or not isinstance(cluster, EksCluster):
        return zones
    region, letter = zones[0][:-1], zones[0][-1]
    return (*zones, region + ("a" if letter != "a" else SECOND_ZONE.get(region, "b")))


def _cluster(recipe: Recipe, cluster: AwsCluster, rung: Rung, place: Place) -> list[Wanted]:
    """What is the cluster itself; ParallelCluster makes stacks of its own."""
    told: dict[str, Part] = {}
    match cluster:
        case BatchCluster():
            told["batch"] = batch.template(recipe, cluster, rung, place)
        case SageMakerCluster():
            told["sagemaker"] = sagemaker.template(recipe)
        case SlurmCluster(flavour="pcs"):
            told["pcs"] = pcs.template(recipe, cluster, rung, place)
        case SlurmCluster(flavour="hyperpod"):
            told["hyperpod"] = hyperpod.template(recipe, cluster, rung, place)
        case EksCluster():
            told["eks"] = eks.template(recipe, cluster, rung, place)
            if cluster.flavour == "hyperpod":
                told["hyperpod"] = hyperpod.template(recipe, cluster, rung, place, stack_name(recipe.name, "eks"))
    return [_wanted(recipe, part, template) for part, template in told.items()]


def _wanted(recipe: Recipe, part: str, template: Part) -> Wanted:
    return Wanted(stack_name(recipe.name, part), part, template)
