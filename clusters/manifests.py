"""A job as Kubernetes objects: pure functions from a job and the address of a cluster to what its API server takes.

A gang of N nodes is one Job with an index per node, or a JobSet around such a Job. All pods start together, any failure
ends all of them at once, and nothing but the JobSet's controller starts them again: a plain Job can restart single pods
only, never a gang, so with `workload: job` the next attempt is the control plane's.

Sources: kubernetes.io/docs/concepts/workloads/controllers/job (indexes, podFailurePolicy, DNS names),
jobset.sigs.k8s.io (v1alpha2), docs.aws.amazon.com/eks (EFA: device name, huge pages; FSx for Lustre: static volumes).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from clusters import catalog, fabric, names
from clusters.base import Address, Job, Refused
from clusters.catalog import Instance

Manifest = dict[str, Any]

JOB = "castra.dev/job"
"""Label: the id of the job, on everything that is of it."""
NAME = "castra.dev/name"
TIME_LIMIT = "castra.dev/time-limit-s"
CANCELLED = "castra.dev/cancelled"
"""Annotation: somebody asked the job to stop; set in the same request that stops it."""
MANAGED = "app.kubernetes.io/managed-by"
OURS = {MANAGED: "castra"}
QUEUE = "kueue.x-k8s.io/queue-name"
TYPE = "node.kubernetes.io/instance-type"
HEALTH = "sagemaker.amazonaws.com/node-health-status"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"

CONTAINER = "node"
SERVICE = "castra"
"""One headless service for all jobs of a namespace: it gives their pods names, `<job>-<index>.castra`."""
FILES = "castra-fsx"
PORT = 29500
LONGEST_NAME = 45
"""A JobSet's pods are called `<name>-node-0-<index>-<5 characters>`, of at most 63."""
KEPT_S = 7 * 24 * 3600
"""How long an ended job can be looked at before the cluster itself removes it."""
FINAL_CODES = (2, 124, 143)
"""Refused, time limit, stopped and saved: another start would not change these."""
SHARE = 0.85
"""Of an instance's memory and processors, what a pod may ask for: the rest is the system's, EKS's and the daemons'."""
GPU, NEURON, EFA = "nvidia.com/gpu", "aws.amazon.com/neuron", "vpc.amazonaws.com/efa"
LOST = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    for key in ("not-ready", "unreachable")
]
"""A node that is not heard of gives its pods up after a minute, not after Kubernetes' own five."""
EFA_PAGES = "5120Mi"
"""2 MiB pages for libfabric, as the EKS guide asks for; the accelerated AMIs set aside a little more."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an address says about where and how jobs run."""

    namespace: str
    service_account: str
    image: str
    instance: Instance | None
    """None: whatever nodes the cluster has, one pod each if possible."""
    workload: str
    queue: str
    grace_s: int
    """From SIGTERM to SIGKILL when a pod is removed."""
    patience_s: int
    """Kubernetes counts a job's time limit from its creation: this much more, for nodes and image to come."""
    files: Mapping[str, str] | None
    """An FSx for Lustre file system: its `id`, `dns` name and `mount` name."""
    hyperpod: bool
    """The nodes are SageMaker HyperPod's, which calls the types `ml.…` and says itself which nodes are well."""
    notes: Mapping[str, str]

    @classmethod
    def at(cls, address: Address) -> Self:
        """Read an address; what a stack has yet to tell stays a placeholder. Raises `Refused`."""
        workload = address.get("workload") or "job"
        if workload not in ("job", "jobset"):
            raise Refused(f"cluster.workload is {workload!r}: use job or jobset")
        kind = address.get("instance_type", "")
        files = {
            key: address.get(name, f"${{{name}}}")
            for key, name in (("id", "FileSystem"), ("dns", "DnsName"), ("mount", "MountName"))
        }
        return cls(
            namespace=address.get("Namespace") or "castra",
            service_account=address.get("ServiceAccount") or "castra",
            image=address.get("image") or "${image}",
            instance=catalog.find(kind) if kind else None,
            workload=workload,
            queue=address.get("queue", ""),
            grace_s=int(address.get("grace_s") or 60),
            patience_s=int(address.get("patience_s") or 3600),
            files=files if "FileSystem" in address else None,
            hyperpod=address.get("flavour") == "hyperpod",
            notes={f"castra.dev/{key}": address[key] for key in ("owner", "run", "expires") if address.get(key)},
        )


