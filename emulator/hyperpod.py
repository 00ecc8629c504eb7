"""SageMaker HyperPod in place of moto's: clusters of instance groups whose nodes are only told, never started."""

import secrets
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers
from emulator.memory import Row, table
from emulator.shapes import checked

CLUSTERS = "hyperpod cluster"


@answers("sagemaker", "CreateCluster")
def create_cluster(call: Call) -> dict[str, Any]:
    """A cluster, in service at once."""
    told = checked(call, "CreateCluster", "ValidationException")
    rows, name = table(CLUSTERS, call.region), told["ClusterName"]
    with memory.lock:
        if name in rows:
            raise Fault("ResourceInUse", f"Cluster with name {name} already exists. Choose a different name.")
        key = secrets.token_hex(6)
        arn = memory.arn("sagemaker", call.region, f"cluster/{key}")
        row = {key: value for key, value in told.items() if key not in ("InstanceGroups", "Tags")} | {
            "ClusterArn": arn,
            "ClusterStatus": "InService",
            "CreationTime": time.time(),
            "NodeRecovery": told.get("NodeRecovery", "Automatic"),
            "InstanceGroups": [_group(one) for one in told.get("InstanceGroups", [])],
            "Tags": told.get("Tags", []),
        }
        rows[name] = row
    return {"ClusterArn": arn}


@answers("sagemaker", "DescribeCluster")
def describe_cluster(call: Call) -> dict[str, Any]:
    """A cluster by its name, ARN or the end of its ARN."""
    return {key: value for key, value in _cluster(call).items() if key != "Tags"}


@answers("sagemaker", "ListClusters")
def list_clusters(call: Call) -> dict[str, Any]:
    """All clusters of a region whose name contains what is asked for."""
    part = call.told.get("NameContains", "")
    names = ("ClusterArn", "ClusterName", "ClusterStatus", "CreationTime")
    rows = [row for name, row in table(CLUSTERS, call.region).items() if part in name]
    return {"ClusterSummaries": [{name: row[name] for name in names} for row in rows]}


@answers("sagemaker", "UpdateCluster")
def update_cluster(call: Call) -> dict[str, Any]:
    """Other instance groups; groups are only taken away by name."""
    told = checked(call, "UpdateCluster", "ValidationException")
    row = _cluster(call)
    groups = {one["InstanceGroupName"]: one for one in row["InstanceGroups"]}
    groups |= {one["InstanceGroupName"]: _group(one) for one in told.get("InstanceGroups", [])}
    for gone in told.get("InstanceGroupsToDelete", []):
        groups.pop(gone, None)
    row |= {key: value for key, value in told.items() if key not in ("ClusterName", "InstanceGroupsToDelete")}
    row["InstanceGroups"] = list(groups.values())
    return {"ClusterArn": row["ClusterArn"]}


@answers("sagemaker", "DeleteCluster")
def delete_cluster(call: Call) -> dict[str, Any]:
    """Remove a cluster and its nodes."""
    row = _cluster(call)
    table(CLUSTERS, call.region).pop(row["ClusterName"], None)
    return {"ClusterArn": row["ClusterArn"]}


@answers("sagemaker", "ListClusterNodes")
def list_cluster_nodes(call: Call) -> dict[str, Any]:
    """The nodes of a cluster."""
    part = call.told.get("InstanceGroupNameContains", "")
    return {"ClusterNodeSummaries": [node for node in _nodes(_cluster(call)) if part in node["InstanceGroupName"]]}


@answers("sagemaker", "DescribeClusterNode")
def describe_cluster_node(call: Call) -> dict[str, Any]:
    """One node."""
    for node in _nodes(_cluster(call)):
        if node["InstanceId"] == call.told.get("NodeId"):
            return {"NodeDetails": node}
    raise Fault("ResourceNotFound", f"Node {call.told.get('NodeId')} was not found")


def _group(told: Row) -> Row:
    count = told.get("InstanceCount", 0)
    kept = {key: value for key, value in told.items() if key != "InstanceCount"}
    return kept | {"CurrentCount": count, "TargetCount": count, "Status": "InService"}


def _nodes(row: Row) -> Iterator[Row]:
    for group in row["InstanceGroups"]:
        for number in range(group["CurrentCount"]):
            told = f"{row['ClusterArn']} {group['InstanceGroupName']} {number}"
            yield {
                "InstanceGroupName": group["InstanceGroupName"],
                "InstanceId": f"i-{sha256(told.encode()).hexdigest()[:17]}",
                "InstanceType": group.get("InstanceType", ""),
                "InstanceStatus": {"Status": "Running"},
                "LaunchTime": row["CreationTime"],
            }


def _cluster(call: Call) -> Row:
    wanted = call.told.get("ClusterName", "")
    for name, row in table(CLUSTERS, call.region).items():
        if wanted in (name, row["ClusterArn"], row["ClusterArn"].rpartition("/")[2]):
            return row
    raise Fault("ResourceNotFound", f"Cluster {wanted} was not found")
