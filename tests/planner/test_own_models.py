"""Models that Castra's own program trains in some of its layouts only: with experts, or beside weights in 4 bits."""

from typing import Any

import pytest

from planner import local_machine, parameters, plan
from planner.errors import DoesNotDivide
from planner.machine import instance
from planner.software import NF4_BYTES, castra
from recipes import Recipe
from recipes.weights import matrices
from recipes.weights import parameters as counted

MIXTRAL = {"family": "mixtral", "experts": 8, "topk": 2, "hidden_size": 1024, "layers": 8, "heads": 8, "kv_heads": 8,
           "ffn_size": 3584, "vocab_size": 32000}  # fmt: skip


def recipe(**parts: dict[str, Any]) -> Recipe:
    told: dict[str, Any] = {
        "model": MIXTRAL,
        "train": {"precision": "bf16", "global_batch_size": 64},
        "data": {"sequence_length": 1024},
    }
    for part, fields in parts.items():
        told[part] = told.get(part, {}) | fields
    return Recipe.model_validate(told)


def layouts(asked: Recipe) -> set[str]:
    found = plan(asked, instance("p4d.24xlarge"), 1, 8)
    return {str(one.layout) for one in found.ranked}


def test_a_model_with_experts_is_planned_in_the_layouts_that_train_it() -> None:
    found = plan(recipe(), instance("p4d.24xlarge"), 1, 8)
    assert {one.layout.strategy for one in found.ranked} <= {"ddp", "fsdp2", "zero1", "zero2"}
    assert {one.layout.world_size == one.layout.dp for one in found.ranked} == {True}
    assert found.best.layout.software == "castra"


@pytest.mark.parametrize("size", ["tp", "pp", "cp"])
def test_it_is_not_cut_up(size: str) -> None:
    with pytest.raises(DoesNotDivide, match="do not cut up a model with experts: leave them out"):
        plan(recipe(parallel={"strategy": "fsdp2", size: 2}), instance("p4d.24xlarge"), 1, 8)


def test_zero3_is_told_what_to_take_instead() -> None:
    with pytest.raises(DoesNotDivide, match=r"not trained with zero3: take parallel\.strategy fsdp2 or zero2"):
        plan(recipe(parallel={"strategy": "zero3"}), local_machine(2, 24), 2, 1)


def test_its_weights_are_counted_alike() -> None:
    model = recipe().model
    assert parameters(model, 1024) == counted(model)
    assert 8 * 3 * 1024 * 3584 * 8 < counted(model) < 1.2 * 8 * 3 * 1024 * 3584 * 8


LLAMA = {"hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_size": 14336, "vocab_size": 128256,
         "tie_embeddings": False}  # fmt: skip


def test_weights_in_4_bits_are_planned_with_ddp_and_take_half_a_byte() -> None:
    lora = {"lora_rank": 16, "activation_checkpointing": True, "global_batch_size": 8}
    told: dict[str, Any] = {"model": LLAMA, "data": {"sequence_length": 2048}}
    four = Recipe.model_validate(told | {"train": lora | {"lora_base": "nf4"}})
    machine = instance("p4d.24xlarge")
    found = plan(four, machine, 1, 8)
    assert {one.layout.strategy for one in found.ranked} == {"ddp"}
    full = plan(Recipe.model_validate(told | {"train": lora}), machine, 1, 8)
    whole = next(one for one in (*full.refused, *full.ranked) if one.layout.strategy == "ddp")
    apart = matrices(four.model, four.train.lora_targets)
    assert apart == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    share = apart / counted(four.model)
    assert found.best.memory.weights / whole.memory.weights == pytest.approx(1 - share + share * NF4_BYTES / 4)
    with pytest.raises(DoesNotDivide, match="do not cut up a base of 4 bits: leave them out"):
        plan(four.model_copy(update={"parallel": four.parallel.model_copy(update={"tp": 2})}), machine, 1, 8)


def test_what_is_kept_in_4_bits_has_no_copy_in_16() -> None:
    plain, most = castra(["ddp"], "bf16"), castra(["ddp"], "bf16", 0.01, 0.9)
    assert most.copy_bytes.item() == pytest.approx(0.1 * plain.copy_bytes.item())
    assert most.weight_bytes.item() == pytest.approx(0.1 * 4 + 0.9 * NF4_BYTES)