def object_name(name: str) -> str:
    """A job's name as Kubernetes takes it (RFC 1035, at most `LONGEST_NAME`): itself where it can be, else with a hash.

    Two names never give one.
    """
    if re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) <= LONGEST_NAME:
        return name
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"j-{words}"
    return f"{words[: LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def ground(place: Place) -> list[Manifest]:
    """What stands once per namespace, whatever jobs there are; in the order it can be made."""
    here = {"namespace": place.namespace, "labels": OURS}
    made = [
        _object("v1", "Namespace", {"name": place.namespace, "labels": OURS}),
        _object("v1", "ServiceAccount", {"name": place.service_account, **here}),
        _object(
            "v1",
            "Service",
            {"name": SERVICE, **here},
            # names exist before the programs behind them are ready: that is when they look for each other
            {"clusterIP": "None", "selector": OURS, "publishNotReadyAddresses": True},
        ),
    ]
    return made + (_files(place, place.files) if place.files else [])


def workload(job: Job, place: Place, command: Iterable[str], env: Mapping[str, str]) -> Manifest:
    """The Job or JobSet that runs `command` on every node; raises `Refused` for a job that cannot be one."""
    names.check(job)
    name = object_name(job.name)
    jobset = place.workload == "jobset"
    spec = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "activeDeadlineSeconds": job.timeout_s + place.patience_s + place.grace_s,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _restartable() if jobset else _final()},
        "template": _pod(job, name, place, command, env),
    }
    about = _about(job, name, place)
    if jobset:
        return _jobset(job, about, place, spec)
    return _object(
        "batch/v1",
        "Job",
        about,
        spec | {"suspend": bool(place.queue), "ttlSecondsAfterFinished": KEPT_S},
    )


def devices(instance: Instance) -> dict[str, int]:
    """What pods can ask for on such an instance once its device plugins work, by the resource's name."""
    nvidia = instance.accelerator.startswith("NVIDIA")
    found = {
        GPU: fabric.gpus(instance) if nvidia else 0,
        NEURON: fabric.neurons(instance),
        EFA: instance.efa_interfaces,
    }
    return {name: count for name, count in found.items() if count}


def _jobset(job: Job, about: Manifest, place: Place, spec: Manifest) -> Manifest:
    final = ["PodFailurePolicy", "DeadlineExceeded"]
    inner = {"metadata": {"labels": OURS | {JOB: about["name"]}}, "spec": spec}
    return _object(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        about,
        {
            "network": {"enableDNSHostnames": True},
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": job.restarts,
                "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": final}],
            },
            "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": inner}],
            "suspend": bool(place.queue),
            "ttlSecondsAfterFinished": KEPT_S,
        },
    )


def _about(job: Job, name: str, place: Place) -> Manifest:
    labels = OURS | {JOB: name} | ({QUEUE: place.queue} if place.queue else {})
    notes = {NAME: job.name, TIME_LIMIT: str(job.timeout_s), **place.notes}
    return {"name": name, "namespace": place.namespace, "labels": labels, "annotations": notes}


def _final() -> list[Manifest]:
    """Every failure ends the Job, and its message keeps how: with the lost node, or with the exit code."""
    return [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": [0]}},
    ]


def _restartable() -> list[Manifest]:
    """A lost node or a crash fails the Job by its backoffLimit: the JobSet restarts it. Final codes are final."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_CODES)}
    return [
        {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]


def _pod(job: Job, name: str, place: Place, command: Iterable[str], env: Mapping[str, str]) -> Manifest:
    keep = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    volumes, mounts = _volumes(place)
    container = {
        "name": CONTAINER,
        "image": place.image,
        "command": list(command),
        # how a failed node ended stays with its pod, even where its log is gone
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": _env(job, name, place, env),
        "resources": _resources(place.instance, job.nodes),
        "volumeMounts": mounts,
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "serviceAccountName": place.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": place.grace_s,
        "containers": [container],
        "volumes": volumes,
        **_where(name, place),
    }
    if place.workload == "job":
        spec["subdomain"] = SERVICE
    return {"metadata": {"labels": OURS | {JOB: name}, "annotations": keep}, "spec": spec}


def _where(name: str, place: Place) -> Manifest:
    """Which nodes: the instance type's, whose devices a pod takes whole; else a node each, if there are enough."""
    if place.instance is None:
        mine = {"labelSelector": {"matchLabels": {JOB: name}}, "topologyKey": "kubernetes.io/hostname"}
        apart = [{"weight": 100, "podAffinityTerm": mine}]
        away = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": apart}}
        return {"affinity": away, "tolerations": LOST}
    kind = place.instance.name
    selector = {TYPE: f"ml.{kind}", HEALTH: "Schedulable"} if place.hyperpod else {TYPE: kind}
    return {
        "nodeSelector": selector,
        "tolerations": [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in (GPU, NEURON, EFA)]
        + LOST,
    }


