"""AWS PCS (Parallel Computing Service), which moto lacks: clusters, compute node groups and queues. Nothing runs."""

import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers
from emulator.memory import Row, table
from emulator.shapes import checked

CLUSTERS, GROUPS, QUEUES = "pcs cluster", "pcs node group", "pcs queue"
PARTS = {GROUPS: ("ComputeNodeGroup", "computeNodeGroup"), QUEUES: ("Queue", "queue")}
PORTS = {"SLURMCTLD": "6817", "SLURMDBD": "6819", "SLURMRESTD": "6820"}


@answers("pcs", "CreateCluster")
def create_cluster(call: Call) -> dict[str, Any]:
    """A cluster's controller, active at once; its name is unique in the region."""
    told = checked(call, "CreateCluster", "ValidationException")
    rows, name = table(CLUSTERS, call.region), told["clusterName"]
    with memory.lock:
        _unique(rows, name, told)
        key = f"pcs_{secrets.token_hex(5)}"
        kinds = ["SLURMCTLD"] + ["SLURMDBD"] * (_accounting(told) == "STANDARD")
        ends = [{"type": kind, "privateIpAddress": "10.0.0.10", "port": PORTS[kind]} for kind in kinds]
        row = _born(key, name, memory.arn("pcs", call.region, f"cluster/{key}"), told)
        rows[key] = row | {key: told[key] for key in ("networking", "scheduler", "size")} | {"endpoints": ends}
        rows[key]["slurmConfiguration"] = told.get("slurmConfiguration", {})
    return {"cluster": _seen(rows[key])}


@answers("pcs", "GetCluster")
def get_cluster(call: Call) -> dict[str, Any]:
    """A cluster by id, name or ARN."""
    return {"cluster": _seen(_cluster(call))}


@answers("pcs", "ListClusters")
def list_clusters(call: Call) -> dict[str, Any]:
    """All clusters of a region."""
    return {"clusters": [_short(row) for row in table(CLUSTERS, call.region).values()]}


@answers("pcs", "UpdateCluster")
def update_cluster(call: Call) -> dict[str, Any]:
    """Other settings of Slurm."""
    row = _cluster(call)
    told = checked(call, "UpdateCluster", "ValidationException")
    row["slurmConfiguration"] |= told.get("slurmConfiguration", {})
    return {"cluster": _seen(row)}


@answers("pcs", "DeleteCluster")
def delete_cluster(call: Call) -> dict[str, Any]:
    """Remove a cluster in which nothing is left."""
    row = _cluster(call)
    for kind in PARTS:
        if any(part["clusterId"] == row["id"] for part in table(kind, call.region).values()):
            what = PARTS[kind][0]
            raise Fault("ConflictException", f"Cluster {row['id']} still has resources of type {what}", 409)
    table(CLUSTERS, call.region).pop(row["id"], None)
    return {}


def _create_part(kind: str, call: Call) -> dict[str, Any]:
    title, word = PARTS[kind]
    told = checked(call, f"Create{title}", "ValidationException")
    cluster, rows = _cluster(call), table(kind, call.region)
    with memory.lock:
        siblings = {key: row for key, row in rows.items() if row["clusterId"] == cluster["id"]}
        _unique(siblings, told[f"{word}Name"], told)
        _check_groups(told, call)
        key = f"pcs_{secrets.token_hex(5)}"
        arn = memory.arn("pcs", call.region, f"cluster/{cluster['id']}/{word.lower()}/{key}")
        kept = {name: one for name, one in told.items() if name not in ("clientToken", "clusterIdentifier", "tags")}
        rows[key] = {**_born(key, kept.pop(f"{word}Name"), arn, told), **kept, "clusterId": cluster["id"]}
    return {word: _seen(rows[key])}


def _update_part(kind: str, call: Call) -> dict[str, Any]:
    title, word = PARTS[kind]
    told = checked(call, f"Update{title}", "ValidationException")
    _check_groups(told, call)
    row = _part(kind, call)
    skip = ("clientToken", "clusterIdentifier", f"{word}Identifier")
    row |= {name: one for name, one in told.items() if name not in skip}
    return {word: _seen(row)}


