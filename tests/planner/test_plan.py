"""The planner as a whole: its choices, its refusals, its agreement with published runs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import (
    DoesNotDivide,
    DoesNotFit,
    Estimate,
    Machine,
    NoProfile,
    PlanError,
    aws_equivalent,
    local_machine,
    plan,
)
from recipes import Recipe

Make = Callable[..., Recipe]
HERE = local_machine(cores=2, ram_gib=24)


def layout_of(judged: list[Estimate], strategy: str, micro: int) -> Estimate:
    return next(one for one in judged if (one.layout.strategy, one.layout.micro_batch_size) == (strategy, micro))


def test_the_miniature_runs_replicated_with_its_largest_micro_batch() -> None:
    found = plan(Recipe(), HERE, nodes=2, processes_per_node=1)
    best = found.best.layout
    assert (best.strategy, best.micro_batch_size, best.gradient_accumulation, best.world_size) == ("ddp", 8, 1, 2)
    assert (found.best.mfu, found.best.usd) == (None, None)
    assert found.ranked[0] == found.best


def test_torchtitan_on_four_p5_lies_in_the_interval(llama3_8b: Make, p5: Machine) -> None:
    """6,785 tokens/s and GPU, 68.6 GiB reserved (awsome-distributed-ai, FSDP2, one sequence of 8,192 per GPU)."""
    best = plan(llama3_8b(), p5, nodes=4, processes_per_node=8).best
    assert best.layout.strategy == "fsdp2"
    assert best.low < 8192 / 6785 < best.high
    assert best.memory.total == pytest.approx(68.6, rel=0.1)


def test_zero3_on_one_p4de_lies_in_the_interval(llama3_8b: Make, p4de: Machine) -> None:
    """11.95 s per step of 32 sequences of 4,000 tokens (DeepSpeed ZeRO-3, recomputation, 193 steps)."""
    recipe = llama3_8b(sequence_length=4000, activation_checkpointing=True)
    found = plan(recipe, p4de, nodes=1, processes_per_node=8)
    zero3 = layout_of(found.ranked, "zero3", 1)
    assert zero3.low < 11.95 < zero3.high


def test_every_estimate_adds_up(llama3_8b: Make, p5: Machine) -> None:
    recipe = llama3_8b(global_batch_size=128)
    found = plan(recipe, p5, nodes=4, processes_per_node=8)
    for one in [*found.ranked, *found.refused]:
        assert one.layout.micro_batch_size * one.layout.gradient_accumulation * one.layout.world_size == 128
        assert sum(one.phases.values()) == pytest.approx(one.step_seconds)
        assert one.tokens_per_second == pytest.approx(128 * 8192 / one.step_seconds)
        assert one.low < one.step_seconds < one.high
        assert one.fits == (one.why_not == "")
    assert all(one.fits for one in found.ranked)
    assert not any(one.fits for one in found.refused)


def test_dollars_are_node_hours_and_half_an_hour_of_set_up(llama3_8b: Make, p5: Machine) -> None:
    found = plan(llama3_8b(), p5, nodes=4, processes_per_node=8)
    assert found.best.total_seconds == pytest.approx(1000 * found.best.step_seconds)
    assert found.best.usd == pytest.approx(4 * (found.best.total_seconds / 3600 + 0.5) * 55.04)
    assert any("2026-07-20" in note for note in found.notes)
    unpriced = replace(p5, price_usd_per_hour=None)
    assert plan(llama3_8b(), unpriced, nodes=4, processes_per_node=8).best.usd is None


def test_a_prescribed_layout_is_taken_and_compared(llama3_8b: Make, p5: Machine) -> None:
    recipe = llama3_8b(parallel={"strategy": "zero3", "micro_batch_size": 1})
    found = plan(recipe, p5, nodes=4, processes_per_node=8)
    assert found.best.layout.strategy == "zero3"
    assert found.ranked[0].layout.strategy == "fsdp2"
    assert found.notes[0].startswith("yours: ")
    assert "slower than fsdp2, micro batch 1 x 1" in found.notes[0]
    chosen = llama3_8b(parallel={"strategy": "fsdp2"})
    assert "also the planner's choice" in plan(chosen, p5, nodes=4, processes_per_node=8).notes[0]


def test_a_replicated_8b_is_refused_with_the_smallest_change(llama3_8b: Make, p5: Machine) -> None:
    recipe = llama3_8b(parallel={"strategy": "ddp"})
    with pytest.raises(DoesNotFit, match=r"ddp, micro batch 1 x 1 needs .* GiB per rank.*parallel.strategy fsdp2\.$"):
        plan(recipe, p5, nodes=4, processes_per_node=8)


def test_too_large_a_micro_batch_names_the_largest_that_fits(llama3_8b: Make, p5: Machine) -> None:
    batches = {"global_batch_size": 256, "activation_checkpointing": True}
    greedy = llama3_8b(parallel={"strategy": "zero3", "micro_batch_size": 32}, sequence_length=32768, **batches)
    with pytest.raises(DoesNotFit) as refused:
        plan(greedy, p5, nodes=1, processes_per_node=8)
    size = int(str(refused.value).rsplit("parallel.micro_batch_size ", 1)[1].rstrip("."))
    modest = llama3_8b(parallel={"strategy": "zero3", "micro_batch_size": size}, sequence_length=32768, **batches)
    assert plan(modest, p5, nodes=1, processes_per_node=8).best.fits


def test_the_number_of_nodes_a_refusal_names_is_the_smallest_that_fits(llama3_8b: Make, p5: Machine) -> None:
    recipe = llama3_8b(global_batch_size=240, sequence_length=1024)
    small = replace(p5, memory_gib=24)
    with pytest.raises(DoesNotFit, match=r"cluster.nodes \d+\.$") as refused:
        plan(recipe, small, nodes=1, processes_per_node=8)
    enough = int(str(refused.value).rsplit(" ", 1)[1].rstrip("."))
    advised = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"activation_checkpointing": "checkpointing" in str(refused.value)})
        }
    )
    assert plan(advised, small, nodes=enough, processes_per_node=8).best.fits
    fewer = max(count for count in range(1, enough) if 240 % (8 * count) == 0)
    with pytest.raises(DoesNotFit):
        plan(advised, small, nodes=fewer, processes_per_node=8)


def test_this_machine_is_told_to_start_fewer_nodes() -> None:
    with pytest.raises(DoesNotFit, match=r"this machine.*cluster.nodes \d+\.$"):
        plan(Recipe(), local_machine(cores=2, ram_gib=4), nodes=16, processes_per_node=1)


@given(batch=st.integers(1, 300), nodes=st.integers(1, 6), processes=st.integers(1, 4))
def test_a_batch_that_does_not_divide_names_values_that_do(batch: int, nodes: int, processes: int) -> None:
    recipe = Recipe.model_validate({"train": {"global_batch_size": batch}})
    try:
        plan(recipe, HERE, nodes, processes)
    except DoesNotDivide as refused:
        words = str(refused).split("take ", 1)[1].rstrip(".").replace(", or cluster.nodes ", " nodes ")
        sizes, _, other = words.partition(" nodes ")
        for size in map(int, sizes.split(" or ")):
            plan(Recipe.model_validate({"train": {"global_batch_size": size}}), HERE, nodes, processes)
        if other:
            plan(recipe, HERE, int(other), processes)
    else:
        assert batch % (nodes * processes) == 0


def test_a_micro_batch_that_does_not_divide_names_its_neighbours(llama3_8b: Make, p5: Machine) -> None:
    with pytest.raises(DoesNotDivide, match=r"micro_batch_size 3 does not divide the 8 sequences .* take 2 or 4\.$"):
        plan(llama3_8b(parallel={"micro_batch_size": 3}), p5, nodes=1, processes_per_node=4)


def test_a_machine_without_figures_is_refused(llama3_8b: Make, p5: Machine) -> None:
    with pytest.raises(NoProfile, match=r"no fp32 peak is known for p5\.48xlarge: set train.precision: bf16"):
        plan(llama3_8b(precision="fp32"), replace(p5, fp32_tflops=None), nodes=4, processes_per_node=8)
    with pytest.raises(NoProfile, match=r"no bf16 peak is known for p5\.48xlarge: take another type\.$"):
        plan(llama3_8b(), replace(p5, fp32_tflops=None, bf16_tflops=None), nodes=4, processes_per_node=8)
    with pytest.raises(NoProfile, match="between accelerators"):
        plan(llama3_8b(), replace(p5, intra_gb_per_s=None), nodes=4, processes_per_node=8)


def test_counts_that_make_no_sense_are_refused(llama3_8b: Make, p5: Machine) -> None:
    with pytest.raises(PlanError, match="has 8 accelerators, 16 processes per node were asked for"):
        plan(llama3_8b(), p5, nodes=4, processes_per_node=16)
    with pytest.raises(PlanError, match="take at least 1 x 1"):
        plan(llama3_8b(), p5, nodes=0, processes_per_node=8)


def test_the_miniature_would_cost_half_an_hour_of_instances(p4de: Machine) -> None:
    found = aws_equivalent(Recipe(), p4de, nodes=2)
    assert found.layout.world_size == 16
    assert found.usd == pytest.approx(2 * 27.44705 * (0.5 + found.total_seconds / 3600))


def test_accelerators_a_small_batch_cannot_use_idle(p4de: Machine) -> None:
    """What the recipe prescribes for this machine says nothing about that one."""
    dozen = Recipe.model_validate({"train": {"global_batch_size": 12}, "parallel": {"micro_batch_size": 6}})
    assert aws_equivalent(dozen, p4de, nodes=2).layout.world_size == 12
    with pytest.raises(DoesNotDivide):
        aws_equivalent(dozen, p4de, nodes=5)


@given(
    batch=st.sampled_from([16, 48, 96]),
    nodes=st.sampled_from([1, 2]),
    checkpointing=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_the_same_question_has_the_same_answer(batch: int, nodes: int, precision: str, *, checkpointing: bool) -> None:
    train = {"global_batch_size": batch, "activation_checkpointing": checkpointing, "precision": precision}
    recipe = Recipe.model_validate({"train": train})
    assert plan(recipe, HERE, nodes, 1) == plan(recipe, HERE, nodes, 1)