def _resources(instance: Instance | None, nodes: int) -> Manifest:
    """All of the instance: devices and memory are limits too, processors are not (a limit would throttle)."""
    if instance is None:
        return {}
    there = devices(instance)
    if not there.keys() & {GPU, NEURON}:
        raise Refused(
            f"{instance.name} has {instance.accelerator}, for which we know no device plugin: use another type"
        )
    limits = {name: str(count) for name, count in there.items() if name != EFA or nodes > 1}
    limits |= {"memory": f"{int(instance.ram_gib * SHARE)}Gi"} | ({"hugepages-2Mi": EFA_PAGES} if EFA in limits else {})
    return {"limits": limits, "requests": limits | {"cpu": str(max(1, int(instance.vcpus * SHARE)))}}


def _volumes(place: Place) -> tuple[list[Manifest], list[Manifest]]:
    """Shared memory for the ranks of a node (a container alone has 64 MiB), and the file system if there is one."""
    size = f"{int(place.instance.ram_gib * SHARE / 4)}Gi" if place.instance else "1Gi"
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108  the place itself, not a file in it
    if place.files:
        volumes.append({"name": "fsx", "persistentVolumeClaim": {"claimName": FILES}})
        mounts.append({"name": "fsx", "mountPath": "/fsx"})
    return volumes, mounts


def _env(job: Job, name: str, place: Place, env: Mapping[str, str]) -> list[Manifest]:
    """The pod contract on top of the program's own; JOB_COMPLETION_INDEX is Kubernetes' own addition."""
    jobset = place.workload == "jobset"
    first = f"{name}-{CONTAINER}-0-0.{name}" if jobset else f"{name}-0.{SERVICE}"
    told = {
        **env,
        **(fabric.environment(place.instance, job.nodes) if place.instance else {}),
        "CASTRA_NODES": str(job.nodes),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": str(PORT),
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(max(1, job.processes_per_node)),
    }
    fields = {"RANK": INDEX, "PET_NODE_RANK": INDEX} | ({"CASTRA_ATTEMPT": ATTEMPT} if jobset else {})
    return [{"name": key, "value": value} for key, value in told.items()] + [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()
    ]


def _files(place: Place, files: Mapping[str, str]) -> list[Manifest]:
    """A file system that stands already, as a volume and a claim on it. The sizes are a formality of the API's."""
    many = {"accessModes": ["ReadWriteMany"]}
    size = "1200Gi"
    volume = f"{FILES}-{place.namespace}"
    driver = {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": files["id"],
        "volumeAttributes": {"dnsname": files["dns"], "mountname": files["mount"]},
    }
    claim = {"storageClassName": "", "volumeName": volume, "resources": {"requests": {"storage": size}}, **many}
    return [
        _object(
            "v1",
            "PersistentVolume",
            {"name": volume, "labels": OURS},
            {
                "capacity": {"storage": size},
                "persistentVolumeReclaimPolicy": "Retain",
                "mountOptions": ["flock"],
                "csi": driver,
                **many,
            },
        ),
        _object("v1", "PersistentVolumeClaim", {"name": FILES, "namespace": place.namespace, "labels": OURS}, claim),
    ]


def _object(version: str, kind: str, about: Manifest, spec: Manifest | None = None) -> Manifest:
    told = {"apiVersion": version, "kind": kind, "metadata": about}
    return told | ({"spec": spec} if spec is not None else {})
