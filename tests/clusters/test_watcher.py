"""One watcher asks for all jobs at once, at a bounded rate, whoever asks it."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from clusters.base import State, Status
from clusters.watcher import Watcher


class Counted:
    """A cluster that counts how often, and for how many jobs at once, it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.when: list[float] = []
        self.done: set[str] = set()

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        self.asked.append(len(job_ids))
        self.when.append(time.monotonic())
        return {job: Status(State.SUCCEEDED if job in self.done else State.RUNNING) for job in job_ids}

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        self.when.append(time.monotonic())
        return [job_id], after


def watcher(pace_s: float = 0.2, calls_per_s: float = 1000.0) -> tuple[Watcher, Counted]:
    cluster: Any = Counted()
    return Watcher(cluster, pace_s, calls_per_s), cluster


def test_many_jobs_are_asked_for_in_one_call() -> None:
    watch, cluster = watcher()
    threads = [threading.Thread(target=watch.status, args=(f"job-{n}",)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cluster.asked) <= 3
    assert max(cluster.asked) > 10


def test_the_cluster_is_not_asked_more_often_than_the_pace() -> None:
    watch, cluster = watcher(pace_s=0.1)
    until = time.monotonic() + 0.45
    while time.monotonic() < until:
        assert watch.status("job").state is State.RUNNING
    assert len(cluster.asked) <= 6
    assert all(later - earlier >= 0.1 for earlier, later in zip(cluster.when, cluster.when[1:], strict=False))


def test_a_job_that_has_ended_is_not_asked_for_again() -> None:
    watch, cluster = watcher(pace_s=0.01)
    cluster.done.add("short")
    assert watch.status("short").state is State.SUCCEEDED
    watch.status("long")
    time.sleep(0.02)
    watch.status("long")
    assert watch.status("short").state is State.SUCCEEDED
    assert cluster.asked == [1, 1, 1]


def test_logs_take_turns() -> None:
    watch, cluster = watcher(calls_per_s=20)
    for _ in range(4):
        watch.logs("job", "")
    assert all(later - earlier >= 0.045 for earlier, later in zip(cluster.when, cluster.when[1:], strict=False))
