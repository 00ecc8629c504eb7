"""What every adapter must do, in the same words: the suite each of them runs.

local           processes of this machine
slurm           a real Slurm on hosts that are network namespaces
batch           emulated API; the nodes are real processes on hosts of their own, as for the three that follow
sagemaker
eks, jobset     a stand-in for Kubernetes' API
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clusters import aws
from clusters.base import Cluster, Job, Refused, State
from clusters.local import LocalCluster
from tests.clusters import batch_yard, eks_yard, sagemaker_yard, slurm_yard
from tests.clusters.yard import Yard, finished, ready, wait_until
from tests.sky import tell


def local(folder: Path) -> Cluster:
    return LocalCluster(folder / "jobs", grace_s=1)


ADAPTERS: dict[str, Callable[[Path], Cluster]] = {
    "local": local,
    "slurm": slurm_yard.cluster,
    "batch": batch_yard.batch,
    "sagemaker": sagemaker_yard.sagemaker,
    "eks": eks_yard.eks,
    "jobset": eks_yard.jobset,
}
SLOW = {"slurm": 45.0}
"""Seconds after which a lost node is noticed, where that is not the gang's own watch."""


def marked(kind: str) -> object:
    return pytest.param(kind, marks=[pytest.mark.root, slurm_yard.needs_slurm] if kind == "slurm" else [])


@dataclass(frozen=True)
class Ground:
    """A cluster to be tested, and what it is."""

    kind: str
    cluster: Cluster
    folder: Path

    def lose(self, job_id: str, node: int) -> None:
        """Pull the plug of a node of a job."""
        if self.kind == "slurm":
            slurm_yard.guests(self.folder.parent).power_off(self.hosts(job_id)[node])
            return
        tell(aws.here().endpoint, "lose", {"job": job_id, "node": node})

    def hosts(self, job_id: str) -> list[str]:
        """The nodes that Slurm gave a job."""
        shown = f"scontrol show hostnames $(squeue -h --states=all -j {job_id.partition('.')[0]} -o %N)"
        return slurm_yard.guests(self.folder.parent).sh(shown).split()

    @property
    def gone(self) -> str:
        """What quarantine says it did, as a pattern."""
        ended = r"i-\w+ is terminated"
        return {"slurm": "is drained", "batch": ended, "sagemaker": "other instances"}.get(
            self.kind, f"is cordoned, {ended}"
        )


@pytest.fixture(params=[marked(kind) for kind in ADAPTERS])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    kind: str = request.param
    if kind not in ("local", "slurm"):
        request.getfixturevalue("site")
    yield Ground(kind, ADAPTERS[kind](tmp_path), tmp_path)
    if kind == "slurm":
        slurm_yard.mend(tmp_path.parent)


@pytest.fixture
def cluster(ground: Ground) -> Cluster:
    return ground.cluster


def gang(job: Job) -> Job:
    """The same program as one rank on each of two nodes."""
    silence = {"CASTRA_GANG_SILENCE_S": "4"}
    return replace(job, nodes=2, processes_per_node=1, env={**job.env, **silence})


def test_a_job_that_ends_well_has_succeeded(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("good"))
    status = finished(cluster, job_id)
    assert (status.state, status.reason, status.exit_code) == (State.SUCCEEDED, "", 0)
    assert cluster.statuses([job_id]) == {job_id: status}


def test_a_job_that_fails_says_how(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("bad", code=3))
    status = finished(cluster, job_id)
    assert (status.state, status.exit_code) == (State.FAILED, 3)
    assert "exited with code 3" in status.reason


def test_submitting_twice_is_one_run(cluster: Cluster, yard: Yard) -> None:
    job = yard.job("once", sleep=0.5)
    first = cluster.submit(job)
    ready(cluster, first)
    assert cluster.submit(job) == first
    finished(cluster, first)
    assert cluster.submit(job) == first, "a job that has ended is never run again under its name"
    assert cluster.status(first).state is State.SUCCEEDED
    assert yard.runs("once") == 1


def test_a_job_runs_and_its_log_can_be_followed_by_cursor(cluster: Cluster, yard: Yard) -> None:
    said = ["first", "zweite Zeile", "x" * 100_000]
    job_id = cluster.submit(yard.job("talks", say=said, sleep=0.3))
    seen: list[str] = []
    cursor, done = "", False
    while not done:
        done = cluster.status(job_id).state.done
        lines, after = cluster.logs(job_id, cursor)
        seen, cursor = seen + lines, after
    assert seen == [*said, "ready"]
    assert cluster.logs(job_id, cursor) == ([], cursor)
    assert cluster.logs(job_id)[0] == seen


