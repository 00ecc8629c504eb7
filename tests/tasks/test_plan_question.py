"""Questions as they are typed, and one sentence for those that make no sense."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters.base import Refused
from tasks import plan_question as question


def test_questions_as_they_are_typed() -> None:
    assert question.instances("p4d.24xlarge, p5.48xlarge,p4d.24xlarge") == ("p4d.24xlarge", "p5.48xlarge")
    assert question.nodes("4..6,8,6") == (4, 5, 6, 8)
    assert question.nodes("1") == (1,)
    assert [question.deadline(text) for text in ("7d", "36h", "90min", "0.5w")] == [604800, 129600, 5400, 302400]
    assert question.dollars(50000) == 50000
    assert question.top(1) == 1


@given(first=st.integers(1, 400), more=st.integers(0, 50))
def test_a_range_has_both_its_ends(first: int, more: int) -> None:
    assert question.nodes(f"{first}..{first + more}") == tuple(range(first, first + more + 1))


@pytest.mark.parametrize("text", ["0", "8..4", "-1", "four", "", "4..", "1.5", "4096..5000", "4...8", "8,", "1e3"])
def test_numbers_of_nodes_that_make_no_sense(text: str) -> None:
    with pytest.raises(Refused, match=r"^--nodes .*"):
        question.nodes(text)


@pytest.mark.parametrize("text", ["soon", "7", "d", "0d", "-3h", "7 years", "1e9d", ""])
def test_deadlines_that_make_no_sense(text: str) -> None:
    with pytest.raises(Refused, match="write it as 7d, 36h, 90min or 2w"):
        question.deadline(text)


@pytest.mark.parametrize("amount", [0, -5, float("nan"), float("inf")])
def test_budgets_that_make_no_sense(amount: float) -> None:
    with pytest.raises(Refused, match="above 0"):
        question.dollars(amount)


def test_nothing_named_and_nothing_shown() -> None:
    with pytest.raises(Refused, match="name instance types"):
        question.instances(" , ")
    with pytest.raises(Refused, match="at least 1"):
        question.top(0)


@given(st.text(max_size=12))
def test_whatever_is_typed_is_a_question_or_one_sentence(text: str) -> None:
    for read in (question.instances, question.nodes, question.deadline):
        with contextlib.suppress(Refused):
            assert read(text)
