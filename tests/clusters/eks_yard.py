"""EKS for the tests: a cluster of the emulator, whose pods really run, and the adapter in front of it."""

import contextlib
import re
from pathlib import Path

from botocore.exceptions import ClientError

from clusters import aws
from clusters.eks import EksCluster
from store import open_store
from tests.clusters.batch_yard import ROLE, network
from tests.sky import client

BUCKET = "castra-eks-yard"
CLUSTER = "castra-yard"
INSTANCE = "g5.xlarge"
NODES = 6


def eks(folder: Path, **more: str) -> EksCluster:
    """The adapter for Jobs in a namespace of the folder's own, in the emulator that AWS_ENDPOINT_URL leads to.

    `more` goes into the address.
    """
    site = aws.here()
    provision(site.endpoint)
    address = {
        "cluster": "eks",
        "region": site.region,
        "endpoint": site.endpoint,
        "memory": site.memory,
        "Cluster": CLUSTER,
        "Namespace": "yard-" + re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[-40:],
        "image": "python:3.11",
        "instance_type": INSTANCE,
        "grace_s": "6",
    }
    return EksCluster(address | more, open_store(f"s3://{BUCKET}/{folder.name}"))


def jobset(folder: Path) -> EksCluster:
    """The same with JobSets."""
    return eks(folder, workload="jobset")


def provision(endpoint: str, name: str = CLUSTER, nodes: int = NODES) -> None:
    """Make a cluster with a group of nodes, unless it is there."""
    api = client("eks", endpoint)
    with contextlib.suppress(ClientError):
        api.describe_cluster(name=name)
        return
    subnets = network(endpoint)["subnets"]
    with contextlib.suppress(ClientError):
        client("s3", endpoint).create_bucket(Bucket=BUCKET)
    api.create_cluster(name=name, roleArn=ROLE, resourcesVpcConfig={"subnetIds": subnets}, version="1.33")
    sizes = {"minSize": 0, "maxSize": 16, "desiredSize": nodes}
    kind = {"instanceTypes": [INSTANCE], "nodeRole": ROLE, "subnets": subnets}
    api.create_nodegroup(clusterName=name, nodegroupName="nodes", scalingConfig=sizes, **kind)
