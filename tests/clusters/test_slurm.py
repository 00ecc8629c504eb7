"""Slurm for real: nodes that lose power, jobs that start again, a controller that is away."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from clusters.base import Job, Refused, State, Unreachable
from clusters.slurm import SlurmCluster
from emulator.slurm import SlurmGuests
from tests.clusters import slurm_yard
from tests.clusters.yard import Yard, finished, ready, wait_until
from tests.training.nursery import losses, result, spec, write_dataset

SAVES = """
import json, pathlib, signal, sys, time
output = pathlib.Path(json.load(open(sys.argv[1]))["output"])
def save(*_):
    output.mkdir(exist_ok=True)
    (output / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
pytestmark = [pytest.mark.root, slurm_yard.needs_slurm]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmGuests]:
    """The session's Slurm, whole again afterwards."""
    guests = slurm_yard.guests(tmp_path.parent)
    yield guests
    if not guests.states():
        guests.start_controller()
        wait_until(guests.states)
    guests.sh("scancel --user=root")
    for node in guests.nodes:
        if not guests.alive(node):
            guests.power_on(node)
    guests.wait_idle()


@pytest.fixture
def cluster(tmp_path: Path, slurm: SlurmGuests) -> SlurmCluster:
    return slurm_yard.cluster(tmp_path)


def number(job_id: str) -> str:
    return job_id.partition(".")[0]


def nodes_of(slurm: SlurmGuests, job_id: str) -> list[str]:
    """Where a job runs, the node of rank 0 first."""
    listed = slurm.sh(f"scontrol show hostnames $(squeue --noheader --jobs={number(job_id)} --format=%N)")
    return listed.split()


def gang(yard: Yard, name: str, **spec: object) -> Job:
    return replace(yard.job(name, **spec), nodes=2, processes_per_node=1)  # type: ignore[arg-type]  # any spec


def test_the_lines_of_several_nodes_name_their_node(cluster: SlurmCluster, yard: Yard) -> None:
    job_id = cluster.submit(gang(yard, "two", say=["here", "there"]))
    assert finished(cluster, job_id).state is State.SUCCEEDED
    lines, cursor = cluster.logs(job_id)
    for node in ("[node0] ", "[node1] "):
        own = [line.removeprefix(node) for line in lines if line.startswith(node)]
        assert [line for line in own if not line.startswith("@castra")] == ["here", "there", "ready"]
    assert all(line.startswith(("[node0] ", "[node1] ")) for line in lines)
    assert cluster.logs(job_id, cursor) == ([], cursor)


def test_a_lost_node_without_restarts_is_a_lost_job(cluster: SlurmCluster, slurm: SlurmGuests, yard: Yard) -> None:
    job_id = cluster.submit(gang(yard, "doomed", sleep=600))
    ready(cluster, job_id)
    slurm.power_off(nodes_of(slurm, job_id)[1])
    status = finished(cluster, job_id, 60)
    assert status.state is State.LOST
    assert "node" in status.reason


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_training_goes_on_with_another_node_as_if_nothing_had_happened(
    cluster: SlurmCluster, slurm: SlurmGuests, tmp_path: Path
) -> None:
    dataset, plan = write_dataset(tmp_path / "dataset"), spec(micro=2, steps=80, checkpoint_every=10)

    def job(name: str) -> Job:
        config = {"spec": plan, "inputs": {"dataset": str(dataset)}, "output": str(tmp_path / name)}
        return Job(name, "training.run", config, 2, 1, {"OMP_NUM_THREADS": "1"}, restarts=2, timeout_s=300)

    cut = cluster.submit(job("cut"))
    wait_until(lambda: list((tmp_path / "cut/checkpoints").glob("step-*")), 90)
    slurm.power_off(nodes_of(slurm, cut)[1])
    status = finished(cluster, cut, 150)
    assert status.state is State.SUCCEEDED, cluster.logs(cut)[0][-20:]
    whole = cluster.submit(job("whole"))
    assert finished(cluster, whole, 90).state is State.SUCCEEDED
    assert 0 < result(tmp_path / "cut")["resumed_from"] < 80
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert result(tmp_path / "cut")["weights_sha256"] == result(tmp_path / "whole")["weights_sha256"]


def test_a_crash_starts_the_gang_again_as_often_as_asked(cluster: SlurmCluster, yard: Yard) -> None:
    job_id = cluster.submit(replace(yard.job("stumbles", code=1), restarts=1))
    status = finished(cluster, job_id, 60)
    assert (status.state, status.exit_code) == (State.FAILED, 1)
    assert yard.runs("stumbles") == 2


