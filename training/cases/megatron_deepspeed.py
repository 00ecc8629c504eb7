"""Megatron-DeepSpeed: `pretrain_gpt.py` with a plan's flags, and the configuration of DeepSpeed, which keeps states.

The flags are those of megatron/arguments.py at the pinned commit, as examples_deepspeed/rebase uses them; the keys of
the configuration are DeepSpeed's.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from training.cases import megatron_lm
from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.flags import laid_over, words
from training.cases.megatron_lm import SCRIPT, STAGES

UPSTREAM: Final = Upstream(
    repository="deepspeedai/Megatron-DeepSpeed",
    version="4efb479",  # 4efb479d5317ce9b86096b9d8e3e8030b0b5263b, there is no release
    licence="Apache-2.0 and others, see its LICENSE",
    folder="/opt/Megatron-DeepSpeed",
    container="nvcr.io/nvidia/pytorch:25.04-py3",  # as awslabs/awsome-distributed-ai has it; it needs deepspeed besides
)
CONFIG: Final = "ds_config.json"
TFLOPS: Final = re.compile(r"TFLOPs: ([.\d]+)")


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """Pre-training of a GPT or Llama; raises `CaseError` for what Megatron-DeepSpeed cannot be told."""
    del nodes, processes_per_node
    _refuse(spec)
    told = (
        *_sizes(spec),
        *_states(spec, paths),
        *_network(spec),
        *([f"--{spec['train']['precision']}"] if spec["train"]["precision"] != "fp32" else []),
        *megatron_lm.optimisation(spec["train"]),
        *_files(spec, paths),
    )
    argv = (SCRIPT, *laid_over(words(told), spec["case"]["arguments"]))
    config = json.dumps(_configuration(spec), indent=1) + "\n"
    return Command(argv, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {CONFIG: config})


def measure(line: str) -> dict[str, float] | None:
    """A line of an iteration, as Megatron-LM's, with another word for TFLOP/s per GPU."""
    if (told := megatron_lm.measure(line)) and (found := TFLOPS.search(line)):
        told["tflops"] = float(found[1])
    return told


def _refuse(spec: Mapping[str, Any]) -> None:
    megatron_lm.refuse(spec, "megatron-deepspeed")
    parallel, train = spec["parallel"], spec["train"]
    if train["precision"] not in ("fp32", "fp16", "bf16"):
        raise CaseError(f"train.precision {train['precision']} is not Megatron-DeepSpeed's: take bf16, fp16 or fp32")
    if train["schedule"] == "wsd":
        raise CaseError("train.schedule wsd is not Megatron-DeepSpeed's: take cosine, linear or constant")
    for name in ("vpp", "cp", "ep"):
        if parallel[name] > 1:
            raise CaseError(f"parallel.{name} {parallel[name]} does not go with Megatron-DeepSpeed's pipeline: write 1")
    if STAGES[parallel["strategy"]] > 1 and parallel["pp"] > 1:
        raise CaseError(f"parallel.strategy {parallel['strategy']} does not go with a pipeline: write pp: 1, or zero1")
    if spec["model"]["experts"] or spec["model"]["mla"]:
        raise CaseError("model.experts and model.mla are not told to Megatron-DeepSpeed: take a dense model")
    if spec["model"]["head_dim"]:
        raise CaseError("model.head_dim has no flag of Megatron-DeepSpeed's parser that its model uses: leave it empty")


def _sizes(spec: Mapping[str, Any]) -> Iterator[str]:
    parallel = spec["parallel"]
    yield f"--tensor-model-parallel-size {parallel['tp']}"
    yield f"--pipeline-model-parallel-size {parallel['pp']}"
    if parallel["pp"] == 1:
        yield "--no-pipeline-parallel"
    yield f"--micro-batch-size {parallel['micro_batch_size']}"
    yield f"--global-batch-size {spec['train']['global_batch_size']}"


def _states(spec: Mapping[str, Any], paths: Paths) -> Iterator[str]:
    """Who keeps weights, gradients and optimizer, and what the backward pass does again."""
    parallel = spec["parallel"]
    yield from ("--deepspeed", f"--deepspeed_config {paths.output}/{CONFIG}")
    yield f"--zero-stage {STAGES[parallel['strategy']]}"
    if parallel["offload"] == "optimizer":
        yield "--cpu-optimizer"
    if parallel["recompute"] == "full":
        yield from ("--checkpoint-activations", "--deepspeed-activation-checkpointing")
    else:
        yield from megatron_lm.again(parallel)


def _network(spec: Mapping[str, Any]) -> Iterator[str]:
    model, length = spec["model"], spec["data"]["sequence_length"]
    yield f"--num-layers {model['layers']}"
    yield f"--hidden-size {model['hidden_size']}"
    yield f"--ffn-hidden-size {model['ffn_size']}"
    yield f"--num-attention-heads {model['heads']}"
    if model["kv_heads"] < model["heads"]:
        yield f"--num-key-value-heads {model['kv_heads']}"
    if model["gated"]:
        yield "--swiglu"
    if model["family"] != "gpt2":
        yield from ("--disable-bias-linear", "--normalization rmsnorm", "--no-position-embedding")
        yield from ("--use-rotary-position-embeddings", f"--rotary-position-embeddings-theta {model['rope_theta']:.0f}")
    if not model["tie_embeddings"]:
        yield "--untie-embeddings-and-output-weights"
    yield from (f"--seq-length {length}", f"--max-position-embeddings {length}")


def _files(spec: Mapping[str, Any], paths: Paths) -> Iterator[str]:
    train = spec["train"]
    yield from megatron_lm.tokens(spec, paths)
    yield "--data-impl mmap"
    yield f"--data-cache-path {paths.output}/cache"
    yield from megatron_lm.checkpoints(train, paths)
    yield from ("--attention-dropout 0", "--hidden-dropout 0", "--log-interval 1", "--exit-signal-handler")
    yield f"--distributed-timeout-minutes {max(1, round(train['hang_after_s'] / 60))}"


def _configuration(spec: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's part: the batch, the stage, the arithmetic."""
    train, parallel = spec["train"], spec["parallel"]
    zero: dict[str, Any] = {"stage": STAGES[parallel["strategy"]]}
    if parallel["offload"] == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    told: dict[str, Any] = {
        "train_batch_size": train["global_batch_size"],
        "train_micro_batch_size_per_gpu": parallel["micro_batch_size"],
        "gradient_clipping": train["grad_clip"],
        "steps_per_print": 2**31 - 1,
        "zero_optimization": zero,
    }
    if train["precision"] == "bf16":
        told |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if train["precision"] == "fp16":
        told["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
    return told
