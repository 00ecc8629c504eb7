"""AWS Batch for the tests: a queue of the emulator, whose jobs really run, and the adapter in front of it."""

import contextlib
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from clusters import aws
from clusters.batch import BatchCluster
from store import open_store
from tests.sky import client, tell

BUCKET = "castra-batch-yard"
ROLE = "arn:aws:iam::123456789012:role/castra-yard"
GROUP = "castra-yard"
INSTANCE = "g5.xlarge"


def batch(folder: Path, **more: str) -> BatchCluster:
    """The adapter for a queue of the emulator, which is made when it is first asked for.

    AWS_ENDPOINT_URL must lead to the emulator, as the fixture `site` sees to. `more` goes into the address.
    """
    site = aws.here()
    address = {
        "cluster": "batch",
        "region": site.region,
        "endpoint": site.endpoint,
        "memory": site.memory,
        "JobQueue": provision(site.endpoint, more.get("instance_type", INSTANCE)),
        "JobRole": ROLE,
        "LogGroup": GROUP,
        "image": "python:3.11",
        "instance_type": INSTANCE,
        "grace_s": "1",
    }
    return BatchCluster(address | more, open_store(f"s3://{BUCKET}/{folder.name}"))


def provision(endpoint: str, instance_type: str = INSTANCE, market: str = "EC2") -> str:
    """Make a network, a compute environment and a queue, unless they are there; returns the queue's name."""
    name = f"yard-{market}-{instance_type.replace('.', '-')}".lower()
    api = client("batch", endpoint)
    if api.describe_job_queues(jobQueues=[name])["jobQueues"]:
        return name
    client("s3", endpoint).create_bucket(Bucket=BUCKET)
    with contextlib.suppress(ClientError):
        client("logs", endpoint).create_log_group(logGroupName=GROUP)
    resources = network(endpoint) | {
        "type": market,
        "allocationStrategy": "BEST_FIT_PROGRESSIVE",
        "minvCpus": 0,
        "maxvCpus": 10_000,
        "instanceTypes": [instance_type],
        "instanceRole": "castra-yard",
    }
    api.create_compute_environment(computeEnvironmentName=name, type="MANAGED", computeResources=resources)
    order = [{"order": 1, "computeEnvironment": name}]
    api.create_job_queue(jobQueueName=name, priority=1, computeEnvironmentOrder=order)
    return name


def network(endpoint: str) -> dict[str, Any]:
    """A subnet, a security group, a role and an instance profile of the tests."""
    ec2, iam = client("ec2", endpoint), client("iam", endpoint)
    with contextlib.suppress(ClientError):  # another test has made them
        iam.create_role(RoleName="castra-yard", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="castra-yard")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/20")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="yard", Description="yard", VpcId=vpc)["GroupId"]
    return {"subnets": [subnet], "securityGroupIds": [group]}


def scarce(endpoint: str, instance_type: str = INSTANCE) -> None:
    """No instances of the yard's type are to be had from here on."""
    tell(endpoint, "faults", [{"kind": "capacity", "instance_type": instance_type, "times": 0}])
