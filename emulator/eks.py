"""EKS beside moto's clusters and node groups: add-ons, access entries, pod identities, updates of versions."""

import json
import time
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers
from emulator.memory import Row, table

ADDONS, ENTRIES, PODS = "eks addon", "eks access entry", "eks pod identity"
CLUSTER = "/clusters/{clusterName}"
ENTRY_TYPES = ("STANDARD", "EC2_LINUX", "EC2_WINDOWS", "FARGATE_LINUX", "EC2", "HYBRID_LINUX", "HYPERPOD_LINUX")
KNOWN_ADDONS = {
    "vpc-cni": "v1.21.1-eksbuild.1",
    "coredns": "v1.12.4-eksbuild.1",
    "kube-proxy": "v1.34.0-eksbuild.4",
    "eks-pod-identity-agent": "v1.3.10-eksbuild.1",
    "aws-ebs-csi-driver": "v1.53.0-eksbuild.1",
    "aws-efs-csi-driver": "v2.1.15-eksbuild.1",
    "aws-fsx-csi-driver": "v1.7.0-eksbuild.1",
    "aws-mountpoint-s3-csi-driver": "v2.2.0-eksbuild.1",
    "eks-node-monitoring-agent": "v1.5.0-eksbuild.1",
    "amazon-cloudwatch-observability": "v4.7.0-eksbuild.1",
    "amazon-sagemaker-hyperpod-taskgovernance": "v1.3.0-eksbuild.1",
    "amazon-sagemaker-hyperpod-training-operator": "v1.2.0-eksbuild.1",
    "metrics-server": "v0.8.0-eksbuild.3",
    "cert-manager": "v1.19.1-eksbuild.1",
    "kube-state-metrics": "v2.17.0-eksbuild.4",
    "prometheus-node-exporter": "v1.10.2-eksbuild.1",
}
"""The versions are one of each, for the answers to have one: nothing is installed."""


@answers("eks", f"POST {CLUSTER}/addons")
def create_addon(call: Call) -> dict[str, Any]:
    """An add-on, active at once; nothing is installed."""
    name, rows = call.told["addonName"], _rows(ADDONS, call)
    if name not in KNOWN_ADDONS:
        raise Fault("InvalidParameterException", f"Addon {name} specified is not supported")
    _configuration(call)
    with memory.lock:
        if name in rows:
            raise Fault("ResourceInUseException", f"Addon already exists: {name}", 409)
        where = f"addon/{call.path['clusterName']}/{name}/{memory.new_id('')[1:9]}"
        told = {"addonVersion": KNOWN_ADDONS[name], **_told(call), "status": "ACTIVE", "health": {"issues": []}}
        rows[name] = told | {"addonArn": memory.arn("eks", call.region, where)}
    return {"addon": rows[name]}


@answers("eks", f"GET {CLUSTER}/addons")
def list_addons(call: Call) -> dict[str, Any]:
    """The names of a cluster's add-ons."""
    return {"addons": list(_rows(ADDONS, call))}


@answers("eks", f"GET {CLUSTER}/addons/{{addonName}}")
def describe_addon(call: Call) -> dict[str, Any]:
    """One add-on."""
    return {"addon": _row(ADDONS, call, "addonName")}


@answers("eks", f"POST {CLUSTER}/addons/{{addonName}}/update")
def update_addon(call: Call) -> dict[str, Any]:
    """Another version or configuration."""
    _configuration(call)
    row = _row(ADDONS, call, "addonName")
    row |= {key: value for key, value in call.told.items() if key not in ("resolveConflicts", "clientRequestToken")}
    return _update("AddonUpdate")


@answers("eks", f"DELETE {CLUSTER}/addons/{{addonName}}")
def delete_addon(call: Call) -> dict[str, Any]:
    """Remove an add-on."""
    row = _row(ADDONS, call, "addonName")
    _rows(ADDONS, call).pop(row["addonName"], None)
    return {"addon": row | {"status": "DELETING"}}


