"""SageMaker: what is asked of it, where it puts things, and what becomes of jobs when something goes wrong."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import validate_parameters

from clusters.aws import Site
from clusters.base import Job, NoCapacity, Refused, State, Unreachable
from clusters.render import NamedStore
from clusters.sagemaker import SPARE_S, SageMakerCluster
from store import Store
from tests.clusters.sagemaker_yard import sagemaker
from tests.clusters.test_batch import fault, lose
from tests.clusters.yard import Yard, finished, ready, wait_until
from tests.sky import client, tell

MODEL = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
INPUTS = {"dataset": "s3://bucket/castra/data-1", "tokenizer": "s3://bucket/castra/data-1/tokenizer.json"}
CONFIG = {"spec": {"secret": "none"}, "inputs": INPUTS, "output": "s3://bucket/castra/train-1"}
JOB = Job("nano-train-1", "training.run", CONFIG, nodes=2, processes_per_node=8, timeout_s=3600)
ADDRESS = {
    "cluster": "sagemaker",
    "region": "us-east-1",
    "Role": "arn:aws:iam::123456789012:role/training",
    "PrivateSubnet": "subnet-1",
    "SecurityGroup": "sg-1",
    "image": "image",
    "instance_type": "p5.48xlarge",
}


STORE = cast("Store", NamedStore("s3://bucket/castra"))


def rendered(job: Job = JOB, **more: str) -> dict[str, Any]:
    return SageMakerCluster(ADDRESS | more, STORE).render(job)


def changed(**more: Any) -> Job:
    told = {name: getattr(JOB, name) for name in ("name", "module", "config", "nodes", "processes_per_node")}
    return Job(**(told | more))


@pytest.mark.parametrize(
    "instance",
    [
        "p4d.24xlarge",
        "p5.48xlarge",
        "p5en.48xlarge",
        "p6-b200.48xlarge",
        "p6-b300.48xlarge",
        "trn1.32xlarge",
        "g5.xlarge",
    ],
)
def test_the_request_is_one_that_sagemaker_takes(instance: str) -> None:
    request = rendered(instance_type=instance)["create_training_job"]
    shape = MODEL.operation_model("CreateTrainingJob").input_shape
    assert shape
    validate_parameters(request, shape)
    kinds = MODEL.shape_for("TrainingInstanceType")
    assert request["ResourceConfig"]["InstanceType"] in getattr(kinds, "enum")  # noqa: B009  mypy knows no enum
    assert request["ResourceConfig"]["InstanceCount"] == 2
    assert "HyperParameters" not in request
    assert ("FI_PROVIDER" in request["Environment"]) == (instance != "g5.xlarge")


def test_everything_comes_as_a_channel_and_job_json_knows_where() -> None:
    told = rendered()
    request = told["create_training_job"]
    channels = {one["ChannelName"]: one["DataSource"]["S3DataSource"]["S3Uri"] for one in request["InputDataConfig"]}
    code, job = told["objects"]
    assert channels == {
        "code": f"s3://bucket/castra/{code}",
        "job": "s3://bucket/castra/jobs/nano-train-1/job.json",
        "dataset": "s3://bucket/castra/data-1/",
        "tokenizer": "s3://bucket/castra/data-1/tokenizer.json",
    }
    assert told["objects"][job]["inputs"] == {
        "dataset": "/opt/ml/input/data/dataset",
        "tokenizer": "/opt/ml/input/data/tokenizer/tokenizer.json",
    }
    assert told["objects"][job]["output"] == "/opt/ml/checkpoints"
    assert request["CheckpointConfig"] == {"S3Uri": CONFIG["output"], "LocalPath": "/opt/ml/checkpoints"}
    assert request["AlgorithmSpecification"]["ContainerArguments"][-1] == "/opt/ml/input/data/job/job.json"
    assert request["Environment"]["PYTHONPATH"] == f"/opt/ml/input/data/code/{code.partition('/')[2]}"
    assert "none" not in json.dumps(request), "who may describe a job must not read its spec"


def test_limits_capacity_and_money() -> None:
    request = rendered(changed(timeout_s=100, restarts=2))["create_training_job"]
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] == 300 + SPARE_S
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    spot = rendered(spot="true")["create_training_job"]
    assert spot["EnableManagedSpotTraining"]
    limits = spot["StoppingCondition"]
    assert limits["MaxWaitTimeInSeconds"] > limits["MaxRuntimeInSeconds"]
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/mine"
    resources = rendered(plan=plan, warm_pool_minutes="10", volume_gib="500")["create_training_job"]["ResourceConfig"]
    assert (resources["TrainingPlanArn"], resources["KeepAlivePeriodInSeconds"]) == (plan, 600)
    assert resources["VolumeSizeInGB"] == 500


def test_what_is_not_known_yet_has_a_placeholder() -> None:
    request = SageMakerCluster({"instance_type": "g5.xlarge", "run": "r"}, STORE).render(JOB)
    told = request["create_training_job"]
    assert (told["RoleArn"], told["VpcConfig"]["Subnets"]) == ("${Role}", ["${PrivateSubnet}"])
    assert {"Key": "castra:run", "Value": "r"} in told["Tags"]


@pytest.mark.parametrize(
    ("job", "address", "wrong"),
    [
        (changed(config=CONFIG | {"output": "/local"}), {}, "writes to S3 only"),
        (changed(config=CONFIG | {"inputs": {"x": "/local"}}), {}, "reads inputs from S3 only"),
        (changed(timeout_s=29 * 86_400), {}, "28 days"),
        (changed(env={"LONG": "x" * 513}), {}, "512 letters in env LONG"),
        (JOB, {"spot": "true", "warm_pool_minutes": "5"}, "choose one"),
    ],
)
def test_what_it_cannot_run_is_refused(job: Job, address: dict[str, str], wrong: str) -> None:
    with pytest.raises(Refused, match=wrong):
        rendered(job, **address)


def test_a_long_name_is_cut_and_found_again(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    name = "v1.2_" + "very-" * 20 + "long"
    job_id = cluster.submit(yard.job(name))
    assert len(job_id) == 63
    assert cluster.find(name) == job_id
    assert finished(cluster, job_id).state is State.SUCCEEDED
    assert cluster.find(name.upper()) is None


def test_what_is_written_is_in_s3_and_comes_back(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    (yard.folder / "writes.py").write_text(
        "import json, pathlib, sys\n"
        "told = json.load(open(sys.argv[1])); place = pathlib.Path(told['output'])\n"
        "print(sorted(path.name for path in place.glob('*')), pathlib.Path(told['inputs']['word']).read_text())\n"
        "place.mkdir(exist_ok=True, parents=True); (place / 'result.json').write_text('{}')\n"
    )
    cluster.store.put("words/word.json", b"hello")
    config = {
        "spec": {},
        "output": f"{cluster.store.url}/written",
        "inputs": {"word": f"{cluster.store.url}/words/word.json"},
    }
    env = yard.job("x").env
    for number, there in ((1, []), (2, ["result.json"])):
        job_id = cluster.submit(Job(f"writes-{number}", "writes", config, env=env))
        assert finished(cluster, job_id).state is State.SUCCEEDED, cluster.logs(job_id)
        assert f"{there} hello" in cluster.logs(job_id)[0]
    assert cluster.store.get("written/result.json")


def test_forget_deletes_the_job_and_its_warm_pool(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path, warm_pool_minutes="10")
    job_id = cluster.submit(yard.job("warm"))
    finished(cluster, job_id)
    api = client("sagemaker", site.endpoint)
    assert api.describe_training_job(TrainingJobName=job_id)["WarmPoolStatus"]["Status"] == "Available"
    cluster.forget(job_id)
    assert cluster.find("warm") is None
    cluster.forget(job_id)


def test_an_answer_that_is_lost_does_not_make_a_second_job(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    fault(site, kind="lost", service="sagemaker", operation="CreateTrainingJob")
    job_id = cluster.submit(yard.job("lost-answer-sm"))
    assert finished(cluster, job_id).state is State.SUCCEEDED
    assert yard.runs("lost-answer-sm") == 1


def test_throttling_is_told_as_such(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    fault(site, kind="throttle", service="sagemaker", operation="DescribeTrainingJob", times=5)
    with pytest.raises(Unreachable, match="overloaded"):
        cluster.find("anything")


def test_many_jobs_are_listed(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    job_id = cluster.submit(yard.job("going", sleep=30))
    ready(cluster, job_id)
    ids = ["gone-1", "gone-2", "gone-3", "gone-4", job_id]
    found = cluster.statuses(ids)
    assert list(found) == ids
    assert [found[one].state for one in ids] == [State.LOST] * 4 + [State.RUNNING]
    cluster.cancel(job_id)
    assert finished(cluster, job_id, 10).state is State.CANCELLED


def test_a_lost_instance_is_told_or_the_gang_starts_again(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    job = yard.job("loses", sleep=2)
    job_id = cluster.submit(Job(job.name, job.module, job.config, env=job.env, restarts=1))
    ready(cluster, job_id)
    lose(site, job_id, 0)
    assert finished(cluster, job_id).state is State.SUCCEEDED
    assert yard.runs("loses") == 2
    job_id = cluster.submit(yard.job("loses-all", sleep=30))
    ready(cluster, job_id)
    lose(site, job_id, 0)
    assert finished(cluster, job_id).state is State.LOST


def test_without_capacity_the_reason_is_told(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    fault(site, kind="capacity", instance_type="g5.xlarge", times=1)
    status = finished(cluster, cluster.submit(yard.job("unlucky")))
    assert status.state is State.FAILED
    assert status.reason.startswith("no capacity: CapacityError")


def test_a_quota_that_is_too_small_is_no_capacity(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    tell(site.endpoint, "quotas", {"code": "ml.g5.xlarge for training job usage", "value": 0})
    try:
        with pytest.raises(NoCapacity, match="training job usage' is 0 Instances"):
            cluster.submit(yard.job("too-many"))
    finally:
        tell(site.endpoint, "quotas", {"code": "ml.g5.xlarge for training job usage", "value": 10_000})


GANG = """
import os, sys, time, json
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.root
def test_two_instances_are_one_gang(site: Site, yard: Yard, tmp_path: Path) -> None:
    cluster = sagemaker(tmp_path)
    (yard.folder / "gang.py").write_text(GANG)
    plain = yard.job("sm-gang")
    job = Job("sm-gang", "gang", plain.config, 2, 1, {**plain.env, "OMP_NUM_THREADS": "1"}, timeout_s=120)
    job_id = cluster.submit(job)
    wait_until(lambda: cluster.status(job_id).state.done, 120)
    lines = cluster.logs(job_id)[0]
    assert cluster.status(job_id).state is State.SUCCEEDED, lines
    assert {"[node0] rank 0 of 2", "[node1] rank 1 of 2"} <= set(lines)
