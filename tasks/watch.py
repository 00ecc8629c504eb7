"""Follow a job by its log alone: progress with an ETA, the story's lines, the rest relayed to the run's log."""

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from clusters.base import NoCapacity, State, Status, Unreachable
from recipes import Recipe
from recipes.cluster import LocalCluster
from tasks import phrases, report
from tasks.ground import Place
from training.job import MARK

QUICKEST_S, SLOWEST_S = 0.1, 2.0
DEAF_S = 1800.0
"""How long a cluster may be out of reach before its job is no longer watched."""

FOR_PEOPLE = ("bad-step", "broken-record", "checkpoint", "checkpoint-skipped", "hang", "rehearsed-failure", "restarted",
              "resumed", "stopped", "straggler")  # fmt: skip
"""Events of a job that a terminal shows; the UI's log has all of them."""

Metrics = dict[str, float]


class Follower:
    """Turns a job's log lines into what people see; one per step."""

    def __init__(self, step: str, describe: Callable[[Metrics], str] = lambda _: "") -> None:
        self.step, self._describe = step, describe
        self.history: list[tuple[int, Metrics]] = []
        """(units done, metrics) of every progress line that carried metrics."""
        self.error = ""
        """What the program itself said went wrong."""
        self.last: deque[str] = deque(maxlen=20)
        """The newest lines that were not meant for us."""

    def take(self, line: str, bar: report.Bar) -> None:
        """Look at one log line."""
        _, mark, told = line.partition(MARK)
        if not mark:
            self.last.append(line)
            report.relay([line])
            return
        fact = json.loads(told)
        if "event" in fact:
            self._event(fact)
        else:
            self._progress(fact, bar)

    def _event(self, fact: dict[str, Any]) -> None:
        event = fact.pop("event")
        if event == "error":
            self.error = str(fact.get("message", ""))
            return
        told = (
            f"{self.step}: {event.replace('-', ' ')} ({', '.join(f'{name} {value}' for name, value in fact.items())})"
        )
        report.say(told) if event in FOR_PEOPLE else report.relay([told])

    def _progress(self, fact: dict[str, Any], bar: report.Bar) -> None:
        done, total, metrics = int(fact["done"]), int(fact["total"]), fact.get("metrics", {})
        if metrics:
            self._remember(done, metrics)
        told = self._describe(metrics) if metrics else ""
        bar.update(done, total, f"{fact['unit']} {done}/{total}{', ' if told else ''}{told}")

    def _remember(self, done: int, metrics: Metrics) -> None:
        # A resumed job repeats the steps since its checkpoint: the newer telling counts.
        while self.history and self.history[-1][0] >= done:
            self.history.pop()
        self.history.append((done, metrics))


def follow(place: Place, job_id: str, follower: Follower) -> Status:
    """Watch a job to its end. The log is read once more after the end, so that its last words are heard.

    Raises `NoCapacity` if the job waits for its instances longer than the recipe's patience, `Unreachable` if the
    cluster has not answered for `DEAF_S` seconds: the job goes on without us.
    """
    cursor, pause, follower.error = "", QUICKEST_S, ""
    waiting, answered = Waiting(place.recipe), time.monotonic()
    with report.progress(follower.step) as bar:
        while True:
            try:
                status = place.watcher.status(job_id)
                lines, cursor = place.watcher.logs(job_id, cursor)
            except Unreachable as error:
                pause = _deaf(follower.step, error, answered)
                continue
            answered = time.monotonic()
            waiting.look(follower.step, status)
            for line in lines:
                follower.take(line, bar)
            if status.state.done and not lines:
                return status
            pause = QUICKEST_S if lines or status.state is State.QUEUED else min(pause * 1.3, SLOWEST_S)
            time.sleep(pause)


def _deaf(step: str, error: Unreachable, answered: float) -> float:
    """Wait a moment for a cluster that does not answer; returns the pause to go on with."""
    if (silent := time.monotonic() - answered) > DEAF_S:
        raise error
    if silent > SLOWEST_S:
        report.relay([f"{step}: {error}; the job goes on meanwhile"])
    time.sleep(SLOWEST_S)
    return SLOWEST_S


class Waiting:
    """How long a job has waited for its instances."""

    def __init__(self, recipe: Recipe) -> None:
        cluster = recipe.cluster
        self._patience_s = float("inf") if isinstance(cluster, LocalCluster) else cluster.patience_minutes * 60
        self._since, self._told = time.monotonic(), ""

    def look(self, step: str, status: Status) -> None:
        """Tell what a queued job waits for; raises `NoCapacity` when that takes too long."""
        if status.state is not State.QUEUED:
            self._since = time.monotonic()
            return
        if status.reason and status.reason != self._told:
            self._told = status.reason
            report.say(f"{step}: queued, {status.reason}")
        if (waited := time.monotonic() - self._since) > self._patience_s:
            raise NoCapacity(
                f"{step}: no instances within {phrases.clock(waited)} ({status.reason or 'no reason was given'})"
            )
