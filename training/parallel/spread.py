"""From a recipe to an engine: the model made without weights, changed, cut up, and only then filled."""

from pathlib import Path
from typing import Any

import torch

from training.model import (
    NextTokenLoss,
    add_adapters,
    allocate,
    checkpoint_activations,
    compile_blocks,
    materialise,
    materialise_in_4_bits,
    skeleton,
)
from training.parallel import pipelined, plans
from training.parallel.engine import Engine
from training.parallel.mesh import Layout, Share
from training.parallel.native import Native, replicated, sharded
from training.parallel.pipelined import Part, Pipelined
from training.process import JobError
from training.ranks import World


def check(spec: dict[str, Any], share: Share, layout: Layout, device: torch.device) -> None:
    """Raise JobError unless a recipe's model can be trained in this layout and precision on such devices."""
    train, model = spec["train"], spec["model"]
    if train["precision"] == "fp16" and spec["parallel"]["strategy"].startswith("zero") and device.type == "cpu":
        raise JobError("DeepSpeed has no fp16 on CPUs; set train.precision to bf16 or fp32")
    plans.check(model, spec["data"]["sequence_length"], layout.tp, layout.cp)
    if train["lora_base"] != "full":
        _check_4_bits(spec)
    if model.get("experts"):
        _check_experts(spec, layout)
    if layout.pp > 1:
        pipelined.check(share, layout, model["layers"])
    if train["precision"] not in ("fp32", "bf16", "fp16"):
        raise JobError(f"train.precision {train['precision']} is planned and not run; use bf16, fp16 or fp32")
    if train["compile"] and layout.tp > 1:  # measured with torch 2.13: the norms' gradients come out wrong
        raise JobError("compiled blocks cannot be cut up among tensor parallel ranks; set train.compile to false")
    if train["lora_rank"] and layout.tp > 1:
        raise JobError("adapters are not cut up among tensor parallel ranks; set parallel.tp to 1 or lora_rank to 0")


def _check_4_bits(spec: dict[str, Any]) -> None:
    """Raise JobError for what is not done with frozen weights in 4 bits."""
    train, strategy = spec["train"], spec["parallel"]["strategy"]
    if not train["lora_rank"]:
        raise JobError("train.lora_base nf4 is of adapters; set train.lora_rank above 0")
    if strategy != "ddp":
        raise JobError(f"weights in 4 bits are not cut up among ranks; set parallel.strategy to ddp, not {strategy}")
    if train["compile"]:
        raise JobError("layers of 4 bits are not compiled; set train.compile to false")


def _check_experts(spec: dict[str, Any], layout: Layout) -> None:
    """Raise JobError for what is not done with routed experts."""
    if layout.pp > 1:
        raise JobError("a model with experts is not cut into pipeline stages; set parallel.pp to 1")
    if layout.cp > 1:
        raise JobError("the sequences of a model with experts are not shared by ranks; set parallel.cp to 1")
    if spec["parallel"]["strategy"] == "zero3":  # DeepSpeed 0.19.8 on CPUs: it keeps a gradient it means to have freed
        raise JobError("a model with experts is not trained with zero3; set parallel.strategy to fsdp2 or zero2")
    if spec["train"]["compile"]:
        raise JobError(
            "blocks with experts are not compiled: where tokens go is known too late; set train.compile to false"
        )


def spread(spec: dict[str, Any], folder: Path | None, share: Share, layout: Layout, world: World) -> Engine:
    """Make the recipe's model, from the Hugging Face `folder` or from its seed, spread as `parallel` asks.

    Of what the layout cuts up, no rank ever holds the whole. Raises JobError.
    """
    train, parallel, length = spec["train"], spec["parallel"], spec["data"]["sequence_length"]
    count, first = layout.pp * layout.vpp, layout.place["pp"]
    objectives = [objective_of(spec, folder, index, count) for index in range(first, count, layout.pp)]
    if parallel["strategy"].startswith("zero"):
        from training.parallel.zero import Zero

        return Zero(objectives[0], folder, spec, share, world)
    if parallel["strategy"] == "ddp":
        if train["lora_base"] == "nf4":
            materialise_in_4_bits(objectives[0], objectives[0].model, train["seed"], folder, world.device)
        else:
            _fill(objectives[0], objectives[0], train["seed"], folder, world.device)
        module = replicated(objectives[0], train["precision"], world)
        return Native(module, objectives[0], train, share, layout)
    modules = [Part(objective, first + place * layout.pp) for place, objective in enumerate(objectives)]
    for module, objective in zip(modules, objectives, strict=True):
        whole = module if count > 1 else objective
        _cut(whole, objective, train["precision"], layout)
        _fill(whole, objective, train["seed"], folder, world.device)
    if count > 1:
        return Pipelined(modules, length, train, share, layout)
    return Native(objectives[0], objectives[0], train, share, layout)


def objective_of(spec: dict[str, Any], folder: Path | None, index: int = 0, count: int = 1) -> NextTokenLoss:
    """Make the training objective of a stage of the recipe's model, its weights without memory. Raises JobError."""
    train = spec["train"]
    model = skeleton(spec["model"], spec["data"]["sequence_length"], folder)
    if train["lora_rank"]:
        add_adapters(model, train["lora_rank"], train["lora_alpha"], train["lora_targets"])
    objective = NextTokenLoss(model, index, count)
    checkpoint_activations(objective, train["activation_checkpointing"])
    if train["compile"]:
        compile_blocks(objective)
    return objective


def _cut(module: torch.nn.Module, objective: NextTokenLoss, precision: str, layout: Layout) -> None:
    """Cut a stage up along the tp axis, then what is left along FSDP2's."""
    if layout.tp > 1:
        plans.cut_up(objective, layout.mesh["tp"])
        objective.tp = layout.mesh["tp"].get_group()
    if layout.cp > 1:
        objective.cp = layout.mesh["cp"].get_group()
    sharded(module, objective.blocks, precision, layout)


def _fill(
    module: torch.nn.Module, objective: NextTokenLoss, seed: int, folder: Path | None, device: torch.device
) -> None:
    allocate(module, device)
    materialise(objective.model, seed, folder)
