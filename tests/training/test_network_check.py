"""The network proof: every rank is seen, sums are right, bandwidths follow from the times."""

from pathlib import Path

import pytest

from tests.training.nursery import Nursery, result, write_job

pytestmark = [pytest.mark.torch]


def test_two_nodes_prove_their_network(nursery: Nursery, tmp_path: Path) -> None:
    codes, run = nursery.run(write_job(tmp_path, {}), 2, "training.checks.network")
    assert codes == [0, 0], run.log.read_text()
    told = result(tmp_path / "out")
    assert (told["ranks"], told["nodes"], told["correct"], told["backend"]) == (2, 2, True, "gloo")
    assert [row["bytes"] for row in told["rows"]] == [4096 << power for power in range(13)]
    for row in told["rows"]:
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"])  # 2 (n - 1) / n is 1 for two ranks
    assert [(member["rank"], member["node"]) for member in run.say("rank")] == [(0, 0), (1, 1)]
    assert {member["pid"] for member in told["members"]} == set(run.pids)


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_and_a_chosen_size(ranks: int, nursery: Nursery, tmp_path: Path) -> None:
    job = write_job(tmp_path, {"network": {"max_bytes": 16384}})
    codes, run = nursery.run(job, ranks, "training.checks.network")
    assert set(codes) == {0}, run.log.read_text()
    told = result(tmp_path / "out")
    assert (told["ranks"], told["nodes"]) == (ranks, ranks)
    assert [row["bytes"] for row in told["rows"]] == [4096, 8192, 16384]
    factor = 2 * (ranks - 1) / ranks
    assert all(row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor) for row in told["rows"])
