"""What stands is found by every flow, limits what may still run, and is forgotten with its emulator."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from clusters.base import Refused
from recipes import Recipe
from tasks import ground
from tasks.ground import Ground


def ago(**time: float) -> str:
    """When that long ago was; in the future if it is negative."""
    return (datetime.now(UTC) - timedelta(**time)).isoformat()


def recipe(folder: Path, **budget: float) -> Recipe:
    cluster = {"kind": "batch", "instance_type": "p5.48xlarge", "nodes": 2, "alternatives": ["p5en.48xlarge"]}
    return Recipe.model_validate({"name": "big", "store": str(folder), "cluster": cluster, "budget": budget})


def stand(told: Recipe, **more: Any) -> Ground:
    address = {"cluster": "batch", "region": "us-east-1", "endpoint": "", "memory": "", "image": "i"}
    taken = told.cluster.model_dump(mode="json") | {"instance_type": "p5en.48xlarge", "alternatives": []}
    made = Ground(address, taken, **{"since": ago(), **more})
    ground.write(told, made)
    return made


def test_nothing_stands_until_it_is_provisioned(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    assert ground.read(told) is None
    assert ground.settled(told) is told
    with pytest.raises(Refused, match=r"python -m flows\.provision"):
        ground.place_of(told)


def test_a_recipe_settles_on_the_capacity_that_was_got(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    stand(told)
    assert ground.settled(told).cluster.instance_type == "p5en.48xlarge"  # type: ignore[union-attr]  # it is batch
    ground.strike(told)
    assert ground.settled(told) is told


def test_what_stood_in_an_emulator_that_is_gone_stands_no_more(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    made = stand(told)
    gone = {**made.address, "endpoint": "http://127.0.0.1:9", "memory": "gone"}
    ground.write(told, Ground(gone, made.cluster, made.since))
    assert ground.read(told) is None


def limit(told: Recipe, made: Ground, wanted_s: int = 36_000) -> int:
    place: Any = ground.Place(told, None, None, None, made)  # type: ignore[arg-type]  # no cluster is asked here
    return int(place.time_limit_s(wanted_s))


def test_a_job_is_given_no_more_time_than_the_budget_pays_for(tmp_path: Path) -> None:
    told = recipe(tmp_path, max_usd=500)
    made = stand(told, since=ago(hours=1))
    assert made.usd_per_hour == pytest.approx(2 * 63.296)
    left = (500 - 2 * 63.296) / (2 * 63.296) * 3600
    assert limit(told, made) == pytest.approx(left - ground.CLEAR_S, abs=5)
    assert limit(told, made, 600) == 600


def test_a_job_ends_before_its_capacity_block_does(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    made = stand(told, until=ago(hours=-2))
    assert limit(told, made) == pytest.approx(7200 - ground.CLEAR_S, abs=5)


def test_when_the_money_is_spent_nothing_more_is_started(tmp_path: Path) -> None:
    told = recipe(tmp_path, max_usd=100)
    made = stand(told, since=ago(hours=1))
    with pytest.raises(Refused, match=r"budget\.max_usd is used up"):
        limit(told, made)
