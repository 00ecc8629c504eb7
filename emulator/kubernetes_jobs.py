"""The controllers of Jobs and JobSets of an emulated Kubernetes cluster: from what is asked for to pods, and back.

As upstream documents them: kubernetes.io/docs/concepts/workloads/controllers/job (indexed completion, pod failure
policy, pods replaced once they have failed, suspension, time limit, removal after the end), jobset.sigs.k8s.io (restart
of all, failure policy, suspension). Here: indexed Jobs of Never restarted pods; JobSets of one replica per Job.
"""

import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from emulator.kubernetes_store import (
    Object,
    Objects,
    Refusal,
    is_true,
    made,
    now,
    owner_of,
    owners,
    phase,
    set_condition,
)

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"


def reconcile(world: Objects) -> None:
    """One round: every JobSet, every Job, and what is to be removed."""
    for one in world.listed("JobSet"):
        _jobset(world, one)
    for one in world.listed("Job"):
        _job(world, one)
    uids = {one["metadata"]["uid"] for one in world.listed("Job")}
    _release(world, [one for one in world.listed("Pod") if not uids & set(owners(one))])
    world.collect()


def ended(one: Object) -> bool:
    """Whether a Job or a JobSet is over."""
    return any(is_true(one, kind) for kind in ("Complete", "Completed", "Failed"))


def _job(world: Objects, job: Object) -> None:
    pods = world.owned(job, "Pod")
    if ended(job) or job["metadata"].get("deletionTimestamp"):
        _release(world, pods)
        _expire(world, job)
        return
    verdict = next((kind for kind in ("FailureTarget", "SuccessCriteriaMet") if is_true(job, kind)), "")
    if not verdict:
        verdict = _judge(world, job, pods)
    if verdict:
        for pod in pods:
            if phase(pod) in ("Pending", "Running"):
                world.delete(pod)
        _release(world, pods)
    elif job["spec"].get("suspend"):
        _suspend(world, job, pods)
    else:
        _fill(world, job, pods)
    world.change(job, lambda one: _tell(one, world.owned(job, "Pod"), verdict))


