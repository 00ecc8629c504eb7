"""What is wrong with a recipe's cluster, found before any call and without a network, one sentence each.

A sentence says where it is wrong (the field), what is wrong, and what to do. What only AWS can answer (quotas, zones,
reservations) is asked by `clusters.preflight`.
"""

from collections.abc import Iterator

from clusters import catalog, interfaces
from clusters.base import Refused
from clusters.capacity import Rung, ladder
from clusters.catalog import Instance
from clusters.stacks import hyperpod, pcs
from clusters.stacks.camp import LETTERS
from clusters.stacks.nodes import is_neuron
from recipes.cluster import AwsCluster, BatchCluster, EksCluster, SageMakerCluster, SlurmCluster
from recipes.spec import Recipe

WITHOUT_EFA = 8
"""Nodes of a type without EFA at most: their gradients go over TCP at 10 to 20 Gbit/s, shared with everybody, and on
more nodes a step waits for the network most of its time."""
BLOCK_NODES = 64
"""Instances in one capacity block at most (AWS, EC2 Capacity Blocks)."""
KUBERNETES = (32, 36)
"""Minor versions that EKS makes clusters of, as of 2026-11 (EKS user guide; endoflife.date/amazon-eks)."""
NOT_IN_TRAINING = {"g4dn.metal", "trn2.3xlarge"}
NOT_IN_HYPERPOD = {"g4dn.metal", "p3dn.24xlarge", "trn1.2xlarge"}
"""Types of the catalogue that SageMaker does not list (botocore's TrainingInstanceType, ClusterInstanceType)."""
LONGEST_PCLUSTER_NAME = 60
LUSTRE_STEP_GIB, SMALLEST_LUSTRE_GIB = 2400, 1200
HOW = {"block": "capacity-block", "on-demand": "on-demand", "spot": "spot"}
"""Market → what the catalogue calls it; a reservation is of instances on demand."""


def problems(recipe: Recipe) -> list[str]:
    """Everything that is wrong with a recipe's cluster; nothing for one on this machine."""
    cluster = recipe.cluster
    if not isinstance(cluster, AwsCluster):
        return []
    found = list(_unknown(cluster))
    if not found:
        found += [*_buying(cluster), *_gang(cluster), *_layout(cluster)]
        found += _brought(recipe)
    found += [*_zones(cluster), *_lustre(cluster), *_names(recipe)]
    if isinstance(cluster, EksCluster):
        found += _kubernetes(cluster)
    return list(dict.fromkeys(found))


def check(recipe: Recipe) -> None:
    """Raise `Refused` with all that is wrong with a recipe's cluster, a line each."""
    if wrong := problems(recipe):
        raise Refused("\n".join(wrong))


def _types(cluster: AwsCluster) -> list[Instance]:
    return [catalog.find(name) for name in (cluster.instance_type, *cluster.alternatives)]


def _unknown(cluster: AwsCluster) -> Iterator[str]:
    named = [("instance_type", cluster.instance_type), *(("alternatives", name) for name in cluster.alternatives)]
    for field, name in named:
        try:
            catalog.find(name)
        except Refused as error:
            yield f"cluster.{field}: {error}"


def _buying(cluster: AwsCluster) -> Iterator[str]:
    unlisted = NOT_IN_HYPERPOD if _is_hyperpod(cluster) else NOT_IN_TRAINING if _is_training(cluster) else set()
    for rung in ladder(cluster):
        instance, how = catalog.find(rung.instance_type), HOW.get(rung.market)
        if how and how not in instance.capacity:
            ways = ", ".join(instance.capacity)
            yield f"cluster.capacity: {instance.name} cannot be had as {rung.market}: use one of {ways}"
        if instance.name in unlisted:
            yield f"cluster.instance_type: SageMaker has no {instance.name}: choose another type, or another kind"
        yield from _block(cluster, rung)
        yield from _spot(cluster, rung)
        yield from _whose(cluster, rung)


def _block(cluster: AwsCluster, rung: Rung) -> Iterator[str]:
    if rung.market != "block":
        return
    if cluster.placement_group:
        yield (
            f"cluster.placement_group: {rung.capacity} is a capacity block, which is in one place already and takes no "
            "placement group: leave placement_group empty"
        )
    if cluster.nodes > BLOCK_NODES:
        yield f"cluster.nodes: {rung.capacity} has {BLOCK_NODES} instances at most, not {cluster.nodes}: ask for fewer"


def _spot(cluster: AwsCluster, rung: Rung) -> Iterator[str]:
    if rung.market != "spot":
        return
    if isinstance(cluster, BatchCluster) and cluster.nodes > 1:
        yield (
            f"cluster.capacity: Batch has no spot instances for a job of {cluster.nodes} nodes: take spot out, or use "
            "one node, or another kind of cluster"
        )
    if isinstance(cluster, SageMakerCluster) and cluster.warm_pool_minutes:
        yield "cluster.warm_pool_minutes: SageMaker keeps no spot instances warm: set it to 0, or take spot out"


