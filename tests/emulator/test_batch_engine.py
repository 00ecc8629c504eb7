"""AWS Batch as the emulator does it: strict requests, queues that wait, and nodes that really run."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from emulator import batch_engine, gangs, guests
from emulator.aws import Emulator
from emulator.batch import Region
from tests.clusters.batch_yard import network, provision
from tests.clusters.yard import wait_until
from tests.sky import client, tell

NEEDS = [{"type": "VCPU", "value": "4"}, {"type": "MEMORY", "value": "8000"}]


class Desk:
    """A queue, and what the tests do at it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.batch, self.logs = endpoint, client("batch", endpoint), client("logs", endpoint)
        self.queue = provision(endpoint)
        self.number = 0

    def container(self, program: str, **more: Any) -> dict[str, Any]:
        return {"image": "x", "command": ["python3", "-uc", program], "resourceRequirements": NEEDS} | more

    def register(self, program: str, nodes: int = 0, main: int = 0, **more: Any) -> str:
        self.number += 1
        name = f"desk-{self.number}-{time.monotonic_ns()}"
        one = self.container(program)
        several = {
            "type": "multinode",
            "nodeProperties": {
                "numNodes": nodes,
                "mainNode": main,
                "nodeRangeProperties": [{"targetNodes": "0:", "container": one}],
            },
        }
        told = several if nodes else {"type": "container", "containerProperties": one}
        self.batch.register_job_definition(jobDefinitionName=name, **told, **more)
        return name

    def submit(self, program: str, nodes: int = 0, main: int = 0, override: Any = None, **more: Any) -> str:
        name = self.register(program, nodes, main, **more)
        job = self.batch.submit_job(jobName=name, jobQueue=self.queue, jobDefinition=name, **(override or {}))
        return str(job["jobId"])

    def look(self, job_id: str) -> Any:
        (row,) = self.batch.describe_jobs(jobs=[job_id])["jobs"]
        return row

    def come_to(self, job_id: str, *statuses: str) -> Any:
        wait_until(lambda: self.look(job_id)["status"] in statuses, 20)
        return self.look(job_id)

    def end(self, job_id: str) -> Any:
        return self.come_to(job_id, "SUCCEEDED", "FAILED")

    def lines(self, job_id: str) -> list[str]:
        stream = self.look(job_id)["container"].get("logStreamName")
        if not stream:
            return []
        asked = {"logGroupName": "/aws/batch/job", "logStreamName": stream, "startFromHead": True}
        return [event["message"] for event in self.logs.get_log_events(**asked)["events"]]

    def tell(self, page: str, told: Any) -> Any:
        return tell(self.endpoint, page, told)

    def forget_faults(self) -> None:
        tell(self.endpoint, "faults", method="DELETE")


@pytest.fixture
def desk(emulator: Emulator) -> Iterator[Desk]:
    desk = Desk(emulator.endpoint)
    yield desk
    desk.forget_faults()


def test_a_container_job_goes_through_its_states(desk: Desk) -> None:
    job = desk.submit("import os; print(os.environ['AWS_BATCH_JOB_ID'], os.environ['AWS_BATCH_JOB_ATTEMPT'])")
    row = desk.end(job)
    assert (row["status"], row["statusReason"]) == ("SUCCEEDED", "Essential container in task exited")
    assert row["container"]["exitCode"] == 0
    assert row["createdAt"] <= row["startedAt"] <= row["stoppedAt"]
    assert desk.lines(job) == [f"{job} 1"]


PLACE = """
import os, socket, time
told = {key: os.environ.get("AWS_BATCH_JOB_" + key) for key in ("NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX")}
print(told, os.environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"))
index, main = int(told["NODE_INDEX"]), int(told["MAIN_NODE_INDEX"])
"""


