"""SageMaker training jobs: the platform brings code, job.json and inputs to the nodes and takes the output from them.

Every object comes as a channel (`/opt/ml/input/data/<channel>`), the output is `/opt/ml/checkpoints`, which SageMaker
keeps in step with the job's place in S3; so the program on a node needs no access to S3. There are no
hyper-parameters: anybody who may describe the job reads them.

A training job's name is its id, unique for ever, so submitting twice cannot make two. SageMaker starts a job again only
after errors of its own (`restarts` of them at most); a program that crashed is started again by who submitted it.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from clusters import aws, catalog, cloudwatch, fabric
from clusters.aws import Site
from clusters.base import Address, Job, NoCapacity, Refused, State, Status
from clusters.names import check, fitted
from clusters.payload import GRACE_S, Payload, deliver, pack
from store import Store

ROOT = "/opt/ml"
CHECKPOINTS = f"{ROOT}/checkpoints"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
TIMED_OUT = 124
"""`training.node` ends with it when the job's time is over."""
SPARE_S = 600
"""The node program keeps the time limit itself; SageMaker does so this much later, downloads and uploads included."""
WAIT_S = 12 * 3600
"""How long a job on Spot waits for instances, beside its run time."""
PENDING_S = 4 * 3600
"""How long a job waits for instances otherwise."""
LONGEST_S = 28 * 86_400
VOLUME_GIB = 200
"""Where the instance type brings no drives of its own and the address says nothing."""
MOST_CHANNELS = 20
LONGEST_VALUE = 512
"""Characters in a value of the environment at most."""
LISTED = 5
"""From so many jobs on, their states are listed instead of asked for one by one."""
STARTING = (
    *(
        "Starting",
        "Pending",
        "LaunchingMLInstances",
        "PreparingTrainingStack",
        "Downloading",
        "DownloadingTrainingImage",
    ),
    *("Interrupted", "Restarting"),
)