@answers("eks", f"POST {CLUSTER}/access-entries")
def create_access_entry(call: Call) -> dict[str, Any]:
    """What a role may do in a cluster."""
    principal, rows = call.told["principalArn"], _rows(ENTRIES, call)
    kind = call.told.get("type", "STANDARD")
    if kind not in ENTRY_TYPES:
        raise Fault("InvalidParameterException", f"type {kind} is none of {', '.join(ENTRY_TYPES)}")
    with memory.lock:
        if principal in rows:
            raise Fault("ResourceInUseException", "The specified access entry resource is already in use", 409)
        where = f"access-entry/{call.path['clusterName']}/role/{memory.ACCOUNT}/{principal.rpartition('/')[2]}"
        told = {"kubernetesGroups": [], "username": principal, "type": kind} | _told(call)
        rows[principal] = told | {"accessEntryArn": memory.arn("eks", call.region, where), "policies": {}}
    return {"accessEntry": _entry(rows[principal])}


@answers("eks", f"GET {CLUSTER}/access-entries")
def list_access_entries(call: Call) -> dict[str, Any]:
    """Whose rights a cluster knows."""
    wanted = call.told.get("associatedPolicyArn")
    rows = _rows(ENTRIES, call)
    return {"accessEntries": [key for key, row in rows.items() if not wanted or wanted in row["policies"]]}


@answers("eks", f"GET {CLUSTER}/access-entries/{{principalArn}}")
def describe_access_entry(call: Call) -> dict[str, Any]:
    """One role's entry."""
    return {"accessEntry": _entry(_row(ENTRIES, call, "principalArn"))}


@answers("eks", f"POST {CLUSTER}/access-entries/{{principalArn}}")
def update_access_entry(call: Call) -> dict[str, Any]:
    """Other groups or another name."""
    row = _row(ENTRIES, call, "principalArn")
    row |= {key: call.told[key] for key in ("kubernetesGroups", "username") if key in call.told}
    return {"accessEntry": _entry(row)}


@answers("eks", f"DELETE {CLUSTER}/access-entries/{{principalArn}}")
def delete_access_entry(call: Call) -> dict[str, Any]:
    """Take a role's rights away."""
    _rows(ENTRIES, call).pop(_row(ENTRIES, call, "principalArn")["principalArn"], None)
    return {}


@answers("eks", f"POST {CLUSTER}/access-entries/{{principalArn}}/access-policies")
def associate_access_policy(call: Call) -> dict[str, Any]:
    """Give an entry a policy."""
    row, policy = _row(ENTRIES, call, "principalArn"), call.told["policyArn"]
    if not policy.startswith("arn:aws:eks::aws:cluster-access-policy/"):
        raise Fault("InvalidParameterException", f"The policyArn {policy} is not an EKS access policy")
    moment = {"associatedAt": time.time(), "modifiedAt": time.time()}
    row["policies"][policy] = {"policyArn": policy, "accessScope": call.told["accessScope"], **moment}
    return {**call.path, "associatedAccessPolicy": row["policies"][policy]}


@answers("eks", f"GET {CLUSTER}/access-entries/{{principalArn}}/access-policies")
def list_access_policies(call: Call) -> dict[str, Any]:
    """The policies of an entry."""
    found = list(_row(ENTRIES, call, "principalArn")["policies"].values())
    return {**call.path, "associatedAccessPolicies": found}


@answers("eks", f"DELETE {CLUSTER}/access-entries/{{principalArn}}/access-policies/{{policyArn}}")
def disassociate_access_policy(call: Call) -> dict[str, Any]:
    """Take a policy from an entry."""
    _row(ENTRIES, call, "principalArn")["policies"].pop(call.path["policyArn"], None)
    return {}


@answers("eks", f"POST {CLUSTER}/pod-identity-associations")
def create_pod_identity(call: Call) -> dict[str, Any]:
    """A service account's role."""
    rows, told = _rows(PODS, call), _told(call)
    with memory.lock:
        for row in rows.values():
            if (row["namespace"], row["serviceAccount"]) == (told["namespace"], told["serviceAccount"]):
                raise Fault("ResourceInUseException", f"Association already exists: {row['associationId']}", 409)
        name = memory.new_id("a")
        where = memory.arn("eks", call.region, f"podidentityassociation/{call.path['clusterName']}/{name}")
        rows[name] = told | {"associationId": name, "associationArn": where}
    return {"association": rows[name]}


