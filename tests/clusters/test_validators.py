"""What is refused before anything is looked at or made: one sentence, which names the field."""

import json
from typing import Any

import pytest
from botocore.session import get_session

from clusters import capacity, catalog, validators
from clusters.base import Refused
from clusters.capacity import Rung
from clusters.stacks import review
from recipes import Recipe
from tests.clusters.gallery import BLOCK, KINDS, PLAN, RESERVATION, recipe, stacks


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_recipe_has_no_problems(kind: str) -> None:
    assert validators.problems(recipe(kind)) == []
    validators.check(recipe(kind))
    assert validators.problems(Recipe()) == []


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "batch",
        {"instance_type": "p5.49xlarge"},
        "cluster.instance_type: 'p5.49xlarge' is not .* did you mean .*p5.48xlarge",
    ),
    ("eks", {"alternatives": ["p4x.24xlarge"]}, "cluster.alternatives: 'p4x.24xlarge' is not"),
    ("batch", {"capacity": [BLOCK], "placement_group": True}, "cluster.placement_group: .* takes no placement group"),
    ("batch", {"capacity": [BLOCK], "instance_type": "g5.48xlarge"}, "g5.48xlarge cannot be had as block"),
    ("eks", {"capacity": [BLOCK], "nodes": 65}, "cluster.nodes: .* has 64 instances at most, not 65"),
    (
        "batch",
        {"capacity": ["on-demand", "spot"]},
        "cluster.capacity: Batch has no spot instances for a job of 2 nodes",
    ),
    ("batch", {"capacity": [PLAN]}, "cluster.capacity: a SageMaker training plan serves kind sagemaker"),
    ("sagemaker", {"capacity": [RESERVATION]}, "cluster.capacity: reservation:cr-.* SageMaker takes none"),
    ("hyperpod", {"capacity": [BLOCK]}, "cluster.capacity: block:cr-.* SageMaker takes none"),
    ("sagemaker", {"instance_type": "g4dn.metal"}, "SageMaker has no g4dn.metal"),
    ("sagemaker", {"capacity": ["spot"], "warm_pool_minutes": 10}, "cluster.warm_pool_minutes: "),
    (
        "batch",
        {"instance_type": "g5.xlarge", "nodes": 64},
        r"cluster.nodes: 64 x g5.xlarge, which has no EFA, .*8 nodes at most",
    ),
    ("eks", {"zones": ["eu-west-1a"]}, "cluster.zones: eu-west-1a is not in us-east-1"),
    ("eks", {"zones": ["us-east-1z"]}, "cluster.zones: there is no zone us-east-1z: zones end in a to f"),
    ("pcs", {"lustre_gib": 1000}, "cluster.lustre_gib: .* not 1000: use 1200 or 2400"),
    ("pcs", {"lustre_gib": 5000}, "cluster.lustre_gib: .* not 5000: use 4800 or 7200"),
    (
        "eks",
        {"kubernetes_version": "1.28"},
        "cluster.kubernetes_version: EKS makes no cluster of 1.28: use 1.32 to 1.36",
    ),
]


@pytest.mark.parametrize(("kind", "cluster", "sentence"), WRONG)
def test_a_wrong_cluster_is_one_sentence(kind: str, cluster: dict[str, Any], sentence: str) -> None:
    (problem,) = validators.problems(recipe(kind, **cluster))
    assert "\n" not in problem
    with pytest.raises(Refused, match=sentence):
        validators.check(recipe(kind, **cluster))


def test_all_mistakes_are_told_at_once() -> None:
    wrong = recipe("batch", capacity=["spot"], zones=["eu-west-1a"], lustre_gib=7)
    told = [problem.partition(":")[0] for problem in validators.problems(wrong)]
    assert told == ["cluster.capacity", "cluster.zones", "cluster.lustre_gib"]


def test_what_a_recipe_must_bring() -> None:
    bare = recipe("eks").model_copy(update={"store": ".castra/store", "image": Recipe().image})
    store, image = validators.problems(bare)
    assert store == "store: nodes on eks cannot reach .castra/store: use s3://bucket/prefix"
    assert image.startswith("image.container: eks runs a container image")
    assert "image.ami" in validators.problems(recipe("pcs").model_copy(update={"image": Recipe().image}))[0]
    shared = recipe("parallelcluster").model_copy(update={"store": "/fsx/store", "image": Recipe().image})
    assert validators.problems(shared) == []