class SageMakerCluster:
    """Runs jobs as SageMaker training jobs.

    The address: `region`, `endpoint`, `memory`; `Role`, `PrivateSubnet` (or `Subnets`, with commas), `SecurityGroup`,
    `image`, `instance_type`; optional are `spot` (`true`), `plan` (a training plan's ARN), `warm_pool_minutes`,
    `volume_gib`, `run` (for the tags), `python` (of the image) and `grace_s`.
    """

    def __init__(self, address: Address, store: Store) -> None:
        self.address, self.store = dict(address), store
        self.site = Site.at(self.address)

    def render(self, job: Job) -> dict[str, Any]:
        """CreateTrainingJob, and what goes into the store before. Raises `Refused`."""
        payload = self._pack(job)
        return {
            "objects": payload.shown(),
            "create_training_job": self._request(job, payload),
        }

    def submit(self, job: Job) -> str:
        request = self.render(job)["create_training_job"]
        name = str(request["TrainingJobName"])
        if self.find(job.name) is not None:
            return name
        deliver(self._pack(job), self.store)
        with self._sentences(f"submit job {job.name}"):
            client = aws.client(self.site, "sagemaker")
            try:
                client.create_training_job(**request)
            except client.exceptions.ResourceInUse:  # by ourselves, before an answer was lost, or by somebody else
                if self._describe(name) is None:
                    raise
            except client.exceptions.ResourceLimitExceeded as error:
                told = str(error.response["Error"]["Message"]).rstrip(".")
                raise NoCapacity(f"submit job {job.name}: {told}; or use fewer instances") from error
        return name

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        going = dict(self._going(set(job_ids))) if len(job_ids) >= LISTED else {}
        return {job_id: going[job_id] if job_id in going else self.status(job_id) for job_id in job_ids}

    def status(self, job_id: str) -> Status:
        if (row := self._describe(job_id)) is not None:
            return _status(row)
        told = f"SageMaker in {self.site} knows no training job {job_id}: it was deleted, or never submitted there"
        return Status(State.LOST, told)

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        if (row := self._describe(job_id)) is None:
            return [], after
        several = row["ResourceConfig"]["InstanceCount"] > 1
        with self._sentences(f"logs of job {job_id}"):
            names = list(self._streams(job_id))
        streams = [cloudwatch.Stream(name, f"[node{_rank(name)}] " if several else "") for name in names]
        return cloudwatch.read(self.site, LOG_GROUP, streams, after)

    def cancel(self, job_id: str) -> None:
        """StopTrainingJob: SageMaker sends SIGTERM, and SIGKILL two minutes later."""
        if (row := self._describe(job_id)) is None or row["TrainingJobStatus"] != "InProgress":
            return
        with self._sentences(f"cancel job {job_id}"):
            client = aws.client(self.site, "sagemaker")
            try:
                client.stop_training_job(TrainingJobName=job_id)
            except client.exceptions.ClientError:
                if not self.status(job_id).state.done:  # it may have ended at this moment
                    raise

    def find(self, name: str) -> str | None:
        return None if self._describe(_name(name)) is None else _name(name)

    def quarantine(self, job_id: str, node: int, why: str) -> str:
        """End the warm pool, if there is one: every other job is given instances of its own."""
        self.forget(job_id)
        return f"the next job gets other instances than that of node {node} ({why})"

    def forget(self, job_id: str) -> None:
        """Delete the training job's record, and end the warm pool that would outlive it."""
        if (row := self._describe(job_id)) is None or not _status(row).state.done:
            return
        with self._sentences(f"forget job {job_id}"):
            client = aws.client(self.site, "sagemaker")
            if row.get("WarmPoolStatus", {}).get("Status") == "Available":
                client.update_training_job(TrainingJobName=job_id, ResourceConfig={"KeepAlivePeriodInSeconds": 0})
            client.delete_training_job(TrainingJobName=job_id)

    def _pack(self, job: Job) -> Payload:
        """The payload, whose job.json names the places on the node that SageMaker brings everything to."""
        check(job)
        if not str(job.config.get("output", "")).startswith("s3://"):
            raise Refused(f"job {job.name}: SageMaker writes to S3 only; its output must be s3://bucket/prefix")
        inputs = {name: _place(_channel(name), url) for name, url in job.config.get("inputs", {}).items()}
        here = dataclasses.replace(job, config={**job.config, "inputs": inputs, "output": CHECKPOINTS})
        return pack(here, self.store.url, grace_s=float(self.address.get("grace_s", GRACE_S)))

    def _request(self, job: Job, payload: Payload) -> dict[str, Any]:
        code, told = payload.objects
        channels = {"code": f"{self.store.url}/{code}", "job": f"{self.store.url}/{told}"}
        channels |= {_channel(name): str(url) for name, url in job.config.get("inputs", {}).items()}
        if len(channels) > MOST_CHANNELS:
            raise Refused(
                f"job {job.name}: SageMaker takes {MOST_CHANNELS - 2} inputs at most, not {len(channels) - 2}"
            )
        retries = {"RetryStrategy": {"MaximumRetryAttempts": job.restarts}} if job.restarts else {}
        return {
            "TrainingJobName": _name(job.name),
            "AlgorithmSpecification": {
                "TrainingImage": self._output("image"),
                "TrainingInputMode": "File",
                "ContainerEntrypoint": [self.address.get("python", "python3")],
                "ContainerArguments": ["-m", "training.node", _place("job", told)],
            },
            "RoleArn": self._output("Role"),
            "InputDataConfig": [_source(name, url) for name, url in channels.items()],
            "OutputDataConfig": {"S3OutputPath": f"{self.store.url}/jobs/{job.name}/sagemaker"},
            "CheckpointConfig": {"S3Uri": str(job.config["output"]), "LocalPath": CHECKPOINTS},
            "ResourceConfig": self._resources(job),
            "StoppingCondition": self._limits(job),
            "EnableManagedSpotTraining": self._spot,
            "VpcConfig": {"SecurityGroupIds": [self._output("SecurityGroup")], "Subnets": self._subnets()},
            "Environment": self._environment(job, payload, _place("code", code)),
            "Tags": self._tags(job),
            **retries,
        }

    def _resources(self, job: Job) -> dict[str, Any]:
        instance = catalog.find(self._output("instance_type"))
        drives = instance.nvme_drives * instance.nvme_gb_each * 10**9 // 2**30
        volume = int(self.address.get("volume_gib") or min(VOLUME_GIB, drives or VOLUME_GIB))
        plan, minutes = self.address.get("plan"), int(self.address.get("warm_pool_minutes") or 0)
        if self._spot and (plan or minutes):
            raise Refused(f"job {job.name}: SageMaker has neither a training plan nor a warm pool on Spot; choose one")
        return {
            "InstanceType": f"ml.{instance.name}",
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": volume,
            **({"KeepAlivePeriodInSeconds": 60 * minutes} if minutes else {}),
            **({"TrainingPlanArn": plan} if plan else {}),
        }

    def _limits(self, job: Job) -> dict[str, int]:
        """SageMaker's own time limit is for all attempts together."""
        run = job.timeout_s * (job.restarts + 1) + SPARE_S
        if run > LONGEST_S:
            raise Refused(f"job {job.name}: SageMaker runs a job for 28 days at most; ask for fewer hours or restarts")
        wait = {"MaxWaitTimeInSeconds": run + WAIT_S} if self._spot else {"MaxPendingTimeInSeconds": PENDING_S}
        return {"MaxRuntimeInSeconds": run} | wait

    def _environment(self, job: Job, payload: Payload, code: str) -> dict[str, str]:
        env = fabric.environment(catalog.find(self._output("instance_type")), job.nodes) | dict(payload.env)
        env["PYTHONPATH"] = ":".join(filter(None, [code, env.get("PYTHONPATH")]))
        for name, value in env.items():
            if len(value) > LONGEST_VALUE:
                raise Refused(
                    f"job {job.name}: SageMaker takes {LONGEST_VALUE} letters in env {name}, not {len(value)}"
                )
        return dict(sorted(env.items()))

    def _tags(self, job: Job) -> list[dict[str, str]]:
        ours = {"castra:run": self.address["run"]} if "run" in self.address else {}
        ours |= {"castra:job": job.name, "castra:timeout_s": str(job.timeout_s)}
        return [{"Key": key, "Value": value} for key, value in ours.items()]

    @property
    def _spot(self) -> bool:
        return self.address.get("spot") == "true"

    def _subnets(self) -> list[str]:
        return self.address.get("Subnets", self._output("PrivateSubnet")).split(",")

    def _describe(self, name: str) -> Any:
        """What SageMaker says about a job, None if it knows none of that name."""
        if not _valid(name):
            return None
        with self._sentences(f"describe job {name}"):
            client = aws.client(self.site, "sagemaker")
            try:
                return client.describe_training_job(TrainingJobName=name)
            except client.exceptions.ClientError as error:
                told = error.response["Error"]
                if told["Code"] in ("ResourceNotFound", "ValidationException") and "not found" in told["Message"]:
                    return None
                raise

    def _going(self, wanted: set[str]) -> Iterator[tuple[str, Status]]:
        """How those jobs stand that go on: a list tells no exit codes."""
        with self._sentences("list jobs"):
            pages = aws.client(self.site, "sagemaker").get_paginator("list_training_jobs")
            for page in pages.paginate(StatusEquals="InProgress", PaginationConfig={"PageSize": 100}):
                for row in page["TrainingJobSummaries"]:
                    if row["TrainingJobName"] in wanted:
                        yield row["TrainingJobName"], _status(row)

    def _streams(self, job_id: str) -> Iterator[str]:
        client = aws.client(self.site, "logs")
        pages = client.get_paginator("describe_log_streams")
        try:
            for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job_id}/"):
                yield from (stream["logStreamName"] for stream in page["logStreams"])
        except client.exceptions.ResourceNotFoundException:  # no training job has ever logged here
            return

    def _output(self, key: str) -> str:
        return self.address.get(key) or f"${{{key}}}"

    def _sentences(self, doing: str) -> Any:
        return aws.sentences(self.site, doing)


