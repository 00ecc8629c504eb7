"""What torchtitan is told, held against its own configuration at the pinned tag."""

import math
import tomllib
from typing import Any

import pytest

from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import command, lines, of, spec
from tests.training.cases.upstream_parsers import Refused
from tests.training.cases.upstream_schemas import hold, read
from training.cases import torchtitan
from training.cases.base import CaseError, Command, Paths
from training.cases.toml import toml

UPSTREAM = read(f"torchtitan-{torchtitan.UPSTREAM.version}")
NAME = "torchtitan-llama3-8b"
CUT = ("parallel.tp=4", "parallel.pp=2", "parallel.vpp=1", "parallel.micro_batch_size=1", "train.global_batch_size=64")


def config(told: Command) -> dict[str, Any]:
    return tomllib.loads(told.files["torchtitan.toml"])


def checked(told: Command) -> dict[str, Any]:
    """The configuration, if torchtitan would take it."""
    found = config(told)
    hold(found, UPSTREAM["classes"], "JobConfig")
    assert set(found["model"]["converters"]) <= set(UPSTREAM["converters"])
    assert found["training"]["dataset"] in UPSTREAM["datasets"]
    assert found["model"]["flavor"] in UPSTREAM["flavours"]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("torchtitan"))
def test_every_kind_tells_it_what_its_configuration_has(name: str, kind: str) -> None:
    told = command(name, kind=kind)
    assert told.argv == ("-m", "torchtitan.train", "--job.config_file", "/fsx/out/torchtitan.toml")
    assert told.per == "rank"
    checked(told)
    record(name, kind, "rendered", f"arguments parsed against torchtitan {torchtitan.UPSTREAM.version}")


def test_the_recipe_is_the_published_one() -> None:
    """configs/llama3_8b.toml of the published test case, but for what it leaves to defaults or switches off."""
    told = config(command(NAME))
    assert told["model"] == {"name": "llama3", "flavor": "8B", "hf_assets_path": "/fsx/Llama-3.1-8B", "converters": []}
    wanted = {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000, "dataset": "c4"}
    assert wanted.items() <= told["training"].items()
    assert told["optimizer"]["lr"] == 3e-4
    assert told["lr_scheduler"] == {"warmup_steps": 200, "decay_type": "linear", "min_lr_factor": 0}
    assert told["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert told["compile"]["enable"] is False
    assert told["parallelism"]["data_parallel_shard_degree"] == 32


def test_float8_is_a_converter_of_the_pinned_version() -> None:
    told = config(command(f"{NAME}-fp8"))
    assert told["model"]["converters"] == ["quantize.linear.float8"]
    assert told["quantize"]["linear"]["float8"]["enable_fsdp_float8_all_gather"] is True
    assert told["compile"] == {"enable": True, "components": ["model", "loss"]}


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (("parallel.tp=8",), {"tensor_parallel_degree": 8, "data_parallel_shard_degree": 4}),
        (("parallel.cp=2",), {"context_parallel_degree": 2, "data_parallel_shard_degree": 16}),
        (("parallel.shard=8",), {"data_parallel_shard_degree": 8, "data_parallel_replicate_degree": 4}),
        (CUT, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}),
        ((*CUT, "parallel.vpp=2"), {"pipeline_parallel_schedule": "Interleaved1F1B"}),
    ],
)  # fmt: skip
def test_sizes_are_degrees(sets: tuple[str, ...], wanted: dict[str, Any]) -> None:
    told = checked(command(NAME, *sets))["parallelism"]
    assert wanted.items() <= told.items()
    degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
               "pipeline_parallel_degree", "context_parallel_degree")  # fmt: skip
    assert math.prod(told[name] for name in degrees) == 32


def test_a_pipeline_is_given_a_replicas_whole_batch() -> None:
    told = checked(command(NAME, *CUT, "parallel.vpp=2"))
    assert (told["training"]["local_batch_size"], told["training"]["global_batch_size"]) == (16, 64)
    assert told["parallelism"]["pipeline_parallel_microbatch_size"] == 1
    assert told["parallelism"]["pipeline_parallel_layers_per_stage"] == 8


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("train.schedule=cosine", "train.min_lr_ratio=0.1"), {"decay_type": "cosine", "min_lr_factor": 0.1}),
        (("train.schedule=wsd", "train.decay_ratio=0.25"), {"decay_type": "linear", "decay_ratio": 0.25}),
        (("train.schedule=constant",), {"decay_ratio": 0}),
    ],
)
def test_schedules(sets: tuple[str, ...], told: dict[str, Any]) -> None:
    assert told.items() <= checked(command(NAME, *sets))["lr_scheduler"].items()


