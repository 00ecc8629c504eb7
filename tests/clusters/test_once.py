"""A job is submitted once, whoever dies when, on a service that takes equal names and lists a new job late."""

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from clusters import ledger, once
from clusters.base import Job, Unreachable
from clusters.ledger import Claim
from store import Store, open_store

LAG_S = 0.2
NEAR = {"cluster": "bureau", "workdir": "here", "endpoint": "near"}
CLAIM = Claim("run", datetime.now(UTC) + timedelta(hours=1), owner="tester")


class Died(BaseException):
    """The process was killed at this point."""


class Bureau:
    """A scheduler that knows no unique names: what a request made shows in its list a moment later."""

    def __init__(self, dies: str = "") -> None:
        self.dies = dies
        self.jobs: list[tuple[str, float]] = []

    def submit(self, job: Job) -> str:
        if self.dies == "before":
            raise Died
        self.jobs.append((job.name, time.monotonic()))
        if self.dies == "after":
            raise Died
        return f"id-{len(self.jobs)}"

    def find(self, name: str) -> str | None:
        shown = (
            f"id-{at}"
            for at, (known, made) in enumerate(self.jobs, 1)
            if known == name and time.monotonic() - made > LAG_S
        )
        return next(shown, None)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "NEAR_GRACE_S", 0.8)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def submit(store: Store, bureau: Any, name: str = "train-1") -> str:
    return once.submit(store, CLAIM, bureau, Job(name, "training.run", {}), NEAR)[0]


def test_the_second_time_it_is_attached_to_without_asking_anybody(store: Store) -> None:
    bureau = Bureau()
    assert submit(store, bureau) == submit(store, bureau) == "id-1"
    assert len(bureau.jobs) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_the_submission_there_is_one_job(store: Store, when: str) -> None:
    bureau = Bureau(dies=when)
    with pytest.raises(Died):
        submit(store, bureau)
    bureau.dies = ""
    assert submit(store, bureau) == "id-1"
    assert len(bureau.jobs) == 1
    assert [(entry.state, entry.id) for entry in ledger.entries(store)] == [("created", "id-1")]


def test_a_job_that_shows_late_is_waited_for(store: Store) -> None:
    bureau = Bureau(dies="after")
    with pytest.raises(Died):
        submit(store, bureau)
    (entry,) = ledger.open_entries(store)
    assert bureau.find("train-1") is None, "it does not show yet"
    assert once.look(bureau, entry) == "id-1"  # type: ignore[arg-type]  # all of a cluster that is asked for here


def test_many_at_once_make_one_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "NEAR_GRACE_S", 3.0)  # nobody's disk is asked to be faster than its real grace
    bureau, ids = Bureau(), []

    def go() -> None:
        while True:
            try:
                ids.append(submit(store, bureau))
            except Unreachable:
                continue
            return

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(ids) == {"id-1"}
    assert len(bureau.jobs) == 1


def test_the_intent_of_another_is_not_taken_for_ones_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bureau, real = Bureau(), ledger.intend

    def late(*told: Any) -> ledger.Entry:
        monkeypatch.setattr(ledger, "intend", real)
        real(store, CLAIM, "job", "train-1", NEAR)  # another's, written after we had begun
        return real(*told)

    monkeypatch.setattr(ledger, "intend", late)
    begun = time.monotonic()
    assert submit(store, bureau) == "id-1"
    assert time.monotonic() - begun > once.NEAR_GRACE_S, "the other's job was not waited for"


def test_whoever_was_frozen_before_submitting_does_not_submit_any_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bureau, real = Bureau(), ledger.intend

    def slowly(*told: Any) -> ledger.Entry:
        entry = real(*told)
        time.sleep(0.4)
        return entry

    monkeypatch.setattr(ledger, "intend", slowly)
    with pytest.raises(Unreachable, match="too slow"):
        submit(store, bureau)
    assert bureau.jobs == []


def test_a_job_stays_where_it_was_submitted_when_its_cluster_changes(store: Store) -> None:
    bureau: Any = Bureau()
    submit(store, bureau)
    moved = NEAR | {"JobQueue": "another"}
    assert once.submit(store, CLAIM, bureau, Job("train-1", "training.run", {}), moved) == ("id-1", NEAR)
