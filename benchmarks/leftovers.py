"""What is left of a recipe in an emulator: everything that bears its name, past our own ledger and inventory."""

from collections.abc import Callable, Iterator

from botocore.exceptions import ClientError

from emulator.aws import REGION
from tests.sky import client, tell


def submissions(endpoint: str, name: str) -> int:
    """How many jobs of the recipe were ever accepted."""
    return sum(f"-{name}-" in job for _, job in tell(endpoint, "journal"))


def leftovers(endpoint: str, name: str) -> list[str]:
    """What bears the recipe's name and would cost money or a quota, as `service: name`."""
    return [f"{service}: {found}" for service, look in LOOKS for found in look(endpoint) if f"-{name}-" in f"-{found}-"]


def _stacks(endpoint: str) -> Iterator[str]:
    for page in client("cloudformation", endpoint).get_paginator("describe_stacks").paginate():
        # the store's own stack holds the results, and stays on purpose
        yield from (one["StackName"] for one in page["Stacks"] if not one["StackName"].startswith("castra-store-"))


def _networks(endpoint: str) -> Iterator[str]:
    ec2 = client("ec2", endpoint)
    for vpc in ec2.describe_vpcs()["Vpcs"]:
        yield from (tag["Value"] for tag in vpc.get("Tags", []) if tag["Key"] == "castra:run")
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        yield template["LaunchTemplateName"]


def _batch(endpoint: str) -> Iterator[str]:
    batch = client("batch", endpoint)
    for queue in batch.describe_job_queues()["jobQueues"]:
        yield queue["jobQueueName"]
    for made in batch.describe_compute_environments()["computeEnvironments"]:
        yield made["computeEnvironmentName"]
    for page in batch.get_paginator("describe_job_definitions").paginate(status="ACTIVE"):
        yield from (made["jobDefinitionName"] for made in page["jobDefinitions"])


def _eks(endpoint: str) -> Iterator[str]:
    yield from client("eks", endpoint).list_clusters()["clusters"]


def _sagemaker(endpoint: str) -> Iterator[str]:
    sagemaker = client("sagemaker", endpoint)
    for status in ("InProgress", "Stopping"):
        told = sagemaker.list_training_jobs(StatusEquals=status)["TrainingJobSummaries"]
        yield from (job["TrainingJobName"] for job in told)


def _roles(endpoint: str) -> Iterator[str]:
    for page in client("iam", endpoint).get_paginator("list_roles").paginate():
        yield from (role["RoleName"] for role in page["Roles"])


def _logs(endpoint: str) -> Iterator[str]:
    for page in client("logs", endpoint).get_paginator("describe_log_groups").paginate():
        yield from (group["logGroupName"].replace("/", "-") for group in page["logGroups"])


def _buckets(endpoint: str) -> Iterator[str]:
    s3 = client("s3", endpoint)
    for bucket in s3.list_buckets()["Buckets"]:
        try:
            tags = s3.get_bucket_tagging(Bucket=bucket["Name"])["TagSet"]
        except ClientError:
            continue
        yield from (tag["Value"] for tag in tags if tag["Key"] == "castra:run")


def _clusters(endpoint: str) -> Iterator[str]:
    told = tell(endpoint, "pcluster", {"operation": "list-clusters", "region": REGION})
    yield from (one["clusterName"] for one in told["answer"]["clusters"])


LOOKS: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
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
