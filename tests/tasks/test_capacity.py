"""The ladder as flows climb it: from where it stands, in time for a block, away before its end."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from clusters.base import NoCapacity
from recipes import Recipe
from tasks import capacity, ground, report
from tasks.ground import Ground
from tests.sky import emulator, site, tell

__all__ = ["emulator", "site"]

BLOCK = "cr-0123456789abcdef0"
NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def no_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_at_leisure", lambda _call: None)


@pytest.fixture
def reserve(site: Site) -> Iterator[Any]:
    """Make a capacity block."""

    def make(begins: datetime, ends: datetime) -> None:
        row = {"id": BLOCK, "type": "p5.48xlarge", "zone": "us-east-1a", "count": 2, "block": True}
        tell(site.endpoint, "reservations", [row | {"start": begins.isoformat(), "end": ends.isoformat()}])

    yield make
    tell(site.endpoint, "reservations", method="DELETE")


def recipe(folder: Path, **cluster: Any) -> Recipe:
    told = {"kind": "batch", "instance_type": "p5.48xlarge", "nodes": 2} | cluster
    return Recipe.model_validate({"name": "big", "store": str(folder), "cluster": told})


def names(rungs: list[Recipe]) -> list[str]:
    return [str(capacity.rung_of(one)) for one in rungs]


def test_every_way_is_tried_in_order(tmp_path: Path) -> None:
    told = recipe(
        tmp_path,
        capacity=[f"block:{BLOCK}", "on-demand"],
        zones=["us-east-1a", "us-east-1b"],
        alternatives=["p5en.48xlarge"],
    )
    assert names(capacity.every(told)) == [
        f"{kind}, {market}, in {zone}"
        for market in (f"block:{BLOCK}", "on-demand")
        for kind in ("p5.48xlarge", "p5en.48xlarge")
        for zone in ("us-east-1a", "us-east-1b")
    ]


def test_what_stands_is_gone_on_with(tmp_path: Path) -> None:
    told = recipe(tmp_path, alternatives=["p5en.48xlarge", "p6-b200.48xlarge"])
    second = capacity.every(told)[1]
    address = {"cluster": "batch", "region": "us-east-1", "endpoint": "", "memory": ""}
    ground.write(told, Ground(address, second.cluster.model_dump(mode="json"), NOW.isoformat()))
    assert names(capacity.rungs(told)) == ["p5en.48xlarge, on-demand", "p6-b200.48xlarge, on-demand"]


def test_the_zones_are_those_that_offer_the_type(tmp_path: Path, site: Site) -> None:
    zones = capacity.zones(capacity.located(recipe(tmp_path, region="sa-east-1")))
    assert zones == ("sa-east-1c",)
    named = recipe(tmp_path, zones=["us-east-1b"])
    assert capacity.located(named) is named


def test_a_block_is_waited_for_and_left_before_it_ends(tmp_path: Path, site: Site, reserve: Any) -> None:
    begins, ends = datetime.now(UTC) + timedelta(seconds=3), NOW + timedelta(hours=5)
    reserve(begins, ends)
    told = recipe(tmp_path, capacity=[f"block:{BLOCK}"])
    leaves = capacity.awaited(told, site)
    assert datetime.now(UTC) >= begins - timedelta(seconds=1), "EC2 tells whole seconds"
    assert leaves
    assert abs((ends - leaves).total_seconds() - 35 * 60) < 2


def test_a_block_that_is_about_to_end_is_no_capacity(tmp_path: Path, site: Site, reserve: Any) -> None:
    now = datetime.now(UTC)  # the module may have been read more than 20 minutes ago
    reserve(now - timedelta(hours=2), now + timedelta(minutes=20))
    with pytest.raises(NoCapacity, match="too late to start on it"):
        capacity.awaited(recipe(tmp_path, capacity=[f"block:{BLOCK}"]), site)


def test_what_is_not_reserved_is_there_or_not(tmp_path: Path, site: Site) -> None:
    assert capacity.awaited(recipe(tmp_path), site) is None
