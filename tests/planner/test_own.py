"""Castra's own layouts beyond data parallelism: what is tried, refused, offloaded; what adapters need."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner import DoesNotDivide, DoesNotFit, Estimate, Layout, Machine, checkpoint_steps, local_machine, plan
from planner.arguments import settled
from planner.judge import Site, Work, judge
from planner.machine import instance
from planner.own import cut_layouts, layouts, own_layouts, prescribes
from planner.profiles import Profiles
from planner.software import castra
from recipes import Recipe
from recipes.cluster import AwsCluster
from recipes.convert import on
from recipes.load import RecipeError, load
from tests.planner.conftest import LLAMA3_8B

Make = Callable[..., Recipe]
LEAN: dict[str, Any] = {"global_batch_size": 256, "activation_checkpointing": True}
HERE = local_machine(cores=2, ram_gib=24)


def site(machine: Machine, nodes: int, processes: int = 8) -> Site:
    return Site(machine=machine, profiles=Profiles.shipped(), nodes=nodes, processes_per_node=processes)


def best(recipe: Recipe, machine: Machine, nodes: int) -> Estimate:
    return plan(recipe, machine, nodes, 8).best


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ({"tp": 4}, (4, 1, 1, 1, 8)),
        ({"tp": 2, "pp": 4}, (2, 4, 1, 1, 4)),
        ({"pp": 2, "vpp": 4, "tp": 1, "cp": 1}, (1, 2, 4, 1, 16)),
        ({"cp": 4, "tp": 2, "pp": 1}, (2, 1, 1, 4, 4)),
    ],
)
def test_what_is_prescribed_is_planned_and_settled(llama3_8b: Make, p5: Machine, parallel: Any, sizes: Any) -> None:
    recipe = llama3_8b(parallel={"strategy": "fsdp2", "cp": 1} | parallel, **LEAN)
    layout = best(recipe, p5, 4).layout
    assert (layout.tp, layout.pp, layout.cp, layout.dp) == (sizes[0], sizes[1], sizes[3], sizes[4])
    assert layout.vpp == sizes[2] or "vpp" not in parallel
    assert layout.sequence_parallel == (layout.tp > 1)
    assert layout.gradient_accumulation >= layout.pp
    told = settled(layout)
    assert all(isinstance(told[name], int) for name in ("shard", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size"))
    again = Recipe.model_validate(recipe.model_dump() | {"parallel": told})
    assert best(again, p5, 4).layout == layout


@pytest.mark.parametrize(
    ("parallel", "train", "says"),
    [
        ({"tp": 3}, {}, "32 ranks do not divide by parallel.tp x pp x cp (3 x 1 x 1): take other sizes."),
        (
            {"tp": 16},
            {},
            "parallel.tp 16 is more than the 8 accelerators of a node, who alone are near enough: take 8.",
        ),
        ({"pp": 32, "vpp": 2}, {}, "parallel.pp 32 x vpp 2 does not divide model.layers 32: take 1, 2, 4, 8 or 16."),
        ({"vpp": 2, "pp": 1, "tp": 2}, {}, "parallel.vpp 2 needs pipeline stages: take parallel.pp above 1, or"),
        (
            {"tp": 2},
            {"global_batch_size": 24},
            "does not divide over the 16 data parallel ranks (32 ranks / 2 for each",
        ),
        (
            {"pp": 4},
            {"global_batch_size": 8},
            "parallel.pp 4 needs at least 4 micro-batches, and each data parallel rank",
        ),
        (
            {"tp": 2, "shard": 3},
            {},
            "parallel.shard 3 does not divide the 16 data parallel ranks: take 1, 2, 4, 8 or 16.",
        ),
        (
            {"tp": 2, "micro_batch_size": 3},
            {},
            "parallel.micro_batch_size 3 does not divide the 2 sequences of each rank",
        ),
    ],
)
def test_what_does_not_divide_is_refused_in_one_sentence(
    llama3_8b: Make, p5: Machine, parallel: Any, train: Any, says: str
) -> None:
    with pytest.raises(DoesNotDivide) as refused:
        best(llama3_8b(parallel={"strategy": "fsdp2", "tp": 1, "pp": 1, "vpp": 1, "cp": 1} | parallel, **train), p5, 4)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"kv_heads": 2}, "parallel.tp 4 does not divide model.kv_heads 2: take 1 or 2."),
        ({"vocab_size": 128258}, "parallel.tp 4 does not divide model.vocab_size 128258: take 1 or 2."),
        (
            {"family": "gpt2", "kv_heads": 32, "tie_embeddings": True},
            "parallel.tp 4: a gpt2 model has no tensor parallel plan; take 1.",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_up_is_refused(p5: Machine, model: Any, says: str) -> None:
    recipe = load({"model": LLAMA3_8B | model, "train": {"global_batch_size": 32}, "parallel": {"tp": 4}})
    with pytest.raises(DoesNotDivide, match=f"^{says}$".replace("(", r"\(")):
        best(recipe, p5, 4)


def test_sequences_are_cut_into_two_chunks_a_rank(llama3_8b: Make, p5: Machine) -> None:
    recipe = llama3_8b(sequence_length=6000, parallel={"tp": 4, "cp": 8})
    with pytest.raises(DoesNotDivide, match=r"6000 does not divide by parallel's 2 x cp 8 x tp 4: take smaller sizes"):
        best(recipe, p5, 4)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "zero0"])
def test_sizes_go_with_fsdp2_only(strategy: str) -> None:
    with pytest.raises(RecipeError, match=f"tp: 2 goes with strategy: fsdp2, not {strategy}"):
        load({"parallel": {"strategy": strategy, "tp": 2}})


def test_adapters_are_not_cut_up(llama3_8b: Make, p5: Machine) -> None:
    with pytest.raises(DoesNotDivide, match="adapters have no tensor parallel plan"):
        best(llama3_8b(parallel={"tp": 2}, lora_rank=8), p5, 4)


def test_compiled_blocks_are_not_cut_up_either(llama3_8b: Make, p5: Machine) -> None:
    with pytest.raises(DoesNotDivide, match="compiled blocks have no tensor parallel plan"):
        best(llama3_8b(parallel={"tp": 2}, compile=True), p5, 4)


def test_deepspeed_has_no_fp16_here() -> None:
    half = {"train": {"precision": "fp16"}}
    found = plan(load(half), HERE, 2, 1)
    assert {one.layout.strategy for one in [*found.ranked, *found.refused]} == {"ddp", "fsdp2"}
    with pytest.raises(DoesNotDivide, match="DeepSpeed has no fp16 on CPUs"):
        plan(load(half | {"parallel": {"strategy": "zero2"}}), HERE, 2, 1)


def test_auto_cuts_a_model_up_only_where_that_helps(llama3_8b: Make, p5: Machine) -> None:
    """A batch of 16 sequences does not divide over 32 ranks: each sequence, or each layer, is cut up."""
    plain = best(llama3_8b(global_batch_size=64), p5, 4).layout
    assert (plain.dp, plain.tp * plain.pp * plain.cp) == (32, 1)
    few = best(llama3_8b(global_batch_size=16, sequence_length=32768), p5, 4).layout
    assert (few.world_size, few.dp <= 16) == (32, True)
    with pytest.raises(DoesNotDivide, match=r"train\.global_batch_size 16 does not divide over 32 ranks"):
        best(llama3_8b(global_batch_size=16, parallel={"tp": 1, "pp": 1, "vpp": 1, "cp": 1}), p5, 4)


def test_a_rehearsal_on_an_emulated_cloud_has_as_many_ranks_as_here() -> None:
    small = load({"cluster": {"kind": "local", "nodes": 2, "processes_per_node": 2}, "parallel": {"tp": 2, "pp": 2}})
    there = on(small, "slurm", small=True)
    assert isinstance(there.cluster, AwsCluster)
    layout = plan(there, instance(there.cluster.instance_type), there.cluster.nodes, 1).best.layout
    assert (layout.tp, layout.pp, layout.world_size) == (2, 2, 4)


def test_this_machine_stays_with_data_parallelism_unless_it_is_asked() -> None:
    assert {one.world_size == one.dp for one in layouts(Recipe(), site(HERE, 2, 2))} == {True}
    asked = load({"parallel": {"tp": 2, "pp": 2}})
    found = plan(asked, HERE, 2, 2).best.layout
    assert (found.tp, found.pp, found.dp) == (2, 2, 1)


def test_what_nobody_asked_for_must_be_clearly_faster(llama3_8b: Make, p5: Machine) -> None:
    found = plan(llama3_8b(global_batch_size=64), p5, 4, 8)
    plain = [one for one in found.ranked if one.layout.dp == 32]
    cut = [one for one in found.ranked if one.layout.dp < 32]
    assert cut
    for one in cut:
        before = found.ranked[: found.ranked.index(one)]
        assert any(other in before for other in plain) or one.step_seconds * 1.15 < plain[0].step_seconds


def test_hybrid_sharding_sends_less_between_nodes_and_holds_more(llama3_8b: Make, p4de: Machine) -> None:
    def one(shard: Any) -> Estimate:
        told = {"strategy": "fsdp2", "shard": shard, "micro_batch_size": 1}
        return best(llama3_8b(parallel=told, global_batch_size=64, activation_checkpointing=True), p4de, 8)

    whole, hybrid = one("auto"), one(8)
    assert (whole.layout.shard, hybrid.layout.shard) == (64, 8)
    assert hybrid.memory.weights == pytest.approx(8 * whole.memory.weights)
    assert hybrid.phases["data parallel"] < whole.phases["data parallel"]
    assert str(hybrid.layout) == "fsdp2 dp64 shard8, micro batch 1 x 1"


def offloaded(what: str, place: str = "cpu", nodes: int = 1, **model: Any) -> Estimate:
    told = {"strategy": "zero3", "offload": what, "offload_to": place} if what != "none" else {"strategy": "zero3"}
    train = {"global_batch_size": 32, "precision": "bf16", "activation_checkpointing": True}
    shape = LLAMA3_8B | model
    recipe = load({"model": shape, "data": {"sequence_length": 8192}, "parallel": told, "train": train})
    return best(recipe, instance("p4d.24xlarge"), nodes)


def test_what_is_offloaded_leaves_the_card_and_takes_time() -> None:
    with pytest.raises(DoesNotFit):
        offloaded("none")
    optimizer, parameters, disk = offloaded("optimizer"), offloaded("parameters"), offloaded("parameters", "nvme")
    assert optimizer.memory.optimizer == optimizer.memory.gradients == 0 < optimizer.memory.weights
    assert parameters.memory.weights == 0
    times = [one.phases["offload"] for one in (optimizer, parameters, disk)]
    assert 0 < times[0] < times[1] < times[2]
    assert str(disk.layout).endswith("parameters offloaded to nvme")


def test_what_is_offloaded_must_fit_into_the_node() -> None:
    """180 GiB of moments, master weights, gradients and buffers do not fit into 64."""
    layout = offloaded("optimizer").layout
    work = Work.of(load({"model": LLAMA3_8B, "train": {"global_batch_size": 32}}))
    machine = instance("p4d.24xlarge")
    little = judge(work, site(replace(machine, ram_gib=64), 1), [layout])[0]
    assert not little.fits
    assert "of each node's own memory" in little.why_not
    bare = judge(work, site(replace(machine, nvme_gb=0.0), 1), [replace(layout, offload="optimizer-nvme")])[0]
    assert "GiB of each node's NVMe drives, 0 GiB are there" in bare.why_not


def test_deepspeed_begins_with_the_whole_model_in_every_rank_s_memory() -> None:
    """8 ranks of 70 billion weights in fp32 are 2.1 TiB, a p5.48xlarge has 2 TiB: zero3 is refused, fsdp2 is not."""
    large = {"hidden_size": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_size": 28672, "vocab_size": 128256}
    train = {"global_batch_size": 512, "precision": "bf16", "activation_checkpointing": True}
    model = large | {"tie_embeddings": False}
    told = {"model": model, "data": {"sequence_length": 8192}, "train": train}
    with pytest.raises(DoesNotFit, match=r"of each node's own memory.*smallest change that fits is .*fsdp2"):
        best(load(told | {"parallel": {"strategy": "zero3"}}), instance("p5.48xlarge"), 32)
    assert best(load(told | {"parallel": {"strategy": "fsdp2"}}), instance("p5.48xlarge"), 32).fits


def test_adapters_need_states_for_themselves_only(llama3_8b: Make, p5: Machine) -> None:
    told = {"strategy": "fsdp2", "micro_batch_size": 1}
    whole = best(llama3_8b(parallel=told), p5, 4)
    lora = best(llama3_8b(parallel=told, lora_rank=16), p5, 4)
    assert lora.memory.weights == pytest.approx(whole.memory.weights)
    share = 41_943_040 / 8_030_261_248
    assert lora.memory.optimizer == pytest.approx(share * whole.memory.optimizer, rel=1e-3)
    assert 0.5 * whole.step_seconds < lora.step_seconds < 0.95 * whole.step_seconds
    assert castra(["fsdp2"], "bf16").trained.tolist() == [1.0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_planned_for_every_strategy(llama3_8b: Make, p5: Machine, precision: str) -> None:
    recipe = llama3_8b(precision=precision, global_batch_size=64, activation_checkpointing=True)
    found = plan(recipe, p5, 4, 8)
    assert found.best.fits
    assert found.best.low < found.best.step_seconds < found.best.high


def test_selective_recomputation_lies_between_none_and_all(llama3_8b: Make, p5: Machine) -> None:
    def one(setting: Any) -> Estimate:
        recipe = llama3_8b(
            parallel={"strategy": "fsdp2", "micro_batch_size": 1},
            sequence_length=4096,
            activation_checkpointing=setting,
        )
        return best(recipe, p5, 4)

    none, some, all_ = one(False), one("selective"), one(True)
    assert none.memory.activations > some.memory.activations > all_.memory.activations
    assert none.step_seconds < some.step_seconds < all_.step_seconds


def test_stage_zero_of_deepspeed_is_planned_where_it_is_asked_for_and_nowhere_else() -> None:
    assert plan(load({"parallel": {"strategy": "zero0"}}), HERE, 2, 1).best.layout.strategy == "zero0"
    assert "zero0" not in {one.strategy for one in own_layouts(Recipe(), site(HERE, 2, 1))}


def test_every_layout_that_is_prescribed_is_listed(llama3_8b: Make, p5: Machine) -> None:
    recipe = llama3_8b(parallel={"strategy": "fsdp2", "pp": 2}, global_batch_size=128)
    found = cut_layouts(recipe, site(p5, 4))
    assert all(prescribes(recipe, one) and one.pp == 2 for one in found)
    assert len(set(found)) == len(found) > 20
    other = Layout(strategy="fsdp2", dp=32, zero=3, shard=32, micro_batch_size=1, gradient_accumulation=4)
    assert not prescribes(recipe, other)


def test_checkpoints_are_as_often_as_the_plan_advises(llama3_8b: Make) -> None:
    cloud = {"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 4}
    told = llama3_8b(checkpoint_every="auto", steps=100_000).model_dump() | {"cluster": cloud}
    recipe = Recipe.model_validate(told)
    found = best(recipe, instance("p5.48xlarge"), 4)
    every = checkpoint_steps(recipe, found)
    assert 0.5 * 3600 < every * found.step_seconds < 6 * 3600
    assert checkpoint_steps(recipe, found, gb_per_s=4) < every, "cheaper saves are made more often"
    assert checkpoint_steps(load(told, ["train.checkpoint_every=7"]), found) == 7
    assert checkpoint_steps(load(told, ["train.steps=200", "train.warmup_steps=1"]), found) == 50
    small = load({"train": {"checkpoint_every": "auto"}})
    assert 1 < checkpoint_steps(small, plan(small, HERE, 2, 1).best) <= 225
