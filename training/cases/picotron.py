"""picotron: its JSON of a recipe's plan, for train.py at commit 59714b1.

Source of the names: template/base_config.json and train.py there. It takes a model of the Hugging Face hub and changes
its layers and heads; its optimizer has a learning rate and nothing else, so a plan that says more is refused.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.sizes import Sizes, again, assigned, lay_over, refuse, sizes

UPSTREAM: Final = Upstream(
    repository="huggingface/picotron",
    version="59714b1bf25541dbeb6f5a721ed15f6d0768e786",
    licence="Apache-2.0",
    folder="/picotron",
)
"""No release and no container; awslabs/awsome-distributed-ai builds one with it at that commit in /picotron."""

NO_CLIPPING: Final = 1000.0
"""A limit of the gradient's norm that never acts: picotron has none."""
UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
STEP: Final = re.compile(
    r"Step: (?P<step>\d+) +\| Loss: +(?P<loss>[\d.]+|nan|inf) \|.*\| Tokens/s: +(?P<speed>[\d.]+)(?P<unit>[KMBT]?) \|"
    r".*\| MFU: +(?P<mfu>[\d.]+)% \| Memory usage: +(?P<memory>[\d.]+)GB"
)


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """train.py on every rank with a JSON of the plan."""
    refuse("picotron", spec, cuts=("tp", "pp", "cp"), also=_wrong(spec))
    name = "picotron.json"
    config = lay_over(_config(spec, sizes(spec, nodes, processes_per_node), paths), spec["case"]["arguments"])
    return Command(
        argv=(f"{paths.folder}/train.py", "--config", f"{paths.output}/{name}"),
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        files={name: json.dumps(config, indent=1)},
    )


def measure(line: str) -> dict[str, float] | None:
    """Of its line per step; tokens per second are of all ranks."""
    found = STEP.search(line)
    if not found:
        return None
    return {
        "step": float(found["step"]),
        "loss": float(found["loss"]),
        "tokens_per_second": float(found["speed"]) * UNITS[found["unit"]],
        "mfu": float(found["mfu"]),
        "memory_gib": float(found["memory"]) * 1e9 / 2**30,
    }


def _wrong(spec: Mapping[str, Any]) -> list[str]:
    model, train = spec["model"], spec["train"]
    fixed = {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999}
    wrong = [
        f"its AdamW has PyTorch's own settings: set train.{name}: {value}"
        for name, value in fixed.items()
        if train[name] != value
    ]
    if train["grad_clip"] < NO_CLIPPING:
        wrong.append(f"it does not clip gradients: set train.grad_clip: {NO_CLIPPING:.0f}, which never acts")
    if train["precision"] != "bf16":
        wrong.append("on GPUs it computes in bf16, and at this commit it counts parameters on a GPU: set bf16")
    if model["family"] != "llama":
        wrong.append("it has Llama's architecture only: set model.family: llama")
    told = spec["parallel"]
    if told["strategy"] != "ddp" and (told["strategy"], told["shard"]) != ("fsdp2", 1):
        wrong.append("every data parallel rank has the whole states: set parallel.strategy: ddp, or fsdp2 and shard: 1")
    if again(spec) != "none":
        wrong.append("it keeps all activations: set parallel.recompute: none and train.activation_checkpointing: false")
    return wrong


def _config(spec: Mapping[str, Any], cut: Sizes, paths: Paths) -> dict[str, Any]:
    model, train, data = spec["model"], spec["train"], spec["data"]
    if "model.name" not in assigned(spec["case"]["arguments"]):
        raise CaseError(
            "picotron takes its tokenizer and the model's other sizes from the Hugging Face hub: give case.arguments "
            "model.name=… such as model.name=HuggingFaceTB/SmolLM-1.7B."
        )
    cut_up = {"tp_size": cut.tp, "cp_size": cut.cp, "pp_size": cut.pp, "dp_size": cut.dp}
    every = train["checkpoint_every"]
    return {
        "distributed": {**cut_up, "pp_engine": "1f1b", "backend": "nccl", "use_cpu": False},
        "model": {
            "num_hidden_layers": model["layers"],
            "num_attention_heads": model["heads"],
            "num_key_value_heads": model["kv_heads"],
            "dtype": "bfloat16",
            "use_flash_attention": True,
            "use_fused_adam": True,
        },
        "training": {
            "seed": train["seed"],
            "learning_rate": train["learning_rate"],
            "total_train_steps": train["steps"],
            "seq_length": data["sequence_length"],
            "micro_batch_size": cut.micro_batch_size,
            "gradient_accumulation_steps": cut.accumulation,
            "num_samples": data["max_documents"],
            "max_tokens": None,
        },
        "dataset": {"name": _dataset(data), "subset_name": None, "num_workers": 0, "num_proc": 1},
        "checkpoint": {
            "save_dir": f"{paths.output}/checkpoints",
            "save_frequency": every if isinstance(every, int) else 300,
            "load_path": "",
        },
        "logging": {"use_wandb": False, "project_name": "picotron", "run_name": spec["name"]},
        # the token of the hub comes from the nodes' environment, never from a file
        "environment": {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "FLASH_ATTEN": "1",
            "HF_TOKEN": None,
        },
    }


def _dataset(data: Mapping[str, Any]) -> str:
    source = data["source"]
    if isinstance(source, str) and source.startswith("hf://") and data["text_field"] == "text":
        return source.removeprefix("hf://")
    if isinstance(source, str) and source.startswith("/") and data["text_field"] == "text":
        return source
    raise CaseError(
        f"picotron reads text itself and cannot read data.source {source!r}: give hf://name, such as "
        "hf://roneneldan/TinyStories, or an absolute folder of JSON lines whose field is text."
    )
