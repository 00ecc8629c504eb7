"""Whatever is written in a recipe file, what comes back is a recipe or sentences of ours."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes import Recipe
from recipes.fields import Field, fields
from recipes.load import RecipeError, load

NAMES = sorted({part for field in fields() for part in field.path})
WORDS = ["auto", "local", "slurm", "ddp", "no", "1e-4", "010", "null", "~", "-1", "0", "x" * 90]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner),
    max_leaves=12,
)
FEW = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NOT_OURS = ("Input should", "pydantic", "Value error", "valid integer", "Traceback", "permitted", "Object of type")


def judge(file: Path, sets: list[str]) -> None:
    problems: list[str] = []
    try:
        recipe = load(file, sets)
    except RecipeError as error:
        problems = error.problems
    assert problems or isinstance(recipe, Recipe)
    for problem in problems:
        assert problem.startswith((str(file), "--set "))
        assert not [words for words in NOT_OURS if words in problem]
        assert len(problem) < 1000


@FEW
@given(raw=st.binary(max_size=200))
def test_bytes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.yaml").write_bytes(raw)
    judge(tmp_path / "x.yaml", [])


@FEW
@given(text=st.text(alphabet="abn:-?[]{}&*!|>'\"%@`#, \n\t<0123.~=", max_size=80), value=st.text(max_size=20))
def test_what_looks_like_yaml(tmp_path: Path, text: str, value: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    judge(tmp_path / "x.yaml", [value, f"train.steps={text}"])


@FEW
@given(values=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), field=st.sampled_from(NAMES), value=VALUES)
def test_known_names_with_any_value(tmp_path: Path, values: object, field: str, value: object) -> None:
    (tmp_path / "x.yaml").write_text(json.dumps(values))
    judge(tmp_path / "x.yaml", [f"train.{field}={json.dumps(value)}", f"cluster.{field}=3"])


@FEW
@given(field=st.sampled_from(fields()), value=VALUES)
def test_any_value_in_a_real_place(tmp_path: Path, field: Field, value: object) -> None:
    inside: dict[str, object] = {"kind": field.kinds[0]} if field.kinds else {}
    whole = {field.path[0]: inside | {field.path[1]: value}} if len(field.path) == 2 else {field.path[0]: value}
    (tmp_path / "x.yaml").write_text(json.dumps(whole))
    judge(tmp_path / "x.yaml", [])


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "a: " * 30_000, "? " * 40_000, "- " * 40_000, "{a: " * 20_000, "&a " * 9]
)
def test_what_is_made_to_hurt_the_parser(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    judge(tmp_path / "x.yaml", [])
