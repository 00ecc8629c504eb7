"""The same training on other machines: which is cheapest in time, which fastest for the money, what nothing beats."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Machine, plan
from planner.machine import instance
from planner.offers import Offer, cheapest, fastest, frontier, judged, planned, refusals, spans
from planner.profiles import Profiles
from recipes import Recipe

RECIPE = Recipe.model_validate(
    {
        "model": {"hidden_size": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "ffn_size": 8192},
        "train": {"precision": "bf16", "global_batch_size": 256, "steps": 20000},
    }
)


@pytest.fixture(scope="module")
def found() -> list[Offer]:
    machines = [instance("p4d.24xlarge"), instance("p5.48xlarge")]
    return [one for machine in machines for one in judged(RECIPE, machine, (1, 2, 3, 4), Profiles.shipped())]


def at(found: list[Offer], seconds: float, usd: float | None, gpus: int = 8) -> Offer:
    """An offer that takes and costs so much."""
    one = planned(found)[0]
    return replace(one, found=replace(one.best, total_seconds=seconds, usd=usd), gpus=gpus)


def test_every_machine_has_a_plan_or_a_reason(found: list[Offer]) -> None:
    assert [(one.machine, one.nodes, one.gpus) for one in found[3:5]] == [
        ("p4d.24xlarge", 4, 32),
        ("p5.48xlarge", 1, 8),
    ]
    assert all((one.found is None) == bool(one.why_not) for one in found)
    assert {str(one) for one in found if one.found is None} == {"3 x p4d.24xlarge", "3 x p5.48xlarge"}
    assert all(one.best.fits and one.best.layout.world_size == one.gpus for one in planned(found))


def test_an_offer_is_what_a_plan_says(llama3_8b: Callable[..., Recipe], p5: Machine) -> None:
    (one,) = judged(llama3_8b(), p5, [4], Profiles.shipped())
    assert one.best == plan(llama3_8b(), p5, 4, 8).best


@settings(max_examples=25, deadline=None)
@given(days=st.floats(0.02, 3), usd=st.floats(100, 3000))
def test_the_cheapest_meets_the_deadline_and_the_fastest_the_budget(
    found: list[Offer], days: float, usd: float
) -> None:
    able = planned(found)
    in_time = [one.usd for one in able if one.best.total_seconds + 1800 <= days * 86400]
    chosen = cheapest(found, days * 86400)
    assert (chosen and chosen.usd) == min(in_time, default=None)
    payable = [one.best.total_seconds for one in able if one.usd <= usd]
    quick = fastest(found, usd)
    assert (quick and quick.best.total_seconds) == min(payable, default=None)
    assert frontier(found)[0].best.total_seconds == min(one.best.total_seconds for one in able)


def test_without_limits_all_are_compared(found: list[Offer]) -> None:
    assert cheapest(found) == min(planned(found), key=lambda one: one.usd)
    assert fastest(found) == min(planned(found), key=lambda one: one.best.total_seconds)
    assert (cheapest([]), fastest([]), frontier([])) == (None, None, [])


def test_a_machine_without_a_price_is_never_the_cheapest_nor_under_a_budget(found: list[Offer]) -> None:
    unpriced = at(found, 1.0, None)
    priced = at(found, 9.0, 5.0)
    assert cheapest([unpriced, priced]) == priced
    assert fastest([unpriced, priced], 100.0) == priced
    assert fastest([unpriced, priced]) == unpriced
    assert frontier([unpriced, priced]) == [priced]
    assert frontier([unpriced]) == [unpriced]


@given(points=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=12))
def test_nothing_beats_what_is_on_the_frontier(found: list[Offer], points: list[tuple[int, int, int]]) -> None:
    machines = [at(found, float(seconds), float(usd), gpus) for seconds, usd, gpus in points]

    def covers(one: Offer, other: Offer) -> bool:
        return all(mine <= theirs for mine, theirs in zip(one.measures, other.measures, strict=True))

    front = frontier(machines)
    assert all(any(covers(one, machine) for one in front) for machine in machines)
    assert not any(covers(machine, one) and machine.measures != one.measures for one in front for machine in machines)
    assert front == sorted(front, key=lambda one: one.measures)


def test_reasons_are_told_once_for_each_type_and_kind(found: list[Offer]) -> None:
    first, second = refusals(judged(RECIPE, instance("g5.xlarge"), (3, 5, 9, 10, 64), Profiles.shipped()))
    assert first.startswith("3, 5 x g5.xlarge: ")
    assert "does not divide" in first
    assert second.startswith("9 to 10, 64 x g5.xlarge: ")
    assert "EFA" in second
    assert len(refusals(found)) == 2
    assert refusals(planned(found)) == []


def test_runs_of_numbers() -> None:
    assert spans([4]) == "4"
    assert spans([4, 5, 6, 9, 11, 12]) == "4 to 6, 9, 11 to 12"
