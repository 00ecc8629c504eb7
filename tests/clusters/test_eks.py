"""Jobs on EKS beyond what every cluster does: gangs, lost nodes, restarts, the cluster's own say, logins, many jobs."""

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from clusters import eks as eks_module
from clusters import kubernetes_api, kubernetes_states, manifests
from clusters.aws import Site
from clusters.base import ClusterError, Job, Refused, State, Status, Unreachable
from clusters.eks import EksCluster
from clusters.kubernetes_api import Server, collection
from emulator import guests
from store import open_store
from tests.clusters.eks_yard import CLUSTER, NODES, eks
from tests.clusters.yard import Yard, finished, ready, wait_until
from tests.sky import client, tell

RELAY = """
import json, os, sys, time
spec = json.load(open(sys.argv[1]))["spec"]
mark = spec["mark"] + os.environ["RANK"]
first = not os.path.exists(mark)
open(mark, "w").close()
print(f"start {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
print("ready", flush=True)
time.sleep(600 if first and spec["waits"] else 0)
os._exit(spec["code"] if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def cluster(tmp_path: Path, site: Site) -> EksCluster:
    return eks(tmp_path)


def gang(yard: Yard, name: str, waits: bool = False, code: int = 0, restarts: int = 0) -> Job:
    """Two nodes under torchrun: the first start waits for ever if it `waits`; rank 1 ends with `code`."""
    (yard.folder / "relay.py").write_text(RELAY)
    spec = {"mark": str(yard.folder / f"{name}.mark"), "waits": waits, "code": code}
    config = {"spec": spec, "output": str(yard.folder / name)}
    env = {"CASTRA_TEST_YARD": str(yard.folder), "PYTHONPATH": str(yard.folder), "CASTRA_GANG_SILENCE_S": "3"}
    return Job(name, "relay", config, 2, 1, env, timeout_s=120, restarts=restarts)


def lose(site: Site, job: str, node: int) -> None:
    """Pull the plug of a job's node."""
    tell(site.endpoint, "lose", {"job": job, "node": node})


def pods(cluster: EksCluster) -> list[kubernetes_api.Body]:
    return list(cluster.server.items(collection("Pod", cluster.place.namespace)))


@pytest.mark.torch
def test_a_gang_runs_as_one(cluster: EksCluster, yard: Yard) -> None:
    job_id = cluster.submit(gang(yard, "both"))
    assert finished(cluster, job_id, 60).state is State.SUCCEEDED
    lines, _ = cluster.logs(job_id)
    assert {"[node0] start 0 of 2", "[node1] start 1 of 2"} <= set(lines)


@pytest.mark.torch
def test_a_gang_fails_as_one(cluster: EksCluster, yard: Yard) -> None:
    job_id = cluster.submit(gang(yard, "one-fails", code=3))
    status = finished(cluster, job_id, 60)
    assert status.state is State.FAILED
    assert re.fullmatch(r"node \d exited with code \d+", status.reason), status.reason


@pytest.mark.torch
@pytest.mark.skipif(not guests.possible(), reason="a node that is a plain process cannot fall silent")
def test_a_lost_node_loses_the_job(cluster: EksCluster, yard: Yard, site: Site) -> None:
    job_id = cluster.submit(gang(yard, "loses", waits=True))
    wait_until(lambda: {"[node0] ready", "[node1] ready"} <= set(cluster.logs(job_id)[0]), 60)
    lose(site, job_id, 1)
    status = finished(cluster, job_id, 60)
    assert status.state is State.LOST
    assert "node was lost" in status.reason


