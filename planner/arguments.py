"""From a layout to what the job is started with: torchrun's arguments, DeepSpeed's configuration, Megatron's flags.

What is shown is what runs: tests hold this against what `training/` makes of the same layout.
"""

import shlex
from dataclasses import dataclass
from typing import Any, Final

from planner.estimate import Layout
from recipes.spec import Recipe
from training.cases import megatron_lm
from training.cases.flags import words

MODULE: Final = "training.run"
MEASUREMENTS: Final = "training.checks.calibrate"
SPLIT: Final = {"fsdp": "zero3", "hsdp": "zero3"}
"""Strategies that a recipe has another name for."""


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
        return Arguments(launcher, (megatron_lm.SCRIPT, *megatron(recipe, layout)), {}, None)
    own = ("-m", MEASUREMENTS if recipe.case.program else MODULE, "job.json")
    return Arguments(launcher, own, settled(layout), deepspeed(recipe, layout))


def torchrun(nodes: int, processes_per_node: int) -> tuple[str, ...]:
    """The launcher's arguments that do not depend on the node; a failed job starts again as a whole."""
    return (f"--nnodes={nodes}", f"--nproc-per-node={processes_per_node}", "--max-restarts=0")


def settled(layout: Layout) -> dict[str, Any]:
    """Fields of a recipe's `parallel` as a layout settles them."""
    same = ("software", "micro_batch_size", "tp", "pp", "vpp", "cp", "ep")
    told = {name: getattr(layout, name) for name in same} | {"strategy": SPLIT.get(layout.strategy, layout.strategy)}
    if layout.software == "megatron":
        return told | {name: getattr(layout, name) for name in ("shard", "recompute", "offload")}
    # of the others DeepSpeed cuts the states up among all ranks, or nobody does: there is no choice of how many
    return told | {"shard": layout.shard if layout.strategy == "fsdp2" else 1}


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
    """Megatron-LM's flags but those of its files: the same that `training.cases.megatron_lm` starts it with."""
    told = megatron_lm.flags(recipe.model_dump(mode="json"), settled(layout), layout.world_size)
    return words(told)
