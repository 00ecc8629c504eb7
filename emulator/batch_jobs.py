"""AWS Batch's job definitions and jobs: what may be registered and submitted, and how it is told."""

import json
import re
from collections.abc import Iterator
from uuid import uuid4

from emulator import batch_engine, journal
from emulator.batch import Record, Region, last_part, named, paged, refusal, region, told
from emulator.batch_engine import Attempt, Job, needed
from emulator.extension import Call, Fault, answers
from emulator.hosts import container_instance

LARGEST_OVERRIDE = 8192
LARGEST_DEFINITION = 24 << 10
"""Bytes, as the next but for SubmitJob (AWS Batch user guide, "AWS Batch service quotas")."""
LARGEST_JOB = 30 << 10
NOT_EMULATED = ("arrayProperties", "dependsOn", "shareIdentifier", "ecsPropertiesOverride", "eksPropertiesOverride")
ACTIVE, INACTIVE = "ACTIVE", "INACTIVE"


@answers("batch", "POST /v1/registerjobdefinition")
def register_job_definition(call: Call) -> Record:
    """Add a revision of a job definition."""
    asked, here = told(call, "RegisterJobDefinition"), region(call.region)
    name = named(asked, "jobDefinitionName")
    _check_definition(asked)
    with here.lock:
        revisions = here.definitions.setdefault(name, [])
        revision = len(revisions) + 1
        arn = here.arn("job-definition", f"{name}:{revision}")
        revisions.append(asked | {"jobDefinitionArn": arn, "revision": revision, "status": ACTIVE})
        here.tags[arn] = dict(asked.get("tags", {}))
    return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}


@answers("batch", "POST /v1/deregisterjobdefinition")
def deregister_job_definition(call: Call) -> Record:
    """Make a revision INACTIVE: no more jobs are submitted with it."""
    asked, here = told(call, "DeregisterJobDefinition"), region(call.region)
    with here.lock:
        name, _, revision = last_part(asked["jobDefinition"]).partition(":")
        if not revision:
            raise refusal("jobDefinition must be name:revision or an ARN")
        for one in here.definitions.get(name, []):
            if one["revision"] == int(revision):
                one["status"] = INACTIVE
    return {}


@answers("batch", "POST /v1/describejobdefinitions")
def describe_job_definitions(call: Call) -> Record:
    """The definitions of a name, of ARNs, of a status, or all; the newest first."""
    asked, here = told(call, "DescribeJobDefinitions"), region(call.region)
    with here.lock:
        rows = [one for name in sorted(here.definitions) for one in reversed(here.definitions[name])]
        if wanted := asked.get("jobDefinitions"):
            keys = {last_part(one) for one in wanted}
            rows = [one for one in rows if _key(one) in keys or one["jobDefinitionName"] in keys]
        if name := asked.get("jobDefinitionName"):
            rows = [one for one in rows if one["jobDefinitionName"] == name]
        if status := asked.get("status"):
            rows = [one for one in rows if one["status"] == status]
        page, more = paged([one | {"tags": here.tags[one["jobDefinitionArn"]]} for one in rows], asked)
    return {"jobDefinitions": page} | more


@answers("batch", "POST /v1/submitjob")
def submit_job(call: Call) -> Record:
    """Put a job into a queue."""
    asked, here = told(call, "SubmitJob"), region(call.region)
    name = named(asked, "jobName")
    if there := [key for key in NOT_EMULATED if key in asked]:
        raise Fault("ClientException", f"{there[0]} is not emulated here", 501)
    if len(json.dumps(asked).encode()) > LARGEST_JOB:
        raise refusal(f"Job payload size must be at most {LARGEST_JOB} bytes")
    with here.lock:
        queue = here.queue(asked["jobQueue"])
        if queue["state"] != "ENABLED":
            raise refusal(f"JobQueue {asked['jobQueue']} is DISABLED")
        definition = _definition(here, asked["jobDefinition"])
        plan = definition | {key: asked[key] for key in ("retryStrategy", "timeout", "propagateTags") if key in asked}
        _check_limits(plan)
        containers = list(_containers(definition, asked))
        job = Job(here, str(uuid4()), name, queue["jobQueueArn"], plan, containers)
        job.tags = dict(asked.get("tags", {}))
        here.jobs[job.id] = job
        here.tags[job.arn] = job.tags
    journal.taken("batch", name)
    batch_engine.wake(here)
    return {"jobArn": job.arn, "jobName": name, "jobId": job.id}


@answers("batch", "POST /v1/describejobs")
def describe_jobs(call: Call) -> Record:
    """Up to 100 jobs or nodes (`id#n`); unknown ones are left out."""
    asked, here = told(call, "DescribeJobs"), region(call.region)
    if len(asked["jobs"]) > 100:
        raise refusal("Too many jobs requested: at most 100")
    with here.lock:
        return {"jobs": [row for job_id in asked["jobs"] if (row := _row(here, last_part(job_id)))]}