@pytest.mark.torch
@pytest.mark.skipif(not guests.possible(), reason="a node that is a plain process cannot fall silent")
def test_a_jobset_starts_its_gang_again(tmp_path: Path, yard: Yard, site: Site) -> None:
    cluster = eks(tmp_path, workload="jobset")
    job_id = cluster.submit(gang(yard, "again", waits=True, restarts=1))
    wait_until(lambda: {"[node0] ready", "[node1] ready"} <= set(cluster.logs(job_id)[0]), 60)
    _, cursor = cluster.logs(job_id)
    lose(site, job_id, 1)
    assert finished(cluster, job_id, 90).state is State.SUCCEEDED
    more, _ = cluster.logs(job_id, cursor)
    assert {"[node0] start 0 of 2", "[node1] start 1 of 2"} <= set(more), "the second start has a log of its own"


def test_a_jobset_does_not_repeat_what_would_only_happen_again(tmp_path: Path, yard: Yard, site: Site) -> None:
    cluster = eks(tmp_path, workload="jobset")
    ids = []
    for name, code in (("crashes", 1), ("refuses", 2)):
        job = yard.job(name, code=code)
        ids.append(cluster.submit(Job(name, job.module, job.config, env=job.env, timeout_s=60, restarts=1)))
    assert [finished(cluster, one).exit_code for one in ids] == [1, 2]
    assert (yard.runs("crashes"), yard.runs("refuses")) == (2, 1)


def test_the_device_plugins_are_brought_along(cluster: EksCluster, yard: Yard) -> None:
    finished(cluster, cluster.submit(yard.job("brings")))
    names = [one["metadata"]["name"] for one in cluster.server.items("apis/apps/v1/daemonsets")]
    assert names == ["castra-efa-device-plugin", "castra-nvidia-device-plugin"][-len(names) :]
    node = next(iter(cluster.server.items("api/v1/nodes")))
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "1"


def test_what_is_missing_is_said(tmp_path: Path, site: Site) -> None:
    files = {"FileSystem": "fs-1", "MountName": "abc", "DnsName": "fs-1.fsx"}
    told = eks(tmp_path, workload="jobset", queue="team-a", **files).lacks()
    assert [sentence.partition(":")[0] for sentence in told] == [
        "the cluster has no Kueue",
        "the cluster cannot mount FSx for Lustre",
    ]


def test_what_waits_says_why(tmp_path: Path, yard: Yard, site: Site) -> None:
    cluster = eks(tmp_path, instance_type="p4d.24xlarge")
    job_id = cluster.submit(yard.job("waits"))
    wait_until(lambda: cluster.status(job_id).reason)
    status = cluster.status(job_id)
    assert status.state is State.QUEUED
    assert re.match(rf"0/{NODES} nodes are available: {NODES} node\(s\) didn't match", status.reason)
    cluster.cancel(job_id)
    assert finished(cluster, job_id, 10).state is State.CANCELLED


def test_a_job_whose_nodes_never_come_is_ended_by_the_cluster(tmp_path: Path, yard: Yard, site: Site) -> None:
    cluster = eks(tmp_path, instance_type="p4d.24xlarge", patience_s="1", grace_s="1")
    status = finished(cluster, cluster.submit(yard.job("never", timeout_s=1)), 15)
    assert status.state is State.TIMED_OUT
    assert "time limit of 1 s" in status.reason


@pytest.mark.parametrize("workload", ["job", "jobset"])
def test_a_queue_admits_what_it_wants(tmp_path: Path, yard: Yard, site: Site, workload: str) -> None:
    cluster = eks(tmp_path, queue="team-a", workload=workload)
    job_id = cluster.submit(yard.job("queued"))
    assert cluster.status(job_id) == Status(State.QUEUED, "waits in Kueue's queue team-a")
    kind = "JobSet" if workload == "jobset" else "Job"
    path = f"{collection(kind, cluster.place.namespace)}/{job_id}"
    cluster.server.patch(path, {"spec": {"suspend": False}})  # as Kueue does
    assert finished(cluster, job_id).state is State.SUCCEEDED
    other = cluster.submit(yard.job("unwanted"))
    cluster.cancel(other)
    assert finished(cluster, other, 10).state is State.CANCELLED
    assert yard.runs("unwanted") == 0


