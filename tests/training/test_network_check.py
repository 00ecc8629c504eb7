"""The network proof: every rank is seen, every result is checked, bandwidths follow from the times."""

import csv
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.training.checks.saboteur import Saboteurs
from tests.training.forks import Run
from tests.training.nursery import Nursery, result, write_job
from training.checks import network
from training.checks.bandwidth import factor, ranks_range
from training.checks.gate import Expected, Seen, judge
from training.ranks import World

pytestmark = [pytest.mark.torch]
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
SMALL = {"checks": {"largest_mib": 1}}
DEBUG = Path(__file__).parent / "checks" / "logs" / "debug_p5en_efa.txt"


@pytest.fixture(scope="module")
def saboteurs() -> Iterator[Saboteurs]:
    made = Saboteurs()
    yield made
    made.close()


@dataclass(frozen=True)
class Proof:
    """A finished proof of two nodes."""

    run: Run
    output: Path

    @property
    def told(self) -> dict[str, Any]:
        return result(self.output)


@pytest.fixture(scope="module")
def proof(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    folder = tmp_path_factory.mktemp("proof")
    codes, run = nursery.run(write_job(folder, SMALL), 2, "training.checks.network")
    assert codes == [0, 0], run.log.read_text()
    return Proof(run, folder / "out")


def test_two_nodes_prove_their_network(proof: Proof) -> None:
    told = proof.told
    assert (told["ranks"], told["nodes"], told["correct"], told["left_out"]) == (2, 2, True, [])
    assert (told["backend"], told["provider"], told["fabrics"]) == ("gloo", "tcp", {})
    assert [(member["rank"], member["node"]) for member in proof.run.say("rank")] == [(0, 0), (1, 1)]
    assert {member["pid"] for member in told["members"]} == set(proof.run.pids)
    assert judge(told["rows"], Expected(2, 2), Seen.of(told)) == []


def test_every_size_of_every_collective_is_measured_all_reduces_first(proof: Proof) -> None:
    expected = [(name, 4096 << power) for name in COLLECTIVES for power in range(9)]
    assert [(row["collective"], row["bytes"]) for row in proof.told["rows"]] == expected
    for row in proof.told["rows"]:
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor(row["collective"], 2))


def test_the_table_beside_the_result_holds_the_same(proof: Proof) -> None:
    with (proof.output / "collectives.csv").open() as table:
        names, *lines = csv.reader(table)
    rows = [[row[name] for name in names] for row in proof.told["rows"]]
    assert [[line[0], *map(float, line[1:])] for line in lines] == rows


def test_progress_tells_what_is_measured_and_how_far_it_is(proof: Proof) -> None:
    lines = [fact for fact in proof.run.told if "done" in fact]
    assert [line["done"] for line in lines] == list(range(1, 46))
    assert {line["total"] for line in lines} == {45}
    assert [line["unit"] for line in lines[::9]] == COLLECTIVES
    assert set(lines[0]["metrics"]) == {"bytes", "seconds", "algbw_gbps", "busbw_gbps"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(ranks: int, nursery: Nursery, tmp_path: Path) -> None:
    codes, run = nursery.run(write_job(tmp_path, SMALL), ranks, "training.checks.network")
    assert set(codes) == {0}, run.log.read_text()
    told = result(tmp_path / "out")
    assert (told["ranks"], told["nodes"]) == (ranks, ranks)
    assert sorted({row["collective"] for row in told["rows"]}) == sorted(COLLECTIVES[: 4 if ranks == 1 else 5])
    assert ranks_range(told["rows"]) == (ranks, ranks)
    # what is split among the ranks is rounded down to whole elements of each, and counted so
    (least,) = [row["bytes"] for row in told["rows"] if row["collective"] == "all_gather"][:1]
    assert least == 4096 // 4 // ranks * ranks * 4


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_wrong_value_on_one_rank_is_refused(collective: str, saboteurs: Saboteurs, tmp_path: Path) -> None:
    codes, run = saboteurs.run(write_job(tmp_path, SMALL), 3, collective=collective)
    assert codes == [2, 2, 2], run.log.read_text()
    (error,) = run.say("error")
    size = 4096 if collective in ("all_reduce", "send_recv") else 4092
    culprit = 2 if collective == "send_recv" else 1  # who receives sees it
    assert f"the {collective} of {size} bytes gave 1 wrong values on rank {culprit}" in error["message"]
    assert not (tmp_path / "out" / "result.json").exists()


def test_what_there_is_no_time_for_is_left_out_and_said(saboteurs: Saboteurs, tmp_path: Path) -> None:
    codes, run = saboteurs.run(write_job(tmp_path, SMALL), 2, limit_s=0.02)
    assert codes == [0, 0], run.log.read_text()
    told = result(tmp_path / "out")
    assert told["left_out"]
    assert len(told["rows"]) < 45
    assert [fact["what"] for fact in run.say("left out")] == told["left_out"]
    assert {row["collective"] for row in told["rows"]} == set(COLLECTIVES)
    findings = judge(told["rows"], Expected(2, 2), Seen.of(told))
    assert [finding.what for finding in findings] == told["left_out"]


def test_sizes_follow_the_recipe_and_leave_an_element_for_every_rank() -> None:
    def sizes(largest: int | str, ranks: int, device: str) -> list[int]:
        world = SimpleNamespace(device=SimpleNamespace(type=device), size=ranks)
        return network.sizes(largest, cast("World", world))

    assert sizes("auto", 2, "cpu")[-1] == 16 << 20
    assert sizes("auto", 16, "cuda")[-1] == 2 << 30
    assert sizes(64, 16, "cuda") == [4096 << power for power in range(15)]
    assert sizes(1, 2000, "cpu")[0] == 8192


def test_what_nccl_wrote_becomes_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no NCCL here: its lines are recorded ones, the ranks two who wrote a half of them each."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")
    path = network.overhear()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"]) == ("INFO", str(path))
    first, second = DEBUG.read_text().split("8h200-3", 1)
    path.write_text("8h200-3" + second)
    gather: Callable[[str], list[str]] = lambda mine: [first, mine]  # noqa: E731
    world = SimpleNamespace(device=SimpleNamespace(type="cuda"), gather=gather)
    found = network._network(cast("World", world))
    assert found["provider"] == "efa+libfabric"
    assert found["fabrics"]["8h200-3"]["nics"] == 16
    assert not path.exists()
