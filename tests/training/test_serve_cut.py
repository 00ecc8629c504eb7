"""Families that several ranks serve together: two processes say what one says, from the folder that export writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.cases.matrix import record
from tests.training.exports import LENGTH, job_of, network, recipe, result, write_checkpoint, write_dataset
from tests.training.kitchen import Kitchen
from tests.training.miniatures import miniature
from training.export.hf import export

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "qwen2": {"kv_heads": 2, "tie_embeddings": False},
    "gpt2": {"kv_heads": 2},
    "mixtral": {"kv_heads": 2, "tie_embeddings": False, "experts": 3, "topk": 2},
}
SPOKEN = {"prompts": ("value_1 = ", "# file", "value_2 = compute("), "max_new_tokens": 16}


@pytest.fixture(scope="module")
def kitchen() -> Iterator[Kitchen]:
    """Ranks that start in milliseconds."""
    kitchen = Kitchen()
    yield kitchen
    kitchen.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("corpus") / "data")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_says(family: str, corpus: Path, kitchen: Kitchen, tmp_path: Path) -> None:
    compare(recipe(model=FAMILIES[family] | {"family": family}, serve=SPOKEN), corpus, kitchen, tmp_path)


def test_the_third_lab_is_served_by_its_two_ranks(corpus: Path, kitchen: Kitchen, tmp_path: Path) -> None:
    spec, _ = miniature(Path(__file__).parents[2] / "recipes/cases/lab3.yaml")
    assert spec["serve"]["tp"] == 2
    spec["model"]["vocab_size"], spec["data"]["sequence_length"] = 400, LENGTH
    spec["serve"] |= SPOKEN
    spec["export"]["dtype"] = "fp32"  # in bf16 another order of sums may choose another word
    compare(spec, corpus, kitchen, tmp_path)
    record("lab3", "local", "ran", "test_serve_cut.py: test_the_third_lab_is_served_by_its_two_ranks")


def compare(spec: dict[str, Any], corpus: Path, kitchen: Kitchen, tmp_path: Path) -> None:
    """Export a network of a recipe, and let one process and two ranks continue the prompts."""
    write_checkpoint(tmp_path / "run", spec, network(spec))
    export(job_of(spec, tmp_path / "export", dataset=corpus, model=tmp_path / "run"))

    def spoken(ranks: int) -> dict[str, Any]:
        folder = tmp_path / f"of-{ranks}"
        told = {"spec": spec, "inputs": {"export": str(tmp_path / "export")}, "output": str(folder / "out")}
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(told))
        run = kitchen.start(folder / "job.json", ranks, "training.export.generate")
        assert set(run.wait()) == {0}, run.log.read_text()
        return result(folder / "out")

    one, two = spoken(1), spoken(2)
    assert (one.pop("ranks"), two.pop("ranks")) == (1, 2)
    assert one == two
    assert all(sample["text"] for sample in two["samples"])


def test_ranks_that_do_not_divide_the_heads_are_told(corpus: Path, kitchen: Kitchen, tmp_path: Path) -> None:
    spec = recipe(serve=SPOKEN)  # one head for keys and values
    write_checkpoint(tmp_path / "run", spec, network(spec))
    export(job_of(spec, tmp_path / "export", dataset=corpus, model=tmp_path / "run"))
    told = {"spec": spec, "inputs": {"export": str(tmp_path / "export")}, "output": str(tmp_path / "out")}
    (tmp_path / "job.json").write_text(json.dumps(told))
    run = kitchen.start(tmp_path / "job.json", 2, "training.export.generate")
    assert set(run.wait()) == {2}, run.log.read_text()
    (error,) = run.say("error")
    assert "serve.tp: 2 ranks do not divide the model's num_key_value_heads" in error["message"]
