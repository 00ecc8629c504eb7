"""AWS Batch: a job of several nodes is a multi-node parallel job, one of a single node a plain container job.

The plain kind also runs on Spot and tells its exit code itself; the other needs on-demand instances or a reservation.
A job definition of the job's name is registered per job and removed by `forget`. SubmitJob takes no client token, so
it is sent once, and a job is looked for by its name before it is submitted.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from clusters import aws, catalog, cloudwatch, fabric
from clusters.aws import Site
from clusters.base import Address, Job, Refused, State, Status
from clusters.names import check, fitted
from clusters.payload import GRACE_S, Payload, deliver, pack
from store import Store

STATES = {
    "SUBMITTED": State.QUEUED,
    "PENDING": State.QUEUED,
    "RUNNABLE": State.QUEUED,
    "STARTING": State.QUEUED,
    "RUNNING": State.RUNNING,
    "SUCCEEDED": State.SUCCEEDED,
    "FAILED": State.FAILED,
}
CANCELLED = "cancelled by Castra"
TIMED_OUT = 124
"""`training.node` ends with it when the job's time is over."""
FINAL = (2, TIMED_OUT, 143)
"""Exit codes after which another attempt is of no use: refused, time is over, asked to stop and saved."""
MEMORY_SHARE = 0.92
"""Of an instance's memory: the kernel keeps some 2.5 %, and AWS advises to leave 5 % to the agent
(AWS Batch user guide, "Compute resource memory management" and "Reserve system memory", read 2026-11)."""
SPARE_S = 300
"""The node program keeps the time limit itself; AWS Batch does so this much later, should the program fail to."""
SHORTEST_S = 60
"""The shortest attemptDurationSeconds that AWS Batch takes."""
MOST_ATTEMPTS = 10
MOST_NODES = 1000
CHUNK = 100
"""Jobs per DescribeJobs at most."""


