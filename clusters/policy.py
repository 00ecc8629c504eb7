"""The IAM policy of whoever runs a recipe: what its stacks and its adapter do, on its own things, and no more.

`python -m clusters policy RECIPE` prints it. It is derived from the very templates that would be deployed: a resource
type they gain must be in `clusters.rights.TYPES` before a policy is made of them.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from clusters import image_rights
from clusters.capacity import ladder
from clusters.rights import ALWAYS, CALLS, TAGGED, TYPES, Grant
from clusters.stacks import architecture
from clusters.stacks.parts import store_rights
from recipes.cluster import AwsCluster, EksCluster, SlurmCluster
from recipes.spec import Recipe

LINKED = {
    "AWS::Batch::ComputeEnvironment": ("batch", "ecs", "autoscaling", "spot"),
    "AWS::EKS::Nodegroup": ("eks", "eks-nodegroup", "autoscaling"),
    "AWS::FSx::FileSystem": ("fsx",),
    "AWS::PCS::Cluster": ("pcs", "spot"),
    "AWS::SageMaker::Cluster": ("hyperpod.sagemaker",),
}
"""Services that want a role of their own in the account, once, before the first such resource."""
MOST_CHARACTERS = 6_144
"""Of one managed policy, without spaces."""

Statement = dict[str, Any]


def policy(recipe: Recipe, account: str = "*", partition: str = "aws") -> dict[str, Any]:
    """The policy document for a recipe's whole life: deploy, run, watch, take down, and its store.

    It is for all rungs of the recipe's ladder, in the recipe's region; `account` narrows it to one account.
    """
    cluster = recipe.cluster
    region = cluster.region if isinstance(cluster, AwsCluster) else "*"
    rungs = ladder(cluster) if isinstance(cluster, AwsCluster) else [None]
    wanted = [stack.template for rung in rungs for stack in architecture.needed(recipe, rung)]
    types = sorted({told["Type"] for template in wanted for told in template["Resources"].values()})
    grants = [*ALWAYS, *(grant for kind in _callers(recipe) for grant in CALLS.get(kind, ()))]
    grants += [grant for kind in types for grant in TYPES[kind]]
    words = {"run": recipe.name, "region": region, "account": account, "partition": partition}
    words["store"] = f"arn:{partition}:s3:::{recipe.store.removeprefix('s3://').partition('/')[0]}"
    statements = [*_merged(grants, words), *_passed(wanted, words), *_linked(types, words), *_store(recipe, words)]
    if recipe.image.flavour != "local" and not recipe.image.ami:  # flows.build_image bakes it
        statements += image_rights.statements(words)
    return {"Version": "2012-10-17", "Statement": statements}


def split(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The same as documents that each fit in a managed policy (ten can be attached to a role)."""
    pages: list[list[Statement]] = [[]]
    for statement in document["Statement"]:
        if _size([*pages[-1], statement]) > MOST_CHARACTERS:
            pages.append([])
        pages[-1].append(statement)
    return [{"Version": document["Version"], "Statement": page} for page in pages]


def _size(statements: list[Statement]) -> int:
    return len(json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":")))


def _callers(recipe: Recipe) -> Iterator[str]:
    """Whose calls: the kind of cluster, or the flavour that stands for it."""
    cluster = recipe.cluster
    if not isinstance(cluster, SlurmCluster):
        yield cluster.kind
    if isinstance(cluster, SlurmCluster) or (isinstance(cluster, EksCluster) and cluster.flavour == "hyperpod"):
        yield cluster.flavour


def _merged(grants: Iterable[Grant], words: dict[str, str]) -> Iterator[Statement]:
    """A statement for each set of resources, whatever it takes from how many services, sorted."""
    groups: dict[tuple[tuple[str, ...], bool], set[str]] = {}
    for grant in grants:
        resources = tuple(_arn(grant.service, name, words) for name in grant.resources)
        told = {f"{grant.service}:{action}" for action in grant.actions.split()}
        groups.setdefault((resources, grant.tagged), set()).update(told)
    for (resources, tagged), actions in sorted(groups.items(), key=lambda group: sorted(group[1])):
        yield _statement(sorted(actions), list(resources), _filled(TAGGED, words) if tagged else None)


def _passed(templates: Iterable[dict[str, Any]], words: dict[str, str]) -> Iterator[Statement]:
    """Hand our roles to the services that they trust, and AWS's own policies to our roles."""
    roles = [
        told for template in templates for told in template["Resources"].values() if told["Type"] == "AWS::IAM::Role"
    ]
    trusted = {
        statement["Principal"]["Service"]
        for made in roles
        for statement in made["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    }
    managed = {
        arn["Fn::Sub"].replace("${AWS::Partition}", words["partition"])
        for made in roles
        for arn in made["Properties"].get("ManagedPolicyArns", [])
    }
    ours = [f"arn:{words['partition']}:iam::{words['account']}:role/{path}castra-*" for path in ("", "aws-pcs/")]
    yield _statement(["iam:PassRole"], ours, {"StringEquals": {"iam:PassedToService": sorted(trusted)}})
    if managed:
        actions = ["iam:AttachRolePolicy", "iam:DetachRolePolicy"]
        yield _statement(actions, ours, {"ArnEquals": {"iam:PolicyARN": sorted(managed)}})


def _linked(types: Iterable[str], words: dict[str, str]) -> Iterator[Statement]:
    names = sorted({f"{service}.amazonaws.com" for kind in types for service in LINKED.get(kind, ())})
    if names:
        where = f"arn:{words['partition']}:iam::{words['account']}:role/aws-service-role/*"
        yield _statement(["iam:CreateServiceLinkedRole"], [where], {"StringEquals": {"iam:AWSServiceName": names}})


def _store(recipe: Recipe, words: dict[str, str]) -> Iterator[Statement]:
    """Whoever runs the recipe reads and writes its store as its jobs do."""
    for told in store_rights(recipe.store):
        yield told | {"Resource": told["Resource"]["Fn::Sub"].replace("${AWS::Partition}", words["partition"])}


def _arn(service: str, name: str, words: dict[str, str]) -> str:
    if name == "*" or name.startswith(("arn:", "{")):
        return name.format(**words)
    return f"arn:{words['partition']}:{service}:{words['region']}:{words['account']}:{name}".format(**words)


def _filled(condition: dict[str, dict[str, str]], words: dict[str, str]) -> Statement:
    return {test: {key: value.format(**words) for key, value in told.items()} for test, told in condition.items()}


def _statement(actions: list[str], resources: list[str], condition: Statement | None = None) -> Statement:
    told: Statement = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return told | ({"Condition": condition} if condition else {})
