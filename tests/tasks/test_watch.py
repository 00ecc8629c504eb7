"""A job is followed by its log alone: progress, the story, errors, and what a resumed job says again."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

import tasks.watch
from clusters.base import State, Status, Unreachable
from clusters.watcher import Watcher
from recipes import Recipe
from tasks import phrases, report
from tasks.ground import Place
from tasks.policy import Interrupted, passing
from tasks.watch import Follower, follow
from training.job import MARK


class Told:
    """A cluster whose job says these lines, one more at every look, and then ends."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def statuses(self, jobs: Sequence[str]) -> dict[str, Status]:
        """Running until everything was said."""
        return {job: Status(State.RUNNING if self.lines else State.SUCCEEDED) for job in jobs}

    def logs(self, _job: str, after: str = "") -> tuple[list[str], str]:
        """The next line."""
        return ([self.lines.pop(0)], f"{after}+") if self.lines else ([], after)


def step(done: int, loss: float) -> str:
    return MARK + json.dumps({"done": done, "total": 4, "unit": "step", "metrics": {"loss": loss}})


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    """A follower whose artifacts are lost, as when the server is away."""
    monkeypatch.setattr(report, "_at_leisure", lambda _call: None)
    return Follower("train", lambda metrics: f"loss {metrics['loss']:.1f}")


def watch(follower: Follower, *lines: str) -> Status:
    cluster: Any = Told(*lines)
    place = Place(Recipe(), cluster, cluster, Watcher(cluster, 0.0, 1e9))  # no store is asked here
    return follow(place, "job", follower)


def test_a_cluster_that_does_not_answer_for_a_while_does_not_end_the_watch(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = Told(step(1, 5.0), step(2, 4.0))
    answers, silent = cluster.logs, iter([True, False, True, True])

    def deaf(job: str, after: str = "") -> tuple[list[str], str]:
        if next(silent, False):
            raise Unreachable("the API is down")
        told: tuple[list[str], str] = answers(job, after)
        return told

    monkeypatch.setattr(cluster, "logs", deaf)
    monkeypatch.setattr(tasks.watch, "SLOWEST_S", 0.01)
    place = Place(Recipe(), cluster, cluster, Watcher(cluster, 0.0, 1e9))
    assert follow(place, "job", follower).state is State.SUCCEEDED
    assert [done for done, _ in follower.history] == [1, 2]


def test_after_half_an_hour_of_silence_it_is_somebody_else_s_turn(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = Told("never heard")

    def deaf(_job: str, _after: str = "") -> tuple[list[str], str]:
        raise Unreachable("the API is down")

    monkeypatch.setattr(cluster, "logs", deaf)
    monkeypatch.setattr(tasks.watch, "SLOWEST_S", 0.01)
    monkeypatch.setattr(tasks.watch, "DEAF_S", 0.05)
    with pytest.raises(Unreachable, match="down"):
        follow(Place(Recipe(), cluster, cluster, Watcher(cluster, 0.0, 1e9)), "job", follower)


def test_progress_is_remembered_in_order(follower: Follower) -> None:
    assert watch(follower, step(1, 5.0), "noise", step(2, 4.0)).state is State.SUCCEEDED
    assert [(done, metrics["loss"]) for done, metrics in follower.history] == [(1, 5.0), (2, 4.0)]
    assert list(follower.last) == ["noise"]


def test_what_a_resumed_job_repeats_replaces_what_was_told(follower: Follower) -> None:
    watch(follower, step(1, 5.0), step(2, 4.0), step(3, 3.0), step(2, 4.5))
    assert [(done, metrics["loss"]) for done, metrics in follower.history] == [(1, 5.0), (2, 4.5)]


def test_the_program_s_own_sentence_is_kept_until_the_next_attempt(follower: Follower) -> None:
    watch(follower, MARK + json.dumps({"event": "error", "message": "the batch does not divide"}))
    assert follower.error == "the batch does not divide"
    watch(follower, step(1, 5.0))
    assert follower.error == ""


@pytest.mark.parametrize(
    ("error", "again"), [(Unreachable("away"), True), (Interrupted("killed"), True), (ValueError("wrong"), False)]
)
def test_only_what_passes_by_itself_is_tried_again(error: Exception, again: bool) -> None:
    from prefect.states import Failed

    assert passing(None, None, Failed(data=error)) is again  # type: ignore[arg-type]  # it looks at the state only


@pytest.mark.parametrize(
    ("seconds", "told"), [(45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (400000, "4.6 days")]
)
def test_durations_read_as_people_say_them(seconds: float, told: str) -> None:
    assert phrases.clock(seconds) == told


def test_sizes_read_as_people_say_them() -> None:
    assert [phrases.size(count) for count in (12, 3400, 5.6e9)] == ["12 B", "3.4 kB", "5.6 GB"]
