"""The table of cases is what the tests proved: every cell filled, the strongest proof shown, and nothing invented."""

import sys
from pathlib import Path

import pytest

from benchmarks import matrix
from tests.training.cases.matrix import FOLDER, KINDS, record

CASES = ("ddp", "nemo")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of two cases, all cells filled."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "results"))
    for kind in KINDS:
        for case in CASES:
            record(case, kind, "rendered", "test_b")
    record("ddp", "local", "ran", "test_a")
    record("ddp", "eks", "emulated", "test_a")
    monkeypatch.setattr(matrix, "TABLE", tmp_path / "table.md")
    monkeypatch.setattr(matrix, "CASES", tmp_path / "cases")
    (tmp_path / "cases").mkdir()
    for case in CASES:
        (tmp_path / f"cases/{case}.yaml").touch()
    return tmp_path / "results"


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["matrix", *map(str, words)])
    return matrix.main()


def test_nothing_is_written_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    record("ddp", "local", "ran", "a test")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="moon"):
        record("ddp", "moon", "ran", "a test")


def test_the_strongest_proof_is_shown_and_the_reference_beside_it(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, results) == 0
    told = matrix.TABLE.read_text()
    rendered = "rendered + arguments checked"
    assert f"| ddp | ran | {rendered} | {rendered} | emulated | {rendered} |" in told
    assert "2 cases, 10 cells: 1 ran, 1 emulated, 8 rendered" in told
    assert "| 2.nemo-launcher | ✅ | ❌ | ❌ |" in told
    assert "| ddp | eks | emulated | test_a |" in told
    assert run(monkeypatch, results, "--check") == 0


def test_a_table_that_says_otherwise_is_told(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, results) == 0
    matrix.TABLE.write_text(matrix.TABLE.read_text().replace("| emulated |", "| ran |", 1))
    assert run(monkeypatch, results, "--check") == 1
    assert "is not what the tests prove" in capsys.readouterr().err


def test_blanks_and_inventions_are_told(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (matrix.CASES / "late.yaml").touch()
    record("gone", "local", "ran", "test_a")
    assert run(monkeypatch, results) == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [*(f"late has no result on {kind}" for kind in KINDS), "recipes/cases has no gone.yaml"]
    assert not matrix.TABLE.exists()
    assert run(monkeypatch, results / "nowhere") == 1
    assert "has no results" in capsys.readouterr().err
