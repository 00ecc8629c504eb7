"""Which layouts a recipe leaves open; what to say when none divides or none fits: the smallest change that helps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.errors import DoesNotDivide
from planner.estimate import Estimate, Layout
from planner.judge import Site, Work, configs_of
from planner.memory import breakdown, hosted
from planner.own import STAGES, asks_to_cut, counts_of, even_nodes, layouts, prescribes
from planner.schema import RECOMPUTE
from planner.search import survey
from planner.software import STRATEGIES
from planner.space import Axes, divisors

if TYPE_CHECKING:
    from recipes.spec import Parallel, Recipe

MOST_RANKS: Final = 16384
"""More nodes than this many ranks make are no advice."""
SIZES: Final = ("tp", "pp", "vpp", "cp", "ep")


def axes_of(recipe: Recipe | None, work: Work, site: Site) -> Axes:
    """What Megatron may try, as far as the recipe's `parallel` part leaves it open; everything without a recipe.

    Raises `DoesNotDivide` for what does not go together.
    """
    per_node = site.processes_per_node or site.machine.accelerators
    if recipe is None:
        return Axes.of(work.shape, per_node)
    told = {name: getattr(recipe.parallel, name) for name in SIZES} | {"mbs": recipe.parallel.micro_batch_size}
    pinned = {name: size for name, size in told.items() if size != "auto"}
    if recipe.parallel.strategy != "auto":
        pinned["zero"] = _stage(recipe.parallel)
    if recipe.parallel.recompute != "auto":
        pinned["recompute"] = RECOMPUTE.index(recipe.parallel.recompute)
    return Axes.of(work.shape, per_node, **pinned)


def _stage(parallel: Parallel) -> int:
    """The ZeRO stage that a recipe prescribes; raises `DoesNotDivide` where its pipeline cannot have it."""
    stage, stages = STAGES[parallel.strategy], parallel.pp
    if stage > 1 and stages != "auto" and stages > 1:
        raise DoesNotDivide(
            f"parallel.strategy {parallel.strategy} (ZeRO {stage}) does not go with parallel.pp {stages}, whose "
            "micro-batches would gather and reduce each stage anew: take parallel.strategy zero1, ddp or auto, or "
            "parallel.pp 1."
        )
    return stage


def nothing_divides(recipe: Recipe, work: Work, refused_by: Counter[str]) -> str:
    """The sentence for a recipe of which Megatron can make no layout."""
    parallel = recipe.parallel
    told = [f"{name} {getattr(parallel, name)}" for name in SIZES if getattr(parallel, name) != "auto"]
    told += [] if parallel.strategy == "auto" else [f"strategy {parallel.strategy}"]
    told += [] if parallel.micro_batch_size == "auto" else [f"micro_batch_size {parallel.micro_batch_size}"]
    reasons = "; ".join(reason for reason, _ in refused_by.most_common(3))
    sizes = ", ".join(map(str, divisors(int(work.shape.heads))[:8]))
    hint = f" (divisors of the heads: {sizes})" if "heads do not divide" in reasons else ""
    return f"parallel ({', '.join(told) or 'auto'}) leaves no layout: {reasons}{hint}; take other sizes, or auto."


def fits(recipe: Recipe, site: Site) -> bool:
    """Whether any layout the recipe leaves open divides and fits, found without the rest of the estimate."""
    work = Work.of(recipe)
    if recipe.parallel.software == "megatron":
        nodes, processes = counts_of(site)
        return bool(survey(work, site, [nodes * processes], axes_of(recipe, work, site), 1).ranked)
    try:
        found = [one for one in layouts(recipe, site) if prescribes(recipe, one)]
    except DoesNotDivide:
        return False
    return any(_some_fits(work, site, [one for one in found if one.strategy == name]) for name in STRATEGIES)


def too_big(recipe: Recipe, site: Site, leanest: Estimate) -> str:
    """The sentence for a recipe none of whose layouts fits; `leanest` is the one that needs least."""
    room = site.room(Work.of(recipe))
    tried = _changes(recipe, site)
    change = next((words for words, tweaked, count in tried if fits(tweaked, replace(site, nodes=count))), "")
    needed = leanest.memory.total
    why = f"needs {needed:.1f} GiB per rank, {needed - room:.1f} GiB more than the {room:.1f} GiB usable"
    return (
        f"the model does not fit on {site.machine.name}: {leanest.layout} {why if needed > room else leanest.why_not}; "
        f"the smallest change that fits is {change or 'a machine with more memory, or a smaller model'}."
    )


def _some_fits(work: Work, site: Site, layouts: list[Layout]) -> bool:
    """Whether any of these layouts of one strategy does."""
    if not layouts:
        return False
    configs = configs_of(work, site, layouts)
    memory = site.profile(work, "castra", layouts[0].strategy).memory
    needed, (ram, disk) = sum(breakdown(configs, memory).values(), start=np.zeros(())), hosted(configs)
    beside = (ram <= site.machine.host_room_gib) & (disk <= site.machine.disk_room_gib)
    return bool(np.any((needed <= site.room(work)) & beside))


def _changes(recipe: Recipe, site: Site) -> Iterator[tuple[str, Recipe, int]]:
    """Changes to try, the smallest first: the layout, then recomputation, then more machines."""
    parallel, (nodes, processes) = recipe.parallel, counts_of(site)
    if parallel.micro_batch_size != "auto":
        for size in reversed(divisors(recipe.train.global_batch_size)):
            if size < parallel.micro_batch_size:
                yield f"parallel.micro_batch_size {size}", _with(recipe, "parallel", micro_batch_size=size), nodes
    if parallel.strategy != "auto" and parallel.software == "castra" and not asks_to_cut(parallel):
        for strategy in ("fsdp2", "zero3"):
            yield f"parallel.strategy {strategy}", _with(recipe, "parallel", strategy=strategy), nodes
    free = recipe.model_copy(update={"parallel": type(parallel)(software=parallel.software)})
    lean = _with(free, "train", activation_checkpointing=True)
    yield "parallel auto", free, nodes
    yield "train.activation_checkpointing true", lean, nodes
    if site.machine.ram_gib is not None and not site.machine.local:
        for what in ("optimizer", "parameters"):
            told = f"parallel.strategy zero3 with parallel.offload {what}"
            yield told, _with(lean, "parallel", strategy="zero3", offload=what), nodes
    if site.machine.local:
        fewer = (count for count in reversed(even_nodes(recipe, processes)) if count < nodes)
        yield from ((f"cluster.nodes {count}", free, count) for count in fewer)
    else:
        yield from _more_nodes(free, "cluster.nodes", site)
        yield from _more_nodes(lean, "train.activation_checkpointing true with cluster.nodes", site)
        other = recipe.model_copy(update={"parallel": type(parallel)(software="megatron")})
        yield "parallel.software megatron (run by case.framework: megatron-lm)", other, nodes


def _more_nodes(recipe: Recipe, words: str, site: Site) -> Iterator[tuple[str, Recipe, int]]:
    """The smallest number of nodes that fits, if any. If some number fits then so does every larger one."""
    nodes, processes = counts_of(site)
    counts = [count for count in even_nodes(recipe, processes) if nodes < count <= MOST_RANKS // processes]
    enough = bisect_left(counts, True, key=lambda count: fits(recipe, replace(site, nodes=count)))
    if enough < len(counts):
        yield f"{words} {counts[enough]}", recipe, counts[enough]


def _with(recipe: Recipe, part: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={part: getattr(recipe, part).model_copy(update=values)})