def test_the_nodes_of_a_gang_are_named_in_its_log(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(gang(yard.job("two", say=["here", "there"])))
    assert finished(cluster, job_id, 60).state is State.SUCCEEDED, cluster.logs(job_id)[0]
    lines, _ = cluster.logs(job_id)
    for node in ("[node0] ", "[node1] "):
        own = [line.removeprefix(node) for line in lines if line.startswith(node)]
        assert [line for line in own if line in ("here", "there", "ready")] == ["here", "there", "ready"]


def test_one_rank_that_fails_ends_the_gang(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(gang(yard.job("uneven", codes={"1": 5}, sleep=600)))
    assert finished(cluster, job_id, 60).state is State.FAILED
    wait_until(lambda: not yard.processes(), 15)


def test_a_lost_node_ends_the_gang(ground: Ground, yard: Yard) -> None:
    if ground.kind == "local":
        pytest.skip("this machine has no node that can be lost without it")
    cluster = ground.cluster
    job_id = cluster.submit(gang(yard.job("doomed", sleep=600)))
    wait_until(lambda: sum(line.endswith("] ready") for line in cluster.logs(job_id)[0]) == 2, 60)
    ground.lose(job_id, 1)
    status = finished(cluster, job_id, SLOW.get(ground.kind, 30.0) + 30)
    assert status.state in (State.LOST, State.FAILED)
    assert status.reason
    wait_until(lambda: not yard.processes(), 15)


def test_a_gang_that_lost_a_node_starts_again_where_the_cluster_can_do_that(ground: Ground, yard: Yard) -> None:
    if ground.kind in ("local", "eks", "sagemaker"):
        pytest.skip("the next attempt is the flow's affair here")
    cluster = ground.cluster
    job_id = cluster.submit(replace(gang(yard.job("phoenix", sleeps=[600, 0])), restarts=1))
    wait_until(lambda: sum(line.endswith("] ready") for line in cluster.logs(job_id)[0]) == 2, 60)
    ground.lose(job_id, 1)
    status = finished(cluster, job_id, 2 * SLOW.get(ground.kind, 30.0) + 60)
    assert status.state is State.SUCCEEDED, cluster.logs(job_id)[0]


def test_a_machine_in_quarantine_gets_no_job_and_another_takes_its_place(ground: Ground, yard: Yard) -> None:
    first = ground.cluster.submit(gang(yard.job("first")))
    assert finished(ground.cluster, first).state is State.SUCCEEDED
    if ground.kind == "local":
        with pytest.raises(Refused, match="nothing can take its place"):
            ground.cluster.quarantine(first, 1, "its clock is wrong")
        return
    told = ground.cluster.quarantine(first, 1, "its clock is wrong")
    assert re.search(ground.gone, told), told
    assert ground.cluster.quarantine(first, 1, "its clock is wrong")
    second = ground.cluster.submit(gang(yard.job("second")))
    assert finished(ground.cluster, second, 60).state is State.SUCCEEDED
    if ground.kind == "slurm":
        assert set(ground.hosts(first)) - set(ground.hosts(second)) == {told.partition(" ")[0]}


def test_cancel_stops_a_job_that_does_not_want_to(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("deaf", deaf=True, daemons=True, sleep=600))
    ready(cluster, job_id)
    cluster.cancel(job_id)
    assert finished(cluster, job_id, 10).state is State.CANCELLED
    wait_until(lambda: not yard.processes(), 2)
    cluster.cancel(job_id)
    assert cluster.status(job_id).state is State.CANCELLED


def test_cancel_does_not_change_how_a_job_has_ended(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("good"))
    finished(cluster, job_id)
    cluster.cancel(job_id)
    assert cluster.status(job_id).state is State.SUCCEEDED


def test_a_job_stops_itself_at_its_time_limit(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("slow", timeout_s=1, deaf=True, sleep=600))
    status = finished(cluster, job_id, 20)
    assert status.state is State.TIMED_OUT
    assert "time limit of 1 s" in status.reason


def test_a_job_is_found_by_its_name(cluster: Cluster, yard: Yard) -> None:
    assert cluster.find("sought") is None
    job_id = cluster.submit(yard.job("sought", sleep=0.2))
    assert cluster.find("sought") == job_id
    finished(cluster, job_id)
    assert cluster.find("sought") == job_id


def test_what_nobody_knows(cluster: Cluster) -> None:
    status = cluster.status("never-heard-of")
    assert status.state is State.LOST
    assert "never-heard-of" in status.reason
    assert cluster.logs("never-heard-of", "7") == ([], "7")
    assert cluster.find("never-heard-of") is None
    cluster.cancel("never-heard-of")
    cluster.forget("never-heard-of")
    assert cluster.find("never-heard-of") is None


def test_forgotten_jobs_leave_nothing_that_runs(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("brief"))
    finished(cluster, job_id)
    cluster.forget(job_id)
    cluster.forget(job_id)
    assert yard.processes() == []


def test_render_is_a_dry_run(cluster: Cluster, yard: Yard, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cluster.render(yard.job("dry")) == cluster.render(yard.job("dry"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "../up", "with space", "a/b", "x" * 300])
def test_a_name_that_cannot_be_one_is_refused(cluster: Cluster, yard: Yard, name: str) -> None:
    with pytest.raises(Refused, match="cannot name a job"):
        cluster.submit(yard.job(name))
