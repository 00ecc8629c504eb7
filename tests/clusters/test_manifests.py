"""Manifests: taken by Kubernetes' own schemas, strictly, over several versions; and what they say."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension

from clusters import catalog, kubernetes_plugins, manifests
from clusters.base import Job, Refused
from clusters.manifests import Manifest, Place, object_name
from emulator.kubernetes_rules import crd

schemas: Any = importlib.import_module("kubernetes_validate")
JOBSET = jsonschema.Draft202012Validator(crd())
VERSIONS = ("1.30", "1.33", "1.34", "1.37")
TYPES = (
    "p4d.24xlarge",
    "p5.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "p6-b300.48xlarge",
    "trn1.32xlarge",
    "g5.xlarge",
)
GANG = Job("tiny-train", "training.run", {"spec": {}, "output": "/out"}, nodes=4, processes_per_node=8, restarts=3)
ADDRESS = {
    "cluster": "eks",
    "region": "us-east-1",
    "image": "train:2026-11",
    "instance_type": "p5.48xlarge",
    "FileSystem": "fs-0123456789abcdef0",
    "DnsName": "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com",
    "MountName": "abcdefgh",
    "owner": "ada",
    "run": "tiny",
    "expires": "2026-11-21T09:00:00+00:00",
}


def rendered(job: Job = GANG, **more: str) -> list[Manifest]:
    """The ground and the workload."""
    place = Place.at(ADDRESS | more)
    return [*manifests.ground(place), manifests.workload(job, place, ["python3", "-c", "pass"], {"A": "1"})]


def pod_of(manifest: Manifest) -> Manifest:
    """The spec of a Job's or a JobSet's pods."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    found: Manifest = spec["template"]["spec"]
    return found


def variables(manifest: Manifest) -> dict[str, str]:
    """The environment of the pods; a field's path for what Kubernetes fills in."""
    env = pod_of(manifest)["containers"][0]["env"]
    return {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in env}


