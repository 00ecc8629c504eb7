"""What a plan shows as the job's arguments is what the job is started with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusters.base import Job
from clusters.local import LocalCluster
from planner import Layout
from planner.arguments import arguments, deepspeed, megatron, settled, torchrun
from recipes.identity import identity
from recipes.load import load
from recipes.spec import Parallel, Recipe

LARGE = Path(__file__).parents[2] / "recipes" / "llama3-70b-p5.yaml"


def own(strategy: str, micro: int = 2, accumulation: int = 4, ranks: int = 2) -> Layout:
    stage = {"ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}[strategy]
    return Layout(
        strategy=strategy,
        dp=ranks,
        zero=stage,
        shard=ranks if stage else 1,
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
    )


def cut(**sizes: Any) -> Layout:
    """A layout of Megatron's."""
    told: dict[str, Any] = {"strategy": "zero1", "tp": 8, "pp": 4, "dp": 8, "zero": 1, "shard": 8}
    batch = {"micro_batch_size": 1, "gradient_accumulation": 64}
    return Layout(software="megatron", **told | batch | sizes)


def flags(recipe: Recipe, layout: Layout) -> dict[str, str]:
    """Megatron's flags by name; those without a value are empty."""
    told: dict[str, str] = {}
    name = ""
    for word in megatron(recipe, layout):
        if word.startswith("--"):
            assert word not in told, f"{word} is given twice"
            name = word
        told[name] = "" if word == name else word
    return told


@pytest.mark.torch
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_gets_what_is_shown(stage: int, precision: str) -> None:
    held_against_the_program(stage, {"precision": precision, "global_batch_size": 48, "grad_clip": 0.7}, {})


@pytest.mark.torch
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_deepspeed_offloads_what_is_shown(what: str, place: str) -> None:
    told = {"offload": what, "offload_to": place, "nvme_path": "/fast"}
    held_against_the_program(3, {"precision": "bf16", "global_batch_size": 48}, told)