@answers("eks", f"GET {CLUSTER}/pod-identity-associations")
def list_pod_identities(call: Call) -> dict[str, Any]:
    """The associations of a cluster."""
    return {"associations": list(_rows(PODS, call).values())}


@answers("eks", f"GET {CLUSTER}/pod-identity-associations/{{associationId}}")
def describe_pod_identity(call: Call) -> dict[str, Any]:
    """One association."""
    return {"association": _row(PODS, call, "associationId")}


@answers("eks", f"POST {CLUSTER}/pod-identity-associations/{{associationId}}")
def update_pod_identity(call: Call) -> dict[str, Any]:
    """Another role."""
    row = _row(PODS, call, "associationId")
    row |= {key: value for key, value in call.told.items() if key != "clientRequestToken"}
    return {"association": row}


@answers("eks", f"DELETE {CLUSTER}/pod-identity-associations/{{associationId}}")
def delete_pod_identity(call: Call) -> dict[str, Any]:
    """Take a service account's role away."""
    row = _row(PODS, call, "associationId")
    _rows(PODS, call).pop(row["associationId"], None)
    return {"association": row}


@answers("eks", f"POST {CLUSTER}/updates")
def update_cluster_version(call: Call) -> dict[str, Any]:
    """Another version of Kubernetes."""
    _cluster(call).version = call.told["version"]
    return _update("VersionUpdate")


@answers("eks", f"POST {CLUSTER}/node-groups/{{nodegroupName}}/update-version")
def update_nodegroup_version(call: Call) -> dict[str, Any]:
    """Another version of the launch template, the release or Kubernetes."""
    found = _cluster(call).nodegroups.get(call.path["nodegroupName"])
    if found is None:
        raise _missing("node group", call.path["nodegroupName"])
    names = {"launchTemplate": "launch_template", "releaseVersion": "release_version", "version": "version"}
    for member, attribute in names.items():
        if member in call.told:
            setattr(found, attribute, call.told[member])
    return _update("VersionUpdate")


def _cluster(call: Call) -> Any:
    from moto.eks.models import eks_backends

    name = call.path["clusterName"]
    found = eks_backends[memory.ACCOUNT][call.region].clusters.get(name)
    if found is None:
        raise _missing("cluster", name)
    return found


def _rows(kind: str, call: Call) -> dict[str, Row]:
    """The rows of one cluster: they go with it, and another one of its name has its own."""
    rows: dict[str, Row] = table(f"{kind} {_cluster(call).created_at}", f"{call.region} {call.path['clusterName']}")
    return rows


def _row(kind: str, call: Call, key: str) -> Row:
    rows = _rows(kind, call)
    if call.path[key] not in rows:
        raise _missing(kind.partition(" ")[2], call.path[key])
    return rows[call.path[key]]


def _missing(what: str, name: str) -> Fault:
    return Fault("ResourceNotFoundException", f"No {what} found for name: {name}.", 404)


def _told(call: Call) -> Row:
    kept = {key: value for key, value in call.told.items() if key not in ("clientRequestToken", "resolveConflicts")}
    own = {"clusterName": call.path["clusterName"], "createdAt": time.time(), "modifiedAt": time.time()}
    return {"tags": {}, **kept, **own}


def _entry(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "policies"}


def _configuration(call: Call) -> None:
    try:
        json.loads(call.told.get("configurationValues", "{}"))
    except ValueError as error:
        raise Fault("InvalidParameterException", f"ConfigurationValues is not JSON: {error}") from None


def _update(kind: str) -> dict[str, Any]:
    row = {"id": memory.new_id("u"), "status": "Successful", "type": kind, "createdAt": time.time()}
    return {"update": row}
