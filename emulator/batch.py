"""AWS Batch's compute environments and job queues, as strict as the service; `emulator.batch_jobs` has the rest."""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from emulator.extension import Call, Fault, answers
from emulator.memory import ACCOUNT
from emulator.shapes import checked

if TYPE_CHECKING:
    from emulator.batch_engine import Job

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
EC2_TYPES = ("EC2", "SPOT")
UPDATABLE = ("BEST_FIT_PROGRESSIVE", "SPOT_CAPACITY_OPTIMIZED", "SPOT_PRICE_CAPACITY_OPTIMIZED")
"""Strategies under which a compute environment's instances can be changed in place."""
ALWAYS_UPDATABLE = {"minvCpus", "maxvCpus", "desiredvCpus"}
STUCK = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
"""Why a job may be stuck in RUNNABLE: https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html"""
Record = dict[str, Any]


@dataclass(slots=True)
class Region:
    """What AWS Batch knows in one region; every change happens under the lock."""

    name: str
    environments: dict[str, Record] = field(default_factory=dict)
    queues: dict[str, Record] = field(default_factory=dict)
    definitions: dict[str, list[Record]] = field(default_factory=dict)
    jobs: "dict[str, Job]" = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def arn(self, kind: str, name: str) -> str:
        """The ARN of a resource of that kind."""
        return f"arn:aws:batch:{self.name}:{ACCOUNT}:{kind}/{name}"

    def queue(self, name: str) -> Record:
        """The job queue of that name or ARN."""
        if (found := self.queues.get(last_part(name))) is None:
            raise refusal(f"JobQueue {name} not found")
        return found

    def environment(self, name: str) -> Record:
        """The compute environment of that name or ARN."""
        if (found := self.environments.get(last_part(name))) is None:
            raise refusal(f"{name} does not exist")
        return found


REGIONS: dict[str, Region] = {}
_making = threading.Lock()


def region(name: str) -> Region:
    """What is known in the region of that name."""
    with _making:
        return REGIONS.setdefault(name, Region(name))


def refusal(message: str) -> Fault:
    """What AWS Batch answers to a request that cannot be carried out."""
    return Fault("ClientException", message)


def last_part(name: str) -> str:
    """The name at the end of an ARN, or the name itself."""
    return name.rpartition("/")[2]


def told(call: Call, operation: str) -> Record:
    """The call's parameters, valid by the service's model."""
    return checked(call, operation, "ClientException")


def paged(rows: list[Any], asked: Mapping[str, Any], most: int = 100) -> tuple[list[Any], Record]:
    """One page of rows, and `nextToken` if there is another."""
    begin = int(asked.get("nextToken") or 0)
    end = begin + min(asked.get("maxResults") or most, most)
    return rows[begin:end], {"nextToken": str(end)} if end < len(rows) else {}


def named(told: Record, member: str) -> str:
    """A new resource's name, of the letters that AWS Batch allows."""
    name = str(told[member])
    if not re.fullmatch(NAME, name):
        raise refusal(f"{member} {name} should match valid pattern: ^{NAME}$")
    return name


@answers("batch", "POST /v1/createcomputeenvironment")
def create_compute_environment(call: Call) -> Record:
    """Make a compute environment; what it refers to and does not exist makes it INVALID, as AWS finds out later."""
    asked, here = told(call, "CreateComputeEnvironment"), region(call.region)
    name = named(asked, "computeEnvironmentName")
    with here.lock:
        if name in here.environments:
            raise refusal("Object already exists")
        if asked["type"] != "MANAGED":
            raise Fault("ClientException", "only MANAGED compute environments are emulated here", 501)
        if "computeResources" not in asked:
            raise refusal("computeResources must be provided for a MANAGED compute environment")
        _check_resources(asked["computeResources"])
        record: Record = {
            **asked,
            "computeEnvironmentArn": here.arn("compute-environment", name),
            "ecsClusterArn": f"arn:aws:ecs:{here.name}:{ACCOUNT}:cluster/{name}_Batch_{uuid4()}",
            "state": asked.get("state", "ENABLED"),
            "containerOrchestrationType": "ECS",
            "uuid": str(uuid4()),
        }
        _settle(here, record)
        here.environments[name] = record
        here.tags[record["computeEnvironmentArn"]] = dict(asked.get("tags", {}))
    return {key: record[key] for key in ("computeEnvironmentName", "computeEnvironmentArn")}


@answers("batch", "POST /v1/updatecomputeenvironment")
def update_compute_environment(call: Call) -> Record:
    """Change a compute environment; its instances only where AWS can replace them in place."""
    asked, here = told(call, "UpdateComputeEnvironment"), region(call.region)
    with here.lock:
        record = here.environment(asked.pop("computeEnvironment"))
        change = asked.pop("computeResources", {})
        strategy = record["computeResources"].get("allocationStrategy", "BEST_FIT")
        if set(change) - ALWAYS_UPDATABLE and (strategy not in UPDATABLE or record.get("serviceRole")):
            raise refusal(
                "Infrastructure updates need a service-linked role and an allocation strategy of "
                f"{', '.join(UPDATABLE)}; this compute environment has {strategy}"
            )
        change.pop("updateToLatestImageVersion", None)
        resources = record["computeResources"] | change
        _check_resources(resources)
        record.update(asked | {"computeResources": resources})
        _settle(here, record)
    return {key: record[key] for key in ("computeEnvironmentName", "computeEnvironmentArn")}


