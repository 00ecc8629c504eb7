"""Run one program of `training/` on a cluster, follow it by its log, and never run it twice."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from clusters.base import ClusterError, Job, NoCapacity, Refused, State, Status, Unreachable
from clusters.kinds import restarts
from clusters.links import links
from tasks import report
from tasks.ground import Place
from tasks.policy import PATIENT, Interrupted
from tasks.watch import Follower, follow

NO_CAPACITY = re.compile(r"^no capacity|CapacityError|InsufficientInstanceCapacity|INSUFFICIENT_INSTANCE_CAPACITY")
"""How adapters and AWS say that a job ended because no instances were to be had."""


@dataclass(frozen=True)
class Work:
    """One step's program, resolved: what to run, on how many ranks, where its files are as its nodes see them."""

    step: str
    key: str
    """The place of the result in the store, which names the job."""
    module: str
    spec: Mapping[str, Any]
    output: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    processes_per_node: int = 0
    timeout_s: int = 4 * 3600
    attempts: int = 2
    env: Mapping[str, str] = field(default_factory=dict)

    def job(self, attempt: int, timeout_s: int, kind: str) -> Job:
        """The job of one attempt on a kind of cluster; the same attempt always has the same name."""
        return Job(
            self.name(attempt),
            self.module,
            {"spec": dict(self.spec), "inputs": dict(self.inputs), "output": self.output},
            self.nodes,
            self.processes_per_node,
            self.env,
            timeout_s,
            restarts=restarts(kind, self.attempts, timeout_s / 3600),
        )

    def name(self, attempt: int) -> str:
        """The name of one attempt's job."""
        return f"{self.key.replace('/', '-').replace('@', '-')}-{attempt}"


def run(place: Place, work: Work, follower: Follower) -> dict[str, Any]:
    """Carry out one step's work, starting it again where that can help; returns what its result.json says.

    Raises `Refused` if the program says its input is wrong, `NoCapacity` if its instances do not come, `Interrupted`
    if every attempt was spent.
    """
    step_task = run_job.with_options(
        name=work.step,
        task_run_name=f"{work.step} on {work.nodes} node{'s' * (work.nodes > 1)}",
        retries=max(work.attempts - 1, 0),
    )
    return step_task(place, work, follower)


@task(cache_policy=NO_CACHE, **PATIENT)
def run_job(place: Place, work: Work, follower: Follower) -> dict[str, Any]:
    """Submit the job, or attach to it where it runs already, and follow it to its end."""
    if (result := place.result(work.key, work.output)) is not None:
        report.say(f"{work.step}: found finished in {work.output}")
        return result
    job_id, place = _submit(place, work)
    report.links(links(place.recipe, place.ground.address if place.ground else None, job_id), work.step)
    try:
        status = follow(place, job_id, follower)
    except Unreachable:
        raise  # the job goes on, and the next try attaches to it
    except BaseException:
        place.cluster.cancel(job_id)
        raise
    # Gloo may abort at interpreter exit after the work is done: the result file decides, not the exit code alone.
    if (result := place.result(work.key, work.output)) is None:
        raise _failure(work, status, follower)
    return result


@task(name="quarantine", task_run_name="quarantine node {node}", cache_policy=NO_CACHE, **PATIENT)
def quarantine(place: Place, work: Work, node: int, why: str) -> str:
    """Keep later jobs from the machine that was a node of a job's last attempt; returns what was done.

    Raises `Refused` where no other machine can take its place.
    """
    attempt, job_id = 1, ""
    while (known := place.cluster.find(work.name(attempt))) is not None:
        attempt, job_id = attempt + 1, known
    if not job_id:
        raise Refused(f"no job of {work.step} is known any more: validate again")
    return place.cluster.quarantine(job_id, node, why)


def _submit(place: Place, work: Work) -> tuple[str, Place]:
    attempt = 1
    while (known := place.cluster.find(work.name(attempt))) is not None and place.cluster.status(known).state.done:
        attempt += 1
    if known is not None:
        report.say(f"{work.step}: attaching to {known}, which is running")
    elif attempt > 1:
        report.say(f"{work.step}: starting again, attempt {attempt}")
    return place.submit(work.job(attempt, place.time_limit_s(work.timeout_s), place.recipe.cluster.kind))


def _failure(work: Work, status: Status, follower: Follower) -> ClusterError | Interrupted:
    # the program's own sentence: its exit code is lost, because torchrun ends with 1 whatever it was
    if follower.error:
        return Refused(f"{work.step}: {follower.error}")
    if NO_CAPACITY.search(status.reason):
        return NoCapacity(f"{work.step}: no instances are to be had ({status.reason})")
    ended = {
        State.CANCELLED: "was cancelled",
        State.LOST: f"was lost ({status.reason})",
        State.TIMED_OUT: f"ran out of time ({status.reason})",
    }.get(status.state, f"failed ({status.reason})")
    told = "; ".join(list(follower.last)[-3:]) or "it printed nothing"
    return Interrupted(f"{work.step} {ended}: {told}")
