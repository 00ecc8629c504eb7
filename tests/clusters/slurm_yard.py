"""A real Slurm for the tests of a session, and the adapter on it: a head and three nodes, one of them to spare."""

import atexit
import json
import os
from functools import cache
from pathlib import Path

import pytest

from clusters.slurm import SlurmCluster
from emulator import slurm
from emulator.slurm import SlurmGuests
from store import open_store

NODES = 3
GRACE_S = "2"
NEEDED = "needs root, iproute2 and the packages slurm-wlm and munge"

needs_slurm = pytest.mark.skipif(not slurm.possible() and not os.environ.get("CI"), reason=NEEDED)
"""On a build machine it must run, and fails where it cannot."""


@cache
def guests(share: Path) -> SlurmGuests:
    """The Slurm whose nodes share that folder; it runs until the tests end."""
    running = SlurmGuests(NODES, [share])
    running.start()
    atexit.register(running.stop)
    return running


def cluster(folder: Path) -> SlurmCluster:
    """The session's Slurm, with its jobs in that folder, which is a test's `tmp_path`."""
    reach = guests(folder.parent).reach()
    address = {"cluster": "slurm", "reach": json.dumps(reach), "folder": f"{folder}/jobs", "gpus": "0"}
    return SlurmCluster(address | {"python": "python", "grace_s": GRACE_S}, open_store(f"file://{folder}/store"))


def mend(share: Path) -> None:
    """Make the session's Slurm whole again: no jobs, all nodes up."""
    slurm = guests(share)
    slurm.sh("scancel --user=root")
    for node in slurm.nodes:
        if not slurm.alive(node):
            slurm.power_on(node)
    slurm.sh("for node in $(sinfo -h -N -t drain -o %N); do scontrol update nodename=$node state=resume; done")
    slurm.wait_idle()