@answers("batch", "POST /v1/describecomputeenvironments")
def describe_compute_environments(call: Call) -> Record:
    """All compute environments, or those asked for; unknown ones are left out."""
    asked, here = told(call, "DescribeComputeEnvironments"), region(call.region)
    with here.lock:
        wanted = [last_part(name) for name in asked.get("computeEnvironments", here.environments)]
        rows = [
            _with_tags(here, here.environments[name], "computeEnvironmentArn")
            for name in wanted
            if name in here.environments
        ]
        page, more = paged(rows, asked)
    return {"computeEnvironments": page} | more


@answers("batch", "POST /v1/deletecomputeenvironment")
def delete_compute_environment(call: Call) -> Record:
    """Delete a compute environment that is disabled and that no queue uses."""
    asked, here = told(call, "DeleteComputeEnvironment"), region(call.region)
    with here.lock:
        name = last_part(asked["computeEnvironment"])
        if (record := here.environments.get(name)) is None:
            return {}
        if record["state"] != "DISABLED":
            raise refusal("Cannot delete, state must be DISABLED")
        arn = record["computeEnvironmentArn"]
        if any(arn == one["computeEnvironment"] for queue in here.queues.values() for one in order_of(queue)):
            raise refusal("Cannot delete, found existing JobQueue relationship")
        del here.environments[name]
        here.tags.pop(arn, None)
    return {}


@answers("batch", "POST /v1/createjobqueue")
def create_job_queue(call: Call) -> Record:
    """Make a queue in front of one to three VALID compute environments of one kind."""
    asked, here = told(call, "CreateJobQueue"), region(call.region)
    name = named(asked, "jobQueueName")
    with here.lock:
        if name in here.queues:
            raise refusal("Object already exists")
        record: Record = {
            **asked,
            "jobQueueArn": here.arn("job-queue", name),
            "state": asked.get("state", "ENABLED"),
            "status": "VALID",
            "statusReason": "JobQueue Healthy",
            "computeEnvironmentOrder": _order(here, asked.get("computeEnvironmentOrder", [])),
            "jobQueueType": "ECS",
        }
        _check_queue(record)
        here.queues[name] = record
        here.tags[record["jobQueueArn"]] = dict(asked.get("tags", {}))
    return {key: record[key] for key in ("jobQueueName", "jobQueueArn")}


@answers("batch", "POST /v1/updatejobqueue")
def update_job_queue(call: Call) -> Record:
    """Change a queue."""
    asked, here = told(call, "UpdateJobQueue"), region(call.region)
    with here.lock:
        record = here.queue(asked.pop("jobQueue"))
        if "computeEnvironmentOrder" in asked:
            asked["computeEnvironmentOrder"] = _order(here, asked["computeEnvironmentOrder"])
        _check_queue(record | asked)
        record.update(asked)
    return {key: record[key] for key in ("jobQueueName", "jobQueueArn")}


@answers("batch", "POST /v1/describejobqueues")
def describe_job_queues(call: Call) -> Record:
    """All queues, or those asked for; unknown ones are left out."""
    asked, here = told(call, "DescribeJobQueues"), region(call.region)
    with here.lock:
        wanted = [last_part(name) for name in asked.get("jobQueues", here.queues)]
        rows = [_with_tags(here, here.queues[name], "jobQueueArn") for name in wanted if name in here.queues]
        page, more = paged(rows, asked)
    return {"jobQueues": page} | more


@answers("batch", "POST /v1/deletejobqueue")
def delete_job_queue(call: Call) -> Record:
    """Delete a disabled queue; the jobs in it are terminated."""
    asked, here = told(call, "DeleteJobQueue"), region(call.region)
    with here.lock:
        name = last_part(asked["jobQueue"])
        if (record := here.queues.get(name)) is None:
            return {}
        if record["state"] != "DISABLED":
            raise refusal("Cannot delete, state must be DISABLED")
        for job in here.jobs.values():
            if job.queue == record["jobQueueArn"]:
                job.terminate("Job queue deleted")
        del here.queues[name]
        here.tags.pop(record["jobQueueArn"], None)
    return {}


@answers("batch", "POST /v1/tags/{arn}")
def tag_resource(call: Call) -> Record:
    """Add tags to a resource."""
    _tags_of(call).update(call.told["tags"])
    return {}


@answers("batch", "GET /v1/tags/{arn}")
def list_tags_for_resource(call: Call) -> Record:
    """The tags of a resource."""
    return {"tags": dict(_tags_of(call))}


@answers("batch", "DELETE /v1/tags/{arn}")
def untag_resource(call: Call) -> Record:
    """Remove tags from a resource."""
    asked = call.told.get("tagKeys", [])
    for key in [asked] if isinstance(asked, str) else asked:
        _tags_of(call).pop(key, None)
    return {}


