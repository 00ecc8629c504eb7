"""NeMo: the exact arguments of its generic trainer, Megatron Bridge's scripts/training/run_recipe.py at v0.5.0.

NeMo's current way to pre-train is Megatron Bridge, "a refactor of the previous NeMo training stack" (its README); the
container nemo:26.06 has its 0.5.0 over Megatron Core 0.18.0 (docs/releases/software-versions.md), and no NeMo 2 any
more. Source of the names: that script, recipes/gpt/vanilla_gpt.py, training/config.py and models/gpt_provider.py.
`case.program: mock` trains on ids that it makes up, as the published benchmarks do.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.sizes import Sizes, again, assigned, refuse, sizes

UPSTREAM: Final = Upstream(
    repository="NVIDIA-NeMo/Megatron-Bridge",
    version="v0.5.0",
    licence="Apache-2.0",
    folder="/opt/Megatron-Bridge",
    container="nvcr.io/nvidia/nemo:26.06",
)

RECIPE: Final = "vanilla_gpt_pretrain_config"
"""The recipe without assumptions: Megatron's own defaults, which every value below is laid over."""
DATA: Final = {"": "llm-pretrain", "mock": "llm-pretrain-mock"}
PRECISIONS: Final = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
PLAIN: Final = re.compile(r"[\w./:+-]+")
"""Text that Hydra's grammar of assignments takes without quotes."""
STEP: Final = re.compile(r"iteration +(\d+)/ +\d+ \|")
FIGURES: Final = {
    "seconds": re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)"),
    "tflops": re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)"),
    "loss": re.compile(r"lm loss: ([\d.E+-]+|nan|inf)"),
    "grad_norm": re.compile(r"grad norm: ([\d.]+|nan|inf)"),
}


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """run_recipe.py on every rank, the plan as assignments to its configuration."""
    refuse("NeMo", spec, offloads=("optimizer", "act"), also=_wrong(spec))
    cut, length = sizes(spec, nodes, processes_per_node), spec["data"]["sequence_length"]
    program = spec["case"]["program"]
    told = dict(_assignments(spec, cut, paths)) | assigned(spec["case"]["arguments"])
    return Command(
        argv=(
            f"{paths.folder}/scripts/training/run_recipe.py",
            *("--recipe", RECIPE, "--dataset", DATA[program], "--seq_length", str(length)),
            *(f"{name}={_hydra(value)}" for name, value in told.items()),
        ),
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )


def measure(line: str) -> dict[str, float] | None:
    """Of its line per logged step; TFLOP/s are of one GPU."""
    step = STEP.search(line)
    if not step:
        return None
    found = {name: float(match[1]) for name, pattern in FIGURES.items() if (match := pattern.search(line))}
    if "seconds" in found:
        found["seconds"] /= 1000
    return {"step": float(step[1]), **found}


def _wrong(spec: Mapping[str, Any]) -> list[str]:
    train, told, program = spec["train"], spec["parallel"], spec["case"]["program"]
    wrong = []
    if program not in DATA:
        wrong.append(f"case.program {program!r} is none of its: leave it empty, or write mock")
    if train["precision"] not in PRECISIONS:
        wrong.append(f"it has no {train['precision']} here: set train.precision to one of {', '.join(PRECISIONS)}")
    if told["strategy"] not in ("ddp", "zero0", "zero1", "auto"):
        wrong.append(f"here it shards the optimizer only, not as {told['strategy']}: set parallel.strategy: zero1")
    if spec["model"]["sliding_window"]:
        wrong.append("its window of attention is not told yet: leave model.sliding_window empty")
    if spec["model"]["pretrained"]:
        wrong.append("it starts from random weights here: leave model.pretrained empty")
    return wrong


def _assignments(spec: Mapping[str, Any], cut: Sizes, paths: Paths) -> Iterator[tuple[str, Any]]:
    for section, told in (
        ("model", _model(spec) | _sizes(spec, cut) | _experts(spec["model"])),
        ("train", _training(spec["train"], cut)),
        ("optimizer", _optimizer(spec["train"], spec["parallel"])),
        ("scheduler", _scheduler(spec["train"])),
        ("ddp", _states(spec["parallel"])),
        ("dataset", _dataset(spec, paths)),
        ("checkpoint", _checkpoint(spec, paths)),
        ("validation", {"eval_iters": 0}),
        ("logger", {"log_interval": 1, "log_throughput": True, "tensorboard_dir": f"{paths.output}/tensorboard"}),
        ("tokenizer", {"vocab_size": spec["model"]["vocab_size"]}),
        ("rng", {"seed": spec["train"]["seed"]}),
    ):
        for name, value in told.items():
            yield f"{section}.{name}", value
    yield "mixed_precision", PRECISIONS[spec["train"]["precision"]]


