from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any

import pytest

from recipes import Recipe
from recipes import identity as identities
from recipes.fields import EXECUTION, Field, choices, fields
from recipes.identity import LATER, STEPS, identity
from recipes.load import load
from store.manifest import fingerprint

INPUTS = {
    "image": (),
    "preprocess": (),
    "train": ("dataset",),
    "score": ("dataset", "model"),
    "export": ("dataset", "model"),
    "serve": ("export",),
}


MIXTURE = {"experts": 8, "topk": 2, "expert_ffn": 64, "shared_experts": 1, "head_dim": 32, "dense_layers": 1}


SIZES = ("shard", "tp", "pp", "vpp", "cp", "ep")
NEEDS: dict[str, dict[str, Any]] = {
    "parallel.offload": {"strategy": "zero3"},
    "parallel.offload_to": {"strategy": "zero3", "offload": "optimizer"},
    "model.sliding_window": {"family": "mistral"},
    "train.lora_base": {"lora_rank": 4},
    "case.program": {"framework": "torchtitan"},  # of Castra's own it names a measurement, which reads no data
}
"""What some fields can be changed only beside."""


def base(kind: str, field: str = "") -> dict[str, Any]:
    """A recipe of which every field can be changed alone."""
    told: dict[str, Any] = {
        "model": {"kv_heads": 1} | MIXTURE,
        "cluster": {"kind": kind},
        "parallel": {"strategy": "ddp" if field == "train.lora_base" else "fsdp2", "micro_batch_size": 4}
        | dict.fromkeys(SIZES, 1),
        "train": {"rehearse_failure_at": 100},
    }
    section = field.partition(".")[0]
    return told | {section: told.get(section, {}) | NEEDS[field]} if field in NEEDS else told


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """Of every step, with the same inputs and facts whatever the recipe."""
    digest = {"tokenizer_digest": "t"} if recipe.data.tokenizer != "train" else {}
    facts: dict[str, dict[str, Any]] = {"preprocess": {"source": "s"} | digest, "train": {"world_size": 2}}
    told = {
        step: identity(recipe, step, {name: f"{name}@1" for name in INPUTS[step]}, **facts.get(step, {}))
        for step in STEPS
    }
    return {step: fingerprint(one) for step, one in told.items()}


OTHERS: dict[str, Any] = {
    "ami": "ami-0123456789abcdef0",
    "capacity": ["spot"],
    "kubernetes_version": "1.34",
    "largest_mib": 64,
    "lustre_gib": 1200,
    "min_line_fraction": 0.5,
    "placement_group": True,
    "warm_pool_minutes": 10,
    "zones": ["us-east-1b"],
    "workers": 3,
}
"""For fields whose form leaves no choice, or whose default is nothing."""


def another(field: Field, value: Any) -> Any:
    """A valid value for a field that is not the one it has; `value` itself where there is no other."""
    if field.path[-1] in OTHERS:
        return OTHERS[field.path[-1]]
    words = choices(field.schema)
    if words and not isinstance(value, int):
        return next((word for word in words if word not in (value, "auto")), value)
    changes: dict[type, Callable[[Any], Any]] = {
        bool: lambda flag: not flag,
        int: lambda number: number * 2 or 8,
        float: lambda number: number / 2,
        NoneType: lambda _: 7,
        list: lambda entries: entries[1:] or ["*.md"],
        str: lambda text: "us-east-2" if field.path[-1] == "region" else f"{text}x",
    }
    return changes[type(value)](value)


def flipped(field: Field) -> tuple[Recipe, Recipe]:
    values = base(field.kinds[0] if field.kinds else "local", field.name)
    before = load(values)
    value = before.model_dump(mode="json")
    for part in field.path:
        value = value[part]
    section = values.setdefault(field.path[0], {}) if len(field.path) == 2 else values
    section[field.path[-1]] = another(field, value)
    return before, load(values)


BEFORE = {
    "image": "54b3bb8b9ec9",
    "preprocess": "6d91f9ac1e64",
    "score": "84ad1bbfbeb6",
    "export": "82572f01c289",
    "serve": "39663a1a07af",
}
"""Fingerprints of a recipe's steps as they were before the fields of LATER."""

ONLY_ONE_VALUE = {"cluster.kind"}


@pytest.mark.parametrize("field", fields(), ids=lambda field: "-".join((field.name, *field.kinds)))
def test_execution_never_enters_a_fingerprint_and_everything_else_does(field: Field) -> None:
    before, after = flipped(field)
    assert (before != after) == (field.name not in ONLY_ONE_VALUE)
    changed = fingerprints(before) != fingerprints(after)
    assert changed == (not field.execution and field.name not in ONLY_ONE_VALUE)


