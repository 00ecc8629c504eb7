"""Tables of measured steps: read as they are meant, refused with the line and the column."""

from pathlib import Path

import numpy as np
import pytest

from planner.errors import BadTable
from planner.rows import read, release_of, steps
from planner.schema import RECOMPUTE
from tests.planner.steps_table import row, table

SHIPPED = Path(__file__).parents[2] / "planner" / "tables" / "measured.csv"


def test_every_shipped_row_is_read() -> None:
    found = read(SHIPPED)
    assert len(found.rows) == 588
    assert np.isfinite(found.seconds).sum() == 581
    assert found.ran_out.sum() == 5


def test_a_row_becomes_the_configuration_it_states() -> None:
    found = steps([row("a", 16, micro=2, accumulation=4, recompute="full", tp="2", dp="8")])
    layout = found.configs.layout
    assert (layout.tp[0], layout.dp[0], layout.mbs[0], layout.ga[0]) == (2, 8, 2, 4)
    assert layout.recompute[0] == RECOMPUTE.index("full")
    assert found.configs.hardware.inter[0] == 3200e9 / 8


def test_an_unstated_micro_batch_is_every_size_that_divides_and_the_fastest_counts() -> None:
    found = steps([dict(row("a", 8)) | {"mbs": "", "ga": "", "gbs": "48"}, row("b", 8)])
    assert found.configs.layout.mbs.tolist() == [1, 2, 1]
    seconds, first = found.fastest(np.array([3.0, 2.0, 5.0]))
    assert seconds.tolist() == [2, 5]
    assert first.tolist() == [1, 2]


def test_a_release_is_read_where_it_is_stated() -> None:
    assert release_of({"notes": "26.04.01 NeMo Container; pre"}) > release_of({"notes": "26.04 NeMo Container"}) > 2026
    assert release_of({"notes": "measured, up to 64 nodes"}) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": "wide"}, "line 3, column hidden: 'wide' is not a number"),
        ({"tp": "0"}, "line 3, column tp: 0 is not a positive value"),
        ({"layers": "-4"}, "line 3, column layers: -4 is not"),
        ({"seq": "nan"}, "line 3, column seq: nan is not"),
        ({"iter_s": "fast"}, "line 3, column iter_s"),
        ({"precision": "fp12"}, "line 3, column precision: 'fp12' is none of"),
        ({"hw": "H900"}, "line 3, column hw: 'H900' is no accelerator known here"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, change: dict[str, str], words: str) -> None:
    path = table(tmp_path / "rows.csv", [row("a", 8), dict(row("b", 8)) | change])
    with pytest.raises(BadTable, match=words):
        read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks the column"),
        ("id,hw\na,H100-80\n", "lacks the column"),
        (None, "cannot be read as a table"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadTable, match=words):
        read(path)


def test_a_short_line_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.csv", [row("a", 8), row("b", 8)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2].rpartition(",")[0]]) + "\n")
    with pytest.raises(BadTable, match="line 3: it has another number of cells"):
        read(path)