def test_every_node_knows_its_place_and_the_others_the_main_node(desk: Desk) -> None:
    job = desk.submit(
        PLACE + "if index == main:\n"
        "    listening = socket.create_server(('', 7000))\n"
        "    print('hello from', listening.accept()[0].recv(9).decode())\n"
        "else:\n"
        "    address = os.environ['AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS']\n"
        "    socket.create_connection((address, 7000)).sendall(b'child'); time.sleep(60)",
        nodes=2,
        main=1,
    )
    row = desk.end(job)
    assert row["status"] == "SUCCEEDED", "the main node has ended, whatever the other does"
    assert "container" not in row
    assert row["attempts"][0]["container"]["exitCode"] == 0
    main, child = desk.lines(f"{job}#1"), desk.lines(f"{job}#0")
    assert "'NODE_INDEX': '1'" in main[0]
    assert main[0].endswith("None"), "the main node is not told its own address"
    assert main[1] == "hello from child"
    assert not child[0].endswith("None")
    assert desk.look(f"{job}#0")["status"] == "FAILED", "it was stopped"
    assert desk.look(f"{job}#0")["nodeDetails"] == {"nodeIndex": 0, "isMainNode": False}
    listed = desk.batch.list_jobs(multiNodeJobId=job, jobStatus="SUCCEEDED")["jobSummaryList"]
    assert [one["jobId"] for one in listed] == [f"{job}#1"]


def test_node_overrides_count(desk: Desk) -> None:
    override = {
        "nodeOverrides": {
            "numNodes": 3,
            "nodePropertyOverrides": [
                {"targetNodes": "0:", "containerOverrides": {"environment": [{"name": "WORD", "value": "yes"}]}}
            ],
        }
    }
    job = desk.submit("import os; print(os.environ['AWS_BATCH_JOB_NUM_NODES'], os.environ['WORD'])", 2, 0, override)
    assert desk.end(job)["nodeProperties"]["numNodes"] == 3
    assert desk.lines(f"{job}#0") == ["3 yes"]
    name = desk.register("pass", nodes=2)
    wrong = {"nodePropertyOverrides": [{"targetNodes": "1:1"}]}
    with pytest.raises(ClientError, match="1:1 is not a range of the job definition"):
        desk.batch.submit_job(jobName="x", jobQueue=desk.queue, jobDefinition=name, nodeOverrides=wrong)


def test_a_child_that_dies_changes_nothing(desk: Desk) -> None:
    job = desk.submit(
        PLACE + "time.sleep(0.6) if index == main else os._exit(9)", nodes=2, retryStrategy={"attempts": 3}
    )
    row = desk.end(job)
    assert (row["status"], len(row["attempts"])) == ("SUCCEEDED", 1)
    assert desk.look(f"{job}#1")["container"]["exitCode"] == 9


def test_a_main_node_that_fails_is_tried_again_with_all_others(desk: Desk) -> None:
    retry = {"attempts": 3, "evaluateOnExit": [{"onExitCode": "7", "action": "EXIT"}]}
    attempt = "import os, sys; attempt = int(os.environ['AWS_BATCH_JOB_ATTEMPT']); print(attempt); "
    row = desk.end(desk.submit(attempt + "sys.exit(1 if attempt < 3 else 0)", retryStrategy=retry))
    assert (row["status"], [one["container"]["exitCode"] for one in row["attempts"]]) == ("SUCCEEDED", [1, 1, 0])
    row = desk.end(desk.submit(attempt + "sys.exit(7)", retryStrategy=retry))
    assert (row["status"], [one["container"]["exitCode"] for one in row["attempts"]]) == ("FAILED", [7])


def test_a_lost_main_node_ends_the_attempt_and_a_lost_child_does_not(desk: Desk) -> None:
    job = desk.submit(PLACE + "time.sleep(2 if index == main else 60)", nodes=2)
    wait_until(lambda: desk.lines(f"{job}#1"))
    assert desk.tell("lose", {"job": job, "node": 1})["instance"].startswith("i-")
    assert desk.end(job)["status"] == "SUCCEEDED"
    job = desk.submit(PLACE + "time.sleep(60)", nodes=2)
    wait_until(lambda: desk.lines(f"{job}#0"))
    instance = desk.tell("lose", {"job": job, "node": 0})["instance"]
    row = desk.end(job)
    assert (row["status"], row["statusReason"]) == ("FAILED", f"Host EC2 (instance {instance}) terminated.")