def held_against_the_program(stage: int, train: dict[str, Any], parallel: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from training.parallel import Share
    from training.parallel.zero import config

    recipe = load({"train": train, "parallel": {"strategy": f"zero{stage}"} | parallel})
    share = Share.of(48, 3, 4)
    place = {"cpu": "", "nvme": "-nvme"}[recipe.parallel.offload_to] if recipe.parallel.offload != "none" else ""
    layout = replace(own(f"zero{stage}", share.micro, share.accumulation, 4), offload=recipe.parallel.offload + place)
    dumped = recipe.model_dump(mode="json")
    shown = deepspeed(recipe, layout, pinned=torch.cuda.is_available())
    assert shown == config(dumped["train"], dumped["parallel"], share)


def test_deepspeed_has_no_part_in_torch_s_own_strategies() -> None:
    assert deepspeed(Recipe(), own("fsdp2")) is None
    assert deepspeed(Recipe(), own("ddp")) is None
    assert deepspeed(Recipe(), cut()) is None


def test_torchrun_gets_what_is_shown(tmp_path: Path) -> None:
    job = Job("train-1", "training.run", {}, nodes=2, processes_per_node=3)
    started = LocalCluster(tmp_path)._argv(job, 1)
    assert {*torchrun(2, 3)} <= {*started}
    of_the_node = {"--node-rank=1", "--master-addr=127.0.0.1"}
    more = [word for word in started if word.startswith("--") and word not in {*torchrun(2, 3), *of_the_node}]
    assert [word.partition("=")[0] for word in more] == ["--master-port"], "only what the platform tells is left out"
    shown = arguments(Recipe(), own("ddp"), nodes=2)
    assert started[started.index("-m", 3) :][:2] == list(shown.program[:2])


def test_what_is_settled_is_a_recipe_s_parallel_and_has_an_identity() -> None:
    told = settled(own("zero2"))
    recipe = load({"parallel": told})
    assert recipe.parallel == Parallel(
        strategy="zero2", micro_batch_size=2, software="castra", shard=1, tp=1, pp=1, vpp=1, cp=1, ep=1
    )
    assert "parallel.tp" not in identity(recipe, "train", {"dataset": "a"}, world_size=2)["recipe"]


def test_megatron_gets_the_sizes_of_the_layout() -> None:
    told = flags(load(LARGE), cut(vpp=5, cp=2, recompute="full", sequence_parallel=True))
    wanted = {
        "--tensor-model-parallel-size": "8",
        "--pipeline-model-parallel-size": "4",
        "--num-layers-per-virtual-pipeline-stage": "4",  # 80 layers over 4 stages of 5 parts
        "--context-parallel-size": "2",
        "--sequence-parallel": "",
        "--micro-batch-size": "1",
        "--global-batch-size": "512",
        "--use-distributed-optimizer": "",
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
        "--bf16": "",
        "--num-query-groups": "8",
        "--untie-embeddings-and-output-weights": "",
        "--seq-length": "8192",
    }
    assert wanted.items() <= told.items()
    assert "--expert-model-parallel-size" not in told


def test_megatron_gets_no_flag_for_what_is_not_asked() -> None:
    told = flags(load(LARGE), cut(tp=1, pp=1, zero=0, strategy="ddp", sequence_parallel=True))
    unwanted = {"--sequence-parallel", "--use-distributed-optimizer", "--recompute-granularity"}
    assert not {*unwanted, "--context-parallel-size"} & told.keys()


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ({"recompute": "selective"}, {"--recompute-granularity": "selective"}),
        ({"zero": 3, "strategy": "fsdp"}, {"--data-parallel-sharding-strategy": "optim_grads_params"}),
        ({"zero": 2, "strategy": "zero2"}, {"--data-parallel-sharding-strategy": "optim_grads"}),
        ({"shard": 2}, {"--num-distributed-optimizer-instances": "4"}),
        ({"offload": "optimizer"}, {"--optimizer-offload-fraction": "1.0"}),
        ({"offload": "act", "pp": 1}, {"--cpu-offloading-num-layers": "79"}),
    ],
)
def test_megatron_says_it_in_its_own_words(layout: dict[str, Any], wanted: dict[str, str]) -> None:
    assert wanted.items() <= flags(load(LARGE), cut(**layout)).items()


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("fp16", {"--fp16": ""}),
        ("fp8", {"--bf16": "", "--fp8-format": "hybrid"}),
        ("mxfp8", {"--bf16": "", "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"}),
        ("nvfp4", {"--bf16": "", "--fp4-format": "e2m1"}),
    ],
)
def test_megatron_s_arithmetic(precision: str, wanted: dict[str, str]) -> None:
    assert wanted.items() <= flags(load(LARGE, [f"train.precision={precision}"]), cut()).items()


def test_megatron_s_schedules_and_gpt_2() -> None:
    told = flags(load(LARGE, ["train.schedule=wsd", "train.steps=1000"]), cut())
    assert (told["--lr-decay-style"], told["--lr-wsd-decay-iters"]) == ("WSD", "200")
    assert flags(load(LARGE), cut())["--lr-decay-style"] == "cosine"
    gpt2 = flags(load({"model": {"family": "gpt2"}, "parallel": {"software": "megatron"}}), cut(tp=1, pp=1))
    assert gpt2["--position-embedding-type"] == "learned_absolute"
    assert not {"--swiglu", "--rotary-base", "--disable-bias-linear"} & gpt2.keys()


def test_megatron_s_experts() -> None:
    mixture = ["model.experts=64", "model.topk=6", "model.expert_ffn=1408", "model.shared_experts=2"]
    other = ["model.dense_layers=3", "model.head_dim=256", "model.gated=false", "model.mla=true"]
    told = flags(load(LARGE, mixture + other), cut(ep=8))
    assert "--swiglu" not in told
    wanted = {
        "--moe-layer-freq": "[0]*3+[1]*77",
        "--kv-channels": "256",
        "--multi-latent-attention": "",
        "--expert-model-parallel-size": "8",
        "--num-experts": "64",
        "--moe-router-topk": "6",
        "--moe-ffn-hidden-size": "1408",
        "--moe-shared-expert-intermediate-size": "2816",
    }
    assert wanted.items() <= told.items()


def test_the_command_is_one_line_that_a_shell_splits_into_the_words() -> None:
    import shlex

    shown = arguments(load(LARGE), cut(), nodes=32)
    assert shlex.split(shown.command) == ["torchrun", *shown.torchrun, *shown.program]
    assert shown.torchrun[1] == "--nproc-per-node=8"
    assert (shown.parallel, shown.deepspeed) == ({}, None)
