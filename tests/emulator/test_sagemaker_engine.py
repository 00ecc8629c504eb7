"""SageMaker's training jobs as the emulator does them: strict requests, instances that really run, data that moves."""

import io
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from emulator.aws import Emulator
from tests.clusters.batch_yard import BUCKET, ROLE, provision
from tests.clusters.yard import wait_until
from tests.sky import client, tell


class Studio:
    """Training jobs, and what the tests do with them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.api = endpoint, client("sagemaker", endpoint)
        self.s3, self.logs = client("s3", endpoint), client("logs", endpoint)
        provision(endpoint)

    def request(self, program: str, nodes: int = 1, **more: Any) -> dict[str, Any]:
        name = f"studio-{time.monotonic_ns()}"
        self.put(f"code/{name}/main.py", program)
        channels = [*more.pop("InputDataConfig", []), channel("code", f"s3://{BUCKET}/code/{name}/")]
        return {
            "InputDataConfig": channels,
            "TrainingJobName": name,
            "AlgorithmSpecification": {
                "TrainingImage": "x",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["python3", "-u", "/opt/ml/input/data/code/main.py"],
            },
            "RoleArn": ROLE,
            "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/studio"},
            "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": nodes, "VolumeSizeInGB": 10},
            "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        } | more

    def start(self, program: str, nodes: int = 1, **more: Any) -> str:
        told = self.request(program, nodes, **more)
        self.api.create_training_job(**told)
        return str(told["TrainingJobName"])

    def look(self, name: str) -> Any:
        return self.api.describe_training_job(TrainingJobName=name)

    def end(self, name: str) -> Any:
        wait_until(lambda: self.look(name)["TrainingJobStatus"] in ("Completed", "Failed", "Stopped"), 30)
        return self.look(name)

    def lines(self, name: str) -> dict[str, list[str]]:
        group = "/aws/sagemaker/TrainingJobs"
        try:
            streams = self.logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=f"{name}/")["logStreams"]
        except self.logs.exceptions.ResourceNotFoundException:
            return {}
        found = {}
        for one in streams:
            told = {"logGroupName": group, "logStreamName": one["logStreamName"], "startFromHead": True}
            found[one["logStreamName"]] = [event["message"] for event in self.logs.get_log_events(**told)["events"]]
        return found

    def put(self, key: str, text: str) -> None:
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=text.encode())

    def get(self, key: str) -> bytes | None:
        try:
            return bytes(self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        except self.s3.exceptions.NoSuchKey:
            return None


@pytest.fixture
def studio(emulator: Emulator) -> Iterator[Studio]:
    studio = Studio(emulator.endpoint)
    yield studio
    tell(studio.endpoint, "faults", method="DELETE")


def channel(name: str, url: str) -> dict[str, Any]:
    return {"ChannelName": name, "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": url}}}


CONTRACT = """
import json, os, pathlib
ml = pathlib.Path(os.environ.get("SM_ROOT", "/opt/ml"))
config = {name: json.loads((ml / f"input/config/{name}.json").read_text())
          for name in ("resourceconfig", "hyperparameters", "inputdataconfig")}
