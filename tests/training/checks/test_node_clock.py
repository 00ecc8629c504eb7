"""The clocks of nodes, measured over real connections; one process adds to what this machine's clock says."""

import json

import pytest

from tests.training.checks.played import ranks
from training.checks import clock
from training.checks.clock import Skew

pytestmark = [pytest.mark.torch]

AHEAD_S = 3.3
RANK = f"""
import json, os, sys, time
from dataclasses import asdict
from training import ranks
from training.checks import clock
world = ranks.join()
ahead = int({AHEAD_S} * 1e9) if world.rank == 2 else 0
told = clock.measure(world, lambda: time.time_ns() + ahead)
if world.rank == 0:
    print(json.dumps([asdict(skew) for skew in told]))
world.part()
sys.stdout.flush()
os._exit(0)
"""


def test_a_clock_that_is_ahead_is_measured() -> None:
    said = ranks(3, "-c", RANK)
    skews = [Skew(**told) for told in json.loads(said[0].splitlines()[-1])]
    assert skews[0] == Skew(0.0, 0.0)
    for skew, ahead in zip(skews[1:], (0.0, AHEAD_S), strict=True):
        assert 0 < skew.uncertainty_s < 1
        assert abs(skew.seconds - ahead) <= skew.uncertainty_s + 0.001
    (finding,) = clock.judge({f"node{rank}": skew for rank, skew in enumerate(skews)})
    assert (finding.node, finding.severity, finding.device) == ("node2", "warn", "clock")
    assert finding.what == "its clock is 3.3 s ahead of the others"


def test_rank_zero_itself_may_be_wrong() -> None:
    skews = {"node0": Skew(0, 0), "node1": Skew(120, 0.01), "node2": Skew(120, 0.01), "node3": Skew(121, 0.01)}
    (finding,) = clock.judge(skews)
    assert (finding.node, finding.what) == ("node0", "its clock is 120.0 s behind the others")


def test_s3_refuses_a_clock_a_quarter_of_an_hour_off() -> None:
    skews = {"node0": Skew(0, 0), "node1": Skew(0, 0.01), "node2": Skew(1000, 0.01)}
    assert [(one.node, one.severity) for one in clock.judge(skews)] == [("node2", "refuse")]


def test_a_slow_network_proves_nothing() -> None:
    assert clock.judge({"node0": Skew(0, 0), "node1": Skew(0, 0), "node2": Skew(2.0, 1.5)}) == []
    assert clock.judge({}) == []
