"""From a layout to what the job is started with: torchrun's arguments, DeepSpeed's configuration, Megatron's flags.

What is shown is what runs: tests hold this against what `training/` makes of the same layout.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from planner.estimate import Layout
from recipes.spec import Model, Recipe, Train

MODULE: Final = "training.run"
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
SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO's stages beyond the optimizer in Megatron's words."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What starts a layout's job. Only what the platform tells each node is left out: its rank, and who leads."""

    torchrun: tuple[str, ...]
    """The launcher's arguments on every node."""
    program: tuple[str, ...]
    """What every rank runs, with its flags."""
    parallel: dict[str, Any]
    """The recipe's `parallel` with every `auto` settled: what Castra's own program reads. Empty for Megatron."""
    deepspeed: dict[str, Any] | None
    """DeepSpeed's configuration; None where it has no part."""

    @property
    def command(self) -> str:
        """All of it as one command line."""
        return shlex.join(("torchrun", *self.torchrun, *self.program))


def arguments(recipe: Recipe, layout: Layout, nodes: int) -> Arguments:
    """What a recipe's job is started with on `nodes` nodes in this layout."""
    launcher = torchrun(nodes, layout.world_size // nodes)
    if layout.software == "megatron":
        return Arguments(launcher, (SCRIPT, *megatron(recipe, layout)), {}, None)
    own = ("-m", MODULE, "job.json")
    return Arguments(launcher, own, settled(layout), deepspeed(recipe, layout))


def torchrun(nodes: int, processes_per_node: int) -> tuple[str, ...]:
    """The launcher's arguments that do not depend on the node; a failed job starts again as a whole."""
    return (f"--nnodes={nodes}", f"--nproc-per-node={processes_per_node}", "--max-restarts=0")


def settled(layout: Layout) -> dict[str, Any]:
    """Fields of a recipe's `parallel` as a layout settles them."""
    same = ("software", "strategy", "micro_batch_size", "tp", "pp", "vpp", "cp", "ep")
    # of the others DeepSpeed cuts the states up among all ranks, or nobody does: there is no choice of how many
    return {name: getattr(layout, name) for name in same} | {"shard": layout.shard if layout.strategy == "fsdp2" else 1}


def deepspeed(recipe: Recipe, layout: Layout, *, pinned: bool = True) -> dict[str, Any] | None:
    """DeepSpeed's configuration as `training.parallel` makes it for zero0 to zero3; None for the other strategies.

    `pinned`: whether what is offloaded lies in pinned memory, as it does wherever there are GPUs.
    """
    if layout.software != "castra" or not layout.strategy.startswith("zero"):
        return None
    train, stage = recipe.train, int(layout.strategy.removeprefix("zero"))
    config: dict[str, Any] = {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        "gradient_clipping": train.grad_clip,
        "zero_optimization": {"stage": stage} | _offloaded(layout, recipe.parallel.nvme_path, pinned),
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if train.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
    if train.precision == "bf16" and stage > 1:
        config["bf16"] = {"enabled": True}
    if "bf16" in config or "fp16" in config:
        config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return config


def _offloaded(layout: Layout, nvme_path: str, pinned: bool) -> dict[str, Any]:
    what, _, disk = layout.offload.partition("-")
    place: dict[str, Any] = {"device": disk or "cpu", "pin_memory": pinned} | ({"nvme_path": nvme_path} if disk else {})
    names = {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[what]
    return {f"offload_{name}": place for name in names}


def megatron(recipe: Recipe, layout: Layout) -> tuple[str, ...]:
    """Megatron-LM's flags but those of its data, as its argument parser names them (NVIDIA/Megatron-LM d98e8a6)."""
    told = (
        *_sizes(recipe, layout),
        *_states(layout),
        *_again(recipe.model, layout),
        *_network(recipe),
        *_optimisation(recipe.train),
    )
    return tuple(word for flag in told for word in flag.split())


def _sizes(recipe: Recipe, layout: Layout) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {layout.tp}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    if layout.vpp > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {recipe.model.layers // (layout.pp * layout.vpp)}"
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp}"
    if layout.ep > 1:
        yield f"--expert-model-parallel-size {layout.ep}"
    if layout.sequence_parallel and layout.tp > 1:
        yield "--sequence-parallel"
    yield f"--micro-batch-size {layout.micro_batch_size}"
    yield f"--global-batch-size {recipe.train.global_batch_size}"


def _states(layout: Layout) -> Iterator[str]:
    """Who keeps which part of weights, gradients and optimizer."""
    yield "--overlap-grad-reduce"
    if layout.zero:
        yield "--use-distributed-optimizer"
        yield "--overlap-param-gather"
    if layout.zero in SHARDING:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {SHARDING[layout.zero]}"
        yield "--ckpt-format fsdp_dtensor"
    if layout.zero and 1 < layout.shard < layout.dp:
        yield f"--num-distributed-optimizer-instances {layout.dp // layout.shard}"
    if layout.offload == "optimizer":
        yield from ("--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0")


def _again(model: Model, layout: Layout) -> Iterator[str]:
    """What the backward pass does again, or fetches from the host."""
    if layout.recompute == "full":
        yield from ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
    elif layout.recompute != "none":
        yield "--recompute-granularity selective"
    if layout.offload == "act":
        yield f"--cpu-offloading-num-layers {model.layers // layout.pp - 1}"


def _network(recipe: Recipe) -> Iterator[str]:
    """A decoder in Megatron's words."""
    model = recipe.model
    yield f"--num-layers {model.layers}"
    yield f"--hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {model.ffn_size}"
    yield f"--num-attention-heads {model.heads}"
    if model.kv_heads < model.heads:
        yield from ("--group-query-attention", f"--num-query-groups {model.kv_heads}")
    if model.head_dim:
        yield f"--kv-channels {model.head_dim}"
    if model.mla:
        yield "--multi-latent-attention"
    if model.gated:
        yield "--swiglu"
    if model.family == "gpt2":
        yield from ("--normalization LayerNorm", "--position-embedding-type learned_absolute")
    else:
        yield from ("--disable-bias-linear", "--normalization RMSNorm")
        yield from ("--position-embedding-type rope", f"--rotary-base {model.rope_theta:.0f}")
    if not model.tie_embeddings:
        yield "--untie-embeddings-and-output-weights"
    yield f"--seq-length {recipe.data.sequence_length}"
    yield f"--max-position-embeddings {recipe.data.sequence_length}"
    if model.experts:
        yield from _experts(model)


def _experts(model: Model) -> Iterator[str]:
    width = model.expert_ffn or model.ffn_size
    yield f"--num-experts {model.experts}"
    yield f"--moe-router-topk {model.topk}"
    yield f"--moe-ffn-hidden-size {width}"
    yield from ("--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall")
    if model.dense_layers:
        yield f"--moe-layer-freq [0]*{model.dense_layers}+[1]*{model.layers - model.dense_layers}"
    if model.shared_experts:
        yield f"--moe-shared-expert-intermediate-size {model.shared_experts * width}"


def _optimisation(train: Train) -> Iterator[str]:
    yield from PRECISIONS[train.precision]
    yield f"--train-iters {train.steps}"
    yield f"--lr {train.learning_rate:g}"
    yield f"--min-lr {train.learning_rate * train.min_lr_ratio:g}"
    yield f"--lr-decay-style {train.schedule.upper() if train.schedule == 'wsd' else train.schedule}"
    if train.schedule == "wsd":
        yield from ("--lr-wsd-decay-style linear", f"--lr-wsd-decay-iters {round(train.decay_ratio * train.steps)}")
    yield f"--lr-warmup-iters {train.warmup_steps}"
    yield f"--weight-decay {train.weight_decay:g}"
    yield f"--adam-beta1 {train.beta1:g}"
    yield f"--adam-beta2 {train.beta2:g}"
    yield f"--clip-grad {train.grad_clip:g}"
    yield f"--seed {train.seed}"
