"""llm-foundry: its YAML (written as JSON, which is YAML) of a recipe's plan, for scripts/train/train.py at v0.21.0.

Source of the names: llmfoundry/utils/config_utils.py, models/mpt/configuration_mpt.py and the presets
scripts/train/yamls/pretrain/mpt-*.yaml at that tag, and composer/utils/parallelism.py of Composer v0.31.0, which it
asks for. It trains MPT: GPT's blocks with learned positions. It reads MDS shards, which its own converter makes of the
hub's or of JSON lines: `case.program: convert`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.sizes import Sizes, lay_over, refuse, sizes

UPSTREAM: Final = Upstream(
    repository="mosaicml/llm-foundry",
    version="v0.21.0",
    licence="Apache-2.0",
    folder="/llm-foundry",
    container="mosaicml/llm-foundry:2.7.0_cu128_aws-latest",
)
"""The container has what it needs, EFA too, but not itself: awslabs/awsome-distributed-ai adds it in /llm-foundry."""

PROGRAMS: Final = ("", "convert")
STRATEGIES: Final = ("auto", "ddp", "fsdp2", "zero3")
"""Its FSDP cuts gradients up after every micro batch: planned as zero3, while Castra's own fsdp2 waits for the last."""
PRECISIONS: Final = {"bf16": "amp_bf16", "fp16": "amp_fp16", "fp32": "fp32", "fp8": "amp_fp8"}
SCHEDULES: Final = {
    "cosine": "cosine_with_warmup",
    "linear": "linear_decay_with_warmup",
    "constant": "constant_with_warmup",
}
START: Final = """import os, runpy, sys
# Composer's own launcher tells each rank its node; torchrun calls that the group.
os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
EXPONENT: Final = re.compile(r'^(\s*(?:"[^"]*": )?-?\d+)(e[+-]?\d+,?)$', re.MULTILINE)
"""A line of JSON whose value is a number such as 1e-08."""
STEP: Final = re.compile(r"\[batch=(\d+)/\d+\]:")
FIGURE: Final = re.compile(r"Train (loss/train/total|throughput/tokens_per_sec): ([\d.]+|nan|inf)\s*$")
NAMES: Final = {"loss/train/total": "loss", "throughput/tokens_per_sec": "tokens_per_second"}


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """train.py on every rank with the plan as its YAML; for the program `convert` its converter on the one node."""
    program = spec["case"]["program"]
    if program not in PROGRAMS:
        raise CaseError(f"case.program {program!r} is none of llm-foundry's: take {', '.join(map(repr, PROGRAMS))}.")
    if program == "convert":
        if nodes > 1:
            raise CaseError(f"llm-foundry converts on one node, not on {nodes}: set cluster.nodes: 1.")
        return _convert(spec, paths)
    refuse("llm-foundry", spec, cuts=(), also=_wrong(spec))
    config = _config(spec, sizes(spec, nodes, processes_per_node), paths)
    config = lay_over(config, spec["case"]["arguments"])
    start, name = "start.py", "llm-foundry.yaml"
    return Command(
        argv=(f"{paths.output}/{start}", f"{paths.folder}/scripts/train/train.py", f"{paths.output}/{name}"),
        files={start: START, name: yaml(config)},
    )


def yaml(config: Mapping[str, Any]) -> str:
    """A configuration as JSON that YAML reads the same: a number with an exponent needs a point there."""
    return EXPONENT.sub(r"\1.0\2", json.dumps(config, indent=1))


class _Blocks:
    """Composer's console: a line with the step, then its figures, one a line."""

    def __init__(self) -> None:
        self._step: float | None = None

    def __call__(self, line: str) -> dict[str, float] | None:
        """What a line says, with the step that the lines before it are of."""
        if found := STEP.search(line):
            self._step = float(found[1])
        figure = FIGURE.search(line)
        if figure is None or self._step is None:
            return None
        return {"step": self._step, NAMES[figure[1]]: float(figure[2])}


measure = _Blocks()
"""What a line of its log says; tokens per second are of all ranks."""


def _wrong(spec: Mapping[str, Any]) -> list[str]:
    model, train, told = spec["model"], spec["train"], spec["parallel"]
    wrong = []
    if model["family"] != "gpt2" or model["kv_heads"] != model["heads"]:
        wrong.append("it trains MPT, which has GPT's blocks: set model.family: gpt2")
    if model["ffn_size"] % model["hidden_size"]:
        wrong.append("MPT's MLP is a whole multiple of its width: change model.ffn_size")
    if told["strategy"] not in STRATEGIES:
        wrong.append(f"it shards everything or nothing, not as {told['strategy']}: set parallel.strategy: zero3")
    if train["precision"] not in PRECISIONS:
        wrong.append(f"it has no {train['precision']}: set train.precision to one of {', '.join(PRECISIONS)}")
    if train["schedule"] not in SCHEDULES:
        wrong.append(f"it has no schedule {train['schedule']}: set one of {', '.join(SCHEDULES)}")
    if train["activation_checkpointing"] == "selective":
        wrong.append("it recomputes whole blocks or nothing: set train.activation_checkpointing: true")
    if spec["model"]["pretrained"]:
        wrong.append("MPT starts from random weights here: leave model.pretrained empty")
    return wrong