@answers("batch", "POST /v1/listjobs")
def list_jobs(call: Call) -> Record:
    """The jobs of a queue with a status (RUNNING if not said) or a filter, newest first; or the nodes of a job."""
    asked, here = told(call, "ListJobs"), region(call.region)
    if len([key for key in ("jobQueue", "arrayJobId", "multiNodeJobId") if key in asked]) != 1:
        raise refusal("exactly one of jobQueue, arrayJobId and multiNodeJobId must be given")
    with here.lock:
        if "jobQueue" in asked:
            rows = [_summary(job) for job in _listed(here, asked)]
        else:
            job = here.jobs.get(asked.get("multiNodeJobId", ""))
            rows = [_node_summary(job, index) for index in range(job.nodes)] if job and job.multinode else []
            status = asked.get("jobStatus", "RUNNING")
            rows = [row for row in rows if row["status"] == status]
        page, more = paged(rows, asked)
    return {"jobSummaryList": page} | more


@answers("batch", "POST /v1/terminatejob")
def terminate_job(call: Call) -> Record:
    """Stop a job, whatever its state; one that has ended stays as it is."""
    asked, here = told(call, "TerminateJob"), region(call.region)
    with here.lock:
        if job := here.jobs.get(asked["jobId"]):
            job.terminate(asked["reason"])
    return {}


@answers("batch", "POST /v1/canceljob")
def cancel_job(call: Call) -> Record:
    """Stop a job that has not come to STARTING."""
    asked, here = told(call, "CancelJob"), region(call.region)
    with here.lock:
        if job := here.jobs.get(asked["jobId"]):
            job.cancel(asked["reason"])
    return {}


def _key(definition: Record) -> str:
    return f"{definition['jobDefinitionName']}:{definition['revision']}"


def _definition(here: Region, wanted: str) -> Record:
    name, _, revision = last_part(wanted).partition(":")
    rows = [one for one in here.definitions.get(name, []) if one["status"] == ACTIVE]
    rows = [one for one in rows if not revision or one["revision"] == int(revision)]
    if not rows:
        raise refusal(f"JobDefinition {wanted} not found or INACTIVE")
    return rows[-1]


def _check_definition(asked: Record) -> None:
    if len(json.dumps(asked).encode()) > LARGEST_DEFINITION:
        raise refusal(f"Job definition size must be at most {LARGEST_DEFINITION} bytes")
    multinode = asked["type"] == "multinode"
    if ("nodeProperties" in asked) != multinode or ("containerProperties" in asked) == multinode:
        wanted = "nodeProperties" if multinode else "containerProperties"
        raise refusal(f"a job definition of type {asked['type']} takes {wanted} and nothing else of that kind")
    if multinode and asked.get("platformCapabilities", ["EC2"]) != ["EC2"]:
        raise refusal("multi-node parallel jobs run on EC2 only")
    _check_limits(asked)
    for container in _all_containers(asked):
        _check_container(container)
    if multinode:
        list(_ranges(asked["nodeProperties"]))


def _check_limits(asked: Record) -> None:
    retry = asked.get("retryStrategy", {})
    if not 1 <= retry.get("attempts", 1) <= 10:
        raise refusal("retryStrategy.attempts must be between 1 and 10")
    rules = retry.get("evaluateOnExit", [])
    if len(rules) > 5 or (rules and "attempts" not in retry):
        raise refusal("evaluateOnExit takes at most 5 rules, and attempts must be given with them")
    for rule in rules:
        if rule["action"].upper() not in ("RETRY", "EXIT"):
            raise refusal("evaluateOnExit.action must be RETRY or EXIT")
        if not re.fullmatch(r"\d*\*?", rule.get("onExitCode", "")):
            raise refusal("evaluateOnExit.onExitCode can contain only numbers, and end with an asterisk")
        for key in ("onReason", "onStatusReason"):
            if not re.fullmatch(r"[A-Za-z0-9.:\s]*\*?", rule.get(key, "")):
                raise refusal(f"evaluateOnExit.{key} can contain letters, numbers, periods, colons and white space")
    if (seconds := asked.get("timeout", {}).get("attemptDurationSeconds")) is not None and seconds < 60:
        raise refusal("timeout.attemptDurationSeconds must be at least 60")


def _all_containers(asked: Record) -> list[Record]:
    if asked["type"] == "container":
        return [asked["containerProperties"]]
    ranges = asked["nodeProperties"]["nodeRangeProperties"]
    if missing := [one["targetNodes"] for one in ranges if "container" not in one]:
        raise refusal(f"container must be given for the nodes {missing[0]}")
    return [one["container"] for one in ranges]