def test_a_pod_that_somebody_deletes_is_a_lost_job(cluster: EksCluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("stopped", sleep=600))
    ready(cluster, job_id)
    path = collection("Pod", cluster.place.namespace)
    cluster.server.delete(f"{path}/{pods(cluster)[0]['metadata']['name']}")
    status = finished(cluster, job_id, 15)
    assert (status.state, status.exit_code) == (State.LOST, 143)
    assert cluster.logs(job_id) == ([], "")


def test_what_is_known_of_a_job_whose_pods_are_gone(cluster: EksCluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("swept", code=3))
    finished(cluster, job_id)
    lines, cursor = cluster.logs(job_id)
    assert "ready" in lines
    path = collection("Pod", cluster.place.namespace)
    cluster.server.delete(f"{path}/{pods(cluster)[0]['metadata']['name']}")
    wait_until(lambda: not pods(cluster))
    assert cluster.status(job_id).exit_code == 3
    assert cluster.logs(job_id, cursor) == ([], cursor)


def test_forgotten_is_gone(cluster: EksCluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("forgotten"))
    finished(cluster, job_id)
    cluster.forget(job_id)
    wait_until(lambda: not pods(cluster))
    assert cluster.find("forgotten") is None
    assert cluster.status(job_id).state is State.LOST
    cluster.forget(job_id)


