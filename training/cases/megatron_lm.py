"""Megatron-LM: `pretrain_gpt.py` with a plan's flags, as its argument parser names them.

The flags are those of megatron/training/arguments.py at the pinned tag. Its logs: training_log() of
megatron/training/training.py there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.flags import laid_over, words

UPSTREAM: Final = Upstream(
    repository="NVIDIA/Megatron-LM",
    version="core_v0.16.1",  # commit 55ac7082517c3878ae653c07c09c534b8aed49f6
    licence="Apache-2.0 and BSD-3-Clause",
    folder="/opt/Megatron-LM",
    container="nvcr.io/nvidia/pytorch:25.11-py3",  # docker/.ngc_version.dev of the tag; it brings what Megatron needs
)
SCRIPT: Final = "pretrain_gpt.py"
PRECISIONS: Final[dict[str, tuple[str, ...]]] = {
    "fp32": (),
    "fp16": ("--fp16",),
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format hybrid"),
    "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format e2m1"),
}
"""Arithmetic in Megatron's words."""
STAGES: Final = {"ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
"""What is split over the data parallel ranks: nothing, the optimizer, gradients too, weights too."""
SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO's stages beyond the optimizer in Megatron's words."""
TOKENS: Final = "megatron/train"
"""Prefix of the .bin and .idx files below a dataset."""
LINE: Final = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
FIGURES: Final = {
    "loss": (re.compile(r"lm loss:\s+([-+.\dE]+)"), 1.0),
    "seconds": (re.compile(r"elapsed time per iteration \(ms\):\s+([.\d]+)"), 1e-3),
    "tflops": (re.compile(r"throughput per GPU \(TFLOP/s/GPU\):\s+([.\d]+)"), 1.0),
    "grad_norm": (re.compile(r"grad norm:\s+([.\d]+)"), 1.0),
    "lr": (re.compile(r"learning rate:\s+([-+.\dE]+)"), 1.0),
}


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """Pre-training of a GPT or Llama; raises `CaseError` for what Megatron-LM cannot be told."""
    refuse(spec, "megatron-lm")
    parallel = spec["parallel"]
    told = (*words(flags(spec, parallel, nodes * processes_per_node)), *words(_files(spec, paths)))
    # its own check: 1 where tensor or context parallel ranks talk beside the work, more where FSDP gathers beside it
    env = {} if STAGES[parallel["strategy"]] > 1 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return Command((SCRIPT, *laid_over(told, spec["case"]["arguments"])), env)


def refuse(spec: Mapping[str, Any], framework: str) -> None:
    """Raise `CaseError` for what no Megatron can be told by these flags."""
    model, train = spec["model"], spec["train"]
    if spec["case"]["program"]:
        raise CaseError(f"case.program {spec['case']['program']!r} is none of {framework}'s here: leave it empty")
    if model["family"] not in ("llama", "mistral", "mixtral", "gpt2"):
        raise CaseError(f"model.family {model['family']} has no flags of {framework}: take llama, mistral or gpt2")
    if model["pretrained"]:
        raise CaseError(f"model.pretrained is a Hugging Face folder, which {framework} does not read: leave it empty")
    if train["lora_rank"]:
        raise CaseError(f"train.lora_rank is of Castra's own program, not of {framework}: leave it out")
    if model["sliding_window"]:
        raise CaseError(f"model.sliding_window cannot be told to {framework}: leave it empty")


def measure(line: str) -> dict[str, float] | None:
    """A line of an iteration: `[…] iteration 10/ 100 | … | lm loss: 9.1E+00 | …`."""
    if not (found := LINE.search(line)):
        return None
    told = {name: (pattern.search(line), scale) for name, (pattern, scale) in FIGURES.items()}
    return {"step": float(found[1])} | {name: float(value[1]) * scale for name, (value, scale) in told.items() if value}


def flags(spec: Mapping[str, Any], parallel: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """All flags but those of its files, each with its values after spaces; `parallel` is settled, see `STAGES`."""
    yield from _sizes(spec, parallel)
    yield from _states(parallel, ranks)
    yield from again(parallel)
    if parallel["offload"] == "act":
        yield f"--cpu-offloading-num-layers {spec['model']['layers'] // parallel['pp'] - 1}"
    yield from _network(spec)
    yield from PRECISIONS[spec["train"]["precision"]]
    yield from optimisation(spec["train"])


def _sizes(spec: Mapping[str, Any], parallel: Mapping[str, Any]) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {parallel['tp']}"
    yield f"--pipeline-model-parallel-size {parallel['pp']}"
    if parallel["vpp"] > 1:
        layers = spec["model"]["layers"] // (parallel["pp"] * parallel["vpp"])
        yield f"--num-layers-per-virtual-pipeline-stage {layers}"
    if parallel["cp"] > 1:
        yield f"--context-parallel-size {parallel['cp']}"
    if parallel["ep"] > 1:
        yield f"--expert-model-parallel-size {parallel['ep']}"
    if parallel["tp"] > 1:
        yield "--sequence-parallel"
    yield f"--micro-batch-size {parallel['micro_batch_size']}"
    yield f"--global-batch-size {spec['train']['global_batch_size']}"


def _states(parallel: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Who keeps which part of weights, gradients and optimizer."""
    stage, copies = STAGES[parallel["strategy"]], ranks // (parallel["tp"] * parallel["pp"] * parallel["cp"])
    yield "--overlap-grad-reduce"
    if stage:
        yield from ("--use-distributed-optimizer", "--overlap-param-gather")
    if stage in SHARDING:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {SHARDING[stage]}"
        yield "--ckpt-format fsdp_dtensor"
    if stage and 1 < parallel["shard"] < copies:
        yield f"--num-distributed-optimizer-instances {copies // parallel['shard']}"
    if parallel["offload"] == "optimizer":
        yield from ("--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0")


def again(parallel: Mapping[str, Any]) -> Iterator[str]:
    """What the backward pass does again."""
    if parallel["recompute"] == "full":
        yield from ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
    elif parallel["recompute"] not in ("none", "auto"):
        yield "--recompute-granularity selective"


def _network(spec: Mapping[str, Any]) -> Iterator[str]:
    """A decoder in Megatron's words."""
    model, length = spec["model"], spec["data"]["sequence_length"]
    yield f"--num-layers {model['layers']}"
    yield f"--hidden-size {model['hidden_size']}"
    yield f"--ffn-hidden-size {model['ffn_size']}"
    yield f"--num-attention-heads {model['heads']}"
    if model["kv_heads"] < model["heads"]:
        yield from ("--group-query-attention", f"--num-query-groups {model['kv_heads']}")
    if model["head_dim"]:
        yield f"--kv-channels {model['head_dim']}"
    if model["mla"]:
        yield "--multi-latent-attention"
    if model["gated"]:
        yield "--swiglu"
    if model["family"] == "gpt2":
        yield from ("--normalization LayerNorm", "--position-embedding-type learned_absolute")
    else:
        yield from ("--disable-bias-linear", "--normalization RMSNorm")
        yield from ("--position-embedding-type rope", f"--rotary-base {model['rope_theta']:.0f}")
    if not model["tie_embeddings"]:
        yield "--untie-embeddings-and-output-weights"
    yield f"--seq-length {length}"
    yield f"--max-position-embeddings {length}"
    if model["experts"]:
        yield from _experts(model)


def _experts(model: Mapping[str, Any]) -> Iterator[str]:
    width = model["expert_ffn"] or model["ffn_size"]
    yield f"--num-experts {model['experts']}"
    yield f"--moe-router-topk {model['topk']}"
    yield f"--moe-ffn-hidden-size {width}"
    yield from ("--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall")
    if model["dense_layers"]:
        yield f"--moe-layer-freq [0]*{model['dense_layers']}+[1]*{model['layers'] - model['dense_layers']}"
    if model["shared_experts"]:
        yield f"--moe-shared-expert-intermediate-size {model['shared_experts'] * width}"


def optimisation(train: Mapping[str, Any]) -> Iterator[str]:
    """The steps and the optimizer, in the words of all Megatrons but for wsd, which only this one has."""
    schedule = train["schedule"]
    yield f"--train-iters {train['steps']}"
    yield f"--lr {train['learning_rate']:g}"
    yield f"--min-lr {train['learning_rate'] * train['min_lr_ratio']:g}"
    yield f"--lr-decay-style {schedule.upper() if schedule == 'wsd' else schedule}"
    if schedule == "wsd":
        yield from (
            "--lr-wsd-decay-style linear",
            f"--lr-wsd-decay-iters {round(train['decay_ratio'] * train['steps'])}",
        )
    yield f"--lr-warmup-iters {train['warmup_steps']}"
    yield f"--weight-decay {train['weight_decay']:g}"
    yield f"--adam-beta1 {train['beta1']:g}"
    yield f"--adam-beta2 {train['beta2']:g}"
    yield f"--clip-grad {train['grad_clip']:g}"
    yield f"--seed {train['seed']}"


def _files(spec: Mapping[str, Any], paths: Paths) -> Iterator[str]:
    """Data, checkpoints, log."""
    train = spec["train"]
    yield from tokens(spec, paths)
    yield f"--data-cache-path {paths.output}/cache"
    yield from checkpoints(train, paths)
    yield from ("--attention-dropout 0", "--hidden-dropout 0", "--log-interval 1", "--log-throughput")
    yield from ("--exit-signal-handler", f"--distributed-timeout-minutes {max(1, round(train['hang_after_s'] / 60))}")


def tokens(spec: Mapping[str, Any], paths: Paths) -> Iterator[str]:
    """The dataset as Castra made it: the ids are there, so that no tokenizer is needed, only how many there are."""
    train = spec["train"]
    yield f"--data-path {paths.dataset}/{TOKENS}"
    yield from ("--tokenizer-type NullTokenizer", f"--vocab-size {spec['model']['vocab_size'] - 1}")  # it adds an end
    if train["eval_every"]:
        batches = max(1, -(-train["eval_sequences"] // train["global_batch_size"]))
        yield from ("--split 99,1,0", f"--eval-interval {train['eval_every']}", f"--eval-iters {batches}")
    else:
        yield from ("--split 100,0,0", "--eval-iters 0")


def checkpoints(train: Mapping[str, Any], paths: Paths) -> Iterator[str]:
    """Where it saves, and starts again from."""
    yield f"--save {paths.output}/checkpoints"
    yield f"--load {paths.output}/checkpoints"
    yield f"--save-interval {train['checkpoint_every']}"
