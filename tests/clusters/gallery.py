"""One recipe of each kind and flavour, as tests want them."""

from typing import Any

from clusters.aws import Site
from clusters.capacity import Rung, ladder
from clusters.ledger import Entry
from clusters.stacks import architecture, camp
from clusters.stacks.architecture import Wanted
from clusters.stacks.deploy import Stack
from recipes import Recipe
from recipes.cluster import AwsCluster

CONTAINER = "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1"
BLOCK = "block:cr-0123456789abcdef0"
RESERVATION = "reservation:cr-0fedcba9876543210"
PLAN = "plan:arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"
KINDS: dict[str, dict[str, Any]] = {
    "batch": {"kind": "batch", "lustre_gib": 4800},
    "eks": {"kind": "eks", "lustre_gib": 4800},
    "eks-hyperpod": {"kind": "eks", "flavour": "hyperpod"},
    "sagemaker": {"kind": "sagemaker"},
    "pcs": {"kind": "slurm", "flavour": "pcs", "lustre_gib": 4800},
    "hyperpod": {"kind": "slurm", "flavour": "hyperpod", "lustre_gib": 4800},
    "parallelcluster": {"kind": "slurm", "lustre_gib": 4800},
}


def recipe(kind: str, name: str = "tiny", **cluster: Any) -> Recipe:
    """A recipe that is all right, unless `cluster` makes it wrong."""
    told = {"instance_type": "p5.48xlarge", "region": "us-east-1"} | KINDS[kind] | cluster
    image = {"container": CONTAINER, "ami": "ami-0123456789abcdef0" if kind == "pcs" else ""}
    return Recipe.model_validate({"name": name, "store": "s3://my-models/castra", "image": image, "cluster": told})


def rung(told: Recipe) -> Rung:
    """The first of its ladder."""
    assert isinstance(told.cluster, AwsCluster)
    return ladder(told.cluster)[0]


def stacks(kind: str, name: str = "tiny", **cluster: Any) -> dict[str, Wanted]:
    """What the recipe stands on, by part."""
    told = recipe(kind, name, **cluster)
    return {one.part: one for one in architecture.needed(told, rung(told))}


def camp_stack(entry: Entry, *, nat: bool = False) -> Stack:
    """The small camp that an intent announced."""
    site = Site(**entry.where)
    return Stack(entry.name, camp.template(tls_only=not site.endpoint, nat=nat), entry.tags, site)