def _model(spec: Mapping[str, Any]) -> dict[str, Any]:
    model = spec["model"]
    told = {
        "num_layers": model["layers"],
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["ffn_size"],
        "num_attention_heads": model["heads"],
        "num_query_groups": model["kv_heads"],
        "share_embeddings_and_output_weights": model["tie_embeddings"],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if model["head_dim"]:
        told["kv_channels"] = model["head_dim"]
    if model["gated"]:
        told |= {"gated_linear_unit": True, "activation_func": "silu"}
    if model["family"] == "gpt2":
        return told | {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
    rope = {"position_embedding_type": "rope", "rotary_base": round(model["rope_theta"])}
    return told | rope | {"normalization": "RMSNorm", "add_bias_linear": False}


def _sizes(spec: Mapping[str, Any], cut: Sizes) -> dict[str, Any]:
    told: dict[str, Any] = {
        "tensor_model_parallel_size": cut.tp,
        "pipeline_model_parallel_size": cut.pp,
        "context_parallel_size": cut.cp,
        "expert_model_parallel_size": cut.ep,
        "sequence_parallel": cut.tp > 1,
    }
    if cut.vpp > 1:
        told["virtual_pipeline_model_parallel_size"] = cut.vpp
    if spec["parallel"]["offload"] == "act":
        told |= {"cpu_offloading": True, "cpu_offloading_num_layers": spec["model"]["layers"] // cut.pp - 1}
    what = again(spec)
    if what == "full":
        return told | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return told | ({"recompute_granularity": "selective"} if what == "selective" else {})


def _experts(model: Mapping[str, Any]) -> dict[str, Any]:
    if not model["experts"]:
        return {}
    width = model["expert_ffn"] or model["ffn_size"]
    told = {
        "num_moe_experts": model["experts"],
        "moe_router_topk": model["topk"],
        "moe_ffn_hidden_size": width,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    if model["dense_layers"]:
        told["moe_layer_freq"] = [0] * model["dense_layers"] + [1] * (model["layers"] - model["dense_layers"])
    if model["shared_experts"]:
        told["moe_shared_expert_intermediate_size"] = model["shared_experts"] * width
    return told


def _training(train: Mapping[str, Any], cut: Sizes) -> dict[str, Any]:
    return {
        "train_iters": train["steps"],
        "global_batch_size": train["global_batch_size"],
        "micro_batch_size": cut.micro_batch_size,
    }


def _optimizer(train: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Whether it is sharded is told here and in `ddp`: the trainer takes either for both, and the recipe says yes."""
    cpu = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    return {
        "use_distributed_optimizer": _sharded(told),
        **(cpu if told["offload"] == "optimizer" else {}),
        "lr": train["learning_rate"],
        "min_lr": float(f"{train['learning_rate'] * train['min_lr_ratio']:.12g}"),
        "weight_decay": train["weight_decay"],
        "adam_beta1": train["beta1"],
        "adam_beta2": train["beta2"],
        "clip_grad": train["grad_clip"],
    }


def _scheduler(train: Mapping[str, Any]) -> dict[str, Any]:
    """The decay of weights too, which the recipe's scheduler would set to 0.033 over the optimizer's."""
    kind = train["schedule"]
    told = {
        "lr_decay_style": "WSD" if kind == "wsd" else kind,
        "lr_warmup_iters": train["warmup_steps"],
        "start_weight_decay": train["weight_decay"],
        "end_weight_decay": train["weight_decay"],
    }
    if kind == "wsd":
        told |= {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": round(train["decay_ratio"] * train["steps"])}
    return told


def _sharded(told: Mapping[str, Any]) -> bool:
    return str(told["strategy"]) == "zero1"


def _states(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "use_distributed_optimizer": _sharded(told),
        "overlap_grad_reduce": True,
        "overlap_param_gather": _sharded(told),
    }


def _dataset(spec: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    told: dict[str, Any] = {"random_seed": spec["train"]["seed"]}
    if spec["case"]["program"] == "mock":
        return told
    if not paths.dataset:
        raise CaseError("NeMo has no data: prepare the recipe's data, or write case.program: mock.")
    # all documents of train.bin are for training: what is held out lies elsewhere
    return told | {"data_path": f"{paths.dataset}/megatron/train", "split": "1,0,0"}


def _checkpoint(spec: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """None with made up data, as the published benchmarks have it: a large one would take longer than their steps."""
    if spec["case"]["program"] == "mock":
        return {"save": None, "load": None}
    every, place = spec["train"]["checkpoint_every"], f"{paths.output}/checkpoints"
    return {
        "save": place,
        "load": place,
        "save_interval": every if isinstance(every, int) else 500,
        "most_recent_k": spec["train"]["keep_checkpoints"],
    }


def _hydra(value: Any) -> str:
    """A value in Hydra's grammar of assignments."""
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
