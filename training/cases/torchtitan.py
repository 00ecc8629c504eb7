"""torchtitan: its TOML of a recipe's plan, for its trainer at v0.2.2, the last that is configured so.

Source of the names: torchtitan/config/job_config.py and torchtitan/models/llama3/__init__.py at that tag. It trains
shapes of its own by name, on text that it tokenises itself; where the published test case writes the converter as
"float8", v0.2.2 registers it as "quantize.linear.float8".
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.sizes import Sizes, lay_over, refuse, sizes
from training.cases.toml import toml

UPSTREAM: Final = Upstream(
    repository="pytorch/torchtitan",
    version="v0.2.2",
    licence="BSD-3-Clause",
    folder="/opt/torchtitan",
    package="git+https://github.com/pytorch/torchtitan@v0.2.2",
)
"""Nobody publishes a container; awslabs/awsome-distributed-ai installs v0.2.2 with torch 2.10 and torchao 0.17."""

SHAPES: Final = ("hidden_size", "layers", "heads", "kv_heads", "ffn_size", "vocab_size")
FLAVOURS: Final[dict[tuple[int, ...], str]] = {
    (4096, 32, 32, 8, 14336, 128256): "8B",
    (8192, 80, 64, 8, 28672, 128256): "70B",
    (16384, 126, 128, 8, 53248, 128256): "405B",
}
"""Its Llama 3 shapes; the width of the MLP is 8/3 of the hidden size times ffn_dim_multiplier, rounded up."""
PRECISIONS: Final = ("bf16", "fp32", "fp8")
CHECKPOINTING: Final = {False: "none", True: "full", "selective": "selective"}
COLOUR: Final = re.compile(r"\x1b?\[\d+m")
STEP: Final = re.compile(
    r"step: +(?P<step>\d+) +loss: +(?P<loss>[\d.]+|nan|inf) +(?:grad_norm: +(?P<grad_norm>[\d.]+|nan|inf) +)?"
    r"memory: +(?P<memory_gib>[\d.]+)GiB\([\d.]+%\) +tps: (?P<tokens_per_second_per_gpu>[\d,]+)"
    r"(?: +tflops: (?P<tflops>[\d,.]+))? +mfu: (?P<mfu>[\d.]+)%"
)


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """`torchtitan.train` on every rank with a TOML of the plan."""
    refuse("torchtitan", spec, cuts=("tp", "pp", "vpp", "cp"), also=_wrong(spec))
    config = _config(spec, sizes(spec, nodes, processes_per_node), paths)
    name = "torchtitan.toml"
    return Command(
        argv=("-m", "torchtitan.train", "--job.config_file", f"{paths.output}/{name}"),
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        files={name: toml(lay_over(config, spec["case"]["arguments"]))},
    )


def measure(line: str) -> dict[str, float] | None:
    """Of its line per logged step; tokens per second and TFLOP/s are of one GPU."""
    found = STEP.search(COLOUR.sub("", line))
    if not found:
        return None
    return {name: float(value.replace(",", "")) for name, value in found.groupdict().items() if value}


def _wrong(spec: Mapping[str, Any]) -> list[str]:
    model, train, told = spec["model"], spec["train"], spec["parallel"]
    wrong = []
    if _flavour(model) is None or model["family"] != "llama" or model["tie_embeddings"]:
        wrong.append(
            f"it has Llama 3 shapes only, {', '.join(FLAVOURS.values())}, embeddings not tied: take one of them"
        )
    elif model["rope_theta"] != 500000:
        wrong.append("its RoPE base is 500000: set model.rope_theta: 500000")
    if train["precision"] not in PRECISIONS:
        wrong.append(f"it has no {train['precision']} here: set train.precision to one of {', '.join(PRECISIONS)}")
    if told["strategy"] not in ("ddp", "fsdp2", "auto"):
        wrong.append(f"strategy {told['strategy']} is DeepSpeed's: set parallel.strategy: fsdp2")
    return wrong


def _flavour(model: Mapping[str, Any]) -> str | None:
    return FLAVOURS.get(tuple(model[name] for name in SHAPES))


def _config(spec: Mapping[str, Any], cut: Sizes, paths: Paths) -> dict[str, Any]:
    train, data = spec["train"], spec["data"]
    eight = train["precision"] == "fp8"
    return {
        "job": {"dump_folder": paths.output, "description": spec["name"]},
        "metrics": {"log_freq": 10, "disable_color_printing": True},
        "model": {
            "name": "llama3",
            "flavor": _flavour(spec["model"]),
            "hf_assets_path": _assets(data["tokenizer"]),
            "converters": ["quantize.linear.float8"] if eight else [],
        },
        "optimizer": {"name": "AdamW", "lr": train["learning_rate"], "beta1": train["beta1"], "beta2": train["beta2"],
                      "weight_decay": train["weight_decay"]},
        "lr_scheduler": _schedule(train),
        "training": _training(spec, cut),
        "parallelism": _parallelism(cut, _layers_per_stage(spec, cut)),
        "checkpoint": _checkpoints(spec, paths),
        "activation_checkpoint": {
            "mode": CHECKPOINTING[train["activation_checkpointing"]],
            "selective_ac_option": "op",
        },
        "compile": {"enable": train["compile"], "components": ["model", "loss"]},
        "quantize": {"linear": {"float8": _float8(eight)}},
        "debug": {"seed": train["seed"]},
    }  # fmt: skip


def _assets(tokenizer: str) -> str:
    if tokenizer == "train":
        raise CaseError("torchtitan tokenises with a model's own tokenizer: set data.tokenizer to its folder.")
    return tokenizer.removesuffix("/tokenizer.json")


def _schedule(train: Mapping[str, Any]) -> dict[str, Any]:
    """Its only schedule holds and then decays; without decay_ratio it decays all the way from the warm-up."""
    ratio = {"wsd": train["decay_ratio"], "constant": 0.0}.get(train["schedule"])
    kind = "cosine" if train["schedule"] == "cosine" else "linear"
    held = {} if ratio is None else {"decay_ratio": ratio}
    return {"warmup_steps": train["warmup_steps"], "decay_type": kind, "min_lr_factor": train["min_lr_ratio"], **held}


def _training(spec: Mapping[str, Any], cut: Sizes) -> dict[str, Any]:
    train = spec["train"]
    # with pipeline stages it takes a replica's whole batch at once, and cuts it into micro batches itself
    local = cut.batch_per_replica if cut.pp > 1 else cut.micro_batch_size
    mixed = "float32" if train["precision"] == "fp32" else "bfloat16"
    return {
        **_text(spec["data"]),
        "local_batch_size": local,
        "global_batch_size": train["global_batch_size"],
        "seq_len": spec["data"]["sequence_length"],
        "max_norm": train["grad_clip"],
        "steps": train["steps"],
        "mixed_precision_param": mixed,
    }


def _text(data: Mapping[str, Any]) -> dict[str, Any]:
    """C4 from the hub, or a folder of JSON lines with a field "text"; its tests' loader reads any such folder."""
    source = data["source"]
    if source == "hf://allenai/c4":
        return {"dataset": "c4"}
    if isinstance(source, str) and source.startswith("/") and data["text_field"] == "text":
        return {"dataset": "c4_test", "dataset_path": source}
    raise CaseError(
        f"torchtitan reads text itself and cannot read data.source {source!r}: give hf://allenai/c4, or an absolute "
        "folder of JSON lines whose field is text."
    )


