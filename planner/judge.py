"""Estimate every layout of a recipe on a machine, all at once."""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.errors import DoesNotDivide
from planner.estimate import Estimate, Layout
from planner.grid import Grid
from planner.machine import Machine
from planner.memory import USABLE, Memory, breakdown
from planner.model import Shape
from planner.prior import prior_for
from planner.software import STRATEGIES, Software
from planner.speed import phases
from recipes.spec import Recipe

SETUP_SECONDS: Final = 1800.0
"""Instances are paid for while the cluster comes up: 15 to 30 minutes on EKS, 25 to 30 on PCS, by AWS's own guides."""


def judge(recipe: Recipe, machine: Machine, nodes: int, processes_per_node: int) -> list[Estimate]:
    """Estimate every layout that divides, fitting or not, in no particular order; raises `PlanError`."""
    hardware = machine.hardware(recipe.train.precision, machine.share(nodes, processes_per_node))
    found = layouts(recipe, nodes, processes_per_node)
    grid = _grid(recipe, found, nodes * processes_per_node if machine.local else processes_per_node)
    seconds = phases(grid, hardware, prior_for(machine))
    memory = breakdown(grid, machine.kind)
    rows = zip(found, _rows(seconds, len(found)), _rows(memory, len(found)), strict=True)
    return [_estimate(recipe, machine, nodes, layout, parts, Memory(**needs)) for layout, parts, needs in rows]


def layouts(recipe: Recipe, nodes: int, processes_per_node: int) -> list[Layout]:
    """Every strategy with every micro batch that divides a rank's part of the global batch.

    Raises `DoesNotDivide` if nothing does, or if what the recipe prescribes does not.
    """
    ranks, batch = nodes * processes_per_node, recipe.train.global_batch_size
    if batch % ranks:
        raise DoesNotDivide(_uneven(batch, nodes, processes_per_node))
    part = batch // ranks
    micros = divisors(part)
    prescribed = recipe.parallel.micro_batch_size
    if prescribed != "auto" and prescribed not in micros:
        near = [max(size for size in micros if size <= prescribed), *(size for size in micros if size > prescribed)][:2]
        raise DoesNotDivide(
            f"parallel.micro_batch_size {prescribed} does not divide the {part} sequences of each rank "
            f"(train.global_batch_size {batch} over {ranks} ranks): take {' or '.join(map(str, near))}."
        )
    return [Layout(strategy, size, part // size, ranks) for strategy in STRATEGIES for size in micros]


def divisors(number: int) -> list[int]:
    """Every whole number that divides a positive one, smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def fits(recipe: Recipe, machine: Machine, nodes: int, processes_per_node: int) -> bool:
    """Whether any layout the recipe leaves open divides and fits, found without the rest of the estimate."""
    try:
        found = [one for one in layouts(recipe, nodes, processes_per_node) if prescribes(recipe, one)]
    except DoesNotDivide:
        return False
    needs = sum(breakdown(_grid(recipe, found, processes_per_node), machine.kind).values(), start=np.zeros(1))
    return bool(np.min(needs) <= usable_gib(machine, machine.share(nodes, processes_per_node)))


def prescribes(recipe: Recipe, layout: Layout) -> bool:
    """Whether a layout is one of those the recipe's `parallel` part leaves open."""
    parallel = recipe.parallel
    strategy = parallel.strategy in {"auto", layout.strategy}
    return strategy and parallel.micro_batch_size in {"auto", layout.micro_batch_size}


def usable_gib(machine: Machine, share: float) -> float:
    """How much memory one rank may plan with."""
    return machine.memory_gib * share * USABLE[machine.kind]


def _uneven(batch: int, nodes: int, processes_per_node: int) -> str:
    ranks = nodes * processes_per_node
    sizes = [size for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if size]
    others = divisors(batch // processes_per_node) if batch % processes_per_node == 0 else []
    nearest = min(others, key=lambda count: abs(count - nodes), default=0)
    fewer = f", or cluster.nodes {nearest}" if nearest else ""
    return (
        f"train.global_batch_size {batch} does not divide over {ranks} ranks ({nodes} nodes x {processes_per_node}): "
        f"take {' or '.join(map(str, sizes))}{fewer}."
    )


def _grid(recipe: Recipe, found: list[Layout], together: int) -> Grid:
    """The layouts as arrays; `together` ranks share one node."""

    def column(values: Iterator[float]) -> NDArray[np.float64]:
        return np.fromiter(values, dtype=np.float64, count=len(found))

    return Grid(
        shape=Shape.of(recipe.model, recipe.data.sequence_length),
        software=Software.of([layout.strategy for layout in found], recipe.train.precision),
        micro=column(layout.micro_batch_size for layout in found),
        accumulation=column(layout.gradient_accumulation for layout in found),
        ranks=column(layout.world_size for layout in found),
        ranks_per_node=column(float(together) for _ in found),
        recompute=np.asarray(float(recipe.train.activation_checkpointing)),
    )


def _rows(arrays: dict[str, NDArray[np.float64]], count: int) -> list[dict[str, float]]:
    columns = {name: np.broadcast_to(values, count).tolist() for name, values in arrays.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _estimate(
    recipe: Recipe, machine: Machine, nodes: int, layout: Layout, parts: dict[str, float], memory: Memory
) -> Estimate:
    step = sum(parts.values())
    tokens = recipe.train.global_batch_size * recipe.data.sequence_length
    low, high = prior_for(machine).interval_of(layout.strategy)
    room = usable_gib(machine, machine.share(nodes, layout.world_size // nodes))
    fits = memory.total <= room
    total = step * recipe.train.steps
    return Estimate(
        layout=layout,
        step_seconds=step,
        low=step * low,
        high=step * high,
        tokens_per_second=tokens / step,
        mfu=_mfu(recipe, machine, layout.world_size, tokens / step),
        memory=memory,
        fits=fits,
        why_not="" if fits else f"needs {memory.total:.1f} GiB per rank, {room:.1f} GiB are usable",
        phases=parts,
        total_seconds=total,
        usd=_usd(machine, nodes, total),
    )


def _mfu(recipe: Recipe, machine: Machine, ranks: int, tokens_per_second: float) -> float | None:
    if machine.local:
        return None
    flops = float(Shape.of(recipe.model, recipe.data.sequence_length).flops_per_token)
    return flops * tokens_per_second / (machine.peak_tflops(recipe.train.precision) * 1e12 * ranks)


def _usd(machine: Machine, nodes: int, train_seconds: float) -> float | None:
    if machine.local or machine.price_usd_per_hour is None:
        return None
    return nodes * (train_seconds + SETUP_SECONDS) / 3600 * machine.price_usd_per_hour