def test_a_folder_of_json_lines_and_first_weights() -> None:
    told = checked(command(NAME, "data.source=/fsx/corpus", paths=Paths("/out", "/opt/t", "/data", "/models/llama")))
    assert told["training"]["dataset_path"] == "/fsx/corpus"
    assert told["checkpoint"]["initial_load_path"] == "/models/llama"


def test_arguments_are_laid_over_the_plan() -> None:
    told = checked(command(NAME, "case.arguments=['metrics.log_freq=1', 'profiling.enable_profiling=true']"))
    assert told["metrics"]["log_freq"] == 1
    assert told["profiling"] == {"enable_profiling": True}


@pytest.mark.parametrize(
    "argument",
    ["training.stepz=5", "nowhere.x=1", 'training.steps="five"', "model.converters=float8", "compile.enable=1",
     "checkpoint.async_mode=never"],
)  # fmt: skip
def test_what_it_would_not_take_is_seen(argument: str) -> None:
    with pytest.raises(Refused):
        checked(command(NAME, f"case.arguments=[{argument!r}]"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"layers": 30}}, "Llama 3 shapes only"),
        ({"model": {"rope_theta": 10000.0}}, "RoPE base"),
        ({"parallel": {"strategy": "zero3"}}, "DeepSpeed's"),
        ({"parallel": {"ep": 2}}, "expert parallel"),
        ({"train": {"precision": "fp16"}}, "no fp16"),
        ({"train": {"lora_rank": 8}}, "no adapters"),
        ({"data": {"source": "python-stdlib"}}, "JSON lines"),
        ({"data": {"tokenizer": "train"}}, "data.tokenizer"),
        ({"parallel": {"tp": 5}}, "do not divide"),
        ({"parallel": {"micro_batch_size": "auto"}}, "auto"),
        ({"train": {"global_batch_size": 40}}, "multiple"),
        ({"case": {"arguments": ["no assignment"]}}, "name=value"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(change: dict[str, dict[str, Any]], sentence: str) -> None:
    wrong = spec(NAME)
    for section, values in change.items():
        wrong[section] |= values
    with pytest.raises(CaseError, match=sentence) as told:
        torchtitan.command(wrong, 4, 8, Paths("/out", "/opt/t"))
    assert "\n" not in str(told.value)


def test_figures_of_recorded_logs() -> None:
    found = [figures for line in lines("torchtitan") if (figures := torchtitan.measure(line))]
    assert found == [
        {"step": 1990, "loss": 3.437, "memory_gib": 68.57, "tokens_per_second_per_gpu": 6785, "mfu": 39.73},
        {"step": 1990, "loss": 3.4255, "memory_gib": 63.48, "tokens_per_second_per_gpu": 7865, "mfu": 46.06},
        {"step": 4, "loss": 7.62585, "grad_norm": 26.625, "memory_gib": 66.91, "tokens_per_second_per_gpu": 10050,
         "tflops": 314.71, "mfu": 13.99},
        {"step": 10, "loss": 3.9119, "grad_norm": 1.6558, "memory_gib": 0.0, "tokens_per_second_per_gpu": 34574,
         "tflops": 3.54, "mfu": 0.36},
    ]  # fmt: skip
    assert torchtitan.measure("[titan] Training starts at step 1") is None


def test_flavours_are_upstreams() -> None:
    for shape, flavour in torchtitan.FLAVOURS.items():
        theirs = UPSTREAM["flavours"][flavour]
        width = int(theirs["ffn_dim_multiplier"] * int(8 * theirs["dim"] / 3))
        ffn = -(-width // theirs["multiple_of"]) * theirs["multiple_of"]
        assert shape == (theirs["dim"], theirs["n_layers"], theirs["n_heads"], theirs["n_kv_heads"], ffn, 128256)


def test_toml_is_read_back_as_it_was() -> None:
    told = {"a": {"on": True, "many": [1, 2.5, "x"], "text": 'a "b"\n\x7f\\', "deep er": {"é": 1e-05, "none": None}}}
    read_back = tomllib.loads(toml(told))
    assert read_back == {"a": told["a"] | {"deep er": {"é": 1e-05}}}
    with pytest.raises(CaseError, match="no form"):
        toml({"a": {"b": [{}]}})
