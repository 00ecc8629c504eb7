"""What every adapter must do, in the same words: the suite each of them runs."""

from pathlib import Path

import pytest

from clusters.base import Cluster, Refused, State
from clusters.local import LocalCluster
from tests.clusters.yard import Yard, finished, ready, wait_until


def local(folder: Path) -> Cluster:
    return LocalCluster(folder / "jobs", grace_s=1)


from tests.clusters.eks_yard import eks, jobset

ADAPTERS = {"eks": eks, "jobset": jobset}


@pytest.fixture(params=ADAPTERS)
def cluster(request, tmp_path, site):
    return ADAPTERS[request.param](tmp_path)


def test_a_job_that_ends_well_has_succeeded(cluster: Cluster, yard: Yard) -> None:
    job_id = cluster.submit(yard.job("good"))
    status = finished(cluster, job_id)
    assert (status.state, status.reason, status.exit_code) == (State.SUCCEEDED, "", 0)


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
    said = ["first", "zweite Zeile", "x" * 100_000, ""]
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
    status = finished(cluster, job_id, 10)
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
    assert cluster.find("never-heard-of") is None


def test_render_is_a_dry_run(cluster: Cluster, yard: Yard, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cluster.render(yard.job("dry")) == cluster.render(yard.job("dry"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "../up", "with space", "a/b", "x" * 300])
def test_a_name_that_cannot_be_one_is_refused(cluster: Cluster, yard: Yard, name: str) -> None:
    with pytest.raises(Refused, match="cannot name a job"):
        cluster.submit(yard.job(name))
