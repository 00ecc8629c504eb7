"""The emulated Kubernetes API: strict, versioned, watched; and its Jobs, which run as upstream's do."""

import contextlib
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from clusters.kubernetes_api import ApiError, Body, Server, collection, of_eks
from tests.clusters.eks_yard import CLUSTER, INSTANCE, NODES, provision
from tests.clusters.yard import wait_until
from tests.sky import client, tell

SPACE = "here"
LOOK = """
import os, socket, time
for name in os.environ["PEERS"].split():
    for attempt in range(100):  # a name is known while its pod is there
        try:
            socket.gethostbyname(name)
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise SystemExit(f"{name} is not known")
print(os.environ["JOB_COMPLETION_INDEX"], "found them all")
time.sleep(2)
"""


@pytest.fixture
def server(site: Site) -> Server:
    """The API server, with a namespace."""
    provision(site.endpoint)
    made = of_eks(CLUSTER, site)
    with contextlib.suppress(ApiError):  # another test has made it
        made.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    return made


def job(name: str, *command: str, env: dict[str, str] | None = None, **spec: Any) -> Body:
    """A Job with one container."""
    variables = [{"name": key, "value": value} for key, value in (env or {}).items()]
    container = {"name": "main", "image": "x", "command": list(command), "env": variables}
    pod = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1, "subdomain": "svc"}
    told = {"backoffLimit": 0, "completionMode": "Indexed", "completions": 1, "parallelism": 1} | spec
    about = {"name": name, "namespace": SPACE}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": told | {"template": {"spec": pod}}}


def at(kind: str, name: str = "") -> str:
    path = collection(kind, SPACE)
    return f"{path}/{name}" if name else path


def condition(server: Server, name: str) -> Body:
    """The condition that a Job ended with."""
    found: list[Body] = []

    def look() -> bool:
        rows = server.get(at("Job", name)).get("status", {}).get("conditions", [])
        found[:] = [one for one in rows if one["type"] in ("Complete", "Failed")]
        return bool(found)

    wait_until(look)
    return found[0]


def said(server: Server, name: str) -> list[str]:
    """What all pods of a Job printed."""
    pods = server.items(at("Pod"), labelSelector=f"job-name={name}")
    return [line for one in pods for line in server.text(f"{at('Pod', one['metadata']['name'])}/log").splitlines()]


def config(name: str, **data: str) -> Body:
    about = {"name": name, "namespace": SPACE, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


@pytest.fixture(autouse=True)
def _config_maps() -> None:
    """The client's table of paths knows only what the adapter uses."""
    from clusters import kubernetes_api

    kubernetes_api.COLLECTIONS.setdefault("ConfigMap", "api/v1/namespaces/{namespace}/configmaps")


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"completion": 1}, 400, "completion"),
        ({"completions": "two"}, 400, "two"),
        ({"podFailurePolicy": {"rule": []}}, 400, "strict decoding error"),
        ({"completions": 10**59, "parallelism": 1}, 422, "no more than 63 characters"),
    ],
)
def test_what_does_not_fit_is_refused(server: Server, change: Body, status: int, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        server.create(job("wrong", "true", **change))
    assert caught.value.status == status


def test_a_jobset_is_held_against_its_definition(server: Server) -> None:
    inner = {"name": "node", "template": {"spec": job("x", "true")["spec"]}}
    about = {"name": "set", "namespace": SPACE}
    told = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": about}
    with pytest.raises(ApiError, match="replicatedJob' was unexpected"):
        server.create(told | {"spec": {"replicatedJob": [inner]}})
    long = about | {"name": "s" * 50}
    with pytest.raises(ApiError, match="no more than 63"):
        server.create(told | {"metadata": long, "spec": {"replicatedJobs": [inner]}})


def test_an_object_has_one_life(server: Server) -> None:
    first = server.create(config("life", a="1"))
    with pytest.raises(ApiError, match="already exists") as caught:
        server.create(config("life"))
    assert caught.value.status == 409
    second = server.patch(at("ConfigMap", "life"), {"data": {"b": "2", "a": None}})
    assert second["data"] == {"b": "2"}
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    old = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}, "data": {"c": "3"}}
    with pytest.raises(ApiError, match="has been modified") as caught:
        server.patch(at("ConfigMap", "life"), old)
    assert caught.value.status == 409
    server.delete(at("ConfigMap", "life"))
    with pytest.raises(ApiError, match="not found") as caught:
        server.get(at("ConfigMap", "life"))
    assert caught.value.status == 404


def test_labels_select(server: Server) -> None:
    for name in ("red", "blue"):
        server.create(config(name))
    selectors = {"app=red": {"red"}, "app in (red,blue)": {"red", "blue"}, "app!=red,app": {"blue"}, "!app": set()}
    for selector, names in selectors.items():
        found = {one["metadata"]["name"] for one in server.items(at("ConfigMap"), labelSelector=selector)}
        assert found & {"red", "blue"} == names, selector


def test_a_watch_tells_what_happens(server: Server) -> None:
    since = server.get(at("ConfigMap"))["metadata"]["resourceVersion"]
    told: list[str] = []
    query = {"watch": "true", "timeoutSeconds": "3", "resourceVersion": since, "labelSelector": "app=seen"}
    watching = threading.Thread(target=lambda: told.append(server.text(at("ConfigMap"), **query)))
    watching.start()
    server.create(config("seen"))
    server.create(config("other"))
    server.delete(at("ConfigMap", "seen"))
    watching.join()
    assert [json.loads(line)["type"] for line in told[0].splitlines()] == ["ADDED", "DELETED"]


