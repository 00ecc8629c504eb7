"""Ranks out of two bandwidths: never wrong, and as sharp as two decimals allow."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from training.checks.bandwidth import TIMES, Row, factor, ranks_of, ranks_range, row, wire_rate

COLLECTIVES = st.sampled_from(sorted(TIMES))


def printed(collective: str, algbw: float, ranks: int) -> Row:
    """A row as nccl-tests prints it, with two decimals."""
    told = row(collective, 1 << 30, (1 << 30) / algbw / 1e9, ranks)
    told["algbw_gbps"], told["busbw_gbps"] = round(told["algbw_gbps"], 2), round(told["busbw_gbps"], 2)
    told["rounding"] = 0.005
    return told


@given(COLLECTIVES, st.floats(0.001, 2000), st.integers(1, 20_000))
def test_the_true_number_of_ranks_is_never_excluded(collective: str, algbw: float, ranks: int) -> None:
    low, high = ranks_of(printed(collective, algbw, ranks))
    assert low <= ranks <= high


@given(st.floats(1, 2000), st.integers(2, 5000))
def test_rounded_figures_tell_the_very_number_up_to_the_bound_that_is_stated(algbw: float, ranks: int) -> None:
    assume(ranks * (ranks + 1) < 2 * algbw / 0.03)
    assert ranks_of(printed("all_reduce", algbw, ranks)) == (ranks, ranks)


@given(st.floats(20, 2000), st.integers(1, 2000))
def test_half_of_the_ranks_missing_is_always_noticed(algbw: float, half: int) -> None:
    assume(half * 2 < algbw / 0.03)
    low, high = ranks_of(printed("all_reduce", algbw, half))
    assert high < 2 * half
    assert low <= half


@given(COLLECTIVES, st.floats(1e-6, 100), st.integers(1, 4096))
def test_unrounded_figures_are_exact(collective: str, seconds: float, ranks: int) -> None:
    assert ranks_of(row(collective, 1 << 26, seconds, ranks)) == (ranks, ranks)


def test_the_stated_bounds() -> None:
    assert ranks_of(printed("all_reduce", 260, 131)) == (131, 131)
    assert ranks_of(printed("all_reduce", 42, 52)) == (52, 52)


def test_rows_together_are_sharper_than_each_and_contradict_each_other_when_mixed() -> None:
    loose, sharp = printed("all_reduce", 1.0, 16), printed("all_reduce", 200, 16)
    assert ranks_of(loose) != (16, 16)
    assert ranks_range([loose, sharp]) == (16, 16)
    low, high = ranks_range([sharp, printed("all_reduce", 200, 8)])
    assert low > high


@pytest.mark.parametrize("collective", ["send_recv", "broadcast", "reduce"])
def test_collectives_of_factor_one_tell_nothing(collective: str) -> None:
    assert factor(collective, 8) == 1
    assert ranks_of(printed(collective, 100, 8)) == (1, math.inf)


def test_an_all_gather_of_before_2020_tells_nothing() -> None:
    old = Row(collective="all_gather", bytes=1, seconds=1, algbw_gbps=129.05, busbw_gbps=129.05, rounding=0.005)
    assert ranks_of(old) == (1, math.inf)


def test_what_the_wire_carries_between_two_nodes_is_algbw() -> None:
    assert wire_rate(row("all_reduce", 10**9, 0.01, 16), 2) == pytest.approx(100)
    assert wire_rate(row("all_reduce", 10**9, 0.01, 32), 4) == pytest.approx(150)
