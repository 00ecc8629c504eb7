"""Calibration of a cluster: real ranks measure, rows hold together, slow ranks are named, a plan can rest on it."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner import local_machine
from planner.achieved import Achieved
from tests.training.crew import Crew
from tests.training.forks import Run
from tests.training.nursery import spec
from training.checks import calibrate
from training.checks.calibrate import PROGRAMS, behind, summary
from training.checks.links import SIZES, Links
from training.job import NodeJob
from training.ranks import World

pytestmark = [pytest.mark.torch]
WORK = f"{__name__}:work"
CPU = "cpu"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Ranks that start in milliseconds."""
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def measured(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Two nodes of two ranks that have measured everything."""
    folder = tmp_path_factory.mktemp("measured")
    codes, run = crew.run(WORK, 4, folder, nodes=2, program="")
    assert codes == [0] * 4, run.log.read_text()
    return run, folder


def work(world: World, folder: Path, *, program: str, framework: str = "castra") -> None:
    """Calibrate with samples so short that figures are rough: what they are is no test."""
    from training.checks import micro

    vars(micro)["SAMPLE_S"] = {CPU: 0.001}
    vars(micro)["ARRAY_BYTES"] = {CPU: 4 << 20}
    vars(micro)["FILE_BYTES"] = {CPU: 8 << 20}
    vars(micro)["SQUARES"] = {CPU: (64, 128)}
    case = {"framework": framework, "program": program}
    calibrate.calibrate(NodeJob(spec() | {"case": case}, folder / "out"), world)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out/result.json").read_text())
    return found


def test_two_nodes_of_two_ranks_measure_everything(measured: tuple[Run, Path]) -> None:
    run, folder = measured
    told = result(folder)
    assert (told["ranks"], told["nodes"], told["device"], told["precision"]) == (4, 2, "cpu", "fp32")
    whats = {row["what"] for row in told["rows"]}
    assert whats == {"gemm", "mlp", "attention", "embedding", "memory", "disk write", "disk read"} | {
        f"{what} {place}" for what in ("all_reduce", "send_recv") for place in ("inside", "between")
    }
    for row in told["rows"]:
        assert row["seconds"] > 0
        assert ("gflops" in row) == (row["what"] in ("gemm", "mlp", "attention"))
        assert row.get("gflops", 1) > 0
        assert row.get("gb_per_s", 1) > 0
        assert row["node"] == row["rank"] // 2
    seen = {what: {row["rank"] for row in told["rows"] if row["what"] == what} for what in whats}
    alone, all_ranks = {0, 2}, {0, 1, 2, 3}
    wanted = dict.fromkeys(("disk write", "disk read", "send_recv between"), alone)
    assert seen == {what: wanted.get(what, all_ranks) for what in whats}
    assert told["summary"].keys() == whats
    assert list(folder.glob("out/*")) == [folder / "out/result.json"]
    done = [fact for fact in run.told if fact.get("unit") == "measurement"]
    assert [fact["done"] for fact in done] == list(range(1, len(done) + 1))
    assert {fact["total"] for fact in done} == {len(done)}
    assert Achieved.of(told, local_machine(os.cpu_count() or 1, 8)).factors.keys() == {
        "flops", "attention", "memory", "intra",
    }  # fmt: skip


def amount(row: dict[str, Any]) -> float:
    """What a row's rate and time multiply to: gigaflops or gigabytes."""
    return float(row.get("gflops", 0) or row["gb_per_s"]) * float(row["seconds"])


def test_rates_are_of_the_work_that_was_done(measured: tuple[Run, Path]) -> None:
    rows = result(measured[1])["rows"]
    for row in rows:
        sides = [int(side) for side in re.findall(r"\d+", row["shape"])]
        if row["what"] == "gemm":
            assert amount(row) == pytest.approx(2 * sides[0] * sides[1] * sides[2] / 1e9)
        elif row["what"] == "mlp":  # gated: three matrices, each multiplied three times
            assert amount(row) == pytest.approx(3 * 3 * 2 * sides[0] * sides[1] * sides[2] / 1e9)
        elif row["what"] == "attention":  # a causal half of two products, and of five
            many, heads, length, width = sides
            assert amount(row) == pytest.approx(7 / 2 * 2 * many * heads * length**2 * width / 1e9)
        elif row["what"] == "memory":
            assert amount(row) == pytest.approx(3 * (4 << 20) / 1e9)
        elif row["what"].startswith(("all_reduce", "send_recv")):  # of two: an all-reduce sends the buffer once too
            assert amount(row) == pytest.approx(sides[0] * 1024 / 1e9)
    model = spec()["model"]
    head = model["vocab_size"], model["hidden_size"]
    shapes = {tuple(map(int, row["shape"].split("x"))) for row in rows if row["what"] == "gemm"}
    assert {(128, 128, 128), (64, 256, 64), (64, 64, 256)} <= shapes  # the sweep
    assert (2 * 32 * 2, min(head[0], 2048), head[1]) in shapes  # the recipe's own head, no side above the most


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_case_measures_what_it_asks_for_alone(program: str, crew: Crew, tmp_path: Path) -> None:
    codes, run = crew.run(WORK, 1, tmp_path, program=program)
    assert codes == [0], run.log.read_text()
    told = result(tmp_path)
    assert told["program"] == program
    wanted = {"disk": {"disk write", "disk read"}, "comms": set()}.get(program, {program})
    assert {row["what"] for row in told["rows"]} == wanted  # one rank has no links


def test_another_framework_s_program_is_no_measurement_s_name(crew: Crew, tmp_path: Path) -> None:
    codes, run = crew.run(WORK, 1, tmp_path, program="comms", framework="param")
    assert codes == [0], run.log.read_text()
    assert {"gemm", "memory", "disk read"} <= {row["what"] for row in result(tmp_path)["rows"]}


def test_an_unknown_program_and_a_closed_disk_are_one_sentence(crew: Crew, tmp_path: Path) -> None:
    codes, run = crew.run(WORK, 2, tmp_path / "a", program="dlrm")
    assert codes == [2, 2]
    known = ", ".join(PROGRAMS)
    wanted = f"case.program 'dlrm' is no measurement: take one of {known}, or leave it empty for all"
    assert {fact["message"] for fact in run.say("error")} == {wanted}
    (tmp_path / "b").mkdir()
    (tmp_path / "b/out").write_text("a file where the folder should be")
    codes, run = crew.run(WORK, 2, tmp_path / "b", program="disk")
    assert codes == [2, 2]
    (told,) = {fact["message"] for fact in run.say("error")}
    assert f"on {socket.gethostname()} cannot be measured: File exists" in told
    assert "Traceback" not in run.log.read_text()


def rows_of(what: str, seconds: list[float], shapes: int = 3) -> list[dict[str, Any]]:
    return [
        {"what": what, "shape": str(shape), "seconds": took * (shape + 1), "gflops": 1 / took, "rank": rank}
        for shape in range(shapes)
        for rank, took in enumerate(seconds)
    ]


def test_the_slow_rank_is_named_with_its_node_and_by_how_much() -> None:
    members = [{"rank": rank, "node": rank // 2, "host": f"ip-{rank // 2}"} for rank in range(4)]
    rows = [*rows_of("gemm", [1.0, 1.02, 1.0, 2.1]), *rows_of("memory", [1.0, 1.1, 1.25, 1.0])]
    assert behind(rows, members) == [{"what": "gemm", "rank": 3, "node": 1, "host": "ip-1", "times": 2.1}]
    assert behind(rows_of("gemm", [1.0, 3.0]), members)[0]["rank"] == 1  # of two, the slower


def test_one_disturbed_sample_names_nobody() -> None:
    members = [{"rank": rank, "node": 0, "host": "a"} for rank in range(4)]
    rows = rows_of("gemm", [1.0] * 4)
    rows[2]["seconds"] *= 9
    assert behind(rows, members) == []


def test_the_summary_is_the_best_shape_of_the_median_rank() -> None:
    rows = [*rows_of("gemm", [1.0, 1.0, 10.0], shapes=1), *rows_of("gemm", [2.0, 2.0, 2.0], shapes=1)]
    for row in rows[3:]:
        row["shape"] = "other"
    assert summary(rows) == {"gemm": 1.0}


@pytest.mark.parametrize(("size", "nodes", "places"), [(1, 1, 0), (2, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_links_are_counted_before_they_are_measured(size: int, nodes: int, places: int) -> None:
    import torch

    world = World(0, size, 0, 0, nodes, torch.device(CPU))
    assert Links.count(world) == 2 * places * len(SIZES[CPU])