class BatchCluster:
    """Runs jobs in a job queue of AWS Batch.

    The address: `region`, `endpoint`, `memory`; `JobQueue`, `JobRole`, `ExecutionRole` (optional), `LogGroup`, `image`,
    `instance_type`; optional are `spot` (`true`), `run` (for the tags), `python` (of the image) and `grace_s`.
    """

    def __init__(self, address: Address, store: Store) -> None:
        self.address, self.store = dict(address), store
        self.site = Site.at(self.address)

    def render(self, job: Job) -> dict[str, Any]:
        """RegisterJobDefinition and SubmitJob, and what goes into the store before. Raises `Refused`."""
        payload = self._pack(job)
        name = _name(job.name)
        definition = self._definition(job, payload)
        told = json.dumps(definition, sort_keys=True).encode()
        tags = definition["tags"] | {"castra:digest": hashlib.sha256(told).hexdigest()}
        return {
            "objects": payload.shown(),
            "register_job_definition": definition | {"tags": tags},
            "submit_job": {
                "jobName": name,
                "jobQueue": self._output("JobQueue"),
                "jobDefinition": name,  # its newest revision
                "propagateTags": True,
                "tags": definition["tags"],
            },
        }

    def submit(self, job: Job) -> str:
        told = self.render(job)
        if (found := self.find(job.name)) is not None:
            return found
        deliver(self._pack(job), self.store)
        with self._sentences(f"submit job {job.name}"):
            self._register(told["register_job_definition"])
            return str(aws.client(self.site, "batch", attempts=1).submit_job(**told["submit_job"])["jobId"])

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        rows = {row["jobId"]: row for row in self._describe(job_ids)}
        lacking = [job_id for job_id, row in rows.items() if row["status"] == "FAILED" and _exit_code(row) is None]
        mains = {row["jobId"].partition("#")[0]: row for row in self._describe(f"{one}#0" for one in lacking)}
        return {one: _status(rows[one], mains.get(one)) if one in rows else self._unknown(one) for one in job_ids}

    def status(self, job_id: str) -> Status:
        return self.statuses([job_id])[job_id]

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        row = next(iter(self._describe([job_id])), None)
        if row is None:
            return [], after
        nodes = row.get("nodeProperties", {}).get("numNodes", 1)
        rows = [row] if "container" in row else self._describe(f"{job_id}#{index}" for index in range(nodes))
        streams = [
            cloudwatch.Stream(name, f"[node{index}] " if nodes > 1 else "")
            for index, node in enumerate(rows)
            for name in _streams(node)
        ]
        return cloudwatch.read(self.site, self.address.get("LogGroup", "/aws/batch/job"), streams, after)

    def cancel(self, job_id: str) -> None:
        """TerminateJob: AWS Batch sends SIGTERM, and SIGKILL 30 s later."""
        row = next(iter(self._describe([job_id])), None)
        if row is not None and not STATES[row["status"]].done:
            with self._sentences(f"cancel job {job_id}"):
                aws.client(self.site, "batch").terminate_job(jobId=job_id, reason=CANCELLED)

    def find(self, name: str) -> str | None:
        """The newest job of that name; AWS Batch remembers an ended one for at least a week."""
        filters = [{"name": "JOB_NAME", "values": [_name(name)]}]
        with self._sentences(f"look for job {name}"):
            pages = aws.client(self.site, "batch").get_paginator("list_jobs")
            for page in pages.paginate(jobQueue=self._output("JobQueue"), filters=filters):
                for row in page["jobSummaryList"]:
                    if row["jobName"] == _name(name):  # the filter ignores case
                        return str(row["jobId"])
        return None

    def quarantine(self, job_id: str, node: int, why: str) -> str:
        """Terminate the node's instance: AWS Batch starts another when a job needs it."""
        rows = [*self._describe([f"{job_id}#{node}"]), *self._describe([job_id])]
        row = rows[0] if rows else {}
        arn = row.get("container", {}).get("containerInstanceArn", "")
        if not arn:
            raise Refused(f"AWS Batch does not say on which instance node {node} of job {job_id} ran ({why})")
        with self._sentences(f"look for the instance of node {node}"):
            ecs = aws.client(self.site, "ecs")
            found = ecs.describe_container_instances(cluster=arn.split("/")[1], containerInstances=[arn])
        instances = [one["ec2InstanceId"] for one in found["containerInstances"]]
        return aws.terminate(self.site, instances) if instances else f"the instance of node {node} is gone already"

    def forget(self, job_id: str) -> None:
        """Deregister the job's definitions; a job that never came to be submitted may be told by its name."""
        row = next(iter(self._describe([job_id])), None)
        name = row["jobDefinition"].rpartition("/")[2].partition(":")[0] if row else _name(job_id)
        with self._sentences(f"forget job {job_id}"):
            for definition in self._active(name):
                arn = definition["jobDefinitionArn"]
                aws.client(self.site, "batch").deregister_job_definition(jobDefinition=arn)

    def _definition(self, job: Job, payload: Payload) -> dict[str, Any]:
        container = self._container(job, payload)
        nodes = {
            "numNodes": job.nodes,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:", "container": container}],
        }
        several = {"type": "multinode", "nodeProperties": nodes}
        run = {"castra:run": self.address["run"]} if "run" in self.address else {}
        return {
            "jobDefinitionName": _name(job.name),
            **(several if job.nodes > 1 else {"type": "container", "containerProperties": container}),
            "platformCapabilities": ["EC2"],
            "propagateTags": True,
            "retryStrategy": {"attempts": job.restarts + 1, "evaluateOnExit": _rules()},
            "timeout": {"attemptDurationSeconds": max(SHORTEST_S, job.timeout_s + SPARE_S)},
            "tags": run | {"castra:job": job.name, "castra:timeout_s": str(job.timeout_s)},
        }

    def _container(self, job: Job, payload: Payload) -> dict[str, Any]:
        instance = catalog.find(self._output("instance_type"))
        memory = int(instance.ram_gib * 1024 * MEMORY_SHARE)
        needs = {"VCPU": instance.vcpus, "MEMORY": memory, "GPU": fabric.gpus(instance)}
        env = fabric.environment(instance, job.nodes) | dict(payload.env)
        devices = [
            {"hostPath": one, "containerPath": one, "permissions": ["READ", "WRITE"]}
            for one in fabric.devices(instance)
        ]
        execution = {"executionRoleArn": self.address["ExecutionRole"]} if "ExecutionRole" in self.address else {}
        return {
            "image": self._output("image"),
            "command": list(payload.command),
            "jobRoleArn": self._output("JobRole"),
            **execution,
            "environment": [{"name": name, "value": value} for name, value in sorted(env.items())],
            "resourceRequirements": [{"type": kind, "value": str(much)} for kind, much in needs.items() if much],
            "linuxParameters": {
                "devices": devices,
                "initProcessEnabled": True,  # signals reach a program that has no handler yet
                "sharedMemorySize": memory // 4,  # NCCL and data loaders; Docker's own default is 64 MiB
            },
            "ulimits": [_limit("memlock", -1), _limit("stack", 64 << 20), _limit("nofile", 1 << 20)],
            "logConfiguration": {
                "logDriver": "awslogs",
                "options": {
                    "awslogs-group": self._output("LogGroup"),
                    "awslogs-region": self._output("region"),
                    "awslogs-stream-prefix": _name(job.name),
                    "mode": "non-blocking",  # a slow CloudWatch must not hold up the training
                    "max-buffer-size": "25m",
                },
            },
        }

    def _pack(self, job: Job) -> Payload:
        check(job)
        if job.nodes > 1 and self.address.get("spot") == "true":
            raise Refused(
                f"job {job.name}: AWS Batch never runs {job.nodes} nodes on Spot; use on-demand instances, a "
                "reservation or a capacity block, or another kind of cluster"
            )
        if job.nodes > MOST_NODES or job.restarts >= MOST_ATTEMPTS:
            raise Refused(
                f"job {job.name}: AWS Batch takes {MOST_NODES} nodes and {MOST_ATTEMPTS - 1} restarts at most"
            )
        grace_s = float(self.address.get("grace_s", GRACE_S))
        return pack(job, self.store.url, self.address.get("python", "python3"), grace_s)

    def _register(self, wanted: dict[str, Any]) -> None:
        """Register the definition, unless its newest revision is the same."""
        newest = max(self._active(wanted["jobDefinitionName"]), key=lambda row: int(row["revision"]), default=None)
        if newest is None or newest.get("tags", {}).get("castra:digest") != wanted["tags"]["castra:digest"]:
            aws.client(self.site, "batch").register_job_definition(**wanted)

    def _active(self, name: str) -> list[Any]:
        """The active revisions of a job definition."""
        pages = aws.client(self.site, "batch").get_paginator("describe_job_definitions")
        return [
            row for page in pages.paginate(jobDefinitionName=name, status="ACTIVE") for row in page["jobDefinitions"]
        ]

    def _describe(self, job_ids: Any) -> list[Any]:
        ids = list(job_ids)
        with self._sentences("describe jobs"):
            batch = aws.client(self.site, "batch")
            chunks = (ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK))
            return [row for chunk in chunks for row in batch.describe_jobs(jobs=chunk)["jobs"]]

    def _unknown(self, job_id: str) -> Status:
        told = f"AWS Batch in {self.site} knows no job {job_id}: it forgets ended jobs after a week"
        return Status(State.LOST, told)

    def _output(self, key: str) -> str:
        return self.address.get(key) or f"${{{key}}}"

    def _sentences(self, doing: str) -> Any:
        return aws.sentences(self.site, doing)


