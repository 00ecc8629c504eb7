"""Find the best layout of a recipe, or honour the one it prescribes and say how it compares."""

import math
from collections.abc import Iterator
from typing import Final

from planner.errors import DoesNotFit
from planner.estimate import Estimate, Plan
from planner.judge import SETUP_SECONDS, judge, prescribes
from planner.machine import Machine
from planner.prior import prior_for
from planner.refusal import too_big
from planner.software import STRATEGIES
from recipes.spec import Parallel, Recipe

COMFORTABLE: Final = 0.8
"""Share of a rank's memory. A layout that needs more may run out of memory, since the estimate may be wrong;"""
RISK: Final = 1.1
"""so it ranks as if it were this much slower."""
EQUAL: Final = 1.02
"""Steps within this ratio count as equally fast."""


def plan(recipe: Recipe, machine: Machine, nodes: int, processes_per_node: int) -> Plan:
    """Judge every layout of a recipe on `nodes` machines and pick the best.

    Raises `DoesNotDivide`, `DoesNotFit` or `NoProfile` (each a `PlanError`), with one sentence for the user.
    """
    judged = judge(recipe, machine, nodes, processes_per_node)
    room = machine.memory_gib * machine.share(nodes, processes_per_node)
    ranked = sorted((one for one in judged if one.fits), key=lambda one: _rank(one, room))
    refused = sorted((one for one in judged if not one.fits), key=lambda one: one.memory.total)
    wanted = next((one for one in ranked if prescribes(recipe, one.layout)), None)
    if wanted is None:
        leanest = next(one for one in refused if prescribes(recipe, one.layout))
        raise DoesNotFit(too_big(recipe, machine, nodes, processes_per_node, leanest))
    notes = [*_comparison(recipe, wanted, ranked[0]), *_basis(machine, wanted)]
    return Plan(best=wanted, ranked=ranked, refused=refused, notes=notes)


def aws_equivalent(recipe: Recipe, machine: Machine, nodes: int) -> Estimate:
    """What the same training would take and cost on `nodes` such instances, in the layout that is best there.

    A small global batch may not divide over all accelerators: the rest idle, and are paid for. Raises `PlanError`.
    """
    batch = recipe.train.global_batch_size
    busy = (count for count in range(machine.accelerators, 1, -1) if batch % (nodes * count) == 0)
    return plan(recipe.model_copy(update={"parallel": Parallel()}), machine, nodes, next(busy, 1)).best


def _rank(one: Estimate, room_gib: float) -> tuple[int, int, int]:
    """Sorts by speed and risk; of equally good layouts the simpler comes first, then the larger micro batch."""
    risk = RISK if one.memory.total > COMFORTABLE * room_gib else 1.0
    slowness = math.floor(math.log(one.step_seconds * risk) / math.log(EQUAL))
    return slowness, STRATEGIES.index(one.layout.strategy), -one.layout.micro_batch_size


def _comparison(recipe: Recipe, mine: Estimate, winner: Estimate) -> Iterator[str]:
    if recipe.parallel == Parallel():
        return
    if mine.layout == winner.layout:
        yield f"yours ({mine.layout}) is also the planner's choice."
    else:
        slower = mine.step_seconds / winner.step_seconds - 1
        yield (
            f"yours: {mine.step_seconds:.3g} s/step, {abs(slower):.0%} {'slower' if slower > 0 else 'faster'} than "
            f"{winner.layout} ({winner.step_seconds:.3g} s/step)."
        )


def _basis(machine: Machine, best: Estimate) -> Iterator[str]:
    low, high = prior_for(machine).interval_of(best.layout.strategy)
    yield (
        f"a roofline, not calibrated on {machine.name}: expect 9 of 10 runs to take {low:.2f} to {high:.2f} times the "
        "estimate."
    )
    if best.usd is not None:
        yield (
            f"dollars: on demand, {machine.price_usd_per_hour:,.2f} per node and hour as of {machine.price_as_of}, "
            f"{SETUP_SECONDS / 60:.0f} minutes of set-up included."
        )