def test_terminate_is_polite_and_tells_the_reason(desk: Desk) -> None:
    job = desk.submit("import signal, time; print('up'); signal.signal(15, lambda *_: exit(5)); time.sleep(60)")
    wait_until(lambda: desk.lines(job))
    desk.batch.terminate_job(jobId=job, reason="enough")
    row = desk.end(job)
    assert (row["status"], row["statusReason"], row["container"]["exitCode"]) == ("FAILED", "enough", 5)
    assert row["isTerminated"]
    desk.batch.terminate_job(jobId=job, reason="again")
    assert desk.look(job)["statusReason"] == "enough"


def test_without_capacity_a_job_waits_and_says_why(desk: Desk) -> None:
    desk.tell("faults", [{"kind": "capacity", "instance_type": "g5.xlarge", "times": 0}])
    job = desk.submit("pass")
    wait_until(lambda: "statusReason" in desk.look(job))
    row = desk.look(job)
    assert (row["status"], row["statusReason"]) == ("RUNNABLE", batch_engine.NO_CAPACITY.format("g5.xlarge"))
    behind = desk.submit("pass")
    desk.batch.cancel_job(jobId=job, reason="not today")
    assert desk.look(job)["status"] == "FAILED"
    wait_until(lambda: desk.look(behind)["status"] == "RUNNABLE")
    desk.forget_faults()
    assert desk.end(behind)["status"] == "SUCCEEDED"


def test_what_never_fits_waits_for_ever(desk: Desk) -> None:
    large = {"containerOverrides": {"resourceRequirements": [{"type": "VCPU", "value": "8"}]}}
    job = desk.submit("pass", override=large)
    wait_until(lambda: "statusReason" in desk.look(job))
    assert desk.look(job)["statusReason"] == batch_engine.TOO_LARGE
    desk.batch.terminate_job(jobId=job, reason="cleared away")
    spot = provision(desk.endpoint, market="SPOT")
    name = desk.register("pass", nodes=2)
    job = desk.batch.submit_job(jobName=name, jobQueue=spot, jobDefinition=name)["jobId"]
    wait_until(lambda: "statusReason" in desk.look(job))
    assert desk.look(job)["statusReason"] == batch_engine.TOO_LARGE, "several nodes never run on Spot"
    desk.batch.terminate_job(jobId=job, reason="cleared away")


@pytest.fixture
def alone() -> Iterator[Region]:
    """A region of this process, for limits that are minutes long where AWS is asked for them."""
    yield Region("us-east-1")
    guests.pool().close()
    guests.pool.cache_clear()


def _job(here: Region, program: str, **plan: Any) -> batch_engine.Job:
    plan = {"type": "container", "jobDefinitionName": "jd", "jobDefinitionArn": "arn:x"} | plan
    container = {"image": "x", "command": ["python3", "-uc", program]}
    job = batch_engine.Job(here, "0a1b2c3d", "name", "arn:queue/q", plan, [container])
    job.running = [None]
    return job


def test_an_attempt_ends_at_its_time_limit_and_is_not_tried_again(
    alone: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gangs.STOP_S, "0.3")
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    job = _job(alone, deaf, timeout={"attemptDurationSeconds": 1}, retryStrategy={"attempts": 3})
    batch_engine.run(job)
    assert (job.status, job.reason) == ("FAILED", "Job attempt duration exceeded timeout")
    assert [one.code for one in job.attempts[0]] == [137]


def test_a_queue_cancels_what_is_stuck_too_long(alone: Region) -> None:
    job = _job(alone, "pass")
    action = {"state": "RUNNABLE", "action": "CANCEL", "maxTimeSeconds": 600, "reason": batch_engine.NO_CAPACITY[:39]}
    queue = {"jobStateTimeLimitActions": [action]}
    reason = batch_engine.NO_CAPACITY.format("p5.48xlarge")
    batch_engine.stick(job, queue, reason)
    assert (job.status, job.reason) == ("SUBMITTED", reason)
    job.stuck_since -= 601
    batch_engine.stick(job, queue, reason)
    told = "Canceled by JobStateTimeLimit action due to reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
    assert (job.status, job.reason) == ("FAILED", told)