def test_many_jobs_cost_few_calls(cluster: EksCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [cluster.submit(yard.job(f"many-{number}", code=number % 2)) for number in range(6)]
    for one in ids:
        finished(cluster, one)
    calls: list[str] = []
    send: Callable[..., bytes] = Server._send

    def counted(self: Server, verb: str, path: str, *told: object, **more: object) -> bytes:
        calls.append(path)
        return send(self, verb, path, *told, **more)

    monkeypatch.setattr(Server, "_send", counted)
    told = cluster.statuses([*ids, *(f"unknown-{number}" for number in range(200))])
    assert [told[one].exit_code for one in ids] == [0, 1] * 3
    assert told["unknown-7"].state is State.LOST
    assert len(calls) == 2, "the jobs, and the pods of those that failed"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_submission_that_breaks_off_anywhere_is_one_job(
    cluster: EksCluster, yard: Yard, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    create = Server.create
    job, calls = yard.job(f"breaks-{after}".lower()), 0
    for broken in itertools.count(1):
        calls = 0

        def breaks(self: Server, manifest: kubernetes_api.Body, broken: int = broken) -> kubernetes_api.Body:
            nonlocal calls
            calls += 1
            answer = {} if calls == broken and not after else create(self, manifest)
            if calls == broken:
                raise Unreachable("killed here")
            return answer

        monkeypatch.setattr(Server, "create", breaks)
        try:
            job_id = cluster.submit(job)
            break
        except Unreachable:
            continue
    assert finished(cluster, job_id).state is State.SUCCEEDED
    assert yard.runs(job.name) == 1


def test_two_jobs_do_not_share_a_name(cluster: EksCluster, yard: Yard) -> None:
    long, longer = "a" * 60, "a" * 61
    ids = {cluster.submit(yard.job(long)), cluster.submit(yard.job(longer))}
    assert ids == {cluster.find(long), cluster.find(longer)}
    assert len(ids) == 2
    for one in ids:
        assert finished(cluster, one).state is State.SUCCEEDED


def test_a_job_without_an_image_is_refused(tmp_path: Path, yard: Yard, site: Site) -> None:
    with pytest.raises(Refused, match=r"set image\.container"):
        eks(tmp_path, image="").submit(yard.job("bare"))


def test_a_cluster_that_is_not_there(tmp_path: Path, yard: Yard, site: Site) -> None:
    with pytest.raises(ClusterError, match="No cluster found for name: nowhere"):
        eks(tmp_path, Cluster="nowhere").submit(yard.job("nowhere"))
    with pytest.raises(Refused, match="no EKS cluster and no kubeconfig"):
        eks(tmp_path, Cluster="").find("nowhere")


def kubeconfig(folder: Path, server: str, **user: str) -> str:
    told = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": user}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(told))
    return str(folder / "kubeconfig")


def test_any_cluster_by_its_kubeconfig(tmp_path: Path, yard: Yard, cluster: EksCluster) -> None:
    path = kubeconfig(tmp_path, cluster.server.url, token=cluster.server.token())
    by_file = EksCluster({"kubeconfig": path, "Namespace": "by-file", "image": "x"}, cluster.store)
    assert finished(by_file, by_file.submit(yard.job("by-file"))).state is State.SUCCEEDED
    path = kubeconfig(tmp_path, cluster.server.url, token="somebody")
    with pytest.raises(Refused, match="does not know who we are"):
        EksCluster({"kubeconfig": path}, cluster.store).find("by-file")


def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(Refused, match=r"nowhere cannot be used .*FileNotFoundError"):
        EksCluster({"kubeconfig": str(tmp_path / "nowhere")}, store).find("x")
    (tmp_path / "program").write_text(
        yaml.safe_dump(yaml.safe_load(Path(kubeconfig(tmp_path, "http://127.0.0.1:9")).read_text()))
    )
    with pytest.raises(Unreachable, match="does not answer"):
        EksCluster({"kubeconfig": str(tmp_path / "program")}, store).find("x")


def test_a_token_is_signed_again_before_it_is_too_old(cluster: EksCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cluster.server.token()
    assert cluster.server.token() == first
    assert first.startswith("k8s-aws-v1.")
    signed = kubernetes_api.Signed(CLUSTER, Site("us-east-1"), client("sts", str(cluster.address["endpoint"])))
    monkeypatch.setattr(kubernetes_api, "TOKEN_S", -1.0)
    tokens = set()
    for _ in range(2):
        tokens.add(signed.token())
        time.sleep(1.1)  # a signature's time has seconds
    assert len(tokens) == 2


def test_lines_of_the_same_time_come_once() -> None:
    text = "2026-11-20T09:00:00.5Z a\n2026-11-20T09:00:00.5Z b\n"
    rows, seen = eks_module._fresh(text, None)
    assert [line for _, line in rows] == ["a", "b"]
    more, seen = eks_module._fresh(text + "2026-11-20T09:00:00.5Z c\n2026-11-20T09:00:00.51Z \n", seen)
    assert [line for _, line in more] == ["c", ""]
    assert eks_module._fresh("unable to retrieve container logs\n", seen) == ([], seen)


def test_how_a_pod_failed_is_told_by_the_node_that_failed_first() -> None:
    def pod(index: int, code: int, at: str, **more: str) -> kubernetes_states.Object:
        notes = {"batch.kubernetes.io/job-completion-index": str(index)}
        end = {"exitCode": code, "finishedAt": f"2026-11-20T09:00:{at}Z", **more}
        states = [{"name": manifests.CONTAINER, "state": {"terminated": end}}]
        return {"metadata": {"annotations": notes}, "status": {"phase": "Failed", "containerStatuses": states}}

    cause = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": ""}
    job = {"kind": "Job", "metadata": {}, "spec": {"completions": 2}, "status": {"conditions": [cause]}}
    told = kubernetes_states.status(job, pods=[pod(0, 1, "07"), pod(1, 3, "07")])
    assert (told.state, told.reason, told.exit_code) == (State.FAILED, "node 1 exited with code 3", 3)
    told = kubernetes_states.status(job, pods=[pod(0, 137, "07", reason="OOMKilled")])
    assert told.reason == "node 0 ran out of memory and exited with code 137"
    lost = '[node0] @castra {"event": "node-lost", "node": 1}'
    assert kubernetes_states.status(job, pods=[pod(0, 1, "07", message=lost)]).state is State.LOST
    assert kubernetes_states.status(job).state is State.LOST, "nobody knows how it ended"


def test_importing_it_is_cheap() -> None:
    code = "import sys; import clusters.eks; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"kubernetes", "boto3", "torch", "prefect"} & set(told)