def _parallelism(cut: Sizes, layers_per_stage: int) -> dict[str, Any]:
    whole = {
        "data_parallel_replicate_degree": cut.dp // cut.shard,
        "data_parallel_shard_degree": cut.shard,
        "tensor_parallel_degree": cut.tp,
        "pipeline_parallel_degree": cut.pp,
        "context_parallel_degree": cut.cp,
    }
    if cut.pp == 1:
        return whole
    stages = {
        "pipeline_parallel_schedule": "Interleaved1F1B" if cut.vpp > 1 else "1F1B",
        "pipeline_parallel_microbatch_size": cut.micro_batch_size,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    return whole | stages | {"pipeline_parallel_layers_per_stage": layers_per_stage}


def _layers_per_stage(spec: Mapping[str, Any], cut: Sizes) -> int:
    layers: int = spec["model"]["layers"]
    stages = cut.pp * cut.vpp
    if layers % stages:
        raise CaseError(f"{layers} layers do not divide into {stages} stages: change parallel.pp or parallel.vpp.")
    return layers // stages


def _checkpoints(spec: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    every = spec["train"]["checkpoint_every"]
    initial = {"initial_load_path": paths.initial, "initial_load_in_hf": True} if paths.initial else {}
    return {
        "enable": True,
        "folder": "checkpoints",
        "interval": every if isinstance(every, int) else 500,
        "keep_latest_k": max(2, spec["train"]["keep_checkpoints"]),
        **initial,
    }


def _float8(on: bool) -> dict[str, Any]:
    """Tensorwise scaling with an all-gather in float8, as the published test case has it; the output layer in bf16."""
    return {
        "enable_fsdp_float8_all_gather": on,
        "precompute_float8_dynamic_scale_for_fsdp": on,
        "filter_fqns": ["output"],
    }