print(config["resourceconfig"]["current_host"], config["resourceconfig"]["hosts"])
print(config["hyperparameters"], list(config["inputdataconfig"]), os.environ["TRAINING_JOB_NAME"], os.environ["WORD"])
print((ml / "input/data/words/deep/hello.txt").read_text(), (ml / "input/data/one/alone.json").read_text())
(ml / "model/weights").write_text("weights of " + config["resourceconfig"]["current_host"])
"""


def test_every_instance_finds_what_it_was_promised(studio: Studio) -> None:
    studio.put("data/words/deep/hello.txt", "hello")
    studio.put("data/alone.json", "{}")
    channels = [channel("words", f"s3://{BUCKET}/data/words/"), channel("one", f"s3://{BUCKET}/data/alone.json")]
    told = {"InputDataConfig": channels, "HyperParameters": {"rate": "0.1"}, "Environment": {"WORD": "yes"}}
    name = studio.start(CONTRACT, nodes=2, **told)
    row = studio.end(name)
    assert (row["TrainingJobStatus"], row["SecondaryStatus"]) == ("Completed", "Completed"), row
    passed = [one["Status"] for one in row["SecondaryStatusTransitions"]]
    assert passed == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    lines = studio.lines(name)
    assert [stream.rpartition("-")[0] for stream in sorted(lines)] == [f"{name}/algo-1", f"{name}/algo-2"]
    for node, stream in enumerate(sorted(lines), 1):
        assert lines[stream] == [
            f"algo-{node} ['algo-1', 'algo-2']",
            f"{{'rate': '0.1'}} ['words', 'one', 'code'] {name} yes",
            "hello {}",
        ]
    assert row["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/studio/{name}/output/model.tar.gz"
    archive = studio.get(f"studio/{name}/output/model.tar.gz")
    assert archive
    with tarfile.open(fileobj=io.BytesIO(archive)) as model:
        file = model.extractfile("weights")
        assert file
        assert file.read() == b"weights of algo-1"


CHECKPOINTS = """
import os, pathlib, time
place = pathlib.Path(os.environ.get("SM_ROOT", "/opt/ml")) / "checkpoints"
print(sorted(path.name for path in place.iterdir()))
(place / "step-2").write_text("two")
time.sleep(30)
"""


def test_checkpoints_come_back_and_go_out_while_it_runs(studio: Studio) -> None:
    studio.put("run/step-1", "one")
    name = studio.start(CHECKPOINTS, CheckpointConfig={"S3Uri": f"s3://{BUCKET}/run"})
    wait_until(lambda: studio.get("run/step-2") == b"two")
    assert studio.look(name)["SecondaryStatus"] == "Training"
    studio.api.stop_training_job(TrainingJobName=name)
    row = studio.end(name)
    assert (row["TrainingJobStatus"], row["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert list(studio.lines(name).values()) == [["['step-1']"]]
    with pytest.raises(ClientError, match="status Stopped"):
        studio.api.stop_training_job(TrainingJobName=name)


def test_one_instance_that_fails_fails_the_job(studio: Studio) -> None:
    program = (
        "import json, os, pathlib, sys, time; ml = pathlib.Path(os.environ.get('SM_ROOT', '/opt/ml'))\n"
        "here = json.loads((ml / 'input/config/resourceconfig.json').read_text())['current_host']\n"
        "if here == 'algo-1': time.sleep(60)\n"
        "(ml / 'output/failure').write_text('no luck'); sys.exit(3)"
    )
    row = studio.end(studio.start(program, nodes=2))
    assert (row["TrainingJobStatus"], row["FailureReason"]) == ("Failed", "AlgorithmError: no luck, exit code: 3")


def test_the_time_limit_is_kept(studio: Studio) -> None:
    name = studio.start("import time; time.sleep(60)", StoppingCondition={"MaxRuntimeInSeconds": 1})
    row = studio.end(name)
    assert (row["TrainingJobStatus"], row["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert 1 <= row["TrainingTimeInSeconds"] < 10


def test_a_lost_instance_is_an_internal_error_that_is_tried_again(studio: Studio) -> None:
    name = studio.start("print('up'); import time; time.sleep(30)", RetryStrategy={"MaximumRetryAttempts": 1})
    wait_until(lambda: len(studio.lines(name)) == 1 and all(studio.lines(name).values()))
    tell(studio.endpoint, "lose", {"job": name})
    wait_until(lambda: len(studio.lines(name)) == 2 and all(studio.lines(name).values()))
    tell(studio.endpoint, "lose", {"job": name})
    row = studio.end(name)
    assert (row["TrainingJobStatus"], row["FailureReason"][:19]) == ("Failed", "InternalServerError")


def test_a_spot_instance_that_is_taken_away_comes_back(studio: Studio) -> None:
    limits = {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 600}
    name = studio.start(
        "import time; print('up'); time.sleep(1)", EnableManagedSpotTraining=True, StoppingCondition=limits
    )
    wait_until(lambda: any(studio.lines(name).values()))
    tell(studio.endpoint, "lose", {"job": name})
    row = studio.end(name)
    assert row["TrainingJobStatus"] == "Completed"
    assert "Interrupted" in [one["Status"] for one in row["SecondaryStatusTransitions"]]


def test_without_capacity_it_fails_and_on_spot_it_waits(studio: Studio) -> None:
    tell(studio.endpoint, "faults", [{"kind": "capacity", "instance_type": "g5.xlarge", "times": 0}])
    row = studio.end(studio.start("pass"))
    assert row["FailureReason"].startswith("CapacityError")
    spot: dict[str, Any] = {"EnableManagedSpotTraining": True}
    limits = {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}
    row = studio.end(studio.start("pass", StoppingCondition=limits, **spot))
    assert (row["TrainingJobStatus"], row["SecondaryStatus"]) == ("Stopped", "MaxWaitTimeExceeded")
    waiting = studio.start("pass", StoppingCondition=limits | {"MaxWaitTimeInSeconds": 600}, **spot)
    assert studio.look(waiting)["TrainingJobStatus"] == "InProgress"
    tell(studio.endpoint, "faults", method="DELETE")
    assert studio.end(waiting)["TrainingJobStatus"] == "Completed"


def test_data_that_is_not_there_fails_the_job(studio: Studio) -> None:
    row = studio.end(studio.start("pass", InputDataConfig=[channel("x", f"s3://{BUCKET}/nothing/")]))
    assert "No S3 objects found" in row["FailureReason"]


def test_names_are_unique_until_a_job_is_deleted(studio: Studio) -> None:
    name = studio.start("import time; time.sleep(0.5)")
    with pytest.raises(ClientError, match="ResourceInUse"):
        studio.start("pass", TrainingJobName=name)
    with pytest.raises(ClientError, match="ResourceInUse"):
        studio.api.delete_training_job(TrainingJobName=name)
    arn = studio.end(name)["TrainingJobArn"]
    studio.api.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "b"}])
    assert studio.api.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "a", "Value": "b"}]
    listed = studio.api.list_training_jobs(NameContains=name, StatusEquals="Completed")["TrainingJobSummaries"]
    assert [one["TrainingJobName"] for one in listed] == [name]
    studio.api.delete_training_job(TrainingJobName=name)
    with pytest.raises(ClientError, match="Requested resource not found"):
        studio.look(name)


def test_a_warm_pool_is_kept_reused_and_ended(studio: Studio) -> None:
    warm = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10, "KeepAlivePeriodInSeconds": 600}
    first = studio.start("pass", ResourceConfig=warm)
    assert studio.end(first)["WarmPoolStatus"]["Status"] == "Available"
    second = studio.start("pass", ResourceConfig=warm)
    pool = studio.end(first)["WarmPoolStatus"]
    assert (pool["Status"], pool["ReusedByJob"]) == ("Reused", second)
    studio.end(second)
    studio.api.update_training_job(TrainingJobName=second, ResourceConfig={"KeepAlivePeriodInSeconds": 0})
    assert studio.look(second)["WarmPoolStatus"]["Status"] == "Terminated"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"RoleArn": "arn:aws:iam::123456789012:role/nobody"}, "Could not assume role"),
        ({"TrainingJobName": "under_score"}, "regular expression"),
        (
            {"ResourceConfig": {"InstanceType": "ml.p9.large", "InstanceCount": 1, "VolumeSizeInGB": 1}},
            "enum value set",
        ),
        ({"EnableManagedSpotTraining": True}, "MaxWaitTimeInSeconds must be given"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9}}, "requires EnableManagedSpot"),
        ({"VpcConfig": {"Subnets": ["subnet-00000000"], "SecurityGroupIds": ["sg-1"]}}, "subnet-00000000"),
        ({"InputDataConfig": [channel("a", "s3://b/c"), channel("a", "s3://b/d")]}, "must be unique"),
    ],
)
def test_what_cannot_be_a_job_is_refused(studio: Studio, change: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ClientError, match=wrong):
        studio.start("pass", **change)


def test_other_resources_are_still_motos(studio: Studio) -> None:
    made = studio.api.create_model_package_group(ModelPackageGroupName=f"group-{time.monotonic_ns()}")
    arn = made["ModelPackageGroupArn"]
    studio.api.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "b"}])
    assert studio.api.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "a", "Value": "b"}]
