import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from planner import local_machine, plan
from planner.machine import instance
from recipes import Recipe, schema
from recipes.cluster import AwsCluster, LocalCluster
from recipes.fields import fields, find
from recipes.load import load
from recipes.rehearse import rehearse
from recipes.spec import Strategy
from recipes.weights import parameters

GALLERY = Path(__file__).parents[2] / "recipes"
FILES = sorted(GALLERY.glob("*.yaml"))
CASES = sorted((GALLERY / "cases").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestGallery:
    def test_it_loads_and_is_called_like_its_file(self, file: Path) -> None:
        assert load(file).name == file.stem

    def test_it_opens_with_the_schema_its_purpose_and_the_commands(self, file: Path) -> None:
        text = file.read_text()
        opening = text[: text.index("\nname:")]
        assert opening.startswith("# yaml-language-server: $schema=schema.json\n")
        assert f"python -m flows.plan recipes/{file.name}" in opening
        assert f"python -m flows.lifecycle recipes/{file.name}" in opening

    def test_editors_find_nothing_wrong_with_it(self, file: Path) -> None:
        written = yaml.safe_load(file.read_text())
        jsonschema.Draft202012Validator(schema.editor_schema()).validate(written)

    def test_other_yaml_readers_see_the_same(self, file: Path) -> None:
        assert Recipe.model_validate(yaml.safe_load(file.read_text())) == load(file)

    def test_what_is_on_aws_has_a_limit_in_dollars_and_a_shared_store(self, file: Path) -> None:
        recipe = load(file)
        if isinstance(recipe.cluster, AwsCluster):
            assert recipe.budget.max_usd
            assert recipe.store.startswith("s3://")
            assert recipe.image.flavour != "local"
            assert recipe.train.attempts > 3

    def test_its_plan_fits_and_is_paid_for(self, file: Path) -> None:
        recipe = load(file)
        if isinstance(recipe.cluster, AwsCluster):
            machine = instance(recipe.cluster.instance_type)
            best = plan(recipe, machine, recipe.cluster.nodes, machine.accelerators).best
            assert 0.2 * machine.memory_gib < best.memory.total < 0.98 * machine.memory_gib
            assert best.usd is not None
            assert recipe.budget.max_usd is not None
            assert 0.3 * recipe.budget.max_usd < best.usd < 0.9 * recipe.budget.max_usd
            assert best.total_seconds < 0.8 * 3600 * recipe.train.timeout_hours

    def test_its_miniature_has_a_plan_here_that_keeps_what_makes_it_itself(self, file: Path) -> None:
        recipe = load(file)
        small, _ = rehearse(recipe)
        assert isinstance(small.cluster, LocalCluster)
        best = plan(small, local_machine(2, 24), small.cluster.nodes, small.cluster.processes_per_node).best
        big, layout = recipe.parallel, best.layout
        assert big.strategy in ("auto", layout.strategy)
        for name in ("tp", "pp", "vpp", "cp"):
            assert (getattr(layout, name) > 1) == (getattr(big, name) not in ("auto", 1)), name
        assert (layout.shard < layout.dp) == (big.shard != "auto")
        assert layout.offload == big.offload
        assert small.model.family == recipe.model.family
        assert (small.train.precision, small.train.lora_rank) == (recipe.train.precision, recipe.train.lora_rank)
        assert (small.data.kind, small.data.packing) == (recipe.data.kind, recipe.data.packing)

    def test_the_readme_lists_it(self, file: Path) -> None:
        assert f"]({file.name})" in (GALLERY / "README.md").read_text()


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
class TestCases:
    """What all cases have in common; whether they plan, render and run is in tests/training/cases."""

    def test_it_loads_and_is_called_like_its_file(self, file: Path) -> None:
        assert load(file).name == file.stem

    def test_it_opens_with_the_schema_its_purpose_and_the_command_that_shows_it(self, file: Path) -> None:
        text = file.read_text()
        opening = text[: text.index("\nname:")]
        assert opening.startswith("# yaml-language-server: $schema=../schema.json\n")
        assert re.search(rf"python -m flows\.train recipes/cases/{file.name} .*--render", opening)

    def test_editors_find_nothing_wrong_with_it(self, file: Path) -> None:
        written = yaml.safe_load(file.read_text())
        jsonschema.Draft202012Validator(schema.editor_schema()).validate(written)

    def test_other_yaml_readers_see_the_same(self, file: Path) -> None:
        assert Recipe.model_validate(yaml.safe_load(file.read_text())) == load(file)

    def test_it_has_a_limit_in_dollars_and_a_shared_store(self, file: Path) -> None:
        recipe = load(file)
        assert isinstance(recipe.cluster, AwsCluster)
        assert recipe.budget.max_usd
        assert recipe.store.startswith("s3://")
        assert recipe.image.flavour != "local"
        assert recipe.train.attempts > 3

    def test_its_miniature_has_a_plan_here(self, file: Path) -> None:
        small, _ = rehearse(load(file))
        assert isinstance(small.cluster, LocalCluster)
        plan(small, local_machine(2, 24), small.cluster.nodes, small.cluster.processes_per_node)
        assert rehearse(small) == (small, [])


def test_the_rehearsal_writes_out_the_defaults() -> None:
    recipe = load(GALLERY / "rehearsal.yaml", ["train.rehearse_failure_at=null", "name=miniature", "description=''"])
    assert recipe == Recipe()


def test_the_rehearsal_fails_between_two_checkpoints() -> None:
    train = load(GALLERY / "rehearsal.yaml").train
    assert train.rehearse_failure_at is not None
    assert train.checkpoint_every != "auto"
    assert train.checkpoint_every < train.rehearse_failure_at < train.steps - train.checkpoint_every / 2
    assert train.rehearse_failure_at % train.checkpoint_every


PUBLISHED = {
    "llama3-8b-p4de": 8_030_261_248,
    "llama3-70b-p5": 70_553_706_496,
    "llama31-8b-p4d": 8_030_261_248,
    "llama31-70b-long-p5": 70_553_706_496,
    "gemma-7b-p4d": 8_537_680_896,
    "gemma2-9b-p4de": 9_241_705_984,
    "solar-10b-p4de": 10_731_524_096,
    "exaone3-8b-p4de": 7_818_448_896,
    "llama2-13b-p4d": 13_015_864_320,
    "qwen25-7b-p5": 7_615_616_512,
    "mistral-7b-p5": 7_241_732_096,
    "gpt2-small-g5": 124_439_808,
    "gpt2-xl-p4d": 1_557_611_200,
}
"""Weights of the published models, as the Hugging Face hub counts them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_the_published_ones(name: str) -> None:
    recipe = load(GALLERY / f"{name}.yaml")
    assert parameters(recipe.model, recipe.data.sequence_length) == PUBLISHED[name]


def test_schema_and_reference_are_current() -> None:
    """`python -m recipes.schema` makes them so."""
    assert json.loads(schema.SCHEMA.read_text()) == schema.editor_schema()
    assert schema.REFERENCE.read_text() == schema.reference()


def test_the_schema_refuses_what_the_spec_refuses() -> None:
    check = jsonschema.Draft202012Validator(schema.editor_schema())
    check.check_schema(schema.editor_schema())
    assert check.is_valid({"parallel": "auto", "cluster": {"kind": "eks", "nodes": 4}})
    for wrong in ({"train": {"stepz": 1}}, {"cluster": {"nodes": 4}}, {"parallel": "best"}, {"train": {"steps": 0}}):
        assert not check.is_valid(wrong)


def test_the_reference_explains_every_field() -> None:
    reference = schema.reference()
    assert all(f"`{field.name}`" in reference for field in fields() if field.path[-1] != "kind")
    strategies = find(("parallel", "strategy"))
    assert strategies is not None
    assert all(word in reference for word in Strategy.__args__)  # type: ignore[attr-defined]  # typing has no name for it


def test_every_field_is_described_and_every_pattern_has_its_form() -> None:
    for field in fields():
        assert re.fullmatch(r".+[.)]", field.description), field.name
        if "pattern" in field.schema:
            assert ": " in field.description, field.name
