"""Run one program of `training/` on a cluster, follow it by its log, and never run it twice."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from clusters.base import Cluster, ClusterError, Job, Refused, State, Status
from clusters.local import LocalCluster as LocalAdapter
from recipes.spec import LocalCluster, Recipe
from store.objects import state_folder
from tasks import report
from tasks.policy import PATIENT, Interrupted
from tasks.watch import Follower, follow
from training.job import NodeJob


@dataclass(frozen=True)
class Work:
    """One step's program, resolved: what to run, on how many ranks, where its result goes."""

    step: str
    key: str
    """The place of the result, which names the job."""
    module: str
    node_job: NodeJob
    nodes: int = 1
    processes_per_node: int = 0
    timeout_s: int = 4 * 3600
    attempts: int = 2
    env: Mapping[str, str] = field(default_factory=dict)

    def job(self, attempt: int) -> Job:
        """The job of one attempt; the same attempt always has the same name."""
        told = self.node_job
        config = {
            "spec": told.spec,
            "inputs": {name: str(place) for name, place in told.inputs.items()},
            "output": str(told.output),
        }
        name = f"{self.key.replace('/', '-').replace('@', '-')}-{attempt}"
        return Job(name, self.module, config, self.nodes, self.processes_per_node, self.env, self.timeout_s)


def cluster_of(recipe: Recipe) -> Cluster:
    """The adapter for a recipe's cluster; raises `Refused` for a kind that cannot be driven yet."""
    if isinstance(recipe.cluster, LocalCluster):
        return LocalAdapter(state_folder() / "jobs")
    raise Refused(
        f"cluster.kind {recipe.cluster.kind!r} can be planned and rehearsed, not yet driven: add --rehearse to "
        "run this recipe's miniature on this machine"
    )


def run(cluster: Cluster, work: Work, follower: Follower) -> dict[str, Any]:
    """Carry out one step's work, starting it again where that can help; returns what its result.json says.

    Raises `Refused` if the program says its input is wrong, `Interrupted` if every attempt was spent.
    """
    step_task = run_job.with_options(
        name=work.step,
        task_run_name=f"{work.step} on {work.nodes} node{'s' * (work.nodes > 1)}",
        retries=max(work.attempts - 1, 0),
    )
    return step_task(cluster, work, follower)


@task(cache_policy=NO_CACHE, **PATIENT)
def run_job(cluster: Cluster, work: Work, follower: Follower) -> dict[str, Any]:
    """Submit the job, or attach to it where it runs already, and follow it to its end."""
    if (result := _result(work)) is not None:
        report.say(f"{work.step}: found finished in {work.node_job.output}")
        return result
    job_id = _submit(cluster, work)
    try:
        status = follow(cluster, job_id, follower)
    except BaseException:
        cluster.cancel(job_id)
        raise
    # Gloo may abort at interpreter exit after the work is done: the result file decides, not the exit code alone.
    if (result := _result(work)) is None:
        raise _failure(work, status, follower)
    return result


def _submit(cluster: Cluster, work: Work) -> str:
    attempt = 1
    while (known := cluster.find(work.job(attempt).name)) is not None and cluster.status(known).state.done:
        attempt += 1
    if known is not None:
        report.say(f"{work.step}: attaching to {known}, which is running")
        return known
    if attempt > 1:
        report.say(f"{work.step}: starting again, attempt {attempt}")
    return cluster.submit(work.job(attempt))


def _result(work: Work) -> dict[str, Any] | None:
    path = work.node_job.output / "result.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def _failure(work: Work, status: Status, follower: Follower) -> ClusterError | Interrupted:
    if (
        follower.error
    ):  # the program's own sentence; its exit code is lost, because torchrun ends with 1 whatever it was
        return Refused(f"{work.step}: {follower.error}")
    ended = "was cancelled" if status.state is State.CANCELLED else f"failed ({status.reason})"
    told = "; ".join(list(follower.last)[-3:]) or "it printed nothing"
    return Interrupted(f"{work.step} {ended}: {told}")
