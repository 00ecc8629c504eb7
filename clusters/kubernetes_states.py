"""What Kubernetes says about a job, in the words all clusters share: pure functions from its objects to a `Status`.

Source of the conditions and reasons: kubernetes.io/docs/concepts/workloads/controllers/job, jobset.sigs.k8s.io.
"""

import re
from collections.abc import Sequence
from typing import Any

from clusters.base import State, Status
from clusters.manifests import CANCELLED, CONTAINER, QUEUE, TIME_LIMIT

Object = dict[str, Any]

ENDING = ("FailureTarget", "SuccessCriteriaMet")
COMING = ("ContainerCreating", "PodInitializing")
ECHOES = (1, 137, 143)
"""Exit codes of nodes that end because another one did."""
NODE_LOST = '"event": "node-lost"'
"""What `training.node` says on the nodes that are left: long before Kubernetes notices."""
STATE_OF_CODE = {124: State.TIMED_OUT, 143: State.LOST}


def note(of: Object, key: str) -> str:
    """An annotation, "" if there is none."""
    return str((of["metadata"].get("annotations") or {}).get(key, ""))


def ended(of: Object) -> bool:
    """Whether a Job or a JobSet will never change again."""
    return any(_condition(of, kind) for kind in ("Complete", "Completed", "Failed"))


def needs_pods(of: Object) -> bool:
    """Whether the pods have something to add: why it waits, or how it failed."""
    return not (_succeeded(of) or (not note(of, CANCELLED) and not ended(of) and _all_run(of)))


def status(of: Object, jobs: Sequence[Object] = (), pods: Sequence[Object] = ()) -> Status:
    """How a Job or a JobSet stands; `jobs` are those of a JobSet."""
    if _succeeded(of):
        return Status(State.SUCCEEDED, "", 0)
    pods = _latest(pods)
    living = [pod for pod in pods if pod.get("status", {}).get("phase") in ("Pending", "Running")]
    if ended(of):
        return _failed(of, jobs, pods)
    if note(of, CANCELLED):
        stopped = of["spec"].get("suspend") and not living
        return Status(State.CANCELLED, "cancelled") if stopped else Status(State.RUNNING, "is being cancelled")
    if _all_run(of) or any(_condition(one, kind) for one in (of, *jobs) for kind in ENDING):
        return Status(State.RUNNING)
    return _waiting(of, pods)


def _succeeded(of: Object) -> bool:
    return bool(_condition(of, "Complete") or _condition(of, "Completed"))


def _failed(of: Object, jobs: Sequence[Object], pods: Sequence[Object]) -> Status:
    if note(of, CANCELLED):
        return Status(State.CANCELLED, "cancelled")
    told = [found for one in _latest(jobs) if (found := _condition(one, "Failed"))] or [_condition(of, "Failed") or {}]
    reason, message = told[0].get("reason", ""), told[0].get("message", "")
    limit = note(of, TIME_LIMIT)
    if reason == "DeadlineExceeded":
        return Status(State.TIMED_OUT, f"did not end within its time limit of {limit} s and the wait for its nodes")
    missed = any(NODE_LOST in end.get("message", "") for _, end in _ends(pods))
    if missed or "DisruptionTarget" in message or any(_condition(pod, "DisruptionTarget") for pod in pods):
        return Status(State.LOST, f"a node was lost, or taken for something else: {message or reason}")
    code, who = _exit(pods, message, _nodes(of))
    if code is None:
        return Status(State.LOST, f"its pods are gone, and nobody knows how they ended: {message or reason}")
    state = STATE_OF_CODE.get(code, State.FAILED)
    texts = {
        State.TIMED_OUT: f"stopped at its time limit of {limit} s",
        State.LOST: f"{who}was stopped by somebody else",
        State.FAILED: f"{who}exited with code {code}",
    }
    return Status(state, texts[state], code)


def _exit(pods: Sequence[Object], message: str, nodes: int) -> tuple[int | None, str]:
    """The exit code of the node that failed first, and that node; from the Job's message once the pods are gone."""
    failed = [(pod, end) for pod, end in _ends(pods) if end["exitCode"]]
    found = [(end.get("finishedAt") or "", end["exitCode"] in ECHOES, end["exitCode"], pod, end) for pod, end in failed]
    if found:
        _, _, code, pod, end = min(found, key=lambda row: row[:3])
        why = " ran out of memory and" if end.get("reason") == "OOMKilled" else ""
        node = f"node {_index(pod)}" if nodes > 1 or why else ""
        return code, f"{node}{why} ".lstrip()
    told = re.search(r"exit code (\d+)", message)
    return (int(told[1]) if told else None), ""


def _ends(pods: Sequence[Object]) -> list[tuple[Object, Object]]:
    """The pods whose program has ended, and how it did."""
    states = [
        (pod, one.get("state", {}).get("terminated"))
        for pod in pods
        for one in pod.get("status", {}).get("containerStatuses") or []
        if one["name"] == CONTAINER
    ]
    return [(pod, end) for pod, end in states if end]


def _waiting(of: Object, pods: Sequence[Object]) -> Status:
    """Running once every node has started, else queued, and why."""
    begun = {_index(pod) for pod in pods if pod.get("status", {}).get("phase") not in (None, "", "Pending")}
    if len(begun) >= _nodes(of):
        return Status(State.RUNNING)
    reasons = sorted({why for pod in pods if (why := _why(pod))})
    if of["spec"].get("suspend"):
        queue = of["metadata"]["labels"].get(QUEUE)
        reasons = [f"waits in Kueue's queue {queue}" if queue else "is suspended"]
    some = [f"{len(begun)} of {_nodes(of)} nodes run"] if begun else []
    return Status(State.QUEUED, "; ".join(some + reasons))


def _why(pod: Object) -> str:
    """Why a pod does not run yet."""
    about = pod.get("status", {})
    for one in about.get("conditions") or []:
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message") or one.get("reason", ""))
    for one in about.get("containerStatuses") or []:
        waiting = one.get("state", {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in COMING:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""


def _all_run(of: Object) -> bool:
    told = of.get("status") or {}
    if of["kind"] == "JobSet":
        return any(one.get("ready", 0) + one.get("succeeded", 0) for one in told.get("replicatedJobsStatus") or [])
    return bool(told.get("ready", 0) + told.get("succeeded", 0) >= _nodes(of))


def _nodes(of: Object) -> int:
    spec = of["spec"]
    return int((spec["replicatedJobs"][0]["template"]["spec"] if of["kind"] == "JobSet" else spec)["completions"])


def _latest(objects: Sequence[Object]) -> list[Object]:
    """Those of a JobSet's last start; all of a Job's."""
    last = max((_start(one) for one in objects), default=0)
    return [one for one in objects if _start(one) == last]


def _start(of: Object) -> int:
    return int(of["metadata"].get("labels", {}).get("jobset.sigs.k8s.io/restart-attempt") or 0)


def _index(pod: Object) -> int:
    return int(note(pod, "batch.kubernetes.io/job-completion-index") or 0)


def order(pod: Object) -> tuple[int, int, str]:
    """Sorts the pods of a job: by start, by node, by age."""
    return _start(pod), _index(pod), str(pod["metadata"].get("creationTimestamp", ""))


def _condition(of: Object, kind: str) -> Object | None:
    """A condition that is true."""
    found = (of.get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind and one["status"] == "True"), None)