def test_what_is_fixed_stays(server: Server) -> None:
    server.create(job("fixed", "sleep", "60"))
    with pytest.raises(ApiError, match="field is immutable") as caught:
        server.patch(at("Job", "fixed"), {"spec": {"completions": 2}})
    assert caught.value.status == 422
    server.delete(at("Job", "fixed"))
    wait_until(lambda: not list(server.items(at("Pod"), labelSelector="job-name=fixed")))


def test_a_token_that_is_none_is_refused(server: Server) -> None:
    with pytest.raises(ApiError) as caught:
        Server(server.url, lambda: "k8s-aws-v1.bm90aGluZw").get(at("Pod"))
    assert caught.value.status == 401


def test_pods_know_who_and_where_they_are(server: Server) -> None:
    peers = {"PEERS": "localhost gang-0.svc gang-1.svc"}
    server.create(job("gang", "python3", "-c", LOOK, env=peers, completions=2, parallelism=2))
    assert condition(server, "gang")["type"] == "Complete"
    assert sorted(said(server, "gang")) == ["0 found them all", "1 found them all"]


def test_a_failed_pod_is_replaced_as_often_as_it_may(server: Server) -> None:
    server.create(job("tries", "python3", "-c", "print('tried'); raise SystemExit(7)", backoffLimit=2))
    assert condition(server, "tries")["reason"] == "BackoffLimitExceeded"
    assert said(server, "tries") == ["tried"] * 3


def test_a_policy_ends_all_and_says_by_which_rule(server: Server) -> None:
    codes = {"containerName": "main", "operator": "NotIn", "values": [0]}
    policy = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    program = "import os, sys, time; time.sleep(60 * int(os.environ['JOB_COMPLETION_INDEX'])); sys.exit(9)"
    server.create(
        job("policy", "python3", "-c", program, podFailurePolicy=policy, completions=2, parallelism=2, backoffLimit=9)
    )
    told = condition(server, "policy")
    assert told["reason"] == "PodFailurePolicy"
    assert told["message"].startswith("Container main for pod here/policy-0-")
    assert told["message"].endswith("failed with exit code 9 matching FailJob rule at index 0")


def test_suspended_and_resumed(server: Server) -> None:
    server.create(job("pauses", "python3", "-c", "print('done')", suspend=True))
    wait_until(lambda: server.get(at("Job", "pauses")).get("status", {}).get("conditions"))
    assert not list(server.items(at("Pod"), labelSelector="job-name=pauses"))
    server.patch(at("Job", "pauses"), {"spec": {"suspend": False}})
    assert condition(server, "pauses")["type"] == "Complete"


def test_the_time_limit_and_the_removal_after_the_end(server: Server) -> None:
    server.create(job("limited", "sleep", "60", activeDeadlineSeconds=1, ttlSecondsAfterFinished=2))
    assert condition(server, "limited")["reason"] == "DeadlineExceeded"

    def gone() -> bool:
        return not [one for one in server.items(at("Job")) if one["metadata"]["name"] == "limited"]

    wait_until(gone)


def test_a_job_without_its_service_account_starts_no_pod(server: Server) -> None:
    told = job("nobody", "true")
    told["spec"]["template"]["spec"]["serviceAccountName"] = "missing"
    server.create(told)
    wait_until(lambda: server.get(at("Job", "nobody")).get("status", {}).get("conditions"))
    why = server.get(at("Job", "nobody"))["status"]["conditions"][0]["message"]
    assert 'serviceaccounts "missing" not found' in why
    server.delete(at("Job", "nobody"))


def test_nodes_follow_their_group_and_its_capacity(server: Server, site: Site) -> None:
    eks = client("eks", site.endpoint)
    tell(site.endpoint, "faults", [{"kind": "capacity", "instance_type": INSTANCE, "times": 0}])

    def nodes() -> int:
        return len(list(server.items("api/v1/nodes")))

    wait_until(lambda: nodes() == NODES)
    other = "castra-scarce"
    provision(site.endpoint, other, 1)
    scarce = of_eks(other, site)
    try:
        wait_until(lambda: scarce.get("version"))
        assert not list(scarce.items("api/v1/nodes"))
    finally:
        tell(site.endpoint, "faults", method="DELETE")
    wait_until(lambda: list(scarce.items("api/v1/nodes")))
    eks.delete_nodegroup(clusterName=other, nodegroupName="nodes")
    eks.delete_cluster(name=other)
    with pytest.raises(ApiError, match="EKS has no cluster"):
        wait_until(lambda: not scarce.get("version"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_finds_its_way(server: Server, tmp_path: Path) -> None:
    server.create(job("seen-by-kubectl", "python3", "-c", "print('hello')"))
    assert condition(server, "seen-by-kubectl")["type"] == "Complete"

    def kubectl(*told: str) -> str:
        words = ["kubectl", "--server", server.url, "--cache-dir", str(tmp_path), "--namespace", SPACE, *told]
        env = {"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout

    assert "seen-by-kubectl" in kubectl("get", "jobs")
    assert kubectl("logs", "job/seen-by-kubectl") == "hello\n"
    assert "NotIn" not in kubectl("describe", "job", "seen-by-kubectl")
    assert "jobset.x-k8s.io/v1alpha2" in kubectl("api-resources")
    kubectl("delete", "job", "seen-by-kubectl")
    assert "seen-by-kubectl" not in kubectl("get", "jobs")