def _list_parts(kind: str, call: Call) -> dict[str, Any]:
    cluster = _cluster(call)["id"]
    rows = [row for row in table(kind, call.region).values() if row["clusterId"] == cluster]
    return {f"{PARTS[kind][1]}s": [_short(row) for row in rows]}


def _delete_part(kind: str, call: Call) -> dict[str, Any]:
    row = _part(kind, call)
    if kind == GROUPS:
        for queue in table(QUEUES, call.region).values():
            if row["id"] in _groups_of(queue):
                raise Fault("ConflictException", f"Compute node group {row['id']} is used by queue {queue['id']}", 409)
    table(kind, call.region).pop(row["id"], None)
    return {}


def _get_part(kind: str, call: Call) -> dict[str, Any]:
    return {PARTS[kind][1]: _seen(_part(kind, call))}


for _kind, (_title, _) in PARTS.items():
    answers("pcs", f"Create{_title}")(partial(_create_part, _kind))
    answers("pcs", f"Update{_title}")(partial(_update_part, _kind))
    answers("pcs", f"Get{_title}")(partial(_get_part, _kind))
    answers("pcs", f"List{_title}s")(partial(_list_parts, _kind))
    answers("pcs", f"Delete{_title}")(partial(_delete_part, _kind))


@answers("pcs", "ListTagsForResource")
def list_tags(call: Call) -> dict[str, Any]:
    """The tags of anything of PCS."""
    return {"tags": _tagged(call)["tags"]}


@answers("pcs", "TagResource")
def tag_resource(call: Call) -> dict[str, Any]:
    """Add or replace tags."""
    _tagged(call)["tags"].update(call.told["tags"])
    return {}


@answers("pcs", "UntagResource")
def untag_resource(call: Call) -> dict[str, Any]:
    """Remove tags."""
    for key in call.told["tagKeys"]:
        _tagged(call)["tags"].pop(key, None)
    return {}


def _born(key: str, name: str, arn: str, told: Mapping[str, Any]) -> Row:
    times = {"createdAt": time.time(), "modifiedAt": time.time()}
    own = {"token": told.get("clientToken"), "tags": dict(told.get("tags", {}))}
    return {"id": key, "name": name, "arn": arn, "status": "ACTIVE", **times, **own}


def _unique(rows: Mapping[str, Row], name: str, told: Mapping[str, Any]) -> None:
    if any(row["name"] == name for row in rows.values()):
        raise Fault("ConflictException", f"A resource with the name {name} already exists", 409)
    if "slurmConfiguration" in told and _accounting(told) not in ("NONE", "STANDARD"):
        raise Fault("ValidationException", "accounting mode is one of NONE, STANDARD")


def _accounting(told: Mapping[str, Any]) -> str:
    return str(told.get("slurmConfiguration", {}).get("accounting", {}).get("mode", "NONE"))


def _check_groups(told: Mapping[str, Any], call: Call) -> None:
    for group in _groups_of(told):
        if group not in table(GROUPS, call.region):
            raise Fault("ResourceNotFoundException", f"Compute node group {group} does not exist", 404)


def _groups_of(told: Mapping[str, Any]) -> set[str]:
    return {one["computeNodeGroupId"] for one in told.get("computeNodeGroupConfigurations", [])}


def _found(rows: Mapping[str, Row], wanted: str, what: str) -> Row:
    for row in rows.values():
        if wanted in (row["id"], row["name"], row["arn"]):
            return row
    raise Fault("ResourceNotFoundException", f"{what} {wanted} does not exist", 404)


def _cluster(call: Call) -> Row:
    return _found(table(CLUSTERS, call.region), call.told.get("clusterIdentifier", ""), "Cluster")


def _part(kind: str, call: Call) -> Row:
    cluster = _cluster(call)["id"]
    rows = {key: row for key, row in table(kind, call.region).items() if row["clusterId"] == cluster}
    return _found(rows, call.told.get(f"{PARTS[kind][1]}Identifier", ""), PARTS[kind][0])


def _tagged(call: Call) -> Row:
    rows = {key: row for kind in (CLUSTERS, *PARTS) for key, row in table(kind, call.region).items()}
    return _found(rows, call.told["resourceArn"], "Resource")


def _seen(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("tags", "token")}


def _short(row: Row) -> Row:
    names = ("id", "name", "arn", "status", "createdAt", "modifiedAt", "clusterId")
    return {key: row[key] for key in names if key in row}
