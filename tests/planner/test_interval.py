"""A checkpoint interval balances what saving costs against what a failure loses."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from planner.errors import PlanError
from planner.interval import (
    advise,
    between_failures_s,
    daly_s,
    planned_save_s,
    waste,
    young_s,
)

SAVES = some.floats(0.1, 600)
FAILURES = some.floats(3600, 1e8)


def test_the_published_run_gives_the_published_rate() -> None:
    assert between_failures_s(1) / 3600 == pytest.approx(50_700, rel=1e-3)
    assert between_failures_s(16_384) / 3600 == pytest.approx(54 * 24 / 419)


def test_64_nodes_that_save_in_a_minute_save_every_1_8_hours() -> None:
    failure_s = between_failures_s(64 * 8)
    assert young_s(60, failure_s) / 3600 == pytest.approx(1.8, abs=0.05)
    assert daly_s(60, failure_s) == pytest.approx(young_s(60, failure_s), rel=0.01)


@given(save=SAVES, failure=FAILURES, more=some.floats(1.1, 10))
def test_more_failures_and_quicker_saves_shorten_the_interval(save: float, failure: float, more: float) -> None:
    assert daly_s(save, failure / more) < daly_s(save, failure)
    assert young_s(save / more, failure) < young_s(save, failure)


@given(save=SAVES, failure=FAILURES, other=some.floats(0.05, 20))
def test_no_other_interval_wastes_noticeably_less_than_dalys(save: float, failure: float, other: float) -> None:
    best = daly_s(save, failure)
    assert waste(best, save, failure) <= waste(best * other, save, failure) * 1.01 + 1e-9


@given(save=SAVES, failure=FAILURES, interval=some.floats(1, 1e6), more=some.floats(1.1, 10))
def test_waste_grows_with_failures_and_with_slower_saves(
    save: float, failure: float, interval: float, more: float
) -> None:
    assert waste(interval, save, failure / more) > waste(interval, save, failure)
    assert waste(interval, save * more, failure) > waste(interval, save, failure)
    assert waste(interval, save, failure, restart_s=60) > waste(interval, save, failure)


def test_an_interval_beyond_all_failures_wastes_everything() -> None:
    assert waste(1e9, 60, 3600) == float("inf")
    assert daly_s(8000, 3600) == 3600


def test_advice_is_told_beside_what_the_recipe_says() -> None:
    found = advise(step_s=5, save_s=60, accelerators=512, yours=200, steps=100_000)
    assert found.every == 1300
    assert found.waste < found.your_waste
    assert str(found) == (
        "Save checkpoints every 1,300 steps (108 min), which wastes 1.9% of the time; yours every 200 steps wastes "
        "6.2%: one of the accelerators fails about every 4.12 days, a save takes 60 s."
    )


def test_a_good_interval_is_left_as_it_is() -> None:
    found = advise(step_s=5, save_s=60, accelerators=512, yours=1200, steps=100_000)
    assert str(found).startswith("Checkpoints every 1,200 steps waste 1.9%, hardly more than any: ")


def test_no_interval_is_longer_than_the_run_whose_last_step_is_saved_anyway() -> None:
    found = advise(step_s=0.1, save_s=0.5, accelerators=2, yours=5000, steps=900)
    assert found.every == 900
    assert found.your_waste == found.waste


@given(step=some.floats(1e-3, 100), save=SAVES, gpus=some.integers(1, 100_000), yours=some.integers(1, 10**6))
def test_what_is_advised_never_wastes_more_than_what_is_asked(step: float, save: float, gpus: int, yours: int) -> None:
    found = advise(step, save, gpus, yours, 10**6)
    assert found.waste <= found.your_waste * 1.02 + 1e-6 or found.every == 1
    assert str(found).endswith(".")


def test_a_save_is_planned_from_the_states_and_the_storage_of_all_nodes() -> None:
    assert planned_save_s(70e9, nodes=8) == pytest.approx(70 * 12 / 8)
    assert planned_save_s(70e9, nodes=8, gb_per_s=2.0) == pytest.approx(70 * 12 / 16)


@pytest.mark.parametrize(("step", "gpus"), [(0.0, 8), (float("nan"), 8), (1.0, 0)])
def test_what_cannot_be_is_one_sentence(step: float, gpus: int) -> None:
    with pytest.raises(PlanError, match="give a positive one"):
        advise(step, 60, gpus, 200, 1000)
