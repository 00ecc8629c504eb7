"""What Megatron-LM and Megatron-DeepSpeed are told, held against their own argument parsers."""

import json
from typing import Any

import pytest

from planner.arguments import megatron
from planner.estimate import Layout
from recipes.load import RecipeError, load
from recipes.weights import parameters
from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import GALLERY, command, lines, of, planned, spec
from tests.training.cases.upstream_parsers import Refused, parse
from training import cases
from training.cases import megatron_deepspeed, megatron_lm
from training.cases.base import CaseError, Command, Paths

LM, DS = "megatron_lm-core_v0.16.1", "megatron_deepspeed-4efb479"
TABLE = {
    # Narayanan et al. 2021, table 1: billions of weights, heads, width, layers, tp, pp, GPUs, batch
    "1b7": (1.7, 24, 2304, 24, 1, 1, 32, 512),
    "3b6": (3.6, 32, 3072, 30, 2, 1, 64, 512),
    "7b": (7.5, 32, 4096, 36, 4, 1, 128, 512),
    "18b": (18.4, 48, 6144, 40, 8, 1, 256, 1024),
    "39b": (39.1, 64, 8192, 48, 8, 2, 512, 1536),
    "76b": (76.1, 80, 10240, 60, 8, 4, 1024, 1792),
    "145b": (145.6, 96, 12288, 80, 8, 8, 1536, 2304),
    "310b": (310.1, 128, 16384, 96, 8, 16, 1920, 2160),
}


