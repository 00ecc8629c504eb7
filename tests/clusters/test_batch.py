"""AWS Batch: what is asked of it, and what becomes of jobs when something goes wrong."""

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import validate_parameters

from clusters import batch as adapter
from clusters.aws import Site
from clusters.base import ClusterError, Job, Refused, State, Unreachable
from clusters.batch import BatchCluster
from clusters.names import fitted
from clusters.render import NamedStore
from store import Store
from tests.clusters.batch_yard import batch
from tests.clusters.yard import Yard, finished, ready, wait_until
from tests.sky import client, tell

MODEL = ServiceModel(Loader().load_service_model("batch", "service-2"), "batch")
JOB = Job("nano-train-1", "training.run", {"spec": {}, "output": "s3://bucket/run"}, nodes=2, processes_per_node=8)
ADDRESS = {
    "cluster": "batch",
    "region": "us-east-1",
    "JobQueue": "queue",
    "JobRole": "arn:aws:iam::123456789012:role/job",
    "LogGroup": "castra",
    "image": "image",
}


STORE = cast("Store", NamedStore("s3://bucket/castra"))


def rendered(job: Job = JOB, **more: str) -> dict[str, Any]:
    return BatchCluster(ADDRESS | {"instance_type": "p5.48xlarge"} | more, STORE).render(job)


def check(operation: str, request: Any) -> None:
    """Hold a request against botocore's model of the service."""
    shape = MODEL.operation_model(operation).input_shape
    assert shape
    validate_parameters(request, shape)


def container(told: dict[str, Any]) -> Any:
    return told["register_job_definition"]["nodeProperties"]["nodeRangeProperties"][0]["container"]


@pytest.mark.parametrize(
    ("instance", "vcpus", "gpus", "efa", "neurons"),
    [
        ("p4d.24xlarge", 96, 8, 4, 0),
        ("p5.48xlarge", 192, 8, 32, 0),
        ("p5en.48xlarge", 192, 8, 16, 0),
        ("p6-b200.48xlarge", 192, 8, 8, 0),
        ("p6-b300.48xlarge", 192, 8, 16, 0),
        ("trn1.32xlarge", 128, 0, 8, 16),
        ("g5.xlarge", 4, 1, 0, 0),
    ],
)
def test_a_node_asks_for_the_whole_instance(instance: str, vcpus: int, gpus: int, efa: int, neurons: int) -> None:
    told = rendered(instance_type=instance)
    check("RegisterJobDefinition", told["register_job_definition"])
    check("SubmitJob", told["submit_job"])
    asked = container(told)
    needs = {one["type"]: int(one["value"]) for one in asked["resourceRequirements"]}
    assert (needs["VCPU"], needs.get("GPU", 0)) == (vcpus, gpus)
    devices = [one["hostPath"] for one in asked["linuxParameters"]["devices"]]
    assert devices == [f"/dev/infiniband/uverbs{at}" for at in range(efa)] + [
        f"/dev/neuron{at}" for at in range(neurons)
    ]
    assert ("FI_PROVIDER" in {one["name"] for one in asked["environment"]}) == bool(efa)
    assert {"name": "memlock", "softLimit": -1, "hardLimit": -1} in asked["ulimits"]


def test_the_time_limit_and_the_tries_are_always_told() -> None:
    told = rendered(
        Job(**{field: getattr(JOB, field) for field in ("name", "module", "config")}, timeout_s=60, restarts=2)
    )
    definition = told["register_job_definition"]
    assert definition["type"] == "container", "one node needs no gang, and may run on Spot"
    assert definition["timeout"] == {"attemptDurationSeconds": 60 + adapter.SPARE_S}
    assert definition["retryStrategy"]["attempts"] == 3
    assert {"onStatusReason": "Host EC2*", "action": "RETRY"} in definition["retryStrategy"]["evaluateOnExit"]


def test_what_is_not_known_yet_has_a_placeholder() -> None:
    told = BatchCluster({"instance_type": "p5.48xlarge", "run": "r1"}, STORE).render(JOB)
    assert told["submit_job"]["jobQueue"] == "${JobQueue}"
    assert container(told)["jobRoleArn"] == "${JobRole}"
    assert told["submit_job"]["tags"] == {"castra:run": "r1", "castra:job": JOB.name, "castra:timeout_s": "86400"}


def test_what_it_cannot_run_is_refused() -> None:
    with pytest.raises(Refused, match="never runs 2 nodes on Spot"):
        rendered(spot="true")
    with pytest.raises(Refused, match="9 restarts at most"):
        rendered(Job(**{field: getattr(JOB, field) for field in ("name", "module", "config")}, restarts=10))
    with pytest.raises(Refused, match="did you mean"):
        rendered(instance_type="p5.48xlarg")


def test_long_and_strange_names_stay_apart() -> None:
    names = ["a" * 128, "a" * 129, "a" * 130, "a.b", "a-b", "a_b"]
    made = [fitted(name, 128, r"[^A-Za-z0-9_-]") for name in names]
    assert len(set(made)) == len(names)
    assert max(map(len, made)) == 128
    assert (made[0], made[-1]) == (names[0], names[-1])


def test_forget_leaves_no_definition(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path)
    job_id = cluster.submit(yard.job("v1.2-forgotten"))
    finished(cluster, job_id)
    api = client("batch", site.endpoint)
    asked = {"jobDefinitionName": fitted("v1.2-forgotten", 128, r"[^A-Za-z0-9_-]"), "status": "ACTIVE"}
    for told in (job_id, "v1.2-forgotten"):
        assert len(api.describe_job_definitions(**asked)["jobDefinitions"]) == 1
        cluster.forget(told)
        assert api.describe_job_definitions(**asked)["jobDefinitions"] == []
        api.register_job_definition(**cluster.render(yard.job("v1.2-forgotten"))["register_job_definition"])
    cluster.forget(job_id)
    assert cluster.find("v1.2-forgotten") == job_id


