"""What is left of a recipe in an emulator: everything that bears its name, past our own ledger and inventory."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import boto3
from botocore.exceptions import ClientError

Env = dict[str, str]


def submissions(env: Env, name: str) -> int:
    """How many jobs of the recipe were ever accepted."""
    request = urllib.request.Request(f"{env['AWS_ENDPOINT_URL']}/castra/journal", b"{}")
    with urllib.request.urlopen(request, timeout=10) as reply:
        return sum(f"-{name}-" in job for _, job in json.loads(reply.read()))


def leftovers(env: Env, name: str) -> list[str]:
    """What bears the recipe's name and would cost money or a quota, as `service: name`."""
    return [f"{service}: {found}" for service, look in LOOKS for found in look(env) if f"-{name}-" in f"-{found}-"]


def _client(env: Env, service: str) -> Any:
    keys = (env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"])
    session = boto3.session.Session(*keys, region_name=env["AWS_REGION"])
    return session.client(service, endpoint_url=env["AWS_ENDPOINT_URL"])  # type: ignore[call-overload]  # a name at run time


def _stacks(env: Env) -> Iterator[str]:
    for page in _client(env, "cloudformation").get_paginator("describe_stacks").paginate():
        # the store's own stack holds the results, and stays on purpose
        yield from (one["StackName"] for one in page["Stacks"] if not one["StackName"].startswith("castra-store-"))


def _networks(env: Env) -> Iterator[str]:
    ec2 = _client(env, "ec2")
    for vpc in ec2.describe_vpcs()["Vpcs"]:
        yield from (tag["Value"] for tag in vpc.get("Tags", []) if tag["Key"] == "castra:run")
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        yield template["LaunchTemplateName"]


def _batch(env: Env) -> Iterator[str]:
    batch = _client(env, "batch")
    for queue in batch.describe_job_queues()["jobQueues"]:
        yield queue["jobQueueName"]
    for made in batch.describe_compute_environments()["computeEnvironments"]:
        yield made["computeEnvironmentName"]
    for page in batch.get_paginator("describe_job_definitions").paginate(status="ACTIVE"):
        yield from (made["jobDefinitionName"] for made in page["jobDefinitions"])


def _eks(env: Env) -> Iterator[str]:
    yield from _client(env, "eks").list_clusters()["clusters"]


def _sagemaker(env: Env) -> Iterator[str]:
    sagemaker = _client(env, "sagemaker")
    for status in ("InProgress", "Stopping"):
        told = sagemaker.list_training_jobs(StatusEquals=status)["TrainingJobSummaries"]
        yield from (job["TrainingJobName"] for job in told)


def _roles(env: Env) -> Iterator[str]:
    for page in _client(env, "iam").get_paginator("list_roles").paginate():
        yield from (role["RoleName"] for role in page["Roles"])


def _logs(env: Env) -> Iterator[str]:
    for page in _client(env, "logs").get_paginator("describe_log_groups").paginate():
        yield from (group["logGroupName"].replace("/", "-") for group in page["logGroups"])


def _buckets(env: Env) -> Iterator[str]:
    s3 = _client(env, "s3")
    for bucket in s3.list_buckets()["Buckets"]:
        try:
            tags = s3.get_bucket_tagging(Bucket=bucket["Name"])["TagSet"]
        except ClientError:
            continue
        yield from (tag["Value"] for tag in tags if tag["Key"] == "castra:run")


def _clusters(env: Env) -> Iterator[str]:
    told = {"operation": "list-clusters", "region": env["AWS_REGION"]}
    request = urllib.request.Request(f"{env['AWS_ENDPOINT_URL']}/castra/pcluster", json.dumps(told).encode())
    with urllib.request.urlopen(request, timeout=10) as reply:
        yield from (one["clusterName"] for one in json.loads(reply.read()).get("clusters", []))


LOOKS: tuple[tuple[str, Callable[[Env], Iterator[str]]], ...] = (
    ("stack", _stacks),
    ("network", _networks),
    ("batch", _batch),
    ("eks", _eks),
    ("sagemaker", _sagemaker),
    ("role", _roles),
    ("log group", _logs),
    ("bucket", _buckets),
    ("pcluster", _clusters),
)
