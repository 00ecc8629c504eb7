"""The operator's policy: it knows every resource type and every call we make, and nothing wider than it must be."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.session import get_session
from cfnlint.api import lint  # type: ignore[import-untyped]  # it has no types
from cfnlint.config import ManualArgs  # type: ignore[import-untyped]  # it has no types

from clusters import policy
from clusters.rights import TYPES
from recipes import Recipe
from tests.clusters.gallery import BLOCK, KINDS, recipe, stacks

CLUSTERS = Path(policy.__file__).parent
ACCOUNT = "123456789012"
CALLED = {
    "cloudformation": ("stacks/deploy.py", "stacks/watch.py"),
    "ec2": ("preflight.py",),
    "service-quotas": ("preflight.py",),
    "batch": ("batch.py",),
    "sagemaker": ("sagemaker.py", "preflight.py"),
    "logs": ("cloudwatch.py",),
    "eks": ("kubernetes_api.py",),
}


def linted(document: dict[str, Any]) -> list[str]:
    template = {"Resources": {"P": {"Type": "AWS::IAM::ManagedPolicy", "Properties": {"PolicyDocument": document}}}}
    return [str(match) for match in lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))]


def allowed(document: dict[str, Any]) -> set[str]:
    return {action for statement in document["Statement"] for action in statement["Action"]}


@pytest.mark.parametrize("kind", KINDS)
def test_iam_knows_every_word_of_it(kind: str) -> None:
    document = policy.policy(recipe(kind), ACCOUNT)
    assert linted(document) == []
    pages = policy.split(document)
    assert [one for page in pages for one in page["Statement"]] == document["Statement"]
    assert len(pages) <= 3
    assert all(len(json.dumps(page, separators=(",", ":"))) <= policy.MOST_CHARACTERS for page in pages)


def test_a_word_that_iam_does_not_know_would_be_found() -> None:
    document = policy.policy(recipe("batch"), ACCOUNT)
    document["Statement"][0]["Action"].append("batch:DoAnything")
    assert "DoAnything" in linted(document)[0].replace("doanything", "DoAnything")


@pytest.mark.parametrize("kind", KINDS)
def test_all_types_of_its_stacks_are_in_the_table(kind: str) -> None:
    types = {told["Type"] for one in stacks(kind).values() for told in one.template["Resources"].values()}
    assert types <= set(TYPES)


def test_all_that_the_code_calls_is_allowed() -> None:
    for service, files in CALLED.items():
        model = get_session().get_service_model(service)
        operations = {xform_name(name): name for name in model.operation_names}
        source = "".join((CLUSTERS / name).read_text().replace("re.search(", "") for name in files)
        named = set(re.findall(r"\.(\w+)\(", source)) | set(re.findall(r'get_paginator\("(\w+)"\)', source))
        prefix = service.replace("-", "")
        kinds = [kind for kind in KINDS if kind.startswith(prefix)] or ["batch"]
        have = allowed(policy.policy(recipe(kinds[0]), ACCOUNT))
        assert {f"{prefix}:{operations[name]}" for name in named & set(operations)} <= have, service


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parallelcluster"])
def test_nothing_is_allowed_wholesale(kind: str) -> None:
    for statement in policy.policy(recipe(kind), ACCOUNT)["Statement"]:
        assert all("*" not in action for action in statement["Action"])
        changes = [action for action in statement["Action"] if re.search(r":(Delete|Put|Update|Terminate)", action)]
        assert statement["Resource"] != ["*"] or "Condition" in statement or not changes, changes
        if "iam:PassRole" in statement["Action"]:
            assert all(":role/" in arn and "castra-" in arn for arn in statement["Resource"])
            assert statement["Condition"]["StringEquals"]["iam:PassedToService"]


def test_another_runs_things_are_out_of_reach() -> None:
    document = policy.policy(recipe("batch", "mine"), ACCOUNT)

    def reaches(action: str, arn: str) -> bool:
        """Whether the action is allowed there without a condition."""
        plain = [one for one in document["Statement"] if action in one["Action"] and "Condition" not in one]
        resources = [one["Resource"] for one in plain]
        listed = [name for one in resources for name in ([one] if isinstance(one, str) else one)]
        return any(fnmatchcase(arn, name) for name in listed)

    stack = f"arn:aws:cloudformation:us-east-1:{ACCOUNT}:stack/castra-"
    assert reaches("cloudformation:DeleteStack", f"{stack}mine-batch/1")
    assert not reaches("cloudformation:DeleteStack", f"{stack}other-batch/1")
    queue = f"arn:aws:batch:us-east-1:{ACCOUNT}:job-queue/castra-"
    assert reaches("batch:SubmitJob", f"{queue}mine")
    assert not reaches("batch:SubmitJob", f"{queue}other")
    assert reaches("s3:GetObject", "arn:aws:s3:::my-models/castra/runs/1")
    assert not reaches("s3:GetObject", "arn:aws:s3:::my-models/elsewhere")
    assert not reaches("ec2:DeleteVpc", "*"), "only what carries the run's tag"


def test_the_policy_covers_every_rung() -> None:
    both = allowed(policy.policy(recipe("batch", capacity=[BLOCK, "on-demand"])))
    assert "ec2:CreatePlacementGroup" in both
    assert "ec2:CreatePlacementGroup" not in allowed(policy.policy(recipe("batch", capacity=[BLOCK])))


def test_a_recipe_of_this_machine_asks_for_its_small_camp_only() -> None:
    services = {action.partition(":")[0] for action in allowed(policy.policy(Recipe()))}
    assert services == {"cloudformation", "ec2", "iam", "logs", "s3", "servicequotas"}


def baking() -> dict[str, Any]:
    """The policy of a recipe whose image is to be baked."""
    told = recipe("batch")
    image = told.image.model_copy(update={"flavour": "batch-ecs-gpu"})
    return policy.policy(told.model_copy(update={"image": image}), ACCOUNT)


def test_who_bakes_images_may_do_all_that_our_code_calls_and_iam_knows_every_word() -> None:
    document = baking()
    assert linted(document) == []
    for service, file in (("ec2", "machine_images.py"), ("ssm", "machine_images.py"), ("ecr", "container_images.py")):
        operations = get_session().get_service_model(service).operation_names
        named = set(re.findall(r"\.(\w+)\(", (CLUSTERS / file).read_text()))
        wanted = {f"{service}:{name}" for name in operations if xform_name(name) in named}
        assert wanted, service
        assert wanted <= allowed(document), service
    assert allowed(document) > allowed(policy.policy(recipe("batch"), ACCOUNT))


def test_who_bakes_images_may_do_all_that_packer_calls() -> None:
    """Packer 1.6.6's calls while it baked an image behind a proxy that wrote them down, 2026-11-20."""
    called = (
        "CreateImage CreateKeyPair CreateTags DeleteKeyPair DescribeImages DescribeInstances DescribeSecurityGroups "
        "DescribeVolumes ModifyImageAttribute ModifyInstanceAttribute RunInstances StopInstances TerminateInstances"
    )
    assert {f"ec2:{name}" for name in called.split()} <= allowed(baking())


def test_who_bakes_images_changes_only_what_a_build_has_made() -> None:
    tagged = {"aws:ResourceTag/castra:flavour", "aws:RequestTag/castra:flavour"}
    removing = re.compile(r"ec2:(Delete|Deregister|Terminate|Stop|Modify|Authorize|CreateTags)")
    rows = [one for one in baking()["Statement"] if any(removing.match(action) for action in one["Action"])]
    ours = [one for one in rows if tagged & set(one.get("Condition", {}).get("Null", {}))]
    strange = {action for one in rows if one not in ours for action in one["Action"] if removing.match(action)}
    stacks_do = {action for action in allowed(policy.policy(recipe("batch"), ACCOUNT)) if removing.match(action)}
    assert strange <= {"ec2:DeleteKeyPair"} | stacks_do
    assert "ec2:DeregisterImage" in {action for one in ours for action in one["Action"]}
    for one in baking()["Statement"]:
        if {"ecr:PutImage", "ssm:PutParameter"} & set(one["Action"]):
            assert all("castra/" in name for name in one["Resource"])