def _check_container(container: Record) -> None:
    if not container.get("image"):
        raise refusal("Container image must be given")
    needs = needed(container)
    if min(needs["VCPU"], needs["MEMORY"] / 4) < 1:
        raise refusal("resourceRequirements must give VCPU (at least 1) and MEMORY (at least 4 MiB)")
    for one in container.get("environment", []):
        if one.get("name", "").startswith("AWS_BATCH"):
            raise refusal("Environment variables must not start with AWS_BATCH: that is reserved")
    sources = {one.get("name") for one in container.get("volumes", [])}
    if missing := [one for one in container.get("mountPoints", []) if one.get("sourceVolume") not in sources]:
        raise refusal(f"mountPoints: there is no volume {missing[0].get('sourceVolume')}")


def _ranges(properties: Record, nodes: int = 0) -> Iterator[tuple[range, Record]]:
    """The nodes of each range; raises a fault if they do not make up the job."""
    nodes = nodes or properties["numNodes"]
    if not 1 <= nodes <= 1000 or not 0 <= properties["mainNode"] < nodes:
        raise refusal("numNodes must be between 1 and 1000, and mainNode one of the nodes")
    covered: set[int] = set()
    for one in properties["nodeRangeProperties"]:
        if not (found := re.fullmatch(r"(\d*)(:?)(\d*)", one["targetNodes"])) or not one["targetNodes"]:
            raise refusal(f"targetNodes {one['targetNodes']} is not a range of nodes")
        first = int(found[1] or 0)
        last = int(found[3]) if found[3] else (nodes - 1 if found[2] else first)
        if not first <= last < nodes:
            raise refusal(f"targetNodes {one['targetNodes']} is outside of the {nodes} nodes")
        covered |= set(range(first, last + 1))
        yield range(first, last + 1), one
    if covered != set(range(nodes)):
        raise refusal(f"nodeRangeProperties must account for all nodes (0:{nodes - 1})")


def _containers(definition: Record, asked: Record) -> Iterator[Record]:
    """The container of each node, with what the submission overrides."""
    if definition["type"] == "container":
        if "nodeOverrides" in asked:
            raise refusal("nodeOverrides must not be given for a job that is not multinode")
        yield _overridden(definition["containerProperties"], asked.get("containerOverrides", {}))
        return
    if "containerOverrides" in asked:
        raise refusal("containerOverrides must not be given for a multinode job: use nodeOverrides")
    properties, change = definition["nodeProperties"], asked.get("nodeOverrides", {})
    nodes = change.get("numNodes", properties["numNodes"])
    targets = [one["targetNodes"] for one in properties["nodeRangeProperties"]]
    if nodes != properties["numNodes"] and not any(one.endswith(":") for one in targets):
        raise refusal("numNodes can be overridden only if a range of the job definition is open (as in 0:)")
    overrides = {}
    for one in change.get("nodePropertyOverrides", []):
        if one["targetNodes"] not in targets:
            raise refusal(
                f"targetNodes {one['targetNodes']} is not a range of the job definition: {', '.join(targets)}"
            )
        overrides[one["targetNodes"]] = one.get("containerOverrides", {})
    found: dict[int, Record] = {}
    for numbers, one in _ranges(properties, nodes):
        container = _overridden(one["container"], overrides.get(one["targetNodes"], {}))
        found |= dict.fromkeys(numbers, container)
    yield from (found[number] for number in range(nodes))


def _overridden(container: Record, override: Record) -> Record:
    if len(json.dumps(override).encode()) > LARGEST_OVERRIDE:
        raise refusal(f"Container Overrides length must be at most {LARGEST_OVERRIDE}")
    merged = container | {key: value for key, value in override.items() if key in ("command", "instanceType")}
    for key, name in (("environment", "name"), ("resourceRequirements", "type")):
        rows = {one[name]: one for one in [*container.get(key, []), *override.get(key, [])]}
        merged[key] = list(rows.values())
    _check_container(merged)
    return merged


def _listed(here: Region, asked: Record) -> list[Job]:
    queue = here.queue(asked["jobQueue"])["jobQueueArn"]
    jobs = sorted((job for job in here.jobs.values() if job.queue == queue), key=lambda job: -job.created)
    filters = asked.get("filters", [])
    if not filters:
        return [job for job in jobs if job.status == asked.get("jobStatus", "RUNNING")]
    if len(filters) > 1:
        raise refusal("Only one filter can be used at a time")
    name, values = filters[0]["name"], filters[0]["values"]
    if name == "JOB_NAME":
        return [job for job in jobs if any(_alike(job.name, value) for value in values)]
    if name == "JOB_DEFINITION":
        return [job for job in jobs if any(_alike(job.plan["jobDefinitionName"], last_part(one)) for one in values)]
    if name in ("BEFORE_CREATED_AT", "AFTER_CREATED_AT"):
        return [job for job in jobs if (job.created < int(values[0])) == name.startswith("BEFORE")]
    raise refusal(f"filter {name} is not known")


