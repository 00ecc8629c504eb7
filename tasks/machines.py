"""From a recipe's cluster to the machine the planner plans for: the catalogue's facts, or this machine's."""

import contextlib
import functools
import os
from dataclasses import replace

import planner
from clusters import catalog
from clusters.base import Refused
from planner.arguments import settled
from recipes.cluster import LocalCluster
from recipes.planned import only_planned
from recipes.spec import Recipe
from tasks import learning
from training import cases
from training.cases.base import Command

MOST_EMULATED = 8
"""Ranks of an emulated cluster at most: each is a process of this machine that imports torch."""


@functools.lru_cache(maxsize=64)
def plan_of(recipe: Recipe) -> planner.Plan:
    """The plan of a recipe on its cluster, by what was learned there; raises `Refused` or a `planner.PlanError`."""
    known, nodes = learning.lessons(recipe), recipe.cluster.nodes
    plan = planner.plan(known.recipe, machine(recipe), nodes, processes_per_node(recipe), known.profiles)
    advice = known.save_advice(plan.best.step_seconds, plan.best.layout.world_size)
    return replace(plan, advice=[*plan.advice, advice]) if advice else plan


def checkpoint_steps(recipe: Recipe) -> int:
    """Optimizer steps between a recipe's checkpoints, by its plan where it says auto; raises what `plan_of` raises."""
    if recipe.train.checkpoint_every != "auto":
        return recipe.train.checkpoint_every
    return planner.checkpoint_steps(recipe, plan_of(recipe).best, learning.lessons(recipe).save_gb_per_s)


def machine(recipe: Recipe) -> planner.Machine:
    """The machine a recipe's nodes are, as the planner sees it; raises `Refused` for an unknown instance type."""
    if isinstance(recipe.cluster, LocalCluster):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return planner.local_machine(cores=os.cpu_count() or 1, ram_gib=memory)
    return as_machine(catalog.find(recipe.cluster.instance_type))


def processes_per_node(recipe: Recipe) -> int:
    """Training ranks per node: as told on this machine, one per accelerator on AWS."""
    if isinstance(recipe.cluster, LocalCluster):
        return recipe.cluster.processes_per_node
    return catalog.find(recipe.cluster.instance_type).accelerators


def check_launchable(recipe: Recipe) -> None:
    """Raise `Refused` if a recipe asks for what its program cannot run."""
    if not (beyond := only_planned(recipe)):
        return
    megatron = recipe.parallel.software == "megatron"
    whose = " or write case.framework: megatron-lm, megatron-deepspeed or nemo, which run it" if megatron else ""
    raise Refused(
        f"{recipe.name} has {', '.join(beyond)}, which is planned, not yet run by Castra's own trainer: "
        f"`python -m flows.plan` shows the plan and its arguments{',' * megatron}{whose}"
    )


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with the planner's choices in place of `auto`; raises what `plan_of` raises.

    On a machine that nobody has measured, a recipe that leaves nothing open is taken as it is.
    """
    try:
        chosen = plan_of(recipe).best.layout
    except planner.NoProfile:
        if "auto" in recipe.parallel.model_dump(exclude={"recompute"}).values():
            raise
        return recipe
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=settled(chosen))})


def command(resolved: Recipe) -> Command | None:
    """What starts another framework's program for a resolved recipe; None where Castra's own trains.

    Raises `Refused` if the framework cannot carry out the plan.
    """
    if resolved.case.framework == "castra":
        return None
    try:
        return cases.command(resolved.model_dump(mode="json"), resolved.cluster.nodes, processes_per_node(resolved))
    except cases.CaseError as problem:
        raise Refused(f"{resolved.name}: {problem}") from None


def check_emulated(recipe: Recipe) -> None:
    """Raise `Refused` if a cluster that is emulated here would start more ranks than this machine can bear."""
    ranks = recipe.cluster.nodes * processes_per_node(recipe)
    if not isinstance(recipe.cluster, LocalCluster) and ranks > MOST_EMULATED:
        raise Refused(
            f"without --aws the cluster is emulated on this machine, and {recipe.name} has {ranks} ranks: add "
            f"--rehearse --on {recipe.cluster.kind} to run its miniature here, or --aws to run it for money"
        )


def as_machine(instance: catalog.Instance) -> planner.Machine:
    """What the planner needs to know of an instance type."""
    return planner.Machine(
        name=instance.name,
        accelerator=instance.accelerator,
        accelerators=instance.accelerators,
        memory_gib=instance.accelerator_memory_gib,
        bf16_tflops=instance.bf16_tflops,
        fp32_tflops=instance.fp32_tflops,
        hbm_gb_per_s=instance.hbm_gb_per_s,
        intra_gb_per_s=instance.nvlink_gb_per_s,
        inter_gbps=instance.network_gbps,
        price_usd_per_hour=instance.price_usd_per_hour,
        price_as_of=instance.price_as_of,
        efa_interfaces=instance.efa_interfaces,
        ram_gib=instance.ram_gib,
        nvme_drives=instance.nvme_drives,
        nvme_gb=instance.nvme_drives * instance.nvme_gb_each,
    )


def cheapest_on_aws(recipe: Recipe) -> tuple[str, planner.Estimate] | None:
    """The instance type on which the same training, on one instance, costs least; None if it fits none."""
    found = []
    for name, instance in catalog.load().items():
        with contextlib.suppress(planner.PlanError):  # does not fit there, or its figures are not known
            estimate = planner.aws_equivalent(recipe, as_machine(instance), nodes=1)
            if estimate.usd is not None:
                found.append((estimate.usd, name, estimate))
    if not found:
        return None
    _, name, estimate = min(found, key=lambda one: one[:2])
    return name, estimate
