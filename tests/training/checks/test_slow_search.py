"""Planted slow nodes and links in simulated clusters: found by number, in few rounds, and nobody else is accused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.checks.search import Pair, Search

FACTOR = 3.0


def searched(
    nodes: int, slow: set[int], links: set[Pair], speeds: st.DataObject, spread: float = 0.2, hiccup: int | None = None
) -> Search:
    """Search a cluster whose pairs vary by e^±spread; what is slow is six times slower."""
    search = Search(nodes, FACTOR)
    while pairs := search.next():
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)) >= nodes - 1  # a matching that leaves out one at most
        told = {}
        for pair in pairs:
            told[pair] = 10 * math.exp(speeds.draw(st.floats(-spread, spread)))
            if slow & set(pair) or pair in links or (hiccup in pair and len(search.rounds) == 0):
                told[pair] /= 6
        search.tell(told)
    return search


@given(st.integers(2, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_is_accused_where_all_are_healthy(nodes: int, data: st.DataObject) -> None:
    search = searched(nodes, set(), set(), data, spread=0.5)
    assert search.verdict.nodes == {}
    assert search.verdict.links == {}
    assert len(search.rounds) == (3 if nodes == 3 else math.ceil(math.log2(nodes)))


@given(st.integers(3, 40), st.data())
@settings(max_examples=100, deadline=None)
def test_a_quarter_of_the_nodes_may_be_slow(nodes: int, data: st.DataObject) -> None:
    slow = data.draw(st.sets(st.integers(0, nodes - 1), max_size=max(1, nodes // 4)))
    search = searched(nodes, slow, set(), data)
    assert set(search.verdict.nodes) == slow
    assert search.verdict.links == {}
    assert search.verdict.unsettled == ()
    assert all(speed * FACTOR < search.verdict.typical for speed in search.verdict.nodes.values())
    assert len(search.rounds) <= math.log2(nodes) + 4


@given(st.integers(4, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_slow_way_between_two_good_nodes_is_no_slow_node(nodes: int, data: st.DataObject) -> None:
    pairs = Search(nodes, FACTOR).next()
    assert pairs
    link = data.draw(st.sampled_from(pairs))
    search = searched(nodes, set(), {link}, data)
    assert set(search.verdict.links) == {link}
    assert search.verdict.nodes == {}


@given(st.integers(4, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_hiccup_accuses_nobody(nodes: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    search = searched(nodes, set(), set(), data, hiccup=node)
    assert search.verdict.nodes == {}
    assert search.verdict.links == {}


def test_a_node_that_was_fast_once_is_still_found() -> None:
    search = Search(4, FACTOR)
    while pairs := search.next():
        slow = {3} if search.rounds else set()
        search.tell({pair: 1.0 if slow & set(pair) else 10.0 for pair in pairs})
    assert set(search.verdict.nodes) == {3}
    assert search.verdict.links == {}


def test_two_nodes_cannot_accuse_each_other() -> None:
    search = Search(2, FACTOR)
    assert search.next() == [(0, 1)]
    search.tell({(0, 1): 0.001})
    assert search.next() is None
    assert search.verdict.nodes == {}


@pytest.mark.parametrize(("nodes", "rounds"), [(4, 2), (5, 3), (64, 6), (512, 9)])
def test_the_first_rounds_are_log2_and_never_repeat_a_pair(nodes: int, rounds: int) -> None:
    search = Search(nodes, FACTOR)
    met: set[Pair] = set()
    for _ in range(rounds):
        pairs = search.next()
        assert pairs
        assert not met & set(pairs)
        met |= set(pairs)
        search.tell(dict.fromkeys(pairs, 1.0))
    assert search.next() is None