def _name(name: str) -> str:
    return fitted(name, 63, r"[^a-zA-Z0-9-]")


def _valid(name: str) -> bool:
    return re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) is not None


def _channel(name: str) -> str:
    """The channel of an input; those of our own are called `code` and `job`."""
    return f"input-{name}" if name in ("code", "job") else re.sub(r"[^A-Za-z0-9._-]", "-", name)[:64]


def _is_file(url: str) -> bool:
    """Whether an input is one object, as `…/tokenizer.json`; our folders have no such endings."""
    return re.search(r"\.[a-z]+$", url) is not None


def _place(channel: str, url: str) -> str:
    """Where SageMaker puts a channel: what lies under a prefix keeps its path from the last slash on."""
    folder = f"{ROOT}/input/data/{channel}"
    return f"{folder}/{url.rpartition('/')[2]}" if _is_file(str(url)) else folder


def _source(channel: str, url: str) -> dict[str, Any]:
    if not url.startswith("s3://"):
        raise Refused(f"SageMaker reads inputs from S3 only, and {channel} is {url}: use a store at s3://bucket/prefix")
    prefix = url if _is_file(url) else f"{url.rstrip('/')}/"
    place = {"S3DataType": "S3Prefix", "S3Uri": prefix, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": channel, "DataSource": {"S3DataSource": place}, "InputMode": "File"}


def _rank(stream: str) -> int:
    """The node of a log stream `job/algo-2-1700000000`."""
    found = re.search(r"/algo-(\d+)", stream)
    return int(found[1]) - 1 if found else 0


def _status(row: Any) -> Status:
    status, secondary = row["TrainingJobStatus"], row.get("SecondaryStatus", "")
    if status == "Completed":
        return Status(State.SUCCEEDED, "", 0)
    if status == "Failed":
        return _failure(row, str(row.get("FailureReason", "")))
    if status == "Stopped":
        return _stopped(row, secondary)
    state = State.QUEUED if secondary in STARTING else State.RUNNING
    told = (row.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", "")
    return Status(state, f"{secondary}: {told}".rstrip(": ") if state is State.QUEUED else "")


def _failure(row: Any, reason: str) -> Status:
    found = re.search(r"exit code: (\d+)", reason)
    code = int(found[1]) if found else None
    if code == TIMED_OUT:
        return Status(State.TIMED_OUT, _limit(row), code)
    if code is not None:
        why = reason.removeprefix("AlgorithmError:").partition(", exit code")[0].strip(" ,")
        return Status(State.FAILED, f"the program exited with code {code}{f' ({why})' if why else ''}", code)
    if reason.startswith("InternalServerError"):
        return Status(State.LOST, f"an instance was lost: {reason}")
    if reason.startswith(("CapacityError", "ResourceLimitExceeded")):
        return Status(State.FAILED, f"no capacity: {reason}")
    return Status(State.FAILED, reason or "SageMaker does not say why")


def _stopped(row: Any, secondary: str) -> Status:
    if secondary == "MaxRuntimeExceeded":
        return Status(State.TIMED_OUT, _limit(row))
    if secondary in ("MaxWaitTimeExceeded", "MaxPendingTimeExceeded"):
        return Status(State.FAILED, "no capacity: it waited as long as it may for instances")
    return Status(State.CANCELLED, "stopped as asked")


def _limit(row: Any) -> str:
    limit = row.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", 0)
    attempts = row.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0) + 1
    return f"stopped at its time limit of {(limit - SPARE_S) // attempts} s"
