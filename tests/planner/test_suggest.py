"""What is suggested teaches most for its price, can be run, and is new."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from planner import suggest
from planner.calibrate import calibrate
from planner.constants import NAMES, start
from planner.errors import PlanError
from planner.profiles import Profiles
from planner.rows import Row, read, steps
from tests.planner.steps_table import as_measured, row, table

MEASURED = [row("a", 8, micro=2), row("b", 16, micro=2, recompute="full")]


def test_sensitivities_are_the_slopes_of_the_logarithm() -> None:
    found = dict(zip(NAMES, suggest.sensitivities(steps(MEASURED), start()).T, strict=True))
    np.testing.assert_allclose(found["scale"], 1.0, rtol=1e-6)  # its unit is a logarithm: everything follows it
    assert (found["gemm"] < 0).all()  # a larger share of the peak is faster
    assert not found["fp8"].any()  # bf16 knows nothing of it


def test_measuring_narrows_and_most_where_nothing_was_measured() -> None:
    candidates = steps([row("here", 8, micro=2), row("far", 1024)])
    beliefs = suggest.Beliefs(steps(as_measured(MEASURED)), candidates, start())
    before, gains = beliefs.open, beliefs.gains()
    assert gains[1] > gains[0] > 0
    beliefs.learn(1)
    assert beliefs.open < before
    assert beliefs.gains()[1] < gains[1]


def test_neighbours_divide_and_differ_in_what_their_program_was_seen_to_do() -> None:
    one = row("a", 8, micro=2, accumulation=3)
    found = list(suggest.neighbours(one, [one, row("b", 8, recompute="full")]))
    assert {(near["mbs"], near["dp"], near["recompute"]) for near in found} == {
        ("1", "8", "none"),  # half the micro-batch; twice does not divide 48 sequences over 8 ranks
        ("2", "4", "none"),
        ("2", "8", "full"),
    }
    for near in found:
        assert float(near["gbs"]) == 48 == float(near["dp"]) * float(near["mbs"]) * float(near["ga"])
        assert float(near["n_gpus"]) == float(near["shard_size"]) == float(near["dp"])
        assert near["iter_s"] == ""


def test_what_was_measured_is_not_suggested_again(profiles: Profiles) -> None:
    measured = as_measured(MEASURED)
    found = suggest.suggest(measured, profiles, 50)
    names = ("mbs", "ga", "dp", "recompute")
    layouts = {tuple(one.row[name] for name in names) for one in found}
    assert len(layouts) == len(found)
    assert not layouts & {tuple(told[name] for name in names) for told in measured}
    assert all(one.after < one.before for one in found)


def test_a_dear_measurement_must_teach_more(profiles: Profiles) -> None:
    cheap, dear = row("cheap", 8, micro=4), row("dear", 512, micro=4)
    (first, *_) = suggest.suggest([*as_measured(MEASURED), cheap, dear], profiles, 1)
    assert first.gpu_hours < 10


def test_no_candidate_is_one_sentence(profiles: Profiles) -> None:
    with pytest.raises(PlanError, match="no layout is left to measure"):
        suggest.suggest([], profiles, 3)


@pytest.fixture
def profiles() -> Profiles:
    """What the measured rows teach."""
    return calibrate(as_measured(MEASURED))


@pytest.fixture
def files(tmp_path: Path, profiles: Profiles) -> list[str]:
    profiles.save(tmp_path)
    rows: list[Row] = [*as_measured(MEASURED), row("c", 64), row("d", 8, hidden="2048", model="other")]
    return ["--profiles", str(tmp_path), "--rows", str(table(tmp_path / "rows.csv", rows))]


def test_the_command_names_rows_to_fill_in(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "next.csv"
    assert suggest.main([*files, "--count", "3", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert told.count("narrows the intervals from ±") == 3
    assert len(read(out).rows) == 3
    with out.open() as file:
        assert all(found["iter_s"] == "" for found in csv.DictReader(file))
    assert suggest.main([*files, "--count", "3"]) == 0
    assert capsys.readouterr().out == told


def test_the_command_keeps_to_a_model_and_speaks_to_programs(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggest.main([*files, "--model", "OTHER", "--json"]) == 0
    assert {one["row"]["model"] for one in json.loads(capsys.readouterr().out)} == {"other"}


def test_mistakes_are_one_sentence(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suggest.main([*files[:2], "--rows", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read as a table" in capsys.readouterr().err
    assert suggest.main([*files, "--model", "no such"]) == 2
    assert "no layout is left" in capsys.readouterr().err
    assert suggest.main([*files, "--out", str(tmp_path / "no/folder.csv")]) == 2
    assert "cannot be written" in capsys.readouterr().err