def _whose(cluster: AwsCluster, rung: Rung) -> Iterator[str]:
    """EC2's reservations are not SageMaker's, and the other way round."""
    sagemakers = _is_training(cluster) or _is_hyperpod(cluster)
    if rung.market == "plan" and not sagemakers:
        yield (
            "cluster.capacity: a SageMaker training plan serves kind sagemaker and flavour hyperpod only: use a block "
            "or a reservation"
        )
    if rung.market in ("block", "reservation") and sagemakers:
        yield f"cluster.capacity: {rung.capacity} is EC2's, and SageMaker takes none: name a training plan, plan:arn…"


def _gang(cluster: AwsCluster) -> Iterator[str]:
    for instance in _types(cluster):
        if not instance.efa_interfaces and cluster.nodes > WITHOUT_EFA:
            yield (
                f"cluster.nodes: {cluster.nodes} x {instance.name}, which has no EFA, would wait for each other over "
                f"{instance.network_gbps:g} Gbit/s of TCP: use {WITHOUT_EFA} nodes at most, or a type with EFA "
                "(`python -m clusters.catalog efa`)"
            )


def _layout(cluster: AwsCluster) -> Iterator[str]:
    """Our own interfaces, held against the catalogue: a wrong figure there is found here and not at the launch."""
    for instance in _types(cluster):
        yield from (
            f"cluster.instance_type: {wrong}"
            for wrong in interfaces.problems(instance, interfaces.interfaces(instance, []))
        )


def _zones(cluster: AwsCluster) -> Iterator[str]:
    for zone in cluster.zones:
        if zone[:-1] != cluster.region:
            yield f"cluster.zones: {zone} is not in {cluster.region}: name its zones, or change cluster.region"
        elif zone[-1] not in LETTERS:
            yield f"cluster.zones: there is no zone {zone}: zones end in a to {LETTERS[-1]}"


def _lustre(cluster: AwsCluster) -> Iterator[str]:
    size, step = cluster.lustre_gib, LUSTRE_STEP_GIB
    if size and size != SMALLEST_LUSTRE_GIB and size % step:
        near = f"{size // step * step or SMALLEST_LUSTRE_GIB} or {(size // step + 1) * step}"
        yield (
            f"cluster.lustre_gib: FSx for Lustre has {SMALLEST_LUSTRE_GIB} GiB or a multiple of {step} GiB, not "
            f"{size}: use {near}"
        )


def _names(recipe: Recipe) -> Iterator[str]:
    """Names that AWS makes of the recipe's own; those of stacks (128) and of EKS clusters (100) always fit."""
    cluster = recipe.cluster
    limits = {"parallelcluster": LONGEST_PCLUSTER_NAME, "pcs": pcs.LONGEST_NAME, "hyperpod": hyperpod.LONGEST_NAME}
    flavour = cluster.flavour if isinstance(cluster, SlurmCluster | EksCluster) else ""
    name, limit = f"castra-{recipe.name}", limits.get(flavour)
    if limit and len(name) > limit:
        yield (
            f"name: {name} would be the name of a {flavour} cluster, which has {limit} characters at most: "
            f"shorten it by {len(name) - limit}"
        )


def _brought(recipe: Recipe) -> Iterator[str]:
    """What a recipe must bring along: a store that nodes reach, an image they run."""
    cluster = recipe.cluster
    if not isinstance(cluster, SlurmCluster) and not recipe.store.startswith("s3://"):
        yield f"store: nodes on {cluster.kind} cannot reach {recipe.store}: use s3://bucket/prefix"
    contained = isinstance(cluster, BatchCluster | EksCluster | SageMakerCluster)
    if not recipe.image.container and (contained or (isinstance(cluster, SlurmCluster) and cluster.containers)):
        yield (
            f"image.container: {cluster.kind} runs a container image, and none is named: name one that has "
            "Python, torch, transformers and boto3"
        )
    if isinstance(cluster, BatchCluster) and not recipe.image.ami and is_neuron(cluster.instance_type):
        yield "image.ami: AWS Batch has no image with the Neuron driver: name an AMI for ECS that has it"
    if isinstance(cluster, SlurmCluster) and cluster.flavour == "pcs" and not recipe.image.ami:
        yield "image.ami: AWS PCS has no image of its own for accelerators: name an AMI with the PCS agent and Slurm"


def _kubernetes(cluster: EksCluster) -> Iterator[str]:
    oldest, newest = KUBERNETES
    if not oldest <= int(cluster.kubernetes_version.removeprefix("1.")) <= newest:
        told = cluster.kubernetes_version
        yield f"cluster.kubernetes_version: EKS makes no cluster of {told}: use 1.{oldest} to 1.{newest}"


def _is_training(cluster: AwsCluster) -> bool:
    return isinstance(cluster, SageMakerCluster)


def _is_hyperpod(cluster: AwsCluster) -> bool:
    return isinstance(cluster, SlurmCluster | EksCluster) and cluster.flavour == "hyperpod"