def _alike(name: str, value: str) -> bool:
    if value.endswith("*"):
        return name.lower().startswith(value[:-1].lower())
    return name.lower() == value.lower()


def _row(here: Region, job_id: str) -> Record | None:
    parent, _, index = job_id.partition("#")
    job = here.jobs.get(parent)
    if job is None or (index and (not job.multinode or not index.isdigit() or int(index) >= job.nodes)):
        return None
    return _node(job, int(index)) if index else _whole(job)


def _common(job: Job) -> Record:
    return {
        "jobName": job.name,
        "jobQueue": job.queue,
        "jobDefinition": job.plan["jobDefinitionArn"],
        "createdAt": job.created,
        "retryStrategy": {"attempts": 1, "evaluateOnExit": []} | job.plan.get("retryStrategy", {}),
        "timeout": job.plan.get("timeout", {}),
        "dependsOn": [],
        "parameters": {},
        "tags": job.tags,
        "propagateTags": bool(job.plan.get("propagateTags")),
        "platformCapabilities": ["EC2"],
        "isCancelled": job.cancelled,
        "isTerminated": job.terminated,
    }


def _times(began: int, ended: int) -> Record:
    return ({"startedAt": began} if began else {}) | ({"stoppedAt": ended} if ended else {})


def _whole(job: Job) -> Record:
    row = _common(job) | {"jobArn": job.arn, "jobId": job.id, "status": job.status}
    row |= _times(job.started, job.stopped) | ({"statusReason": job.reason} if job.reason else {})
    row["attempts"] = [_attempt(one) for one in job.attempts[job.main] if one.stopped]
    if not job.multinode:
        return row | {"container": _container(job, 0)}
    return row | {"nodeProperties": job.plan["nodeProperties"] | {"numNodes": job.nodes}}


def _node(job: Job, index: int) -> Record:
    attempts = job.attempts[index]
    last = attempts[-1] if attempts else Attempt()
    row = _common(job) | {"jobArn": f"{job.arn}#{index}", "jobId": f"{job.id}#{index}"}
    row |= {"status": _node_status(job, index), "attempts": [_attempt(one) for one in attempts if one.stopped]}
    row |= _times(last.started, last.stopped) | ({"statusReason": last.reason} if last.reason else {})
    details = {"nodeIndex": index, "isMainNode": index == job.main}
    return row | {"nodeDetails": details, "container": _container(job, index)}


def _node_status(job: Job, index: int) -> str:
    last = job.attempts[index][-1] if job.attempts[index] else None
    if last is None or not last.started:
        return job.status if job.status in ("SUBMITTED", "RUNNABLE", "STARTING", "FAILED") else "STARTING"
    if not last.stopped:
        return "RUNNING"
    return "SUCCEEDED" if last.code == 0 else "FAILED"


def _ended(attempt: Attempt) -> Record:
    told: Record = {"logStreamName": attempt.stream} if attempt.stream else {}
    told |= {"exitCode": attempt.code} if attempt.code is not None else {}
    return told | ({"reason": attempt.container_reason} if attempt.container_reason else {})


def _attempt(attempt: Attempt) -> Record:
    container = _ended(attempt) | {"networkInterfaces": []}
    return {"container": container, "statusReason": attempt.reason} | _times(attempt.started, attempt.stopped)


def _container(job: Job, index: int) -> Record:
    last = job.attempts[index][-1] if job.attempts[index] else Attempt()
    host = {"containerInstanceArn": container_instance(job.here.name, last.instance)} if last.instance else {}
    return job.containers[index] | _ended(last) | host


def _summary(job: Job) -> Record:
    row = {"jobArn": job.arn, "jobId": job.id, "jobName": job.name, "createdAt": job.created, "status": job.status}
    row |= {"jobDefinition": job.plan["jobDefinitionArn"], "isTerminated": job.terminated, "isCancelled": job.cancelled}
    row |= _times(job.started, job.stopped) | ({"statusReason": job.reason} if job.reason else {})
    last = job.attempts[job.main][-1] if job.attempts[job.main] else Attempt()
    row["container"] = {key: value for key, value in _ended(last).items() if key != "logStreamName"}
    return row | ({"nodeProperties": {"numNodes": job.nodes}} if job.multinode else {})


def _node_summary(job: Job, index: int) -> Record:
    row = _node(job, index)
    kept = ("jobArn", "jobId", "jobName", "createdAt", "status", "statusReason", "startedAt", "stoppedAt")
    place = {"isMainNode": index == job.main, "numNodes": job.nodes, "nodeIndex": index}
    return {key: row[key] for key in kept if key in row} | {"nodeProperties": place}
