"""What a plan says, as data: JSON whose keys stay, and rows of tables for whoever draws them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from planner.arguments import arguments
from planner.estimate import Estimate, Layout, Memory, Plan
from planner.machine import Machine
from planner.memory import PARTS
from planner.model import parameters
from recipes.spec import Recipe

VERSION: Final = 1
"""Of the JSON: raised when a key goes or changes its meaning."""
EXAMPLES: Final = 5
"""Refused layouts that are shown."""


def as_json(plan: Plan, recipe: Recipe, machine: Machine, nodes: int, top: int) -> dict[str, Any]:
    """A plan for programs: docs/plan.md says what each key means. Everything in it is a plain JSON value."""
    return {
        "version": VERSION,
        "recipe": recipe.name,
        "parameters": parameters(recipe.model, recipe.data.sequence_length),
        "tokens_per_step": tokens_per_step(recipe),
        "steps": recipe.train.steps,
        "machine": machine_json(machine),
        "nodes": nodes,
        "considered": plan.considered,
        "best": estimate_json(plan.best),
        "why": why(plan),
        "ranked": [estimate_json(one) for one in plan.ranked[:top]],
        "alternatives": [estimate_json(one) for one in plan.alternatives[:top]],
        "refused_by": dict(plan.refused_by),
        "refused": [estimate_json(one) for one in examples(plan.refused)],
        "elsewhere": estimate_json(plan.elsewhere) if plan.elsewhere else None,
        "notes": list(plan.notes),
        "advice": list(plan.advice),
        "arguments": arguments_json(recipe, plan.best.layout, nodes),
        "elsewhere_arguments": arguments_json(recipe, plan.elsewhere.layout, nodes) if plan.elsewhere else None,
    }


def machine_json(machine: Machine) -> dict[str, Any]:
    """What a plan says of the machine; prices are of one node and hour."""
    told = ("name", "accelerator", "accelerators", "memory_gib", "price_usd_per_hour", "price_as_of")
    return {name: getattr(machine, name) for name in told}


def estimate_json(one: Estimate) -> dict[str, Any]:
    """One layout on one machine."""
    return {
        "layout": layout_json(one.layout),
        "step_seconds": one.step_seconds,
        "low": one.low,
        "high": one.high,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
        "mfu": one.mfu,
        "memory_gib": memory_json(one.memory),
        "fits": one.fits,
        "why_not": one.why_not,
        "phases": dict(one.phases),
        "total_seconds": one.total_seconds,
        "days": one.days,
        "usd": one.usd,
        "bill": dict(one.bill),
        "usd_per_billion_tokens": one.usd_per_billion_tokens,
    }


def layout_json(layout: Layout) -> dict[str, Any]:
    """A layout's sizes, and how people say it."""
    return {"text": str(layout), **asdict(layout), "world_size": layout.world_size}


def memory_json(memory: Memory) -> dict[str, float]:
    """Peak memory of one rank by what it holds, and its sum. Unit: GiB."""
    return {**{part: getattr(memory, part) for part in PARTS}, "total": memory.total}


def arguments_json(recipe: Recipe, layout: Layout, nodes: int) -> dict[str, Any]:
    """What the job of a layout is started with."""
    told = arguments(recipe, layout, nodes)
    return {
        "torchrun": list(told.torchrun),
        "program": list(told.program),
        "parallel": told.parallel,
        "deepspeed": told.deepspeed,
        "command": told.command,
    }


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens of one optimizer step, over all ranks."""
    return recipe.train.global_batch_size * recipe.data.sequence_length


def rows(estimates: Iterable[Estimate]) -> list[dict[str, Any]]:
    """Layouts as a table, one each; memory is of the fullest rank, in GiB."""
    return [_row(one) for one in estimates]


def _row(one: Estimate) -> dict[str, Any]:
    return {
        "layout": str(one.layout),
        "s/step": one.step_seconds,
        "90 %": f"{one.low:.3g} – {one.high:.3g}",
        "tokens/s/GPU": one.tokens_per_second_per_gpu,
        "MFU": "" if one.mfu is None else f"{one.mfu:.1%}",
        "GiB": one.memory.total,
        "time": duration(one.total_seconds),
        "USD": dollars(one.usd),
        "$/B tokens": "" if one.usd_per_billion_tokens is None else f"{one.usd_per_billion_tokens:,.0f}",
    }


def duration(seconds: float) -> str:
    """All of a training's time in the unit that suits it."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def dollars(usd: float | None) -> str:
    """A sum of money, to the cent where cents are some of it; empty where it is not known."""
    return "" if usd is None else f"{usd:,.0f}" if usd >= 100 else f"{usd:,.2f}"


def memory_rows(estimates: Iterable[Estimate]) -> list[dict[str, Any]]:
    """What each layout's fullest rank holds. Unit: GiB."""
    return [{"layout": str(one.layout), **memory_json(one.memory)} for one in estimates]


def phase_rows(one: Estimate) -> list[dict[str, Any]]:
    """Where a step's time goes, the longest first; what takes no time is left out."""
    found = sorted(one.phases.items(), key=lambda item: -item[1])
    return [
        {"phase": phase, "seconds": seconds, "share": f"{seconds / one.step_seconds:.1%}"}
        for phase, seconds in found
        if seconds > 0
    ]


def refusal_rows(plan: Plan) -> list[dict[str, Any]]:
    """How many layouts each constraint refused."""
    return [
        {"refused by": reason, "layouts": count}
        for reason, count in sorted(plan.refused_by.items(), key=lambda item: -item[1])
    ]


def examples(refused: Sequence[Estimate]) -> list[Estimate]:
    """Some of the refused layouts: those that were nearest to fitting."""
    return list(refused[:EXAMPLES])


def example_rows(plan: Plan) -> list[dict[str, Any]]:
    """Refused layouts that were nearest to fitting, and what was against each."""
    return [{"layout": str(one.layout), "why": one.why_not} for one in examples(plan.refused)]


def bill_rows(one: Estimate) -> list[dict[str, Any]]:
    """What a run costs, by what it is paid for. Unit: US dollars."""
    found = [{"what": what, "USD": usd} for what, usd in one.bill.items()]
    return [*found, {"what": "all of it", "USD": one.usd}] if found else []


def why(plan: Plan) -> str:
    """One sentence: what speaks for the layout that is launched."""
    best, others = plan.best, [one for one in plan.ranked if one.layout != plan.best.layout]
    if plan.ranked and plan.ranked[0].layout != best.layout:
        return f"{best.layout} is what the recipe prescribes."
    told = f"{best.layout} is the fastest that fits"
    if not others:
        return f"{best.layout} is the only one that fits."
    margin = others[0].step_seconds / best.step_seconds - 1
    if abs(margin) < 0.02:
        return f"{told}, as fast as {others[0].layout} within 2 %, and the simpler or leaner of the two."
    if margin < 0:
        return f"{others[0].layout} is {-margin:.0%} faster, but so near the memory's end that {best.layout} is safer."
    return f"{told}: {margin:.0%} faster than the next, {others[0].layout}{_because(best, others[0])}."


def _because(best: Estimate, other: Estimate) -> str:
    """Which phase makes most of the difference."""
    names = {*best.phases, *other.phases}
    saved = {name: other.phases.get(name, 0.0) - best.phases.get(name, 0.0) for name in names}
    phase = max(sorted(saved), key=lambda name: saved[name])
    return f", which spends {saved[phase]:.3g} s more on {phase}" if saved[phase] > 0 else ""