def check(manifest: Manifest, version: str) -> None:
    """Hold a manifest against the schema of its kind; raises if it does not fit strictly."""
    if manifest["kind"] != "JobSet":
        schemas.validate(manifest, version, strict=True)
        return
    JOBSET.validate(manifest)
    for one in manifest["spec"]["replicatedJobs"]:
        about = {"name": "x", **one["template"].get("metadata", {})}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": one["template"]["spec"]}
        schemas.validate(job, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("workload", ["job", "jobset"])
def test_kubernetes_takes_them_strictly(workload: str, version: str) -> None:
    for kind in ("", *TYPES) if version == VERSIONS[-1] else ("", "p5.48xlarge"):
        for manifest in rendered(workload=workload, instance_type=kind, queue="team-a"):
            check(manifest, version)


def test_a_wrong_field_would_be_seen() -> None:
    job, jobset = rendered()[-1], rendered(workload="jobset")[-1]
    job["spec"]["backofLimit"] = 0
    with pytest.raises(schemas.ValidationError, match="backofLimit"):
        check(job, "1.33")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 0
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        check(jobset, "1.33")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_device_plugins_are_taken_too(version: str) -> None:
    for plugin in kubernetes_plugins.PLUGINS:
        for one in kubernetes_plugins.objects(plugin):
            check(one, version)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("p4d.24xlarge", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}),
        ("p5.48xlarge", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}),
        ("p5en.48xlarge", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16"}),
        ("p6-b200.48xlarge", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "8"}),
        ("p6-b300.48xlarge", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16"}),
        ("trn1.32xlarge", {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"}),
    ],
)
def test_a_pod_takes_all_devices_of_its_node(kind: str, devices: dict[str, str]) -> None:
    pod = pod_of(rendered(instance_type=kind)[-1])
    asked = pod["containers"][0]["resources"]
    limits = asked["limits"]
    assert {name: limits[name] for name in devices} == devices
    assert limits["hugepages-2Mi"] == "5120Mi"
    assert {name: asked["requests"][name] for name in limits} == limits, "devices and huge pages must be both"
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": kind}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert variables(rendered(instance_type=kind)[-1])["FI_PROVIDER"] == "efa"


def test_the_nodes_of_hyperpod_have_other_names() -> None:
    selector = pod_of(rendered(flavour="hyperpod")[-1])["nodeSelector"]
    assert selector["node.kubernetes.io/instance-type"] == "ml.p5.48xlarge"
    assert selector["sagemaker.amazonaws.com/node-health-status"] == "Schedulable"


def test_one_node_needs_no_fabric() -> None:
    alone = rendered(Job("alone", "training.score", {}))[-1]
    assert "vpc.amazonaws.com/efa" not in pod_of(alone)["containers"][0]["resources"]["limits"]
    assert "FI_PROVIDER" not in variables(alone)


def test_the_pod_contract() -> None:
    told = variables(rendered()[-1])
    assert told["A"] == "1"
    assert told["CASTRA_NODES"] == told["PET_NNODES"] == "4"
    assert told["PET_NPROC_PER_NODE"] == "8"
    assert told["MASTER_ADDR"] == told["PET_MASTER_ADDR"] == "tiny-train-0.castra"
    assert told["PET_NODE_RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert pod_of(rendered()[-1])["subdomain"] == "castra"
    jobset = variables(rendered(workload="jobset")[-1])
    assert jobset["MASTER_ADDR"] == "tiny-train-node-0-0.tiny-train"
    assert jobset["CASTRA_ATTEMPT"] == "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def test_a_gang_lives_and_dies_together() -> None:
    spec = rendered()[-1]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (4, 4, 0)
    assert spec["podReplacementPolicy"] == "Failed"
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    jobset = rendered(workload="jobset")[-1]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 3
    inner = jobset["replicatedJobs"][0]["template"]["spec"]
    lost, final = inner["podFailurePolicy"]["rules"]
    assert lost["action"] == "Count", "a lost node is worth another start"
    assert final["onExitCodes"]["values"] == [2, 124, 143], "these would only happen again"


def test_the_cluster_itself_ends_a_job_that_nobody_watches() -> None:
    job = Job("late", "training.run", {}, timeout_s=100)
    spec = rendered(job, patience_s="20", grace_s="3")[-1]["spec"]
    assert spec["activeDeadlineSeconds"] == 123
    assert spec["ttlSecondsAfterFinished"] > 0


def test_a_queue_holds_the_job_until_it_is_admitted() -> None:
    for workload in ("job", "jobset"):
        queued, free = rendered(workload=workload, queue="team-a")[-1], rendered(workload=workload)[-1]
        assert queued["spec"]["suspend"] is True
        assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
        assert free["spec"]["suspend"] is False


def test_who_made_it_for_what_until_when() -> None:
    about = rendered()[-1]["metadata"]
    assert about["labels"] == {"app.kubernetes.io/managed-by": "castra", "castra.dev/job": "tiny-train"}
    told = {"castra.dev/owner": "ada", "castra.dev/run": "tiny", "castra.dev/expires": ADDRESS["expires"]}
    assert told.items() <= about["annotations"].items()


def test_the_file_system_is_mounted() -> None:
    *_, volume, claim, job = rendered()
    assert volume["spec"]["csi"]["volumeHandle"] == ADDRESS["FileSystem"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert {"name": "fsx", "mountPath": "/fsx"} in pod_of(job)["containers"][0]["volumeMounts"]
    without = {name: value for name, value in ADDRESS.items() if name != "FileSystem"}
    assert [one["kind"] for one in manifests.ground(Place.at(without))] == ["Namespace", "ServiceAccount", "Service"]


def test_what_is_not_provisioned_yet_stays_a_placeholder() -> None:
    place = Place.at({"FileSystem": "${FileSystem}"})
    assert (place.image, place.files) == (
        "${image}",
        {"id": "${FileSystem}", "dns": "${DnsName}", "mount": "${MountName}"},
    )


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Refused, match=r"p5\.49xlarge"):
        rendered(instance_type="p5.49xlarge")
    with pytest.raises(Refused, match="use job or jobset"):
        rendered(workload="pytorchjob")
    with pytest.raises(Refused, match="one process"):
        rendered(Job("two", "training.score", {}, nodes=2))


@given(st.text(alphabet="abcXYZ019._-", min_size=1, max_size=200))
def test_every_job_name_becomes_a_name_for_kubernetes(name: str) -> None:
    found = object_name(name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", found)
    assert len(f"{found}-node-0-9999-abcde") <= 63
    assert (found == name) == bool(re.fullmatch(r"[a-z]([a-z0-9-]{0,43}[a-z0-9])?", name))


def test_names_that_differ_only_in_what_is_lost_stay_apart() -> None:
    names = ["a.b", "a_b", "A-b", "a-b", "x" * 60, "x" * 61]
    assert len({object_name(name) for name in names}) == len(names)


def test_a_device_plugin_is_needed_only_where_nobody_brings_it() -> None:
    node = {"metadata": {"labels": {"node.kubernetes.io/instance-type": "p5.48xlarge"}}, "status": {"allocatable": {}}}
    ready = node | {"status": {"allocatable": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}}}
    instance = catalog.find("p5.48xlarge")

    def names(nodes: list[Manifest], daemons: list[Manifest]) -> list[str]:
        return [one.resource for one in kubernetes_plugins.lacking(instance, nodes, daemons)]

    assert names([node], []) == ["nvidia.com/gpu", "vpc.amazonaws.com/efa"]
    assert names([node, ready], []) == []
    theirs = json.loads(json.dumps(kubernetes_plugins.objects(kubernetes_plugins.PLUGINS[0])[-1]))
    theirs["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror.example/nvidia/k8s-device-plugin:v0.17.4"
    assert names([node], [theirs]) == ["vpc.amazonaws.com/efa"]


def test_the_golden_jobset(snapshot: SnapshotAssertion) -> None:
    assert rendered(workload="jobset") == snapshot.use_extension(JSONSnapshotExtension)


def test_the_schema_says_where_it_is_from() -> None:
    told = json.loads((Path(manifests.__file__).parents[1] / "emulator" / "jobset.json").read_text())
    assert "kubernetes-sigs/jobset v0.12.0" in told["$comment"]
