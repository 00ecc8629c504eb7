"""What a run costs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters.stacks.files import MB_PER_S_PER_TIB
from planner import Machine, plan
from planner.cost import PRICES, Extras, Prices, bill, per_billion_tokens, storage
from planner.machine import instance
from recipes import Recipe

P5 = instance("p5.48xlarge")


def test_instances_are_paid_by_the_hour_and_while_they_come_up() -> None:
    paid = bill(P5, 4, 7200.0, Extras())
    assert paid["instances"] == pytest.approx(4 * 2 * 55.04)
    assert paid["set-up"] == pytest.approx(4 * 0.5 * 55.04)
    assert set(paid) == {"instances", "set-up", "storage"}


def test_an_image_that_is_baked_takes_half_an_hour_of_one_instance() -> None:
    assert bill(P5, 4, 7200.0, Extras(builds_image=True))["image build"] == pytest.approx(27.52)


def test_storage_is_disks_the_shared_file_system_and_what_stays() -> None:
    prices = Prices(s3=1.0, gp3=0.0, lustre=0.0)
    assert storage(1, 730.0, Extras(parameters=1e9, checkpoints=2), prices) == pytest.approx((24 + 4) * 2)
    prices = Prices(s3=0.0, gp3=1.0, lustre=0.0)
    assert storage(2, 365.0, Extras(), prices) == pytest.approx(2 * 500 * 2**30 / 1e9 / 2)
    prices = Prices(s3=0.0, gp3=0.0, lustre=0.145)
    assert storage(2, 730.0, Extras(lustre_gib=1200), prices) == pytest.approx(1200 * 2**30 / 1e9 * 0.145)


def test_the_shared_file_system_is_priced_in_the_class_that_is_made() -> None:
    assert MB_PER_S_PER_TIB == 250
    assert PRICES.lustre == 0.210


def test_an_unknown_price_is_no_bill() -> None:
    unpriced = replace(P5, price_usd_per_hour=None)
    assert bill(unpriced, 4, 7200.0, Extras()) == {}
    assert per_billion_tokens(unpriced, 4, 1e5) is None


@given(nodes=st.integers(1, 64), seconds=st.floats(1, 1e7), speed=st.floats(1e3, 1e8))
def test_dollars_per_billion_tokens_are_the_instances_alone(nodes: int, seconds: float, speed: float) -> None:
    each = per_billion_tokens(P5, nodes, speed)
    assert each is not None
    assert each * speed * seconds / 1e9 == pytest.approx(bill(P5, nodes, seconds, Extras())["instances"])


def test_a_recipe_says_what_is_baked_and_kept(llama3_8b: Callable[..., Recipe], p5: Machine) -> None:
    recipe = llama3_8b()
    plain = plan(recipe, p5, nodes=4, processes_per_node=8).best
    assert plain.usd == pytest.approx(sum(plain.bill.values()))
    baked = recipe.model_copy(update={"image": recipe.image.model_copy(update={"flavour": "pcluster-gpu"})})
    more = plan(baked, p5, nodes=4, processes_per_node=8).best
    assert more.bill["image build"] == pytest.approx(0.5 * 55.04)
    told = {"flavour": "pcluster-gpu", "ami": "ami-0123456789abcdef0"}
    there = recipe.model_copy(update={"image": recipe.image.model_copy(update=told)})
    assert "image build" not in plan(there, p5, nodes=4, processes_per_node=8).best.bill
    hoard = recipe.model_copy(update={"train": recipe.train.model_copy(update={"keep_checkpoints": 20})})
    assert plan(hoard, p5, nodes=4, processes_per_node=8).best.bill["storage"] > plain.bill["storage"]