def test_environments_and_queues_go_in_order(desk: Desk) -> None:
    resources = network(desk.endpoint) | {"type": "EC2", "minvCpus": 0, "maxvCpus": 16, "instanceTypes": ["p5"]}
    told = {"type": "MANAGED", "computeResources": resources | {"instanceRole": "castra-yard"}}
    desk.batch.create_compute_environment(computeEnvironmentName="orderly", **told)
    order = [{"order": 1, "computeEnvironment": "orderly"}]
    made = desk.batch.create_job_queue(
        jobQueueName="orderly", priority=1, computeEnvironmentOrder=order, tags={"a": "b"}
    )
    assert desk.batch.list_tags_for_resource(resourceArn=made["jobQueueArn"])["tags"] == {"a": "b"}
    for wrong in ("Cannot delete, state must be DISABLED", "found existing JobQueue relationship"):
        with pytest.raises(ClientError, match=wrong):
            desk.batch.delete_compute_environment(computeEnvironment="orderly")
        desk.batch.update_compute_environment(computeEnvironment="orderly", state="DISABLED")
    with pytest.raises(ClientError, match="Cannot delete, state must be DISABLED"):
        desk.batch.delete_job_queue(jobQueue="orderly")
    desk.batch.update_job_queue(jobQueue="orderly", state="DISABLED")
    desk.batch.delete_job_queue(jobQueue="orderly")
    desk.batch.delete_compute_environment(computeEnvironment="orderly")
    assert desk.batch.describe_compute_environments(computeEnvironments=["orderly"])["computeEnvironments"] == []
    with pytest.raises(ClientError, match="orderly does not exist"):
        desk.batch.create_job_queue(jobQueueName="x", priority=1, computeEnvironmentOrder=order)


def test_an_environment_of_things_that_do_not_exist_is_invalid(desk: Desk) -> None:
    resources = network(desk.endpoint) | {"type": "EC2", "minvCpus": 0, "maxvCpus": 16, "instanceTypes": ["p5"]}
    lost = {"subnets": ["subnet-00000000"], "instanceRole": "castra-yard"}
    told = {"type": "MANAGED", "computeResources": resources | lost}
    desk.batch.create_compute_environment(computeEnvironmentName="lost", **told)
    (row,) = desk.batch.describe_compute_environments(computeEnvironments=["lost"])["computeEnvironments"]
    assert row["status"] == "INVALID"
    assert "subnet-00000000" in row["statusReason"]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"timeout": {"attemptDurationSeconds": 59}}, "at least 60"),
        ({"retryStrategy": {"attempts": 11}}, "between 1 and 10"),
        ({"retryStrategy": {"attempts": 2, "evaluateOnExit": [{"onExitCode": "a", "action": "EXIT"}]}}, "only numbers"),
        ({"jobDefinitionName": "a.b"}, "should match valid pattern"),
        ({"type": "multinode"}, "takes nodeProperties"),
        ({"containerProperties": {"image": "x", "command": []}}, "VCPU"),
        ({"type": "multinode", "containerProperties": None, "nodeProperties": {"numNodes": 3}}, "must account for all"),
    ],
)
def test_what_cannot_be_a_definition_is_refused(desk: Desk, change: dict[str, Any], wrong: str) -> None:
    told = {"jobDefinitionName": "x", "type": "container", "containerProperties": desk.container("pass")} | change
    if "nodeProperties" in change:
        ranges = [{"targetNodes": "0:1", "container": desk.container("pass")}]
        told["nodeProperties"] = {"mainNode": 0, "nodeRangeProperties": ranges} | change["nodeProperties"]
    with pytest.raises(ClientError, match=wrong):
        desk.batch.register_job_definition(**{key: value for key, value in told.items() if value is not None})


def test_what_the_model_does_not_know_is_refused(desk: Desk) -> None:
    bare = {"jobDefinitionName": "x", "type": "containr", "nonsense": 1}
    request = urllib.request.Request(
        f"{desk.endpoint}/v1/registerjobdefinition",
        json.dumps(bare).encode(),
        {
            "Authorization": "AWS4-HMAC-SHA256 Credential=castra/20260101/us-east-1/batch/aws4_request",
            "Content-Type": "application/json",
        },
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    told = json.loads(refused.value.read())["message"]
    assert "Unknown parameter 'nonsense'" in told
    assert "enum value set: [container, multinode]" in told