def _judge(world: Objects, job: Object, pods: Sequence[Object]) -> str:
    """Whether the Job is to end, and how: remembered in a condition before any pod goes."""
    spec, told = job["spec"], None
    failures = 0
    for pod in pods:
        action, words = _policy(spec, pod) if phase(pod) == "Failed" else ("Ignore", "")
        failures += action in ("Count", "FailJob")
        if action == "FailJob" and told is None:
            told = ("FailureTarget", "PodFailurePolicy", words)
    started = job.get("status", {}).get("startTime")
    if told is None and failures > spec.get("backoffLimit", 6):
        told = ("FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
    if told is None and started and _age(started) >= spec.get("activeDeadlineSeconds", float("inf")):
        told = ("FailureTarget", "DeadlineExceeded", "Job was active longer than specified deadline")
    done = {index_of(pod) for pod in pods if phase(pod) == "Succeeded"}
    if told is None and len(done) >= spec.get("completions", 1):
        told = ("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods")
    if told is None:
        return ""
    kind, reason, message = told
    world.change(job, lambda one: set_condition(one, kind, reason=reason, message=message))
    return kind


def _policy(spec: Object, pod: Object) -> tuple[str, str]:
    """What a failed pod does to its Job, and the words for it."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(spec.get("podFailurePolicy", {}).get("rules", [])):
        end = f"matching {rule['action']} rule at index {number}"
        for one in rule.get("onPodConditions") or []:
            if is_true(pod, one["type"]) == (one.get("status", "True") == "True"):
                return rule["action"], f"Pod {name} has condition {one['type']} {end}"
        codes = rule.get("onExitCodes")
        for one in pod["status"].get("containerStatuses", []) if codes else []:
            code = one["state"].get("terminated", {}).get("exitCode", 0)
            mine = codes.get("containerName") in (None, one["name"])
            if mine and code and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"], f"Container {one['name']} for pod {name} failed with exit code {code} {end}"
    return "Count", ""


def _fill(world: Objects, job: Object, pods: Sequence[Object]) -> None:
    """A pod for every index that has none that runs, has succeeded, or is still ending."""
    if not job.get("status", {}).get("startTime") or is_true(job, "Suspended"):
        world.change(job, _resume)
    taken = {index_of(pod) for pod in pods if phase(pod) != "Failed"}
    try:
        for index in set(range(job["spec"].get("completions", 1))) - taken:
            world.create(_pod(world, job, index))
    except Refusal as refusal:
        words = f"Error creating: {refusal.message}"
        world.change(job, lambda one: set_condition(one, "FailedCreate", truth=True, message=words))


def _resume(job: Object) -> None:
    job.setdefault("status", {})["startTime"] = now()
    if is_true(job, "Suspended"):
        set_condition(job, "Suspended", truth=False, reason="JobResumed", message="Job resumed")


def _pod(world: Objects, job: Object, index: int) -> Object:
    about, template = job["metadata"], job["spec"]["template"]
    namespace = about["namespace"]
    world.get("ServiceAccount", namespace, template["spec"].get("serviceAccountName", "default"))
    pod = made("Pod", f"{about['name']}-{index}-{secrets.token_hex(3)[:5]}", namespace)
    pod["metadata"] |= {
        "labels": template["metadata"]["labels"] | {INDEX: str(index)},
        "annotations": template["metadata"].get("annotations", {}) | {INDEX: str(index)},
        "ownerReferences": owner_of(job),
        "finalizers": [TRACKING],
    }
    pod["spec"] = {**template["spec"], "hostname": f"{about['name']}-{index}"}
    given = {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}},
    }
    pod["spec"]["containers"] = [one | {"env": [*one.get("env", []), given]} for one in template["spec"]["containers"]]
    pod["status"] = {"phase": "Pending"}
    return pod


def _suspend(world: Objects, job: Object, pods: Sequence[Object]) -> None:
    for pod in pods:
        if phase(pod) in ("Pending", "Running"):
            world.delete(pod)
    _release(world, [pod for pod in pods if phase(pod) == "Pending" and not pod["spec"].get("nodeName")])

    def tell(one: Object) -> None:
        set_condition(one, "Suspended", reason="JobSuspended", message="Job suspended")
        one["status"].pop("startTime", None)

    world.change(job, tell)


def _release(world: Objects, pods: Sequence[Object]) -> None:
    """Let go of the pods that are counted, so that those that are to be removed can be."""
    for pod in pods:
        waits = not pod["spec"].get("nodeName") and pod["metadata"].get("deletionTimestamp")
        if phase(pod) in ("Succeeded", "Failed") or waits:
            world.change(pod, lambda one: one["metadata"].pop("finalizers", None))


def _tell(job: Object, pods: Sequence[Object], verdict: str) -> None:
    """The Job's status; the end is told once no pod is left that runs."""
    about = job.setdefault("status", {})
    active = [pod for pod in pods if phase(pod) in ("Pending", "Running")]
    leaving = [pod for pod in active if pod["metadata"].get("deletionTimestamp")]
    about |= {
        "active": len(active) - len(leaving),
        "terminating": len(leaving),
        "ready": sum(phase(pod) == "Running" for pod in active if pod not in leaving),
        "succeeded": len({index_of(pod) for pod in pods if phase(pod) == "Succeeded"}),
        "failed": sum(phase(pod) == "Failed" for pod in pods),
    }
    if not verdict or active:
        return
    cause = next(one for one in about["conditions"] if one["type"] == verdict)
    final = "Failed" if verdict == "FailureTarget" else "Complete"
    set_condition(job, final, reason=cause["reason"], message=cause["message"])
    if final == "Complete":
        about["completionTime"] = now()


def _jobset(world: Objects, jobset: Object) -> None:
    if ended(jobset) or jobset["metadata"].get("deletionTimestamp"):
        _expire(world, jobset)
        return
    restarts = jobset.get("status", {}).get("restarts", 0)
    jobs = world.owned(jobset, "Job")
    current = [one for one in jobs if one["metadata"]["labels"][ATTEMPT] == str(restarts)]
    for old in jobs:
        if old not in current:
            world.delete(old, foreground=True)
    wanted = jobset["spec"]["replicatedJobs"]
    if failed := [one for one in current if is_true(one, "Failed")]:
        world.change(jobset, lambda one: _meet(one, failed[0]))
        return
    if current and len(current) == len(wanted) and all(is_true(one, "Complete") for one in current):
        words = "jobset completed successfully"
        world.change(jobset, lambda one: set_condition(one, "Completed", reason="AllJobsCompleted", message=words))
    for told in wanted:
        _start(world, jobset, told, restarts)
    suspend = bool(jobset["spec"].get("suspend"))
    for one in current:
        world.change(one, lambda job: job["spec"].update(suspend=suspend))
    world.change(jobset, lambda one: _sum_up(one, current, suspend))


def _meet(jobset: Object, failed: Object) -> None:
    """A Job has failed: fail too, or start all again."""
    about, policy = jobset.setdefault("status", {}), jobset["spec"].get("failurePolicy", {})
    cause = next(one for one in failed["status"]["conditions"] if one["type"] == "Failed")
    rules = policy.get("rules", [])
    fits = [one for one in rules if cause["reason"] in one.get("onJobFailureReasons", [cause["reason"]])]
    words = f"(first failed job: {failed['metadata']['name']})"
    if fits and fits[0]["action"] == "FailJobSet":
        said = f"jobset failed due to FailJobSet failure policy action {words}"
        set_condition(jobset, "Failed", reason="FailJobSetFailurePolicyAction", message=said)
    elif about.get("restarts", 0) >= policy.get("maxRestarts", 0):
        said = f"jobset failed due to reaching max number of restarts {words}"
        set_condition(jobset, "Failed", reason="ReachedMaxRestarts", message=said)
    else:
        about["restarts"] = about.get("restarts", 0) + 1


def _start(world: Objects, jobset: Object, told: Object, restarts: int) -> None:
    about, template = jobset["metadata"], told["template"]
    name, namespace = f"{about['name']}-{told['name']}-0", about["namespace"]
    if ("Job", namespace, name) in world.objects:
        return
    labels = {
        JOBSET_NAME: about["name"],
        ATTEMPT: str(restarts),
        "jobset.sigs.k8s.io/replicatedjob-name": told["name"],
        "jobset.sigs.k8s.io/job-index": "0",
    }
    job = made("Job", name, namespace)
    inner = template["spec"]["template"]
    marked = inner.get("metadata", {}) | {"labels": inner.get("metadata", {}).get("labels", {}) | labels}
    subdomain = jobset["spec"].get("network", {}).get("subdomain", about["name"])
    pod = {"metadata": marked, "spec": inner["spec"] | {"subdomain": subdomain}}
    job["metadata"] |= {
        "labels": template.get("metadata", {}).get("labels", {}) | labels,
        "ownerReferences": owner_of(jobset),
    }
    job["spec"] = template["spec"] | {"template": pod, "suspend": bool(jobset["spec"].get("suspend"))}
    world.create(job)
    if ("Service", namespace, subdomain) not in world.objects:
        spec = {"clusterIP": "None", "selector": {JOBSET_NAME: about["name"]}, "publishNotReadyAddresses": True}
        service = made("Service", subdomain, namespace, spec=spec)
        service["metadata"]["ownerReferences"] = owner_of(jobset)
        world.create(service)


def _sum_up(jobset: Object, jobs: Sequence[Object], suspend: bool) -> None:
    rows = []
    for told in jobset["spec"]["replicatedJobs"]:
        named = [
            one for one in jobs if one["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] == told["name"]
        ]
        status = [one.get("status", {}) for one in named]
        full = [
            one
            for one in status
            if one.get("ready", 0) + one.get("succeeded", 0) >= told["template"]["spec"]["completions"]
        ]
        rows.append(
            {
                "name": told["name"],
                "ready": len(full),
                "active": sum(bool(one.get("active")) for one in status),
                "succeeded": sum(is_true(one, "Complete") for one in named),
                "failed": sum(is_true(one, "Failed") for one in named),
                "suspended": sum(bool(one["spec"].get("suspend")) for one in named),
            }
        )
    jobset.setdefault("status", {}).setdefault("restarts", 0)
    jobset["status"]["replicatedJobsStatus"] = rows
    if suspend or is_true(jobset, "Suspended"):
        words = "jobset is suspended" if suspend else "jobset is resumed"
        set_condition(jobset, "Suspended", truth=suspend, reason="SuspendedJobs", message=words)


def _expire(world: Objects, one: Object) -> None:
    """Remove what has ended long enough ago."""
    limit = one["spec"].get("ttlSecondsAfterFinished")
    if limit is None or not ended(one):
        return
    if max(_age(found["lastTransitionTime"]) for found in one["status"]["conditions"]) >= limit:
        world.delete(one)


def index_of(pod: Object) -> int:
    """A pod's completion index."""
    return int(pod["metadata"].get("annotations", {}).get(INDEX, 0))


def _age(time_: str) -> float:
    return time.time() - datetime.strptime(time_, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
