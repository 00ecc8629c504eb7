"""The constants and what they are worth, on the shipped rows that others measured."""

import csv
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from planner.calibrate import chosen_on, derive, ratios
from planner.machine import Hardware
from planner.measured import TABLE, Measured, arrays, rows_in_scope, select
from planner.prior import table
from planner.speed import Prior

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> Measured:
    return arrays(rows_in_scope()[0])


@pytest.fixture(scope="module")
def derived(rows: Measured) -> dict[str, Prior]:
    return derive(rows)


def test_the_shipped_constants_are_those_the_shipped_rows_give(derived: dict[str, Prior]) -> None:
    for name, prior in derived.items():
        shipped = asdict(table()[name])
        for field, value in asdict(prior).items():
            assert shipped[field] == pytest.approx(value), (name, field)


@pytest.mark.parametrize("family", ["A100", "H100"])
def test_rows_the_constants_never_saw_are_predicted_within_six_percent(rows: Measured, family: str) -> None:
    unseen = select(rows, ~chosen_on(rows) & rows.certain & (rows.family == family))
    missed = np.abs(1 / ratios(unseen, table()[family]) - 1)
    assert len(missed) >= 25
    assert np.mean(missed) < 0.06


def test_nine_of_ten_unseen_rows_lie_in_the_interval(rows: Measured) -> None:
    inside: list[bool] = []
    for family in ("A100", "H100"):
        prior = table()[family]
        unseen = select(rows, ~chosen_on(rows) & (rows.family == family))
        found, deepspeed = ratios(unseen, prior), unseen.grid.software.deepspeed > 0
        low, high = (np.where(deepspeed, *pair) for pair in zip(prior.deepspeed_interval, prior.interval, strict=True))
        inside.extend((low <= found) & (found <= high))
    assert np.mean(inside) >= 0.9


def test_constants_scale_with_what_was_measured(rows: Measured, derived: dict[str, Prior]) -> None:
    """A cluster of faster machines must not be explained by other constants than a slower one's."""
    faster = Hardware(**{field.name: 2 * getattr(rows.hardware, field.name) for field in fields(Hardware)})
    again = derive(replace(rows, hardware=faster, seconds=rows.seconds / 2))
    assert again["A100"].gemm == pytest.approx(derived["A100"].gemm, abs=0.03)


def test_a_source_may_be_renamed(rows: Measured, derived: dict[str, Prior]) -> None:
    renamed = replace(rows, source=np.char.add("x-", rows.source))
    assert derive(renamed) == derived


def test_a_table_without_a_column_is_refused_by_its_name(tmp_path: Path) -> None:
    with TABLE.open(newline="") as file:
        first = next(csv.DictReader(file))
    del first["mbs"]
    broken = tmp_path / "rows.csv"
    broken.write_text(",".join(first) + "\n" + ",".join(first.values()) + "\n")
    with pytest.raises(ValueError, match=r"rows.csv lacks the column mbs"):
        rows_in_scope(broken)


def test_the_report_runs_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.planner_accuracy"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "held out" in told.stdout
    assert "memory: 7 rows" in told.stdout
    absent = subprocess.run([*command, tmp_path / "no.csv"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "no.csv" in absent.stderr