def order_of(queue: Record) -> list[Record]:
    """A queue's compute environments, the one to try first first."""
    return sorted(queue["computeEnvironmentOrder"], key=lambda one: int(one["order"]))


def _tags_of(call: Call) -> dict[str, str]:
    known = region(call.region).tags
    if (arn := call.path["arn"]) not in known:
        raise Fault("ClientException", f"{arn} not found", 404)
    return known[arn]


def _with_tags(here: Region, record: Record, arn: str) -> Record:
    return record | {"tags": here.tags.get(record[arn], {})}


def _check_resources(resources: Record) -> None:
    kind = resources["type"]
    if kind not in EC2_TYPES:
        raise Fault("ClientException", f"compute resources of type {kind} are not emulated here", 501)
    missing = [name for name in ("subnets", "instanceTypes", "instanceRole") if not resources.get(name)]
    if missing or "minvCpus" not in resources:
        raise refusal(f"computeResources.{(missing or ['minvCpus'])[0]} must be provided")
    if not 0 <= resources["minvCpus"] <= resources["maxvCpus"]:
        raise refusal("minvCpus must be between 0 and maxvCpus")
    strategy = resources.get("allocationStrategy", "BEST_FIT")
    if strategy.startswith("SPOT_") and kind != "SPOT":
        raise refusal(f"Allocation strategy {strategy} needs compute resources of type SPOT")
    if kind == "SPOT" and strategy == "BEST_FIT" and not resources.get("spotIamFleetRole"):
        raise refusal("spotIamFleetRole must be provided for SPOT compute resources with BEST_FIT")
    if len(resources.get("securityGroupIds", [])) > 5:
        raise refusal("a compute environment can have at most 5 security groups")
    from emulator.instances import expanded

    for name in resources["instanceTypes"]:
        if not expanded(name):
            raise refusal(f"Specified InstanceType {name} is not supported")


def _settle(here: Region, record: Record) -> None:
    """Find out whether what a compute environment refers to exists."""
    resources, wrong = record["computeResources"], ""
    for look in (_subnets, _groups, _template, _profile):
        wrong = wrong or look(here, resources)
    record["status"] = "INVALID" if wrong else "VALID"
    record["statusReason"] = f"CLIENT_ERROR - {wrong}" if wrong else "ComputeEnvironment Healthy"


def _subnets(here: Region, resources: Record) -> str:
    return _asks(lambda ec2: ec2.describe_subnets(SubnetIds=resources["subnets"]), here)


def _groups(here: Region, resources: Record) -> str:
    groups = resources.get("securityGroupIds")
    if groups:
        return _asks(lambda ec2: ec2.describe_security_groups(GroupIds=groups), here)
    return "" if "launchTemplate" in resources else "securityGroupIds must be given, here or in the launch template"


def _template(here: Region, resources: Record) -> str:
    if "launchTemplate" not in resources:
        return ""
    return _asks(lambda ec2: ec2.describe_launch_template_versions(**template_of(resources)), here)


def _profile(here: Region, resources: Record) -> str:
    from emulator.world import World

    name = last_part(resources["instanceRole"])
    try:
        World.region(here.name).services.iam.get_instance_profile(InstanceProfileName=name)
    except World.region(here.name).services.iam.exceptions.NoSuchEntityException:
        return f"Invalid IAM Instance Profile name {name}"
    return ""


def template_of(resources: Record) -> Record:
    """How to ask EC2 for the launch template that a compute environment names."""
    template = resources["launchTemplate"]
    key = "launchTemplateId" if "launchTemplateId" in template else "launchTemplateName"
    version = template.get("version") or "$Default"
    return {f"L{key[1:]}": template[key], "Versions": [version]}


def _asks(ask: Callable[[Any], Any], here: Region) -> str:
    from botocore.exceptions import ClientError

    from emulator.world import World

    try:
        ask(World.region(here.name).services.ec2)
    except ClientError as error:
        return str(error.response["Error"]["Message"])
    return ""


def _order(here: Region, order: Iterable[Record]) -> list[Record]:
    return [one | {"computeEnvironment": _usable(here, one["computeEnvironment"])} for one in order]


def _usable(here: Region, name: str) -> str:
    record = here.environment(name)
    if record["status"] != "VALID" or record["state"] != "ENABLED":
        raise refusal(f"{name} is not VALID and ENABLED: {record['statusReason']}")
    return str(record["computeEnvironmentArn"])


def _check_queue(record: Record) -> None:
    if not 1 <= len(record["computeEnvironmentOrder"]) <= 3:
        raise refusal("a job queue needs between 1 and 3 compute environments")
    if not 0 <= record["priority"] <= 1000:
        raise refusal("priority must be between 0 and 1000")
    for action in record.get("jobStateTimeLimitActions", []):
        if action["reason"] not in STUCK:
            raise refusal(f"jobStateTimeLimitActions reason must be one of {', '.join(STUCK)}")
        if not 600 <= action["maxTimeSeconds"] <= 86_400:
            raise refusal("jobStateTimeLimitActions maxTimeSeconds must be between 600 and 86400")
