import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from recipes import Recipe, schema
from recipes.cluster import AwsCluster
from recipes.fields import fields, find
from recipes.load import load
from recipes.spec import Strategy

GALLERY = Path(__file__).parents[2] / "recipes"
FILES = sorted(GALLERY.glob("*.yaml"))


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

    def test_the_readme_lists_it(self, file: Path) -> None:
        assert f"]({file.name})" in (GALLERY / "README.md").read_text()


def test_the_rehearsal_writes_out_the_defaults() -> None:
    recipe = load(GALLERY / "rehearsal.yaml", ["train.rehearse_failure_at=null", "name=miniature", "description=''"])
    assert recipe == Recipe()


def test_the_rehearsal_fails_between_two_checkpoints() -> None:
    train = load(GALLERY / "rehearsal.yaml").train
    assert train.rehearse_failure_at is not None
    assert train.checkpoint_every < train.rehearse_failure_at < train.steps - train.checkpoint_every / 2
    assert train.rehearse_failure_at % train.checkpoint_every


def test_llama_shapes_are_the_published_ones() -> None:
    shapes = {
        name: (m.hidden_size, m.layers, m.heads, m.kv_heads, m.ffn_size, m.vocab_size, m.rope_theta, m.tie_embeddings)
        for name in ("llama3-8b-p4de", "llama3-8b-p5", "llama3-70b-p5")
        for m in [load(GALLERY / f"{name}.yaml").model]
    }
    small, large = (4096, 32, 32, 8, 14336), (8192, 80, 64, 8, 28672)
    rest = (128256, 500000.0, False)
    assert shapes == {
        "llama3-8b-p4de": small + rest,
        "llama3-8b-p5": small + rest,
        "llama3-70b-p5": large + rest,
    }


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
