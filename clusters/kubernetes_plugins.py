"""The device plugins that nodes need before they offer GPUs, Neuron devices and EFA interfaces to pods.

None of them is an add-on of EKS, and its AL2023 images bring none (Bottlerocket brings NVIDIA's): who runs a job on a
cluster without them gets pods that wait for ever. So `submit` applies ours where neither a node offers the device nor
anybody else's plugin is there. Facts (images, mounts, rights): NVIDIA/k8s-device-plugin deployments/static v0.20.0,
aws/eks-charts aws-efa-k8s-device-plugin v0.5.30, aws-neuron/neuron-helm-charts 1.10; read 2026-11.
The JobSet controller with its webhook is not ours to render: `JOBSET` says how to install it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusters import catalog
from clusters.catalog import Instance
from clusters.manifests import EFA, GPU, NEURON, OURS, TYPE, Manifest, devices

NAMESPACE = "kube-system"
SOCKETS = "/var/lib/kubelet/device-plugins"
JOBSET = (
    "the cluster knows no JobSet: helm upgrade --install jobset oci://registry.k8s.io/jobset/charts/jobset "
    "--namespace jobset-system --create-namespace"
)
KUEUE = (
    "the cluster has no Kueue: helm upgrade --install kueue oci://registry.k8s.io/kueue/charts/kueue "
    "--namespace kueue-system --create-namespace"
)
FILES = "the cluster cannot mount FSx for Lustre: install the EKS add-on aws-fsx-csi-driver"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin and the resource it makes nodes offer."""

    resource: str
    name: str
    image: str
    like: str
    """Matches the image of whoever's plugin of that kind."""
    privileged: bool = False
    folders: dict[str, str] = field(default_factory=dict)
    """More of the node that it must see: name → path."""
    rights: Sequence[Manifest] = ()
    """What it may do in the cluster, if anything."""

    def nodes(self) -> list[str]:
        """The instance types that have such devices, also as HyperPod calls them."""
        names = [one.name for one in catalog.load().values() if self.resource in devices(one)]
        return sorted([*names, *(f"ml.{name}" for name in names)])

    def installed(self, daemons: Iterable[Manifest]) -> bool:
        """Whether one of these DaemonSets is such a plugin."""
        pods = [one["spec"]["template"]["spec"] for one in daemons]
        return any(re.search(self.like, one["image"]) for pod in pods for one in pod["containers"])


PLUGINS = (
    Plugin(
        GPU,
        "castra-nvidia-device-plugin",
        "nvcr.io/nvidia/k8s-device-plugin:v0.20.0",
        r"(/|nvidia-)k8s-device-plugin",
    ),
    Plugin(
        EFA,
        "castra-efa-device-plugin",
        "602401143452.dkr.ecr.us-west-2.amazonaws.com/eks/aws-efa-k8s-device-plugin:v0.5.20",
        r"aws-efa-k8s-device-plugin",
        privileged=True,
        folders={"infiniband": "/dev/infiniband", "neuron": "/opt/aws/neuron"},
    ),
    Plugin(
        NEURON,
        "castra-neuron-device-plugin",
        "public.ecr.aws/neuron/neuron-device-plugin:2.32.0.0",
        r"neuron-device-plugin",
        folders={"run": "/run"},
        rights=(
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch", "update"]},
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch", "update"]},
        ),
    ),
)


def wanted(instance: Instance) -> list[Plugin]:
    """The plugins that nodes of this type need."""
    return [one for one in PLUGINS if one.resource in devices(instance)]


def lacking(instance: Instance, nodes: Iterable[Manifest], daemons: Iterable[Manifest]) -> list[Plugin]:
    """The plugins that a cluster with these nodes and DaemonSets still needs for that type."""
    there = [
        one for one in nodes if one["metadata"].get("labels", {}).get(TYPE) in (instance.name, f"ml.{instance.name}")
    ]
    offers = [one.get("status", {}).get("allocatable", {}) for one in there]
    offered = {one for one in devices(instance) if any(offer.get(one, "0") != "0" for offer in offers)}
    known = list(daemons)
    return [one for one in wanted(instance) if one.resource not in offered and not one.installed(known)]


def objects(plugin: Plugin) -> list[Manifest]:
    """What is to be applied for a plugin, in order."""
    about = {"name": plugin.name, "labels": OURS}
    here = about | {"namespace": NAMESPACE}
    daemons = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": here,
        "spec": {"selector": {"matchLabels": {"name": plugin.name}}, "template": _pod(plugin)},
    }
    if not plugin.rights:
        return [daemons]
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": plugin.name, "namespace": NAMESPACE}
    role = {"apiGroup": group, "kind": "ClusterRole", "name": plugin.name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": here},
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": about, "rules": list(plugin.rights)},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": about,
            "roleRef": role,
            "subjects": [subject],
        },
        daemons,
    ]


def _pod(plugin: Plugin) -> Manifest:
    folders = {"sockets": SOCKETS} | plugin.folders
    kinds = {"sockets": "Directory", "run": "Directory"}
    volumes = [
        {"name": name, "hostPath": {"path": path, "type": kinds.get(name, "DirectoryOrCreate")}}
        for name, path in folders.items()
    ]
    rights: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "plugin",
        "image": plugin.image,
        "securityContext": {"privileged": True} if plugin.privileged else rights,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in folders.items()],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    has_them = {"key": TYPE, "operator": "In", "values": plugin.nodes()}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [has_them]}]}
    spec = {
        "priorityClassName": "system-node-critical",
        "hostNetwork": plugin.privileged,
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "containers": [container],
        "volumes": volumes,
        **({"serviceAccountName": plugin.name} if plugin.rights else {"automountServiceAccountToken": False}),
    }
    return {"metadata": {"labels": OURS | {"name": plugin.name}}, "spec": spec}