def test_cancel_lets_a_job_save(cluster: SlurmCluster, yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    job_id = cluster.submit(replace(yard.job("saves"), module="saves", restarts=2))
    ready(cluster, job_id)
    cluster.cancel(job_id)
    assert finished(cluster, job_id, 10).state is State.CANCELLED
    assert (tmp_path / "saves" / "saved").exists()


def test_a_job_that_waits_says_for_what_and_can_be_cancelled(cluster: SlurmCluster, yard: Yard) -> None:
    job_id = cluster.submit(replace(gang(yard, "large"), nodes=9))
    wait_until(lambda: "fewer nodes" in cluster.status(job_id).reason)
    assert cluster.status(job_id).state is State.QUEUED
    cluster.cancel(job_id)
    assert finished(cluster, job_id).state is State.CANCELLED


def test_nodes_that_ec2_does_not_start_are_told(cluster: SlurmCluster, slurm: SlurmGuests, yard: Yard) -> None:
    why = "(Code:InsufficientInstanceCapacity)Failure when resuming nodes"
    slurm.sh(f"scontrol update nodename=node-3 state=down reason='{why}'")
    job_id = cluster.submit(replace(gang(yard, "large"), nodes=3))
    wait_until(lambda: "InsufficientInstanceCapacity" in cluster.status(job_id).reason, 60)
    slurm.sh("scontrol update nodename=node-3 state=resume || true")  # unless it came back by itself
    assert finished(cluster, job_id, 60).state is State.SUCCEEDED


def test_many_submissions_at_once_are_one_job(cluster: SlurmCluster, yard: Yard) -> None:
    job = yard.job("crowd", sleep=0.5)
    with ThreadPoolExecutor() as threads:
        (job_id,) = {future.result() for future in [threads.submit(cluster.submit, job) for _ in range(4)]}
    assert finished(cluster, job_id).state is State.SUCCEEDED
    assert yard.runs("crowd") == 1


def test_a_submission_whose_answer_was_lost_is_found_by_name(cluster: SlurmCluster, yard: Yard, tmp_path: Path) -> None:
    job = replace(gang(yard, "unheard"), nodes=9)
    job_id = cluster.submit(job)
    (tmp_path / "jobs/unheard/id").unlink()
    assert cluster.find("unheard") == job_id
    assert cluster.submit(job) == job_id


def test_what_the_controller_has_forgotten_is_known_all_the_same(
    cluster: SlurmCluster, slurm: SlurmGuests, yard: Yard, tmp_path: Path
) -> None:
    jobs = [cluster.submit(yard.job("good")), cluster.submit(yard.job("bad", code=3))]
    before = [finished(cluster, job_id) for job_id in jobs]
    unrun = cluster.submit(replace(gang(yard, "never"), nodes=9))
    slurm.stop_controller()
    slurm.start_controller(forgetful=True)
    wait_until(slurm.states)
    assert list(cluster.statuses(jobs).values()) == before
    assert cluster.status(unrun).state is State.LOST
    for left in (tmp_path / "jobs").glob("*/ended"):
        left.unlink()
    assert list(cluster.statuses(jobs).values()) == before, "by the accounting"


def test_what_slurm_refuses_is_refused_in_its_words(cluster: SlurmCluster, yard: Yard, tmp_path: Path) -> None:
    elsewhere = SlurmCluster({**cluster.address, "partition": "nowhere"}, cluster.store)
    with pytest.raises(Refused, match="Slurm refuses the job: Invalid partition name specified"):
        elsewhere.submit(yard.job("lost-way"))
    assert elsewhere.find("lost-way") is None


def test_a_controller_that_is_away_is_unreachable_and_then_fine(
    cluster: SlurmCluster, slurm: SlurmGuests, yard: Yard
) -> None:
    job_id = cluster.submit(yard.job("patient", sleep=9))
    ready(cluster, job_id)
    slurm.stop_controller()
    away = time.monotonic()
    asked = [lambda: cluster.status(job_id), lambda: cluster.submit(yard.job("early"))]
    with ThreadPoolExecutor() as threads:
        for problem in [future.exception() for future in [threads.submit(ask) for ask in asked]]:
            assert isinstance(problem, Unreachable)
            assert "does not answer" in str(problem)
    assert any("ready" in line for line in cluster.logs(job_id)[0]), "logs need no controller"
    time.sleep(max(0.0, away + 5 - time.monotonic()))
    slurm.start_controller()
    wait_until(slurm.states)
    assert finished(cluster, job_id, 60).state is State.SUCCEEDED
    assert finished(cluster, cluster.submit(yard.job("early"))).state is State.SUCCEEDED
    assert yard.runs("early") == 1