def test_the_mark_is_the_description_of_a_field_or_of_its_section() -> None:
    marked = {field.name for field in fields() if field.execution}
    assert {"store", "keep", "cluster.nodes", "train.checkpoint_every", "train.attempts", "budget.max_usd"} <= marked
    assert not marked & {"name", "train.steps", "train.seed", "model.layers", "parallel.strategy", "data.source"}
    assert not any(field.description.startswith(EXECUTION.strip()) for field in fields())


def test_a_field_reaches_only_the_steps_it_matters_to() -> None:
    before = fingerprints(load(base("local")))
    for assignment, steps in {
        "train.steps=300": {"train"},
        "data.min_chars=100": {"preprocess"},
        "model.vocab_size=5000": {"preprocess", "train"},
        "data.source=/elsewhere": {"export"},
        "score.max_tokens=5": {"score"},
        "serve.max_new_tokens=5": {"serve"},
        "image.flavour=eks-gpu": {"image"},
    }.items():
        after = fingerprints(load(base("local"), [assignment]))
        assert {step for step in STEPS if before[step] != after[step]} == steps


def test_inputs_facts_and_version_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(base("local"))
    one = identity(recipe, "train", {"dataset": "a"}, world_size=2)
    assert one["version"] == STEPS["train"].version
    others = [
        identity(recipe, "train", {"dataset": "b"}, world_size=2),
        identity(recipe, "train", {"dataset": "a"}, world_size=4),
        identity(recipe, "train", {"dataset": "a", "initial": "c"}, world_size=2),
        one | {"version": one["version"] + 1},
    ]
    assert len({fingerprint(told) for told in [one, *others]}) == 5


def test_a_dataset_with_a_given_tokenizer_knows_its_content_and_not_its_size_or_path() -> None:
    def told(path: str, size: int, inputs: dict[str, str], **facts: str) -> dict[str, Any]:
        recipe = load({"data": {"tokenizer": path}, "model": {"vocab_size": size}})
        return identity(recipe, "preprocess", inputs, source="s", **facts)

    assert told("/a.json", 5000, {}, tokenizer_digest="t") == told("/b.json", 6000, {}, tokenizer_digest="t")
    assert told("/a.json", 5000, {}, tokenizer_digest="t") != told("/a.json", 5000, {}, tokenizer_digest="u")
    assert told("train", 5000, {"tokenizer": "k"}) == told("/a.json", 6000, {"tokenizer": "k"})


@pytest.mark.parametrize(
    ("step", "inputs", "facts", "says"),
    [
        ("train", {}, {"world_size": 2}, "needs dataset"),
        ("train", {"dataset": "a"}, {}, "needs world_size"),
        ("train", {"dataset": "a", "data": "b"}, {"world_size": 2}, "does not know data"),
        ("serve", {"export": "a"}, {"speed": 2}, "does not know speed"),
        ("preprocess", {}, {"source": "s", "tokenizer_digest": "t"}, "when, and only when, data.tokenizer is a path"),
    ],
)
def test_what_is_missing_or_unknown_is_refused(
    step: str, inputs: dict[str, str], facts: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        identity(load(base("local")), step, inputs, **facts)


def test_what_came_later_moves_no_result_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprints are those of the commit before the fields of LATER were there, when all versions were 1."""
    first = {step: replace(told, version=1) for step, told in identities.STEPS.items()}
    monkeypatch.setattr(identities, "STEPS", first)
    recipe = load(base("local") | {"model": {"kv_heads": 1}}, ["parallel.shard=2"])
    told = identity(recipe, "train", {"dataset": "a"}, world_size=2)
    assert not {*LATER, "parallel.shard"} & told["recipe"].keys()
    assert fingerprint(told) == "58b1b16b2f8f"
    others = fingerprints(recipe)
    assert {step: others[step] for step in BEFORE} == BEFORE


def test_hybrid_sharding_is_another_result_and_sharding_over_all_ranks_is_the_old_one() -> None:
    def told(strategy: str, shard: int, ranks: int) -> dict[str, Any]:
        parallel = base("local")["parallel"] | {"strategy": strategy, "shard": shard}
        recipe = load(base("local") | {"parallel": parallel})
        return dict(identity(recipe, "train", {"dataset": "a"}, world_size=ranks)["recipe"])

    assert "parallel.shard" not in told("fsdp2", 8, 8)
    assert told("fsdp2", 4, 8)["parallel.shard"] == 4
    assert told("fsdp2", 1, 8)["parallel.shard"] == 1
    assert "parallel.shard" not in told("ddp", 1, 8)


def test_an_unresolved_recipe_has_no_training_identity() -> None:
    with pytest.raises(ValueError, match="resolve it with the planner"):
        identity(Recipe(), "train", {"dataset": "a"}, world_size=2)