def test_a_name_that_aws_would_cut() -> None:
    name = "a" * 40
    assert validators.problems(recipe("pcs", name)) == [
        f"name: castra-{name} would be the name of a pcs cluster, which has 40 characters at most: shorten it by 7"
    ]
    assert all(validators.problems(recipe(kind, name)) == [] for kind in KINDS if kind != "pcs")
    names = [one.name for kind in KINDS for one in stacks(kind, name).values()]
    assert max(map(len, names)) <= 128


def test_what_sagemaker_does_not_list_is_what_botocore_says() -> None:
    model = get_session().get_service_model("sagemaker")
    for shape, known in (
        ("TrainingInstanceType", validators.NOT_IN_TRAINING),
        ("ClusterInstanceType", validators.NOT_IN_HYPERPOD),
    ):
        listed = set(getattr(model.shape_for(shape), "enum"))  # noqa: B009  only some shapes have it
        assert {name for name in catalog.load() if f"ml.{name}" not in listed} == known


def test_the_ladder_goes_by_capacity_then_type_then_zone() -> None:
    told = recipe("eks", capacity=[BLOCK, "spot"], alternatives=["p5en.48xlarge"], zones=["us-east-1b", "us-east-1d"])
    cluster = told.cluster
    assert cluster.kind == "eks"
    rungs = [(rung.capacity, rung.instance_type[:4], rung.zone[-1]) for rung in capacity.ladder(cluster)]
    assert rungs[:3] == [(BLOCK, "p5.4", "b"), (BLOCK, "p5.4", "d"), (BLOCK, "p5en", "b")]
    assert [one[0] for one in rungs] == [BLOCK] * 4 + ["spot"] * 4
    plain = recipe("eks").cluster
    assert plain.kind == "eks"
    assert capacity.ladder(plain) == [Rung("on-demand", "", "p5.48xlarge", "")]
    assert [rung.zone for rung in capacity.ladder(plain, ["us-east-1c"])] == ["us-east-1c"]
    assert str(capacity.parse(BLOCK, "p5.48xlarge", "us-east-1b")) == f"p5.48xlarge, {BLOCK}, in us-east-1b"


def batch(change: dict[str, Any], **cluster: Any) -> list[str]:
    """What the review says to Batch's template with something changed in its environment or its launch template."""
    template = json.loads(json.dumps(stacks("batch", **cluster)["batch"].template))
    resources = template["Resources"]
    resources["ComputeEnvironment"]["Properties"]["ComputeResources"] |= change.get("environment", {})
    resources["LaunchTemplate"]["Properties"]["LaunchTemplateData"] |= change.get("launch", {})
    return review.problems(template)


def test_a_template_that_would_start_no_gang_is_found() -> None:
    assert batch({}) == []
    assert batch({"environment": {"Subnets": ["subnet-1", "subnet-2"]}}) == [
        "ComputeEnvironment: the nodes of one job would be spread over several zones: name one subnet"
    ]
    assert batch({"environment": {"PlacementGroup": "close"}}, capacity=[BLOCK]) == [
        "ComputeEnvironment: a capacity block takes no placement group: take PlacementGroup out"
    ]
    (told,) = batch({"environment": {"InstanceTypes": ["p5en.48xlarge"]}, "launch": {}})[-1:]
    assert told == "ComputeEnvironment: p5en.48xlarge: 32 EFA interfaces are wanted, and the type has 16"
    (told,) = batch({"launch": {"SecurityGroupIds": ["sg-1"]}})
    assert told.startswith("LaunchTemplate: a launch template with interfaces has its security groups there")


def test_a_node_group_and_its_launch_template_go_together() -> None:
    template = json.loads(json.dumps(stacks("eks", capacity=[BLOCK])["eks"].template))
    assert review.problems(template) == []
    template["Resources"]["Nodes"]["Properties"] |= {"CapacityType": "ON_DEMAND", "InstanceTypes": ["p5.48xlarge"]}
    assert [problem.split(": ")[1].split()[0] for problem in review.problems(template)] == ["CapacityType", "the"]
