"""What calibration teaches, seen through the command line that others use: accuracy, laws, and what must not matter."""

import csv
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.__main__ import main
from planner.calibrate import adapt, calibrate
from planner.errors import PlanError
from planner.keys import Key, key_of
from planner.predict import predict
from planner.profiles import Profiles
from planner.rows import Row, steps

TABLES = Path(__file__).parents[2] / "planner" / "tables"
SOURCES = {"vtrain_multi", "mosaicml_h100", "bigscience_tr11", "mtnlg_530b", "torchtitan"}
BLANK = ("iter_s", "tok_s_gpu", "tflops_gpu", "mem_gib")
Foretold = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def published() -> list[Row]:
    """Rows of a few clusters, three of one kind: enough to learn from, few enough to be quick."""
    with (TABLES / "measured.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["source"] in SOURCES]


@pytest.fixture(scope="module")
def parts(published: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to learn from, and whole groups held out."""
    names = sorted({row["group"] for row in published})
    held = set(random.Random(0).sample(names, len(names) // 4))
    return [row for row in published if row["group"] not in held], [row for row in published if row["group"] in held]


@pytest.fixture(scope="module")
def learned(parts: tuple[list[Row], list[Row]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tmp_path_factory.mktemp("learned"), parts[0])


@pytest.fixture
def foretell(learned: Path, tmp_path: Path) -> Callable[..., Foretold]:
    """What the command line says of rows whose measurements are blanked, by id."""

    def ask(rows: Sequence[Row], profiles: Path = learned, **change: str) -> Foretold:
        blank = [dict(row) | dict.fromkeys(BLANK, "") | change for row in rows]
        assert main(["predict", "--profiles", str(profiles), "--rows", str(write(tmp_path / "in.csv", blank)), "--out", str(tmp_path / "out.csv")]) == 0  # fmt: skip  # noqa: E501
        with (tmp_path / "out.csv").open(newline="") as file:
            return {row["id"]: row for row in csv.DictReader(file)}

    return ask


def write(path: Path, rows: Sequence[Row]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def calibrated(folder: Path, rows: Sequence[Row]) -> Path:
    table = write(folder / "rows.csv", rows)
    words = ["--rows", str(table), "--collectives", str(TABLES / "collectives.csv"), "--out", str(folder / "profiles")]
    assert main(["calibrate", *words]) == 0
    return folder / "profiles"


def column(told: Foretold, rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    return np.array([float(told[row["id"]][name]) for row in rows])


def test_rows_never_seen_are_foretold(parts: tuple[list[Row], list[Row]], foretell: Callable[..., Foretold]) -> None:
    rows = [row for row in parts[1] if row["iter_s"]]
    told = foretell(rows)
    assert list(told) == [row["id"] for row in rows]
    measured = np.array([float(row["iter_s"]) for row in rows])
    off = np.abs(column(told, rows, "iter_s") / measured - 1)
    assert off.mean() < 0.07
    assert np.median(off) < 0.03
    inside = (column(told, rows, "iter_s_lo") <= measured) & (measured <= column(told, rows, "iter_s_hi"))
    assert 0.8 <= inside.mean() <= 0.98


@pytest.mark.parametrize("source", ["mosaicml_h100", "vtrain_multi"])
def test_a_slower_cluster_is_slower_by_as_much_and_the_others_stay(
    parts: tuple[list[Row], list[Row]], foretell: Callable[..., Foretold], tmp_path: Path, source: str
) -> None:
    def slowed(row: Row) -> Row:
        slow = row["source"] == source and row["iter_s"]
        return dict(row) | {"iter_s": str(float(row["iter_s"]) * 1.37)} if slow else row

    again = calibrated(tmp_path, [slowed(row) for row in parts[0]])
    usual, slower = foretell(parts[1]), foretell(parts[1], again)
    ratio = column(slower, parts[1], "iter_s") / column(usual, parts[1], "iter_s")
    mine = np.array([row["source"] == source and row["precision"] != "fp8" for row in parts[1]])
    np.testing.assert_allclose(ratio[mine], 1.37, rtol=0.02)
    others = np.array([row["source"] not in {source, "mtnlg_530b", "torchtitan"} for row in parts[1]])
    np.testing.assert_allclose(ratio[others], 1.0, rtol=0.02)


def test_names_and_order_mean_nothing(
    parts: tuple[list[Row], list[Row]], foretell: Callable[..., Foretold], tmp_path: Path
) -> None:
    shuffled = [dict(row) | {"source": "x", "source_ref": "y", "id": f"r{at}"} for at, row in enumerate(parts[0])]
    random.Random(1).shuffle(shuffled)
    usual, again = foretell(parts[1]), foretell(parts[1], calibrated(tmp_path, shuffled), source="z", source_ref="")
    for name in ("iter_s", "iter_s_lo", "iter_s_hi", "mem_gib"):
        np.testing.assert_allclose(column(again, parts[1], name), column(usual, parts[1], name), rtol=1e-5)


@pytest.mark.parametrize("factor", [1.1, 2, 4])
def test_more_bandwidth_is_never_slower_whatever_cluster_it_makes(
    published: list[Row], foretell: Callable[..., Foretold], factor: float
) -> None:
    more = [dict(row) | {"inter_node_gbps": str(float(row["inter_node_gbps"]) * factor)} for row in published]
    usual, faster = foretell(published), foretell(more)
    assert np.all(column(faster, published, "iter_s") <= column(usual, published, "iter_s") * (1 + 1e-5))


def test_a_step_is_linear_in_its_micro_batches(published: list[Row], foretell: Callable[..., Foretold]) -> None:
    rows = [row for row in published if row["mbs"] and row["ga"]]

    def seconds(times: int) -> NDArray[np.float64]:
        change = [
            dict(row) | {"ga": str(float(row["ga"]) * times), "gbs": str(float(row["gbs"]) * times)} for row in rows
        ]
        return column(foretell(change), rows, "iter_s")

    one, two, three = (seconds(times) for times in (1, 2, 3))
    np.testing.assert_allclose(three - two, two - one, rtol=2e-4)


def test_more_sharding_never_needs_more_memory(published: list[Row], foretell: Callable[..., Foretold]) -> None:
    rows = [row for row in published if float(row["pp"] or 1) == 1]
    needs = [column(foretell(rows, zero=str(stage)), rows, "mem_gib") for stage in range(4)]
    for less, more in pairwise(needs):
        assert np.all(more <= less * (1 + 1e-6))


def test_a_cluster_nobody_measured_has_its_familys_prior_and_a_wider_interval(
    parts: tuple[list[Row], list[Row]], foretell: Callable[..., Foretold]
) -> None:
    row = next(row for row in parts[1] if row["source"] == "mosaicml_h100")
    known, new = foretell([row])[row["id"]], foretell([row], hw="H200", framework="New-FSDP")[row["id"]]
    assert known["profile"].startswith("H100-80|Composer-FSDP|")
    assert new["profile"] == "prior: dense Hopper fsdp"

    def width(told: dict[str, str]) -> float:
        return float(told["iter_s_hi"]) / float(told["iter_s_lo"])

    assert width(new) > width(known)


def test_a_few_steps_of_a_new_cluster_bring_it_near(parts: tuple[list[Row], list[Row]]) -> None:
    rows = [row for row in parts[0] if row["source"] == "vtrain_multi"]
    before = calibrate([row for row in parts[0] if row["source"] != "vtrain_multi"])
    after = adapt(before, rows[::9])

    def off(profiles: Profiles) -> float:
        found = steps(rows)
        told = predict(profiles, found, [key_of(row) for row in rows])
        return float(np.mean(np.abs(told.seconds / found.seconds - 1)))

    assert off(after) < min(off(before), 0.12)
    assert {key for key in after.own if key not in before.own} == {key_of(rows[0])}


def test_profiles_survive_being_kept(learned: Path, tmp_path: Path, parts: tuple[list[Row], list[Row]]) -> None:
    profiles = Profiles.load(learned)
    profiles.save(tmp_path / "copy")
    found, keys = steps(parts[1]), [key_of(row) for row in parts[1]]
    before, after = predict(profiles, found, keys), predict(Profiles.load(tmp_path / "copy"), found, keys)
    np.testing.assert_allclose(after.seconds, before.seconds, rtol=1e-9)


def test_asking_for_a_profile_finds_the_cluster_or_the_family(learned: Path) -> None:
    profiles = Profiles.load(learned)
    assert profiles.find("H100-80", "Composer-FSDP", "bf16").steps > 20
    assert profiles.find("H100-80", "castra-fsdp2", "bf16").key == "prior: dense Hopper fsdp"
    assert profiles.find("V100-32", "castra-ddp", "fp16").steps == 0


def test_a_key_says_what_it_is_for() -> None:
    key = Key("A100-80", "Megatron-LM", "bf16", True, 8, 1600)
    assert str(key) == "A100-80|Megatron-LM|bf16|experts|8x1600"
    assert (key.kind, key.style, key.family) == ("experts", "megatron", "experts Ampere megatron")
    assert str(key.anywhere) == "A100-80|Megatron-LM|bf16|experts"


@pytest.mark.parametrize("words", [["predict", "--profiles", "/nowhere"], ["calibrate", "--collectives", "/nowhere"]])
def test_what_is_missing_is_one_sentence(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--rows", str(TABLES / "cpu.csv"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("planner: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_broken_profiles_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "profiles.json").write_text('{"everything": 1}')
    with pytest.raises(PlanError, match="holds no profiles that can be read"):
        Profiles.load(tmp_path)
