"""SageMaker's API of training jobs, as strict as the service; everything else of SageMaker is moto's."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from emulator import journal, quotas, sagemaker_engine
from emulator.extension import Call, Fault, answers
from emulator.memory import ACCOUNT
from emulator.sagemaker_engine import Record, TrainingJob
from emulator.shapes import checked

JOBS: dict[tuple[str, str], TrainingJob] = {}
TAGS: dict[str, dict[str, str]] = {}
KIND = ":training-job/"
_lock = threading.RLock()
DAYS = 86_400
UNTOLD = ("Tags",)
"""Members of a request that DescribeTrainingJob does not repeat."""
POOL_ALIKE = ("RoleArn", "VpcConfig", "EnableInterContainerTrafficEncryption", "EnableNetworkIsolation")
"""What must be the same for a job to run on the warm instances of another."""


def refusal(message: str) -> Fault:
    """What SageMaker answers to a request that cannot be carried out."""
    return Fault("ValidationException", message)


@answers("sagemaker", "CreateTrainingJob")
def create_training_job(call: Call) -> Record:
    """Take a job and begin to run it."""
    asked = checked(call, "CreateTrainingJob", "ValidationException")
    _check(asked)
    _check_place(call.region, asked)
    name = asked["TrainingJobName"]
    arn = f"arn:aws:sagemaker:{call.region}:{ACCOUNT}{KIND}{name.lower()}"
    with _lock:
        if (call.region, name) in JOBS:
            told = (
                "Training job names must be unique within an AWS account and region, and a training job with this name"
            )
            raise Fault("ResourceInUse", f"{told} already exists ({arn})")
        _check_quota(call.region, asked)
        job = TrainingJob(call.region, arn, asked)
        job.keep_alive_s = asked["ResourceConfig"].get("KeepAlivePeriodInSeconds", 0)
        if job.keep_alive_s and (pool := _warm_pool(job)):
            pool.reused_by = name
        JOBS[call.region, name] = job
        TAGS[arn] = {tag["Key"]: tag["Value"] for tag in asked.get("Tags", [])}
    journal.taken("sagemaker", name)
    sagemaker_engine.start(job)
    return {"TrainingJobArn": arn}


@answers("sagemaker", "DescribeTrainingJob")
def describe_training_job(call: Call) -> Record:
    """All about one job."""
    job = _job(call, "DescribeTrainingJob")
    row = {key: value for key, value in job.told.items() if key not in UNTOLD} | _summary(job)
    row |= {
        "ModelArtifacts": {"S3ModelArtifacts": job.artifacts},
        "SecondaryStatus": job.secondary,
        "SecondaryStatusTransitions": job.transitions,
        "ProfilingStatus": "Disabled",
    }
    if job.reason:
        row["FailureReason"] = job.reason[:1024]
    if job.started:
        seconds = max(1, int((job.ended or time.time()) - job.started))
        row |= {"TrainingStartTime": job.started, "TrainingTimeInSeconds": seconds}
        row |= {"BillableTimeInSeconds": seconds} if job.ended else {}
    return row


@answers("sagemaker", "StopTrainingJob")
def stop_training_job(call: Call) -> Record:
    """Ask a job to end: SIGTERM, and two minutes later SIGKILL."""
    job = _job(call, "StopTrainingJob")
    if job.done:
        raise refusal(f"The request was rejected because the training job is in status {job.status}.")
    job.stopping = True
    if job.status == "InProgress":
        job.status = "Stopping"
    return {}


@answers("sagemaker", "DeleteTrainingJob")
def delete_training_job(call: Call) -> Record:
    """Forget a job that has ended and keeps no warm instances."""
    job = _job(call, "DeleteTrainingJob")
    if not job.done or _pool_status(job) == "Available":
        raise Fault("ResourceInUse", f"Training job {job.name} is in status {job.status} or keeps a warm pool.")
    with _lock:
        del JOBS[call.region, job.name]
        TAGS.pop(job.arn, None)
    return {}


@answers("sagemaker", "UpdateTrainingJob")
def update_training_job(call: Call) -> Record:
    """Change how long the instances are kept warm."""
    job = _job(call, "UpdateTrainingJob")
    if "ResourceConfig" in call.told:
        if not job.keep_alive_s or _pool_status(job) in ("Terminated", "Reused"):
            raise refusal("The training job has no warm pool to be updated.")
        job.keep_alive_s = call.told["ResourceConfig"]["KeepAlivePeriodInSeconds"]
    return {"TrainingJobArn": job.arn}


@answers("sagemaker", "ListTrainingJobs")
def list_training_jobs(call: Call) -> Record:
    """Jobs by name, status and time, ten a page if not said otherwise."""
    asked = checked(call, "ListTrainingJobs", "ValidationException")
    with _lock:
        jobs = [job for (region, _), job in JOBS.items() if region == call.region and _fits(job, asked)]
    keys = {"Name": lambda job: job.name, "Status": lambda job: job.status}
    jobs.sort(key=keys.get(asked.get("SortBy", ""), lambda job: job.created))
    if asked.get("SortOrder", "Descending") == "Descending":
        jobs.reverse()
    begin = int(asked.get("NextToken") or 0)
    end = begin + asked.get("MaxResults", 10)
    more = {"NextToken": str(end)} if end < len(jobs) else {}
    return {
        "TrainingJobSummaries": [_summary(job) | {"SecondaryStatus": job.secondary} for job in jobs[begin:end]]
    } | more


@answers("sagemaker", "AddTags")
def add_tags(call: Call) -> Record:
    """Add tags to a training job; moto has the other resources."""
    asked = checked(call, "AddTags", "ValidationException")
    if (known := TAGS.get(asked["ResourceArn"])) is None:
        return {"Tags": _moto(call).add_tags(asked["ResourceArn"], asked["Tags"])}
    known.update({tag["Key"]: tag["Value"] for tag in asked["Tags"]})
    return {"Tags": _tag_list(known)}


@answers("sagemaker", "ListTags")
def list_tags(call: Call) -> Record:
    """The tags of a training job; moto has the other resources."""
    asked = checked(call, "ListTags", "ValidationException")
    if (known := TAGS.get(asked["ResourceArn"])) is None:
        tags, _ = _moto(call).list_tags(arn=asked["ResourceArn"])
        return {"Tags": tags}
    return {"Tags": _tag_list(known)}


@answers("sagemaker", "DeleteTags")
def delete_tags(call: Call) -> Record:
    """Remove tags from a training job; moto has the other resources."""
    asked = checked(call, "DeleteTags", "ValidationException")
    if (known := TAGS.get(asked["ResourceArn"])) is None:
        _moto(call).delete_tags(asked["ResourceArn"], asked["TagKeys"])
        return {}
    for key in asked["TagKeys"]:
        known.pop(key, None)
    return {}


def _job(call: Call, operation: str) -> TrainingJob:
    asked = checked(call, operation, "ValidationException")
    if (job := JOBS.get((call.region, asked["TrainingJobName"]))) is None:
        raise refusal("Requested resource not found.")
    return job


def _moto(call: Call) -> Any:
    from moto.backends import get_backend

    return get_backend("sagemaker")[ACCOUNT][call.region]


def _tag_list(tags: Mapping[str, str]) -> list[Record]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _summary(job: TrainingJob) -> Record:
    row: Record = {
        "TrainingJobName": job.name,
        "TrainingJobArn": job.arn,
        "CreationTime": job.created,
        "LastModifiedTime": job.changed,
        "TrainingJobStatus": job.status,
    }
    row |= {"TrainingEndTime": job.ended} if job.ended else {}
    if status := _pool_status(job):
        kept = min(time.time() - job.ended, job.keep_alive_s) if job.ended else 0
        row["WarmPoolStatus"] = {"Status": status, "ResourceRetainedBillableTimeInSeconds": int(kept)}
        row["WarmPoolStatus"] |= {"ReusedByJob": job.reused_by} if job.reused_by else {}
    return row


def _pool_status(job: TrainingJob) -> str:
    """What has become of a job's warm instances; "" where none are kept."""
    if not job.told["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
        return ""
    if job.reused_by:
        return "Reused"
    if not job.ended:
        return "InUse"
    return "Available" if time.time() < job.ended + job.keep_alive_s else "Terminated"


def _warm_pool(wanted: TrainingJob) -> TrainingJob | None:
    """The job whose warm instances a new one can have."""
    size = ("InstanceType", "InstanceCount", "VolumeSizeInGB")
    for job in JOBS.values():
        alike = all(job.told.get(key) == wanted.told.get(key) for key in POOL_ALIKE)
        same = all(job.told["ResourceConfig"].get(key) == wanted.told["ResourceConfig"].get(key) for key in size)
        if job.region == wanted.region and alike and same and _pool_status(job) == "Available":
            return job
    return None


def _fits(job: TrainingJob, asked: Record) -> bool:
    status, pool = asked.get("StatusEquals"), asked.get("WarmPoolStatusEquals")
    return (
        asked.get("NameContains", "").lower() in job.name.lower()
        and status in (None, job.status)
        and pool in (None, _pool_status(job))
        and float(asked.get("CreationTimeAfter", 0)) <= job.created <= float(asked.get("CreationTimeBefore", 1e12))
    )


def _check(asked: Record) -> None:
    """The rules that the model does not know."""
    resources, limits = asked.get("ResourceConfig", {}), asked.get("StoppingCondition", {})
    if "InstanceType" not in resources or "TrainingImage" not in asked.get("AlgorithmSpecification", {}):
        raise Fault("ValidationException", "instance groups, algorithms and serverless jobs are not emulated here", 501)
    if resources.get("InstanceCount", 0) < 1 or resources.get("VolumeSizeInGB", 1) < 1:
        raise refusal("ResourceConfig: InstanceCount and VolumeSizeInGB must be at least 1")
    channels = [one["ChannelName"] for one in asked.get("InputDataConfig", [])]
    if len(set(channels)) < len(channels):
        raise refusal(f"Channel names must be unique: {', '.join(channels)}")
    if any("S3DataSource" not in one["DataSource"] for one in asked.get("InputDataConfig", [])):
        raise Fault("ValidationException", "input from file systems is not emulated here", 501)
    runtime, wait = limits.get("MaxRuntimeInSeconds", DAYS), limits.get("MaxWaitTimeInSeconds")
    if runtime > 28 * DAYS:
        raise refusal("MaxRuntimeInSeconds must be at most 28 days")
    if asked.get("EnableManagedSpotTraining"):
        if wait is None or wait < runtime:
            raise refusal(
                "MaxWaitTimeInSeconds must be given for managed spot training, and not below MaxRuntimeInSeconds"
            )
        if resources.get("KeepAlivePeriodInSeconds") or resources.get("TrainingPlanArn"):
            raise refusal("KeepAlivePeriodInSeconds and TrainingPlanArn are not supported with managed spot training")
    elif wait is not None:
        raise refusal("MaxWaitTimeInSeconds requires EnableManagedSpotTraining")


def _check_quota(region: str, asked: Record) -> None:
    """Whether the account may have so many instances at a time."""
    kind, wanted = (asked["ResourceConfig"][key] for key in ("InstanceType", "InstanceCount"))
    name = f"{kind} for {'spot ' if asked.get('EnableManagedSpotTraining') else ''}training job usage"
    going = [job for (where, _), job in JOBS.items() if where == region and not job.done]
    told = [one for job in going if (one := job.told["ResourceConfig"])["InstanceType"] == kind]
    used, most = sum(one["InstanceCount"] for one in told), quotas.value(name)
    if used + wanted > most:
        raise Fault(
            "ResourceLimitExceeded",
            f"The account-level service limit '{name}' is {most:g} Instances, with current utilization of {used} "
            f"Instances and a request delta of {wanted} Instances. Please use AWS Service Quotas to request an "
            "increase for this quota.",
        )


def _check_place(region: str, asked: Record) -> None:
    """Whether the role and the network exist."""
    from botocore.exceptions import ClientError

    from emulator.world import World

    services = World.region(region).services
    try:
        services.iam.get_role(RoleName=asked["RoleArn"].rpartition("/")[2])
    except ClientError:
        raise refusal(f"Could not assume role {asked['RoleArn']}. Please ensure that the role exists") from None
    if network := asked.get("VpcConfig"):
        try:
            services.ec2.describe_subnets(SubnetIds=network["Subnets"])
            services.ec2.describe_security_groups(GroupIds=network["SecurityGroupIds"])
        except ClientError as error:
            raise refusal(f"VpcConfig: {error.response['Error']['Message']}") from None