def _name(name: str) -> str:
    return fitted(name, 128, r"[^A-Za-z0-9_-]")


def _rules() -> list[dict[str, str]]:
    """What is tried again: a lost host, and any exit code but those that mean the end."""
    lost = {"onStatusReason": "Host EC2*", "action": "RETRY"}
    return [lost, *({"onExitCode": str(code), "action": "EXIT"} for code in FINAL)]


def _limit(name: str, most: int) -> dict[str, Any]:
    return {"name": name, "softLimit": most, "hardLimit": most}


def _streams(row: Any) -> Iterator[str]:
    """The log streams of a node's attempts, the oldest first."""
    containers = [attempt.get("container", {}) for attempt in row.get("attempts", [])] + [row.get("container", {})]
    yield from dict.fromkeys(one["logStreamName"] for one in containers if one.get("logStreamName"))


def _exit_code(row: Any) -> int | None:
    """The exit code of the last attempt: of a multi-node job, only its attempts tell."""
    last = (row.get("attempts") or [{}])[-1]
    found = row.get("container", {}).get("exitCode", last.get("container", {}).get("exitCode"))
    return None if found is None else int(found)


def _status(row: Any, main: Any) -> Status:
    state, reason = STATES[row["status"]], row.get("statusReason", "")
    if state is State.FAILED:
        code = _exit_code(row)
        return _failure(row, reason, _exit_code(main) if code is None and main else code)
    if state is State.SUCCEEDED:
        return Status(state, "", 0)
    tried = len(row.get("attempts", []))
    told = [f"attempt {tried + 1}"] * bool(tried) + [reason] * bool(reason and state is State.QUEUED)
    return Status(state, ": ".join(told))


def _failure(row: Any, reason: str, code: int | None) -> Status:
    limit = row.get("tags", {}).get("castra:timeout_s", "?")
    if reason == CANCELLED:
        return Status(State.CANCELLED, reason, code)
    if reason.startswith("Host EC2"):
        return Status(State.LOST, reason)
    if code == TIMED_OUT or reason.startswith("Job attempt duration exceeded"):
        return Status(State.TIMED_OUT, f"stopped at its time limit of {limit} s", code)
    if "CAPACITY:INSUFFICIENT" in reason:
        return Status(State.FAILED, f"no capacity: {reason}")
    if code is not None:
        why = _container_reason(row)
        return Status(State.FAILED, f"node 0 exited with code {code}{why}", code)
    return Status(State.FAILED, f"{reason}{_container_reason(row)}")


def _container_reason(row: Any) -> str:
    """What the container runtime adds, as `OutOfMemoryError` or `CannotPullContainerError`."""
    last = (row.get("attempts") or [{}])[-1].get("container", {})
    told = row.get("container", {}).get("reason") or last.get("reason")
    return f" ({' '.join(told.split())})" if told else ""
