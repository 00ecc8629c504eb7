"""What a recipe will take, before anything is created: layouts, memory, time, dollars, and what was refused."""

from typing import Any

import planner
from clusters.base import Refused
from recipes.spec import LocalCluster, Recipe
from tasks import report
from tasks.machines import cheapest_on_aws, machine, plan_of

SHOWN = 12
"""Layouts listed; the ranking goes on below them."""


def show(recipe: Recipe) -> str:
    """Show the plan in the UI and on the terminal; returns its headline. Raises `Refused` if it is over the budget."""
    plan = plan_of(recipe)
    report.table("plan", [_row(estimate) for estimate in plan.ranked[:SHOWN]], "Layouts that fit, best first")
    refused = [{"layout": _layout(estimate), "why": estimate.why_not} for estimate in plan.refused]
    report.table("refused-layouts", refused, "Layouts that do not fit")
    report.page("plan-summary", markdown(recipe), "The plan in short")
    headline = _headline(recipe, plan.best)
    for note in plan.notes:
        report.say(f"plan: {note}")
    _check_budget(recipe)
    return headline


def bill(recipe: Recipe) -> list[dict[str, str]]:
    """What the run costs where it runs, and what the same training would cost on AWS. Unit: US dollars."""
    here = plan_of(recipe).best.usd
    rows = [{"what": "on this machine" if here is None else "on AWS, planned", "usd": f"${here or 0:,.2f}"}]
    if isinstance(recipe.cluster, LocalCluster) and (there := cheapest_on_aws(recipe)):
        name, estimate = there
        rows.append({"what": f"on AWS it would be about (one {name})", "usd": f"${estimate.usd:,.2f}"})
    return rows


def _check_budget(recipe: Recipe) -> None:
    limit, cost = recipe.budget.max_usd, plan_of(recipe).best.usd
    if limit is not None and cost is not None and cost > limit:
        raise Refused(
            f"the plan costs ${cost:,.0f}, budget.max_usd is ${limit:,.0f}: train fewer steps (train.steps), use a "
            "cheaper instance type, or raise the budget"
        )


def _headline(recipe: Recipe, best: planner.Estimate) -> str:
    cost = "free" if best.usd is None else f"${best.usd:,.0f}"
    return (
        f"{planner.parameters(recipe.model) / 1e6:,.1f} M parameters, "
        f"{_layout(best)} on {machine(recipe).name}, "
        f"{best.memory.total:.2f} GiB per rank, {best.step_seconds:.3g} s a step ({best.low:.3g} to {best.high:.3g}), "
        f"{report.clock(best.total_seconds)}, {cost}"
    )


def markdown(recipe: Recipe) -> str:
    """The plan in short, with its pictures and its bill."""
    from tasks import pictures  # matplotlib costs half a second that a skipped step need not pay

    plan = plan_of(recipe)
    best = plan.best
    memory = [(name, gib) for name, gib in _memory(best).items() if gib > 0]
    phases = sorted(best.phases.items(), key=lambda item: -item[1])
    notes = "".join(f"- {note}\n" for note in plan.notes)
    return (
        f"{_headline(recipe, best)}\n\n{pictures.bars('memory per rank', 'GiB', memory)}\n\n"
        f"{pictures.bars('one step', 'seconds', phases)}\n\n{notes}\n{report.grid(bill(recipe))}"
    )


def _memory(estimate: planner.Estimate) -> dict[str, float]:
    parts = ("total", "weights", "gradients", "optimizer", "activations", "buffers")
    return {part: float(getattr(estimate.memory, part)) for part in parts}


def _row(estimate: planner.Estimate) -> dict[str, Any]:
    return {
        "layout": _layout(estimate),
        "s/step": estimate.step_seconds,
        "90 % interval": f"{estimate.low:.3g} to {estimate.high:.3g}",
        "tokens/s": estimate.tokens_per_second,
        "MFU": "" if estimate.mfu is None else f"{estimate.mfu:.1%}",
        "GiB/rank": estimate.memory.total,
        "time": report.clock(estimate.total_seconds),
        "USD": "" if estimate.usd is None else f"{estimate.usd:,.0f}",
    }


def _layout(estimate: planner.Estimate) -> str:
    layout = estimate.layout
    return f"{layout} on {layout.world_size} ranks"