def told(name: str, *sets: str) -> dict[str, Any]:
    """What Megatron-LM's own parser makes of a recipe's command."""
    return parse(LM, command(name, *sets).argv[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("megatron-lm"))
def test_every_kind_tells_megatron_lm_what_its_parser_takes(name: str, kind: str) -> None:
    shown = command(name, kind=kind)
    assert (shown.argv[0], shown.per) == ("pretrain_gpt.py", "rank")
    assert parse(LM, shown.argv[1:])["data_path"] == ["/fsx/dataset/megatron/train"]
    record(name, kind, "rendered", "arguments parsed against Megatron-LM core_v0.16.1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("megatron-deepspeed"))
def test_every_kind_tells_megatron_deepspeed_what_its_parser_takes(name: str, kind: str) -> None:
    shown = command(name, kind=kind)
    parsed = parse(DS, shown.argv[1:])
    config = json.loads(shown.files["ds_config.json"])
    assert parsed["deepspeed_config"] == "/fsx/out/ds_config.json"
    assert parsed["zero_stage"] == config["zero_optimization"]["stage"]
    assert parsed["global_batch_size"] == config["train_batch_size"]
    assert parsed["micro_batch_size"] == config["train_micro_batch_size_per_gpu"]
    assert parsed["bf16"] == config["bf16"]["enabled"]
    record(name, kind, "rendered", "arguments parsed against Megatron-DeepSpeed 4efb479")


@pytest.mark.parametrize("size", TABLE)
def test_the_presets_are_the_published_table(size: str) -> None:
    weights, heads, width, layers, tp, pp, gpus, batch = TABLE[size]
    name = f"megatron-gpt3-{size}"
    recipe, parsed = planned(name), told(name)
    # the paper's own formula counts a little more than there is (equation 2 has no final norm), and rounds
    assert parameters(recipe.model, 2048) / 1e9 == pytest.approx(weights, rel=0.03)
    assert (parsed["num_attention_heads"], parsed["hidden_size"], parsed["num_layers"]) == (heads, width, layers)
    assert (parsed["tensor_model_parallel_size"], parsed["pipeline_model_parallel_size"]) == (tp, pp)
    assert parsed["global_batch_size"] == batch
    assert (parsed["ffn_hidden_size"], parsed["seq_length"], parsed["vocab_size"] + 1) == (4 * width, 2048, 51200)
    assert recipe.cluster.nodes * 8 == gpus
    assert batch % (gpus // (tp * pp) * parsed["micro_batch_size"]) == 0, "Megatron wants whole micro-batches"
    assert parsed["sequence_parallel"] == (tp > 1)
    assert parsed["use_distributed_optimizer"]


def test_the_plan_shows_the_words_the_job_is_started_with() -> None:
    recipe = planned("megatron-gpt3-39b")
    layout = Layout(
        software="megatron",
        strategy="zero1",
        tp=8,
        pp=2,
        dp=32,
        zero=1,
        shard=32,
        micro_batch_size=recipe.parallel.micro_batch_size if recipe.parallel.micro_batch_size != "auto" else 1,
        gradient_accumulation=12,
        recompute=recipe.parallel.recompute,
    )
    shown = megatron(recipe, layout)
    assert command("megatron-gpt3-39b").argv[1 : 1 + len(shown)] == shown


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (["train.eval_every=50"], {"split": "99,1,0", "eval_interval": 50, "eval_iters": 1}),
        ([], {"split": "100,0,0", "eval_iters": 0, "save_interval": 100, "exit_signal_handler": True}),
        (["train.schedule=wsd"], {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 40}),
        (["parallel.recompute=full"], {"recompute_granularity": "full", "recompute_method": "uniform"}),
        (["parallel.vpp=2", "parallel.pp=2"], {"num_layers_per_virtual_pipeline_stage": 9}),
        (['case.arguments=["log-interval=10", "bf16=false", "fp16=true"]'], {"log_interval": 10, "fp16": True}),
    ],
)
def test_what_the_recipe_says_is_what_its_parser_reads(sets: list[str], wanted: dict[str, Any]) -> None:
    parsed = told("megatron-gpt3-7b", *sets)
    assert {name: parsed[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    "argument", ["tensor-parallel=2", "lr-decay-style=sine", "micro-batch-size=two", "swiglu=yes", "seed=1 2"]
)
@pytest.mark.parametrize("table", [LM, DS])
def test_a_wrong_argument_is_seen(table: str, argument: str) -> None:
    name = "megatron-gpt3-7b" if table == LM else "megatron-deepspeed-gpt-103b"
    shown = command(name, f'case.arguments=["{argument}"]')
    with pytest.raises(Refused):
        parse(table, shown.argv[1:])


def settled(name: str, change: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = spec(name)
    for section, values in change.items():
        found[section] = found[section] | values
    return found


def refused(name: str, change: dict[str, dict[str, Any]]) -> str:
    with pytest.raises(CaseError) as problem:
        cases.command(settled(name, change), 16, 8)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": {"precision": "fp8"}}, "train.precision fp8"),
        ({"train": {"schedule": "wsd"}}, "train.schedule wsd"),
        ({"parallel": {"vpp": 2}}, "parallel.vpp 2"),
        ({"parallel": {"cp": 2}}, "parallel.cp 2"),
        ({"parallel": {"strategy": "zero3"}}, "does not go with a pipeline"),
        ({"model": {"experts": 8, "topk": 2}}, "dense"),
        ({"model": {"family": "gemma2"}}, "model.family gemma2"),
    ],
)
def test_what_deepspeed_s_cannot_do_is_one_sentence(change: dict[str, dict[str, Any]], says: str) -> None:
    assert says in refused("megatron-deepspeed-gpt-103b", change)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_deepspeed_gets_a_llama_and_an_offloaded_optimizer(stage: str) -> None:
    llama = {"family": "llama", "gated": True, "kv_heads": 8, "tie_embeddings": False, "heads": 96}
    change = {"model": llama, "parallel": {"pp": 1, "strategy": stage, "offload": "optimizer", "recompute": "full"}}
    shown = cases.command(settled("megatron-deepspeed-gpt-103b", change), 8, 8)
    parsed = parse(DS, shown.argv[1:])
    assert parsed["zero_stage"] == int(stage[-1])
    assert (parsed["no_pipeline_parallel"], parsed["cpu_optimizer"], parsed["checkpoint_activations"]) == (True,) * 3
    assert (parsed["normalization"], parsed["num_key_value_heads"], parsed["swiglu"]) == ("rmsnorm", 8, True)
    config = json.loads(shown.files["ds_config.json"])
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_fsdp_of_megatron_may_not_be_told_one_connection() -> None:
    def env(strategy: str) -> dict[str, str]:
        change = {"parallel": {"strategy": strategy, "tp": 1}}
        return dict(cases.command(settled("megatron-gpt3-1b7", change), 4, 8).env)

    assert env("zero1") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert env("zero3") == {}


def test_recorded_lines_are_read() -> None:
    (line,) = lines("megatron-lm")
    assert megatron_lm.measure(line) == pytest.approx(
        {"step": 1, "loss": 11.92634, "seconds": 271.607, "tflops": 40.4, "grad_norm": 5.96, "lr": 1.5e-6}
    )
    (line,) = lines("megatron-deepspeed")
    assert megatron_deepspeed.measure(line) == pytest.approx(
        {"step": 11, "loss": 13.76514, "seconds": 52.7281, "tflops": 167.52, "grad_norm": 459.628, "lr": 1.499e-5}
    )
    for other in (
        "",
        "training ...",
        "saving checkpoint at iteration     100 to /fsx",
        "validation loss at iteration 5 |",
    ):
        assert megatron_lm.measure(other) is None


def test_megatron_s_frameworks_are_planned_as_megatron_and_read_its_files() -> None:
    recipe = load({"case": {"framework": "megatron-lm"}, "parallel": "auto"})
    assert recipe.parallel.software == "megatron"
    assert recipe.data.megatron
    assert load(recipe.model_dump(mode="json")) == recipe
    with pytest.raises(RecipeError, match="megatron-lm goes with parallel"):
        load({"case": {"framework": "megatron-lm"}, "parallel": {"software": "castra"}})
    assert load({"case": {"framework": "torchtitan"}}).parallel.software == "castra"


def test_the_paths_are_the_jobs() -> None:
    paths = Paths("/out", "/opt/theirs", "/data", "")
    shown: Command = cases.command(spec("megatron-gpt3-7b"), 16, 8, paths)
    parsed = parse(LM, shown.argv[1:])
    assert (parsed["save"], parsed["load"], parsed["data_cache_path"]) == ("/out/checkpoints",) * 2 + ("/out/cache",)
    assert GALLERY.is_dir()