def _config(spec: Mapping[str, Any], cut: Sizes, paths: Paths) -> dict[str, Any]:
    train, length = spec["train"], spec["data"]["sequence_length"]
    every = train["checkpoint_every"]
    return {
        "max_seq_len": length,
        "run_name": spec["name"],
        "model": _model(spec["model"], length),
        "tokenizer": {"name": _tokenizer(spec["data"]), "kwargs": {"model_max_length": length}},
        "train_loader": _loader(spec, paths),
        "scheduler": _schedule(train),
        "optimizer": {
            "name": "decoupled_adamw",
            "lr": train["learning_rate"],
            "betas": [train["beta1"], train["beta2"]],
            "eps": 1e-8,
            # Composer's decay is not multiplied by the learning rate, as AdamW's is
            "weight_decay": train["weight_decay"] * train["learning_rate"],
        },
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": train["grad_clip"]}},
        "max_duration": f"{train['steps']}ba",
        "eval_interval": 0,
        "global_train_batch_size": train["global_batch_size"],
        "seed": train["seed"],
        "device_eval_batch_size": cut.micro_batch_size,
        "device_train_microbatch_size": cut.micro_batch_size,
        "precision": PRECISIONS[train["precision"]],
        "fsdp_config": _fsdp(train, cut),
        "progress_bar": False,
        "log_to_console": True,
        "console_log_interval": "1ba",
        "callbacks": {"speed_monitor": {"window_size": 10}, "lr_monitor": {}, "memory_monitor": {}},
        "save_folder": f"{paths.output}/checkpoints",
        "save_interval": f"{every if isinstance(every, int) else 500}ba",
        "save_num_checkpoints_to_keep": train["keep_checkpoints"],
        "autoresume": True,
        **({"compile_config": {}} if train["compile"] else {}),
    }


def _model(model: Mapping[str, Any], length: int) -> dict[str, Any]:
    return {
        "name": "mpt_causal_lm",
        "init_device": "meta",
        "d_model": model["hidden_size"],
        "n_heads": model["heads"],
        "n_layers": model["layers"],
        "expansion_ratio": model["ffn_size"] // model["hidden_size"],
        "max_seq_len": length,
        "vocab_size": model["vocab_size"],
        "tie_word_embeddings": model["tie_embeddings"],
        "attn_config": {"attn_impl": "flash"},
    }


def _schedule(train: Mapping[str, Any]) -> dict[str, Any]:
    told = {"name": SCHEDULES[train["schedule"]], "t_warmup": f"{train['warmup_steps']}ba"}
    last = "alpha" if train["schedule"] == "constant" else "alpha_f"
    return told | {last: 1.0 if train["schedule"] == "constant" else train["min_lr_ratio"]}


def _fsdp(train: Mapping[str, Any], cut: Sizes) -> dict[str, Any] | None:
    """None is DDP; sharding among fewer than all ranks is Composer's HYBRID_SHARD."""
    if cut.shard == 1:
        return None
    hybrid = {"data_parallel_shard_degree": cut.shard, "data_parallel_replicate_degree": cut.dp // cut.shard}
    return {
        "sharding_strategy": "HYBRID_SHARD" if cut.shard < cut.dp else "FULL_SHARD",
        "mixed_precision": "PURE",
        "activation_checkpointing": bool(train["activation_checkpointing"]),
        "activation_checkpointing_reentrant": False,
        "activation_cpu_offload": False,
        "limit_all_gathers": True,
        **(hybrid if cut.shard < cut.dp else {}),
    }


def _tokenizer(data: Mapping[str, Any]) -> str:
    if data["tokenizer"] == "train":
        raise CaseError(
            "llm-foundry's shards hold the ids of a Hugging Face tokenizer: set data.tokenizer to its name or folder."
        )
    name: str = data["tokenizer"]
    return name.removesuffix("/tokenizer.json")


def _loader(spec: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """Shards lie in a folder that every node sees, or are fetched from S3 as they are needed."""
    source = spec["data"]["source"]
    if not isinstance(source, str) or not source.startswith(("/", "s3://")):
        raise CaseError(
            f"llm-foundry reads MDS shards, which data.source {source!r} is not: make them with case.program: convert, "
            "then give their absolute folder or s3://bucket/prefix."
        )
    remote = source if source.startswith("s3://") else None
    return {
        "name": "text",
        "dataset": {
            "local": f"{paths.output}/mds" if remote else source,
            "remote": remote,
            "split": "train",
            "shuffle": True,
            "max_seq_len": spec["data"]["sequence_length"],
            "shuffle_seed": spec["train"]["seed"],
        },
        "drop_last": True,
        "num_workers": 8,
    }


def _convert(spec: Mapping[str, Any], paths: Paths) -> Command:
    """Its converters: of the hub's C4 and Pile, or of JSON lines."""
    data = spec["data"]
    source = data["source"]
    words = ["--out_root", f"{paths.output}/mds", "--concat_tokens", str(data["sequence_length"])]
    words += ["--tokenizer", _tokenizer(data), "--eos_text", "<|endoftext|>"]
    if source == "hf://allenai/c4":
        script, first = "convert_dataset_hf.py", ["--dataset", "allenai/c4", "--data_subset", "en"]
        first += ["--splits", "train_small", "val_small"]
    elif isinstance(source, str) and source.startswith("/"):
        script, first = "convert_dataset_json.py", ["--path", source]
    else:
        raise CaseError(
            f"llm-foundry converts no {source!r}: give data.source hf://allenai/c4, or an absolute path of JSON lines."
        )
    return Command(argv=(f"{paths.folder}/scripts/data_prep/{script}", *first, *words), per="node")
