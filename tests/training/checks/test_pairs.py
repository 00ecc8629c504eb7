"""The slow node, found by name among hosts in network namespaces; without root, what one machine can show."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from emulator import guests
from tests.training.checks.namespaces import Cluster
from tests.training.nursery import Nursery, result, write_job
from training.checks.pairs import Place, _of_node, _result, findings
from training.checks.search import Pair, Search

pytestmark = [pytest.mark.torch]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if not guests.possible() and not os.environ.get("CI"):
        pytest.skip("needs root, iproute2 and util-linux")
    made = Cluster(tmp_path, 4)
    yield made
    made.close()


@pytest.mark.root
def test_a_host_whose_link_is_slow_is_found_by_name(cluster: Cluster) -> None:
    cluster.limit(2, "50mbit")
    told = cluster.run("training.checks.pairs")
    (slow,) = told["slow"]
    assert (slow["node"], slow["host"]) == (2, "node2")
    assert slow["gbps"] < 0.0065  # 50 Mbit/s and what fits into the bucket
    assert slow["typical_gbps"] > 4 * slow["gbps"]
    assert told["hosts"] == ["node0", "node1", "node2", "node3"]
    assert all(len({node for pair in made for node in pair["nodes"]}) == 4 for made in told["rounds"])
    (finding,) = findings(told)
    assert (finding.severity, finding.node, finding.action) == ("refuse", "node2", "isolate")
    assert told["findings"] == [asdict(finding)]
    assert [(member["node"], member["host"]) for member in told["members"]][2] == (2, "node2")


@pytest.mark.root
def test_a_slow_way_between_two_good_hosts_is_told_as_that(cluster: Cluster) -> None:
    cluster.limit(1, "50mbit", to=2)  # they meet in the second round
    told = cluster.run("training.checks.pairs")
    assert told["slow"] == []
    assert [link["hosts"] for link in told["links"]] == [["node1", "node2"]]
    (finding,) = findings(told)
    assert "the way between node1 and node2 carries" in finding.what


@pytest.mark.parametrize("ranks", [1, 3])
def test_few_nodes_measure_and_nobody_is_accused(ranks: int, nursery: Nursery, tmp_path: Path) -> None:
    codes, run = nursery.run(write_job(tmp_path, {}), ranks, "training.checks.pairs")
    assert set(codes) == {0}, run.log.read_text()
    told = result(tmp_path / "out")
    assert (told["nodes"], told["slow"], told["links"]) == (ranks, [], [])
    assert all(pair["gbps"] > 0 for made in told["rounds"] for pair in made)
    assert findings(told) == []


@pytest.mark.parametrize(("broken", "devices"), [({1}, [1]), ({0, 1}, [])])
def test_of_a_slow_node_the_ranks_are_named_that_make_it_slow(broken: set[int], devices: list[int]) -> None:
    """Simulated: two ranks a node, of which some of node 2 are slow."""
    search, by_rank = Search(4, 1.5), []
    while pairs := search.next():
        speeds: dict[tuple[Pair, int], float] = {
            (pair, rank): 10.0 if 2 in pair and rank in broken else 45.0 for pair in pairs for rank in range(2)
        }
        by_rank.append(speeds)
        search.tell({pair: _of_node(pair, speeds) for pair in pairs})
    places = [Place(2 * node + rank, node, rank, f"node{node}") for node in range(4) for rank in range(2)]
    (slow,) = _result(search, by_rank, places)["slow"]
    assert (slow["host"], slow["gbps"], slow["typical_gbps"], slow["devices"]) == ("node2", 20, 90, devices)