def test_an_answer_that_is_lost_does_not_make_a_second_job(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path)
    fault(site, kind="lost", service="batch", operation="SubmitJob")
    job = yard.job("lost-answer", sleep=0.2)
    with pytest.raises(Unreachable):
        cluster.submit(job)
    job_id = cluster.submit(job)
    finished(cluster, job_id)
    asked = {"jobQueue": cluster.address["JobQueue"], "filters": [{"name": "JOB_NAME", "values": ["lost-answer"]}]}
    assert [row["jobId"] for row in client("batch", site.endpoint).list_jobs(**asked)["jobSummaryList"]] == [job_id]


def test_throttling_is_told_as_such(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path)
    job_id = cluster.submit(yard.job("throttled"))
    finished(cluster, job_id)
    fault(site, kind="throttle", service="batch", operation="DescribeJobs", times=2)
    assert cluster.status(job_id).state is State.SUCCEEDED, "a little of it is waited out"
    fault(site, kind="throttle", service="batch", operation="DescribeJobs", times=5)
    with pytest.raises(Unreachable, match="overloaded"):
        cluster.status(job_id)


def test_a_queue_that_is_not_there_is_one_sentence(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path, JobQueue="nowhere")
    with pytest.raises(ClusterError, match=r"look for job stray: .* JobQueue nowhere not found"):
        cluster.submit(yard.job("stray"))


def test_without_capacity_the_reason_is_told(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path)
    fault(site, kind="capacity", instance_type="g5.xlarge", times=0)
    job_id = cluster.submit(yard.job("patient"))
    wait_until(lambda: "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY" in cluster.status(job_id).reason)
    assert cluster.status(job_id).state is State.QUEUED
    cluster.cancel(job_id)
    assert cluster.status(job_id).state is State.CANCELLED
    tell(site.endpoint, "faults", method="DELETE")


def test_many_jobs_are_asked_for_in_few_calls(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path)
    job_id = cluster.submit(yard.job("one-of-many"))
    finished(cluster, job_id)
    ids = [f"00000000-0000-0000-0000-{number:012}" for number in range(205)]
    found = cluster.statuses([*ids, job_id])
    assert len(found) == 206
    assert [one for one, status in found.items() if status.state is not State.LOST] == [job_id]


def test_a_host_that_is_lost_is_told_and_started_again(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = batch(tmp_path)
    job_id = cluster.submit(yard.job("host-lost", sleep=30))
    ready(cluster, job_id)
    lose(site, job_id, 0)
    status = finished(cluster, job_id)
    assert status.state is State.LOST
    assert "Host EC2" in status.reason


GANG_ENV = {"OMP_NUM_THREADS": "1", "CASTRA_GANG_SILENCE_S": "5"}
GANG = """
import os, pathlib, signal, sys, time, json
import torch.distributed as dist
spec = json.load(open(sys.argv[1]))["spec"]
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["AWS_BATCH_JOB_ATTEMPT"])
place = pathlib.Path(spec["place"])
(place / f"pid-{attempt}-{rank}").write_text(open("/proc/self/stat").read().split()[0])
print(f"rank {rank} of {dist.get_world_size()} in attempt {attempt}", flush=True)
if attempt == 1:
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.root
@pytest.mark.parametrize("fault", ["program", "host"])
def test_a_dead_child_ends_the_gang_which_is_started_again(site: Site, yard: Yard, tmp_path: Path, fault: str) -> None:
    """AWS Batch itself does nothing when a child dies, so the node programs must."""
    cluster = batch(tmp_path)
    (yard.folder / "gang.py").write_text(GANG)
    plain = yard.job(f"gang-{fault}", place=str(tmp_path))
    job = Job(f"gang-{fault}", "gang", plain.config, 2, 1, {**plain.env, **GANG_ENV}, timeout_s=180, restarts=1)
    job_id = cluster.submit(job)
    wait_until((tmp_path / "pid-1-1").exists, 90)
    wait_until(lambda: any("rank 1 of 2 in attempt 1" in line for line in cluster.logs(job_id)[0]), 30)
    kill_program(yard, rank=1) if fault == "program" else lose(site, job_id, 1)
    status = finished(cluster, job_id, 90)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), cluster.logs(job_id)[0]
    lines = cluster.logs(job_id)[0]
    for rank in (0, 1):
        said = [f"[node{rank}] rank {rank} of 2 in attempt {attempt}" for attempt in (1, 2)]
        assert [line for line in lines if "in attempt" in line and line.startswith(f"[node{rank}]")] == said
    assert all(line.startswith("[node") for line in lines)
    assert cluster.logs(job_id, cluster.logs(job_id)[1])[0] == []


def kill_program(yard: Yard, rank: int) -> None:
    """SIGKILL the program of a rank, wherever it runs."""
    for place in Path("/proc").iterdir():
        try:
            environ = (place / "environ").read_bytes() if place.name.isdigit() else b""
            if yard.mark.encode() in environ and f"\0RANK={rank}\0".encode() in b"\0" + environ:
                os.kill(int(place.name), signal.SIGKILL)
        except OSError:
            continue


def lose(site: Site, job_id: str, node: int) -> None:
    tell(site.endpoint, "lose", {"job": job_id, "node": node})


def fault(site: Site, **told: Any) -> None:
    tell(site.endpoint, "faults", [told])
