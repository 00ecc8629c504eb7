"""Leases: one holder at a time, the dead do not block the living."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from store import Store
from store.lease import Busy, lease

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from store import open_store
from store.lease import lease
with lease(open_store(sys.argv[1]), "lifecycle-tiny"):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(url: str) -> subprocess.Popen[str]:
    """A process that holds the lease."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen([sys.executable, "-c", HOLD, url], env=env, stdout=subprocess.PIPE, text=True)
    assert started.stdout
    assert started.stdout.readline() == "held\n"
    return started


def test_a_held_lease_names_its_holder_and_ends_with_it(store: Store, url: str) -> None:
    other = holder(url)
    told = rf"is being run by process {other.pid} on .*: wait for it, or stop it"
    with pytest.raises(Busy, match=told), lease(store, "lifecycle-tiny"):
        raise AssertionError("held by two")
    other.send_signal(signal.SIGKILL)
    other.communicate()
    with lease(store, "lifecycle-tiny"):
        assert store.get("leases/lifecycle-tiny.json")
    assert store.get("leases/lifecycle-tiny.json") is None


def test_different_things_are_held_side_by_side(store: Store) -> None:
    with lease(store, "a"), lease(store, "b"):
        assert store.keys("leases/") == ["leases/a.json", "leases/b.json"]


def test_a_lease_is_given_back_after_a_failure(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), lease(store, "a"):
        raise ZeroDivisionError
    assert store.keys("leases/") == []


@pytest.mark.parametrize(("seconds", "free"), [(60, False), (-1, True)])
def test_a_holder_elsewhere_is_believed_until_its_time_is_over(store: Store, seconds: float, free: bool) -> None:
    told = {"what": "a", "host": "far", "machine": "away", "pid": os.getpid(), "born": "1", "token": "t"}
    store.put("leases/a.json", json.dumps(told | {"expires": time.time() + seconds}).encode())
    if free:
        with lease(store, "a"):
            pass
    else:
        with pytest.raises(Busy, match="on far"), lease(store, "a"):
            pass


def test_a_pid_that_was_used_again_is_not_the_holder(store: Store) -> None:
    with lease(store, "a"):
        there = store.get("leases/a.json")
    assert there
    store.put("leases/a.json", json.dumps(json.loads(there.data) | {"born": "1"}).encode())
    with lease(store, "a"):
        pass
