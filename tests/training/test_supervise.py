"""Supervision: ranks that stop, wait or are slow are named, every rank's stack is kept, bad steps are judged alike."""

import ctypes
import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from tests.training.crew import Crew, Ranks
from training.job import NodeJob, say
from training.process import JobError
from training.ranks import World
from training.supervise import Supervisor
from training.supervise.attempts import Attempts
from training.supervise.beat import Beat, Seat
from training.supervise.blame import blame
from training.supervise.judge import Judge

pytestmark = [pytest.mark.torch]

TRAIN = {"hang_after_s": 2.0, "on_bad_step": "stop", "max_bad_steps": 3, "loss_spike": None}
WORK = "tests.training.test_supervise:work"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Ranks that start in milliseconds."""
    crew = Crew()
    yield crew
    crew.close()


def work(
    world: World, folder: Path, *, steps: int = 10**6, culprit: int = -1, trouble: str = "", limit: float = 2.0
) -> None:
    """Train nothing, in steps of two phases; from step 5 on the culprit is in trouble."""
    job = NodeJob({"train": TRAIN | {"hang_after_s": limit}}, folder / "out")
    supervisor = Supervisor(job, world, report_steps=20)
    say("pid", rank=world.rank, pid=os.getpid(), restarts=supervisor.restarts)
    for step in range(1, steps + 1):
        supervisor.at(step, "data")
        began = time.perf_counter()
        time.sleep(0.01)
        if world.rank == culprit and step >= 5:
            _trouble(trouble)
        own = time.perf_counter() - began
        supervisor.at(step, "step")
        if trouble == "compute" and world.rank == culprit and step >= 5:
            _trouble("sleep")
        distributed.all_reduce(torch.zeros(1))
        supervisor.stepped(step, own)
        if world.rank == 0 and step == 5:
            say("five")
    supervisor.close()


def _trouble(kind: str) -> None:
    if kind == "sleep":
        time.sleep(1000)
    elif kind == "slow":
        time.sleep(0.02)
    elif kind == "deaf":  # C code that holds Python's lock: no thread of Python runs
        ctypes.PyDLL(None).sleep(1000)


def hung(ranks: Ranks, out: Path) -> dict[str, Any]:
    """Wait for the end of a run that hangs: what was said of it, and that there are stacks."""
    (told,) = ranks.hear("hang")
    said = [json.loads(line) for line in (out / "attempts.jsonl").read_text().splitlines()]
    assert said[-1]["hang"] == told["message"]
    return told


@pytest.mark.parametrize(("culprit", "size"), [(1, 2), (0, 2), (2, 4)])
def test_a_stopped_rank_is_named_and_the_others_end(crew: Crew, tmp_path: Path, culprit: int, size: int) -> None:
    ranks = crew.start(WORK, size, tmp_path, nodes=2)
    ranks.hear("five")
    os.kill(ranks.pids[culprit], signal.SIGSTOP)
    told = hung(ranks, tmp_path / "out")
    os.kill(ranks.pids[culprit], signal.SIGKILL)
    codes = ranks.wait()
    assert codes[culprit] == -signal.SIGKILL
    assert {*codes} == {1, -signal.SIGKILL}
    assert (told["ranks"], told["nodes"]) == ([culprit], [culprit * 2 // size])
    assert f"rank {culprit} (node {culprit * 2 // size}, " in told["message"]
    assert "has not been heard of for" in told["message"]
    for rank in {*range(size)} - {culprit}:
        stacks = (tmp_path / f"out/stacks/rank-{rank}.txt").read_text()
        assert f"rank {rank} (node {rank * 2 // size}" in stacks
        assert "in all_reduce" in stacks
        assert "test_supervise.py" in stacks


def test_a_rank_that_sleeps_in_its_data_is_named(crew: Crew, tmp_path: Path) -> None:
    codes, ranks = crew.run(WORK, 3, tmp_path, culprit=1, trouble="sleep")
    told = hung(ranks, tmp_path / "out")
    assert codes == [1, 1, 1]
    assert told["ranks"] == [1]
    assert re.search(r"is behind: in phase data of step 5 since \d s", told["message"])
    assert "(_trouble), while others are in phase step of step 5" in told["message"]
    assert "in _trouble" in (tmp_path / "out/stacks/rank-1.txt").read_text()
    assert "in all_reduce" in (tmp_path / "out/stacks/rank-2.txt").read_text()


def test_a_rank_that_others_wait_for_in_a_collective_is_named(crew: Crew, tmp_path: Path) -> None:
    codes, ranks = crew.run(WORK, 2, tmp_path, culprit=0, trouble="compute")
    told = hung(ranks, tmp_path / "out")
    assert codes == [1, 1]
    assert told["ranks"] == [0]
    assert "while others wait in a collective" in told["message"]


def test_code_that_holds_pythons_lock_ends_too(crew: Crew, tmp_path: Path) -> None:
    codes, ranks = crew.run(WORK, 2, tmp_path, culprit=1, trouble="deaf")
    told = hung(ranks, tmp_path / "out")
    assert codes == [1, 1]
    assert told["ranks"] == [1]
    assert "in _trouble" in (tmp_path / "out/stacks/rank-1.txt").read_text()


def test_a_slow_rank_is_reported_and_nothing_else_said(crew: Crew, tmp_path: Path) -> None:
    codes, ranks = crew.run(WORK, 3, tmp_path, culprit=2, trouble="slow", steps=60)
    assert codes == [0, 0, 0], ranks.log.read_text()
    first = ranks.say("straggler")[0]
    assert (first["rank"], first["node"]) == (2, 0)
    assert first["ratio"] > 1.5
    assert first["seconds"] > first["others_seconds"] > 0
    assert ranks.say("hang") == []
    assert list((tmp_path / "out/stacks").iterdir()) == []


def test_attempts_are_counted_and_the_hang_before_is_told(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(WORK, 2, tmp_path, culprit=1, trouble="sleep")[0] == [1, 1]
    codes, second = crew.run(WORK, 1, tmp_path, steps=3)
    assert codes == [0]
    (restarted,) = second.say("restarted")
    assert restarted["restarts"] == 1
    assert "rank 1 (node 0" in restarted["hung"]
    with (tmp_path / "out/attempts.jsonl").open("a") as torn:
        torn.write('{"ra')
    _, third = crew.run(WORK, 1, tmp_path, steps=3)
    assert [fact["restarts"] for fact in third.say("pid")] == [2]
    assert third.say("restarted") == [{"event": "restarted", "restarts": 2}]
    assert Attempts(tmp_path / "out").count == 3


def test_a_closed_output_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    world = World(0, 1, 0, 0, 1, torch.device("cpu"))
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(JobError, match=r"cannot be written: .*; make it writable"):
            Supervisor(NodeJob({"train": TRAIN}, tmp_path / "out"), world)
    finally:
        distributed.destroy_process_group()


def test_blame() -> None:
    seats = [Seat(rank // 2, f"host{rank // 2}", ("", 0)) for rank in range(4)]

    def beats(*told: Beat) -> dict[int, tuple[Beat, float]]:
        return {beat.rank: (beat, 0.5) for beat in told}

    ahead = [Beat(rank, 7, "step", 1, 9, waits=True) for rank in range(3)]
    verdict = blame(beats(*ahead, Beat(3, 6, "save", 3, 9, place="a.py:1 (f)")), seats, 4)
    assert verdict.ranks == (3,)
    assert verdict.sentence == (
        "rank 3 (node 1, host1) is behind: in phase save of step 6 since 9 s at a.py:1 (f), while others are in "
        "phase step of step 7"
    )
    verdict = blame(beats(*ahead, Beat(3, 7, "step", 1, 9, waits=True)), seats, 4)
    assert verdict.ranks == ()
    assert verdict.sentence.startswith("all 4 ranks are in phase step of step 7 since 9 s")
    silent = beats(*ahead) | {1: (Beat(1, 7, "step", 1, 30), 21.0), 3: (Beat(3), 30.0)}
    verdict = blame(silent, seats, 4)
    assert verdict.ranks == (1, 3)
    assert verdict.sentence.startswith("rank 1 (node 0, host0) with 1 more has not been heard of for 21 s")


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_a_step_that_is_not_finite_stops(loss: float, norm: float) -> None:
    judge = Judge(TRAIN, talking=True)
    assert judge.judge(1, 2.0, 1.0)
    with pytest.raises(JobError, match=r"the loss is .* and the gradient norm .* at step 2: training diverged; lower"):
        judge.judge(2, loss, norm)


def test_bad_steps_are_skipped_until_there_are_too_many_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge(TRAIN | {"on_bad_step": "skip"}, talking=True)
    assert [judge.judge(step, loss, 1.0) for step, loss in enumerate((2, math.nan, math.inf, 2, math.nan))] == [
        True,
        False,
        False,
        True,
        False,
    ]
    told = [json.loads(line.removeprefix("@castra ")) for line in capsys.readouterr().out.splitlines()]
    assert [(fact["event"], fact["step"], fact["in_a_row"]) for fact in told] == [
        ("bad-step", 1, 1),
        ("bad-step", 2, 2),
        ("bad-step", 4, 1),
    ]
    assert not judge.judge(5, math.nan, 1.0)
    with pytest.raises(JobError, match=r"at step 6, bad step 3 in a row \(train\.max_bad_steps\)"):
        judge.judge(6, math.nan, 1.0)


def test_a_spike_is_judged_by_the_median_of_good_steps_and_alike_after_a_resume() -> None:
    train = TRAIN | {"on_bad_step": "skip", "loss_spike": 2.0}
    judge = Judge(train, talking=False)
    assert judge.judge(1, 100.0, 1.0)
    assert all(judge.judge(step, 3.0, 1.0) for step in range(2, 12))
    resumed = Judge(train, talking=False)
    resumed.restore(json.loads(json.dumps(judge.state())))
    for one in (judge, resumed):
        assert not one.judge(12, 6.1, 1.0)
        assert one.judge(13, 5.9, 1.0)
    assert judge.state() == resumed.state()
    stopping = Judge(train | {"on_bad_step": "stop"}, talking=False)
    stopping.restore(judge.state())
    with pytest.raises(JobError, match=r"the loss is 9, 3\.0 times the median 3 of the last 12 steps at step 14"):
        stopping.judge(14, 9.0, 1.0)
