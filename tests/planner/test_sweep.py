"""Sweeps over numbers of GPUs, as they are typed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import PlanError
from planner.request import counts, duration
from planner.sweep import main

ROOT = Path(__file__).parents[2]
SMALL = "--model llama3-8b --instance p5.48xlarge"


def sweep(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main([*words.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_the_json_says_what_was_considered_and_what_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    answer = sweep(capsys, f"{SMALL} --gpus 8..32 --global-batch 96 --top 5")
    assert answer["considered"] > 1000
    assert answer["configurations_per_second"] == pytest.approx(answer["considered"] / answer["seconds"])
    best = answer["best"]
    assert len(best) == 5
    assert [row["step_seconds"] for row in best] == sorted(row["step_seconds"] for row in best)
    for row in best:
        assert row["low"] < row["step_seconds"] < row["high"]
        assert row["gpus"] in {8, 16, 24, 32}
        assert row["nodes"] == row["gpus"] // 8
        assert row["memory_gib"]["total"] < 80
        assert 0 < row["mfu"] < 1
        assert row["usd"] > 0
    assert any("layers do not divide by pp" in reason for reason in answer["rejected"])
    assert answer["what_if"] is None


def test_the_front_holds_no_offer_that_another_beats(capsys: pytest.CaptureFixture[str]) -> None:
    rows = sweep(capsys, f"{SMALL} --gpus 8..64 --global-batch 192")["pareto"]
    points = [(row["total_seconds"], row["usd"], row["gpus"]) for row in rows]
    assert points == sorted(points)
    for one in points:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)


def test_the_table_for_people_has_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{SMALL} --gpus 8 --top 3 --deadline 400d --max-usd 1e9 --what-if nvlink=2x".split()) == 0
    text = capsys.readouterr().out
    assert "layouts in" in text
    assert "rejected" in text
    assert "cheapest that meets the deadline:" in text
    assert "fastest under the budget:" in text
    assert "What binds is" in text


def test_a_recipe_is_swept_as_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        "name: mine\nmodel: {hidden_size: 1024, layers: 8, heads: 8, kv_heads: 8, ffn_size: 2816, vocab_size: 32000}\n"
        "data: {sequence_length: 512}\ntrain: {global_batch_size: 48, steps: 100, precision: bf16}\n"
        "parallel: {software: megatron, tp: 2}\n"
    )
    answer = sweep(capsys, f"--model {path} --instance p4d.24xlarge --gpus 8..16")
    assert (answer["global_batch"], answer["sequence"], answer["steps"]) == (48, 512, 100)
    assert {row["layout"]["tp"] for row in answer["best"]} == {2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model no.yaml --instance p5.48xlarge --gpus 8", "there is no model file no.yaml"),
        ("--model llama3-8b --instance p5.49xlarge --gpus 8", "did you mean p5"),
        (f"{SMALL} --gpus 0..8", "take at least 1"),
        (f"{SMALL} --gpus 16..8", "the smaller number first"),
        (f"{SMALL} --gpus many", "write it as 8..64"),
        (f"{SMALL} --gpus 9..15", "no whole number of p5.48xlarge"),
        (f"{SMALL} --gpus 8 --tp 3", "32 heads do not divide by tp"),
        (f"{SMALL} --gpus 8 --global-batch 0", "a global batch of 0 makes no sense"),
        (f"{SMALL} --gpus 8 --profiles nowhere", "nowhere holds no profiles that can be read"),
        (f"{SMALL} --gpus 8 --sequence 0", "a --sequence of 0 makes no sense"),
        (f"{SMALL} --gpus 8 --max-usd nan", "a --max-usd of nan makes no sense"),
        (f"{SMALL} --gpus 8 --deadline soon", "'soon' is no duration"),
        (f"{SMALL} --gpus 8 --what-if warp=2x", "what-if: 'warp=2x'"),
        (f"{SMALL} --gpus 8 --precision int1", "invalid choice"),
        (f"{SMALL} --gpus 8 --precision nvfp4", "no arithmetic for nvfp4"),
        ("--model llama3-8b --instance g5.xlarge --gpus 64", "no Elastic Fabric Adapter (EFA), 64 nodes"),
        ("--model llama3-8b --instance trn1.32xlarge --gpus 16", "calibrate with 3 measured steps"),
        ("--model mt-nlg-530b --instance p4d.24xlarge --gpus 8", "does not fit on 8 GPUs of p4d.24xlarge"),
        ("--instance p5.48xlarge --gpus 8", "--model"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.startswith("sweep: ")
    assert told.err.count("\n") == 1
    assert not told.out


@given(first=st.integers(1, 5000), more=st.integers(0, 5000))
def test_a_range_is_read_as_written(first: int, more: int) -> None:
    assert counts(f"{first}..{first + more}") == (first, first + more)


def test_durations() -> None:
    assert (duration("36h"), duration("7d"), duration("0.5w")) == (129600, 604800, 302400)
    for text in ("", "7", "d", "-1d", "infd", "nand", "7y"):
        with pytest.raises(PlanError, match="is no duration"):
            duration(text)


def test_the_command_has_one_thread_and_the_library_leaves_that_to_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "atexit.register(lambda: print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS')))\n"
    )
    told = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}

    def run(*words: str) -> str:
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = told | {"PYTHONPATH": paths}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    assert run("-m", "planner", "sweep", *SMALL.split(), "--gpus", "8") == "1 1"
    assert run("-c", "import planner").endswith(" None")
