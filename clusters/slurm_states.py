"""What Slurm says about jobs, in Castra's words; understands 22.05 as well as 24.05.

Three sources, the best first: the controller, which forgets a job minutes after its end (MinJobAge); the accounting,
where there is one; and what the job's script left in its folder.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clusters.base import State, Status

TIMED_OUT, STOPPED = 124, 143
"""Exit codes of `training.node`."""

WAITING: Mapping[str, str] = {
    "Resources": "for nodes to become free",
    "Priority": "behind other jobs",
    "BeginTime": "for a moment, before it starts again",
    "Dependency": "for another job of its name to end",
    "PartitionNodeLimit": "for ever: the queue allows fewer nodes",
    "PartitionConfig": "for ever: the queue has fewer nodes",
    "PartitionDown": "for its queue to be opened",
    "ReqNodeNotAvail": "for nodes that are down or reserved",
    "launch_failed_requeued_held": "for somebody to release it: it could not be started",
    "JobHeldUser": "for somebody to release it",
    "JobHeldAdmin": "for an administrator to release it",
}
"""What pending jobs wait for, by Slurm's reason."""
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
ENDED: Mapping[str, tuple[State, str]] = {
    "COMPLETED": (State.SUCCEEDED, ""),
    "CANCELLED": (State.CANCELLED, ""),
    "TIMEOUT": (State.TIMED_OUT, "Slurm ended it at its time limit"),
    "DEADLINE": (State.TIMED_OUT, "Slurm ended it at its deadline"),
    "NODE_FAIL": (State.LOST, "a node failed"),
    "BOOT_FAIL": (State.LOST, "its nodes did not start"),
    "LAUNCH_FAILED": (State.LOST, "it could not be started on its nodes"),
    "RECONFIG_FAIL": (State.LOST, "its nodes could not be set up"),
    "PREEMPTED": (State.LOST, "another job took its nodes"),
    "REVOKED": (State.LOST, "another cluster took it over"),
    "OUT_OF_MEMORY": (State.FAILED, "it ran out of memory"),
}


@dataclass(slots=True)
class Record:
    """What the files in a job's folder say."""

    cancelled: bool = False
    """We have asked for its end."""
    code: int | None = None
    """The exit code that its script saw last."""
    timeout_s: str = ""
    lost: bool = False
    """The nodes said that one of them was lost, or Slurm has started it too often."""

    def add(self, words: list[str]) -> None:
        """Read a line: `cancelled`, or `<code> <time limit> [lost]`."""
        if words[0] == "cancelled":
            self.cancelled = True
        else:
            self.code, self.timeout_s, self.lost = int(words[0]), words[1], "lost" in words

    def status(self, name: str) -> Status:
        """How the job stands, for all that the folder says."""
        if self.code == 0:
            return Status(State.SUCCEEDED, "", 0)
        if self.cancelled:
            return Status(State.CANCELLED)
        if self.code is not None:
            return _failed(f"{self.code}:0", "None", self)
        return Status(State.LOST, f"Slurm knows no job {name}, and its folder does not say how it ended")


@dataclass(slots=True)
class Told:
    """All that one look at the cluster has told."""

    controller: dict[str, dict[str, str]] = field(default_factory=dict)
    """By Slurm's job id, the fields of `scontrol -o show job`."""
    accounting: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """By Slurm's job id: name, state and exit code."""
    launches: set[str] = field(default_factory=set)
    """What EC2 answered when nodes were to be started: InsufficientInstanceCapacity and the like."""
    folder: dict[str, Record] = field(default_factory=dict)
    """By name."""

    def status(self, number: str, name: str) -> Status:
        """How a job stands, from the best source there is."""
        record = self.folder.get(name, Record())
        # a number that has another name is of a new cluster on the old one's file system
        if (job := self.controller.get(number)) and job["JobName"] == name:
            status = _standing(job["JobState"], job.get("ExitCode", "0:0"), job, record)
            return self._with_launches(status) if status.state is State.QUEUED and self.launches else status
        if number in self.accounting and self.accounting[number][0] == name:
            return _standing(*self.accounting[number][1:], {}, record)
        return record.status(name)

    def _with_launches(self, status: Status) -> Status:
        return replace(status, reason=f"{status.reason}; nodes do not start: {', '.join(sorted(self.launches))}")


def read(answer: str) -> Told:
    """Understand the answer of `clusters.slurm.STATUSES`."""
    told, part = Told(), ""
    for line in answer.splitlines():
        if line.startswith("# "):
            part = line[2:]
        elif part == "controller" and "JobId" in (fields := _fields(line)):
            told.controller[fields["JobId"]] = fields
        elif part == "accounting" and line.count("|") == 3:
            number, name, state, code = line.split("|")
            told.accounting[number] = (name, state.split()[0].rstrip("+"), code)  # "CANCELLED by 1000"
        elif part == "nodes" and (found := re.match(r"\(Code:(\w+)\)", line)):  # as ParallelCluster writes it
            told.launches.add(found[1])
        elif part == "folder":
            name, *words = line.split()
            told.folder.setdefault(name, Record()).add(words)
    return told


def _fields(line: str) -> dict[str, str]:
    """`JobId=1 JobName=x …`. Comments may hold anything; they come last, so the first of a name is the field."""
    return {name: value for name, _, value in (word.partition("=") for word in reversed(line.split()))}


def _standing(state: str, code: str, job: Mapping[str, str], record: Record) -> Status:
    if state in QUEUED:
        return Status(State.QUEUED, _waiting(state, job))
    if state in RUNNING:
        return Status(State.RUNNING, _again(job))
    if state == "FAILED":
        return _failed(code, job.get("Reason", "None"), record)
    ended, reason = ENDED.get(state, (State.FAILED, f"Slurm says {state}"))
    if ended is State.LOST and (nodes := job.get("NodeList", "")) not in ("", "(null)"):
        reason += f" (it ran on {nodes})"
    return Status(ended, reason, 0 if ended is State.SUCCEEDED else None)


def _failed(code: str, reason: str, record: Record) -> Status:
    status, signal = (int(part) for part in code.split(":"))
    if record.lost:
        return Status(State.LOST, "a node was lost", status)
    if status == TIMED_OUT:
        limit = f" of {record.timeout_s} s" if record.timeout_s else ""
        return Status(State.TIMED_OUT, f"it ran past its time limit{limit}", TIMED_OUT)
    if status == STOPPED:
        return Status(State.FAILED, f"it was asked to stop, not by us, and has saved (exit code {STOPPED})", STOPPED)
    if status:
        return Status(State.FAILED, f"exited with code {status}", status)
    if signal and reason.startswith(("RaisedSignal", "None")):
        return Status(State.FAILED, f"was killed by signal {signal}", 128 + signal)
    return Status(State.FAILED, f"could not be run ({reason})")


def _waiting(state: str, job: Mapping[str, str]) -> str:
    reason = re.split(r"[,(]", job.get("Reason", "None"))[0]
    if state == "CONFIGURING":
        return f"its nodes are being started ({job.get('NodeList', '')})"
    waits = "" if reason == "None" else f"waits {WAITING.get(reason, 'to be started')} ({job['Reason']})"
    return "; ".join(filter(None, [waits, _again(job)]))


def _again(job: Mapping[str, str]) -> str:
    again = int(job.get("Restarts", 0))
    return f"started again {again} time{'s' if again > 1 else ''}" if again else ""
