"""What if the machine were another."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Machine, PlanError
from planner.whatif import RESOURCES, parse, what_if
from recipes import Recipe

Make = Callable[..., Recipe]


def test_factors_are_read_with_and_without_the_x() -> None:
    assert parse("nvlink=2x, efa=0.5X,flops=3") == {"nvlink": 2.0, "efa": 0.5, "flops": 3.0}


@pytest.mark.parametrize(
    "text", ["", "nvlink", "warp=2x", "nvlink=fast", "nvlink=0x", "nvlink=-1x", "efa=nan", "efa=inf"]
)
def test_nonsense_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(PlanError, match=r"^what-if: [^\n]*nvlink=2x[^\n]*\.$|^what-if: [^\n]*=2x\.$"):
        parse(text)


@given(name=st.sampled_from(sorted(RESOURCES)), factor=st.floats(0.01, 100))
def test_what_is_read_is_what_was_written(name: str, factor: float) -> None:
    assert parse(f"{name}={factor!r}x") == {name: factor}


def test_a_network_ten_times_slower_binds(llama3_8b: Make, p4de: Machine) -> None:
    recipe = llama3_8b(global_batch_size=64, sequence_length=1024, parallel={"strategy": "fsdp2"})
    found = what_if(recipe, p4de, 8, 8, {"efa": 0.02})
    assert found.same.layout == found.before.layout
    assert found.same.step_seconds > found.before.step_seconds
    again = what_if(recipe, p4de, 8, 8, {"efa": 50.0})
    assert again.same.step_seconds < found.before.step_seconds
    assert found.elasticity == again.elasticity
    assert "instead of" in str(found)
    assert found.binds in str(found)


def test_shares_of_the_step_are_shares(llama3_8b: Make, p5: Machine) -> None:
    found = what_if(llama3_8b(), p5, 4, 8, {"flops": 2.0})
    assert all(0 <= share <= 1 for share in found.elasticity.values())
    assert 0.2 < sum(found.elasticity.values()) <= 1.01
    assert found.binds == "flops"
    assert found.best.step_seconds < found.before.step_seconds


def test_twice_the_memory_changes_no_time_of_the_same_layout(llama3_8b: Make, p5: Machine) -> None:
    found = what_if(llama3_8b(), p5, 4, 8, {"capacity": 2.0})
    assert found.same.step_seconds == pytest.approx(found.before.step_seconds)
    assert found.best.step_seconds <= found.before.step_seconds * 1.03
