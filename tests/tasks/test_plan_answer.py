"""The whole answer: as JSON, on a terminal, as a picture; from a recipe and from a config.json."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import planner
from clusters.base import Refused
from planner import whatif
from recipes.load import RecipeError, load
from recipes.rehearse import rehearse
from recipes.spec import Recipe
from tasks import machines, plan_answer, plan_model, plan_picture, plan_terminal
from tasks import plan as planning
from tasks.lineage import trace
from tasks.plan_answer import Answer
from tasks.plan_question import Question

ROOT = Path(__file__).parents[2]
LARGE = ROOT / "recipes" / "llama3-70b-p5.yaml"
ASKED = Question(
    instances=("p4de.24xlarge", "p5.48xlarge"),
    nodes=(8, 9, 16, 32),
    deadline_s=30 * 86400,
    max_usd=1_000_000,
    what_if=whatif.parse("nvlink=2x,efa=0.5x"),
    top=3,
)


@pytest.fixture(scope="module")
def swept() -> Answer:
    return plan_answer.answer(load(LARGE), ASKED)


def test_the_recipe_s_own_plan_is_what_is_launched() -> None:
    recipe = load(LARGE)
    found = plan_answer.answer(recipe, Question())
    assert found.plan == machines.plan_of(recipe)
    assert (found.nodes, found.machine.name) == (32, "p5.48xlarge")
    assert found.chosen == {}
    assert {one.nodes for one in found.candidates} == {8, 16, 32, 64, 128}


def test_the_plan_in_full_is_that_of_the_first_answer(swept: Answer) -> None:
    chosen = swept.chosen["cheapest that meets the deadline"]
    assert chosen
    assert (swept.machine.name, swept.nodes) == (chosen.machine, chosen.nodes)
    assert swept.plan.best.step_seconds == pytest.approx(chosen.best.step_seconds)
    assert chosen.best.total_seconds <= 30 * 86400
    assert swept.unmet == []


def test_what_cannot_be_met_is_said() -> None:
    found = plan_answer.answer(load(LARGE), Question(nodes=(8,), deadline_s=3600))
    assert found.unmet == ["cheapest that meets the deadline"]


def test_a_deadline_alone_looks_at_more_and_fewer_nodes() -> None:
    own = machines.plan_of(load(LARGE)).best.total_seconds
    found = plan_answer.answer(load(LARGE), Question(deadline_s=0.8 * own))
    chosen = found.chosen["cheapest that meets the deadline"]
    assert chosen
    assert chosen.nodes > 32


def test_all_of_it_is_plain_json_whose_keys_are_documented(swept: Answer) -> None:
    told = json.loads(json.dumps(plan_answer.as_json(swept, "there.svg"), allow_nan=False))
    text = (ROOT / "docs" / "plan.md").read_text()
    inside = [*told["prices"], *told["candidates"], told["what_if"]]
    assert not {key for one in (told, *inside) for key in one if f"`{key}`" not in text}
    assert len(told["candidates"]) == 8
    assert {one["nodes"] for one in told["candidates"] if one["best"] is None} == {9}
    assert all(price["as_of"] for price in told["prices"])
    assert told["what_if"]["factors"] == {"nvlink": 2.0, "efa": 0.5}
    assert told["picture"] == "there.svg"


def test_a_terminal_shows_all_that_was_asked_for(swept: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    plan_terminal.show(swept, "there.svg")
    told = capsys.readouterr().out
    for wanted in (
        "Layouts that fit",
        "tokens/s/GPU",
        "MFU",
        "fragmentation",
        "One step of",
        "Layouts refused",
        "Dollars on",
        "set-up",
        "image build",
        "storage",
        "per hour, on demand (2026-07-20)",
        "cheapest that meets the deadline",
        "fastest under the budget",
        "What binds is",
        "torchrun --nnodes=",
        "pretrain_gpt.py --tensor-model-parallel-size",
        "9 x p5.48xlarge: train.global_batch_size 512 does not divide",
        "there.svg",
    ):
        assert wanted in told, wanted
    assert "…" not in told, "nothing is cut"


def test_no_table_is_cut_where_names_are_long(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["parallel.software=megatron", "parallel.strategy=auto", "parallel.tp=8", "parallel.pp=4"]
    found = plan_answer.answer(load(LARGE, changes), Question(top=2))
    plan_terminal.show(found, "")
    told = capsys.readouterr().out
    assert "…" not in told
    assert "planned, not yet run by Castra's own trainer: parallel.software megatron, parallel.tp 8" in told
    assert "slower than" in told


def test_the_picture_is_svg_and_the_same_every_time(swept: Answer, tmp_path: Path) -> None:
    one, two = tmp_path / "plans" / "a.svg", tmp_path / "b.svg"
    for path in (one, two):
        plan_picture.write(swept.candidates, path)
    assert one.read_bytes() == two.read_bytes()
    words = "".join(ET.parse(one).getroot().itertext())
    assert "US dollars" in words
    assert "p5.48xlarge" in words
    assert [path.name for path in one.parent.iterdir()] == ["a.svg"]


def test_nothing_to_compare_is_no_picture(swept: Answer) -> None:
    assert not plan_picture.drawable(swept.candidates[:1])


def test_the_page_in_the_ui_has_pictures_bill_and_arguments() -> None:
    page = planning.markdown(load(LARGE))
    assert page.count("](data:image/svg+xml;base64,") == 3
    assert "torchrun --nnodes=32 --nproc-per-node=8" in page
    assert '"micro_batch_size"' in page
    assert "image build" in page


def test_a_plan_over_the_budget_is_refused() -> None:
    recipe = load(LARGE, ["budget.max_usd=1000"])
    with pytest.raises(Refused, match=r"the plan costs \$.*, budget.max_usd is \$1,000"):
        plan_answer.check_budget(recipe, machines.plan_of(recipe))


@pytest.mark.parametrize(
    "change", ["parallel.recompute=full", "parallel.software=megatron", "train.precision=fp8", "model.gated=false"]
)
def test_what_is_only_planned_is_not_launched(change: str) -> None:
    recipe = load(LARGE, [change, "parallel.strategy=auto"])
    with pytest.raises(Refused, match=r"planned, not yet run by Castra's own trainer: `python -m flows\.plan`"):
        trace(recipe)
    small, _ = rehearse(recipe)
    machines.check_launchable(small)


def test_a_recipe_for_this_machine_is_compared_with_one_instance_of_each_type() -> None:
    found = plan_answer.answer(Recipe(), Question())
    assert found.plan.best.usd is None
    assert {one.nodes for one in found.candidates} == {1}
    with pytest.raises(Refused, match="add --instances"):
        plan_answer.answer(Recipe(), Question(nodes=(4,)))


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14336,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}


def config(tmp_path: Path, told: dict[str, Any], folder: str = "My Model-7B") -> Path:
    path = tmp_path / folder / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize(("told", "parameters"), [(MIXTRAL, 46.7e9), (GEMMA, 9.24e9)], ids=["mixtral", "gemma2"])
def test_a_config_json_is_a_model_to_plan(tmp_path: Path, told: dict[str, Any], parameters: float) -> None:
    asked = Question(instances=("p5.48xlarge",), nodes=(4, 8))
    recipe = plan_model.recipe_of(config(tmp_path, told), ["train.global_batch_size=256"], asked)
    assert recipe.name == "my-model-7b"
    assert planner.parameters(recipe.model) == pytest.approx(parameters, rel=0.01)
    assert (recipe.train.global_batch_size, recipe.data.sequence_length) == (256, 8192)
    found = plan_answer.answer(recipe, asked)
    assert found.plan.best.fits
    with pytest.raises(Refused, match="not yet run"):
        machines.check_launchable(recipe)


def test_a_config_json_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    asked = Question(instances=("p5.48xlarge",))
    with pytest.raises(Refused, match="add --instances"):
        plan_model.recipe_of(config(tmp_path, MIXTRAL, "a"), [], Question())
    with pytest.raises(planner.PlanError, match="model_type 'bert'"):
        plan_model.recipe_of(config(tmp_path, {"model_type": "bert"}, "b"), [], asked)
    with pytest.raises(RecipeError, match="did you mean"):
        plan_model.recipe_of(config(tmp_path, MIXTRAL, "c"), ["train.stepz=3"], asked)
