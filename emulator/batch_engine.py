"""AWS Batch's scheduler, and the nodes of its jobs as real processes in guests of their own.

A queue is first in, first out, and a job that cannot be placed blocks those behind it. Of a multi-node job the main
node starts first; the other nodes follow in any order, and are told its address. The main node's end is the job's end;
the death of another node does nothing, as on AWS.
"""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from emulator import faults, gangs
from emulator.batch import Record, Region, last_part, order_of, template_of
from emulator.gangs import LOST, Container, LogStream
from emulator.hosts import HOSTS
from emulator.instances import Room, expanded, room

GRACE_S = 30.0
"""The ECS agent's default from SIGTERM to SIGKILL (ECS_CONTAINER_STOP_TIMEOUT)."""
AGAIN_S = 1.0
"""How often it is tried again to get instances."""
EXITED = "Essential container in task exited"
TIMED_OUT = "Job attempt duration exceeded timeout"
TOO_LARGE = (
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) is higher than that "
    "can be met by the CE(s) attached to the job queue."
)
TOO_MANY = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - CE(s) associated with the job queue cannot meet the CPU "
    "requirement of the job."
)
NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested for instance type [{}]"
)


def _now() -> int:
    return int(time.time() * 1000)


@dataclass(slots=True)
class Attempt:
    """One run of one node. Times are in milliseconds, 0 if not yet."""

    started: int = 0
    stopped: int = 0
    code: int | None = None
    reason: str = ""
    container_reason: str = ""
    stream: str = ""
    instance: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """A job in a queue."""

    here: Region
    id: str
    name: str
    queue: str
    plan: Record
    """Its definition, with the retries and time limit of the submission."""
    containers: list[Record]
    """What each node runs."""
    status: str = "SUBMITTED"
    reason: str = ""
    created: int = field(default_factory=_now)
    started: int = 0
    stopped: int = 0
    attempts: list[list[Attempt]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    cancelled: bool = False
    terminated: bool = False
    stopping: str | None = None
    """Why it is to stop, None if it is not."""
    over: bool = False
    """Its main node has ended by itself: nothing changes how the attempt ended."""
    stuck_since: float = 0.0
    asked_at: float = 0.0
    vcpus: int = 0
    """What it takes from its compute environment while it runs."""
    environment: str = ""
    running: list[Container | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attempts = [[] for _ in self.containers]

    @property
    def arn(self) -> str:
        """Its ARN."""
        return self.here.arn("job", self.id)

    @property
    def multinode(self) -> bool:
        """Whether it is a multi-node parallel job."""
        return bool(self.plan["type"] == "multinode")

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return len(self.containers)

    @property
    def main(self) -> int:
        """The index of its main node."""
        return int(self.plan["nodeProperties"]["mainNode"]) if self.multinode else 0

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.status in ("SUCCEEDED", "FAILED")

    def cancel(self, reason: str) -> None:
        """End it unless it has got instances."""
        if self.status in ("SUBMITTED", "PENDING", "RUNNABLE"):
            self.cancelled = True
            self.end("FAILED", reason)

    def terminate(self, reason: str) -> None:
        """End it, however far it is."""
        if self.done or self.over:
            return
        self.terminated = True
        if self.status in ("STARTING", "RUNNING"):
            self.stopping = self.stopping or reason
        else:
            self.end("FAILED", reason)

    def end(self, status: str, reason: str) -> None:
        """Say how it ended."""
        self.status, self.reason, self.stopped = status, reason, _now()


_schedulers: dict[str, threading.Event] = {}
_making = threading.Lock()


def wake(here: Region) -> None:
    """Have the scheduler of a region look for work."""
    with _making:
        if here.name not in _schedulers:
            _schedulers[here.name] = threading.Event()
            threading.Thread(target=_schedule, args=(here, _schedulers[here.name]), daemon=True).start()
    _schedulers[here.name].set()


def _schedule(here: Region, work: threading.Event) -> None:
    while True:
        work.wait()
        work.clear()
        while _step(here):
            time.sleep(gangs.POLL_S)


def _step(here: Region) -> bool:
    """Move every waiting job one step on; returns whether any is left waiting."""
    with here.lock:
        waiting = [job for job in here.jobs.values() if job.status in ("SUBMITTED", "RUNNABLE")]
        blocked: set[str] = set()
        for job in waiting:
            if job.status == "SUBMITTED":
                job.status = "RUNNABLE"
            elif job.queue not in blocked and not _place(here, job):
                blocked.add(job.queue)
        return bool(waiting)


def _place(here: Region, job: Job) -> bool:
    """Give a job its instances, if they are to be had."""
    if (queue := here.queues.get(last_part(job.queue))) is None:
        return False
    if time.monotonic() - job.asked_at < AGAIN_S:
        return False
    reasons = []
    for environment in map(here.environment, (one["computeEnvironment"] for one in order_of(queue))):
        offer = _offer(here, job, environment)
        if isinstance(offer, int):
            _start(job, environment["computeEnvironmentName"], offer)
            return True
        reasons.append(offer)
    if reasons and all(reasons):  # an empty one is a queue that is busy
        stick(job, queue, reasons[-1])
    return False


def stick(job: Job, queue: Record, reason: str) -> None:
    """Say why a job is stuck, and apply the queue's time limits."""
    now = time.monotonic()
    job.asked_at = now
    if job.reason != reason:
        job.reason, job.stuck_since = reason, now
    for action in queue.get("jobStateTimeLimitActions", []):
        if reason.startswith(action["reason"]) and now - job.stuck_since >= action["maxTimeSeconds"]:
            verb = "Canceled" if action["action"] == "CANCEL" else "Terminated"
            job.cancelled = True
            job.end("FAILED", f"{verb} by JobStateTimeLimit action due to reason: {action['reason']}")


def _offer(here: Region, job: Job, environment: Record) -> int | str:
    """The vCPUs that a job takes in a compute environment, or why it cannot run there; "" if it must only wait."""
    resources, name = environment["computeResources"], environment["computeEnvironmentName"]
    rooms = [found for container in job.containers if (found := _room(container, resources))]
    if len(rooms) < job.nodes or (job.multinode and resources["type"] != "EC2"):
        return TOO_LARGE  # as AWS: Spot takes multi-node jobs, and never runs them
    vcpus = sum(one.vcpus for one in rooms) if job.multinode else needed(job.containers[0])["VCPU"]
    if vcpus > resources["maxvCpus"]:
        return TOO_MANY
    used = sum(one.vcpus for one in here.jobs.values() if one.environment == name)
    usable = environment["state"] == "ENABLED" and environment["status"] == "VALID"
    if not usable or used + vcpus > resources["maxvCpus"]:
        return ""
    kinds = dict.fromkeys(one.type for one in rooms)
    lacking = [kind for kind in kinds if not _capacity(here, kind, resources)]
    return NO_CAPACITY.format(lacking[0]) if lacking else vcpus


def needed(container: Record) -> dict[str, int]:
    """What a container needs: VCPU, MEMORY in MiB, GPU."""
    needs = {"VCPU": container.get("vcpus", 0), "MEMORY": container.get("memory", 0), "GPU": 0}
    return needs | {one["type"]: int(float(one["value"])) for one in container.get("resourceRequirements", [])}


def _room(container: Record, resources: Record) -> Room | None:
    """The first instance type of a compute environment that can hold a container."""
    need = needed(container)
    names = [container["instanceType"]] if container.get("instanceType") else resources["instanceTypes"]
    for one in (room(name) for family in names for name in expanded(family)):
        if need["VCPU"] <= one.vcpus and need["MEMORY"] <= one.memory_mib and need["GPU"] <= one.gpus:
            return one
    return None


def _capacity(here: Region, instance_type: str, resources: Record) -> bool:
    """Whether an instance is to be had in one of the compute environment's zones."""
    from emulator.world import World

    ec2 = World.region(here.name).services.ec2
    subnets = ec2.describe_subnets(SubnetIds=resources["subnets"])["Subnets"]
    market = "spot" if resources["type"] == "SPOT" else _reservation(ec2, resources) or "on-demand"
    zones = dict.fromkeys(one["AvailabilityZone"] for one in subnets)
    return any(faults.no_capacity(instance_type, zone, market) is None for zone in zones)


def _reservation(ec2: Any, resources: Record) -> str:
    """The capacity reservation that the compute environment's launch template aims at, "" if none."""
    if "launchTemplate" not in resources:
        return ""
    found = ec2.describe_launch_template_versions(**template_of(resources))["LaunchTemplateVersions"]
    told = found[0]["LaunchTemplateData"].get("CapacityReservationSpecification", {})
    return str(told.get("CapacityReservationTarget", {}).get("CapacityReservationId", ""))


def _start(job: Job, environment: str, vcpus: int) -> None:
    job.status, job.reason, job.stopping, job.over = "STARTING", "", None, False
    job.environment, job.vcpus = environment, vcpus
    job.running = [None] * job.nodes
    threading.Thread(target=run, args=(job,), daemon=True).start()


def run(job: Job) -> None:
    """Run one attempt of a job to its end, then end the job or send it round again."""
    attempts = [Attempt() for _ in job.containers]
    for node, attempt in enumerate(attempts):
        job.attempts[node].append(attempt)
    try:
        _attempt(job, attempts)
    except (OSError, LookupError, RuntimeError) as error:
        attempts[job.main].container_reason = f"CannotStartContainerError: {error}"
        attempts[job.main].reason = "Task failed to start"
    finally:
        for container in filter(None, job.running):
            container.close()
    _conclude(job, attempts)
    wake(job.here)


def _conclude(job: Job, attempts: list[Attempt]) -> None:
    with job.here.lock:
        job.environment, job.vcpus, job.running = "", 0, [None] * job.nodes
        for one in attempts:
            one.stopped = one.stopped or _now()
        main = attempts[job.main]
        if main.code == 0 and job.stopping is None:
            job.end("SUCCEEDED", main.reason)
        elif job.stopping is None and _again(job, main):
            job.status, job.asked_at, job.over = "RUNNABLE", 0.0, False
        else:
            job.end("FAILED", job.stopping or main.reason)


def _attempt(job: Job, attempts: list[Attempt]) -> None:
    """Start the main node, then the others; wait for the main node's end; stop the others."""
    main, others = job.main, [node for node in range(job.nodes) if node != job.main]
    random.shuffle(others)
    leader = _launch(job, main, attempts[main], "")
    with job.here.lock:
        job.status = "RUNNING"
        job.started = attempts[main].started
    for node in others:
        if leader.code is None and job.stopping is None:
            _launch(job, node, attempts[node], leader.guest.address)
    seconds = job.plan.get("timeout", {}).get("attemptDurationSeconds", 0)
    until = time.monotonic() + seconds if seconds else float("inf")
    while leader.code is None and job.stopping is None and time.monotonic() < until:
        _note_ends(job, attempts)
        time.sleep(gangs.POLL_S)
    with job.here.lock:
        job.over = leader.code is not None and job.stopping is None
    if leader.code is None and job.stopping is None:
        job.stopping = TIMED_OUT
    _note_ends(job, attempts)
    gangs.stop([one for one in job.running if one], GRACE_S)
    _note_ends(job, attempts)


def _note_ends(job: Job, attempts: list[Attempt]) -> None:
    """Write down which nodes have ended, and how."""
    for container, attempt in zip(job.running, attempts, strict=True):
        if container is None or attempt.stopped or (code := container.code) is None:
            continue
        attempt.reason = EXITED
        if code is LOST:
            attempt.reason = f"Host EC2 (instance {container.instance}) terminated."
        else:
            attempt.code = code
        attempt.stopped = _now()


def _launch(job: Job, node: int, attempt: Attempt, leader: str) -> Container:
    """Boot an instance and start a node's container on it."""
    told = job.containers[node]
    options = told.get("logConfiguration", {}).get("options", {})
    prefix = options.get("awslogs-stream-prefix", job.plan["jobDefinitionName"])
    stream = f"{prefix}/default/{uuid4().hex}"
    group = options.get("awslogs-group", "/aws/batch/job")
    make = "awslogs-group" not in options or options.get("awslogs-create-group") == "true"
    log = LogStream(options.get("awslogs-region", job.here.name), group, stream, make)
    host = f"ip-{job.id[:8]}-{len(job.attempts[node])}-{node}"
    container = Container(job.id, node, host, log)
    job.running[node], attempt.stream, attempt.instance = container, stream, container.instance
    HOSTS[container.instance] = container.guest.power_off
    container.start(told["command"], dict(_environment(job, node, leader, host)))
    attempt.started = _now()
    return container


def _environment(job: Job, node: int, leader: str, host: str) -> Iterator[tuple[str, str]]:
    """What a node's container finds in its environment."""
    from emulator.world import World

    yield from gangs.container_environment(World.endpoint, host).items()
    yield from ((one["name"], one.get("value", "")) for one in job.containers[node].get("environment", []))
    yield "AWS_BATCH_JOB_ID", f"{job.id}#{node}" if job.multinode else job.id
    yield "AWS_BATCH_JOB_ATTEMPT", str(len(job.attempts[node]))
    yield "AWS_BATCH_JQ_NAME", last_part(job.queue)
    yield "AWS_BATCH_CE_NAME", job.environment
    if job.multinode:
        yield "AWS_BATCH_JOB_NUM_NODES", str(job.nodes)
        yield "AWS_BATCH_JOB_NODE_INDEX", str(node)
        yield "AWS_BATCH_JOB_MAIN_NODE_INDEX", str(job.main)
    if leader:
        yield "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", leader


def _again(job: Job, main: Attempt) -> bool:
    """Whether the retry strategy gives the job another attempt."""
    strategy = job.plan.get("retryStrategy", {})
    if len(job.attempts[job.main]) >= strategy.get("attempts", 1):
        return False
    seen = {
        "onExitCode": "" if main.code is None else str(main.code),
        "onReason": main.container_reason,
        "onStatusReason": main.reason,
    }
    for rule in strategy.get("evaluateOnExit", []):
        if all(_matches(rule[key], value) for key, value in seen.items() if key in rule):
            return bool(rule["action"].upper() == "RETRY")
    return True


def _matches(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
