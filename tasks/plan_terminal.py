"""A plan on a terminal: what was chosen and why, all layouts, memory, time, dollars, machines, the job's arguments."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import planner
from planner import report as told
from planner import whatif
from planner.offers import Offer, cheapest, fastest, planned, refusals
from recipes.spec import Model
from tasks import plan_answer
from tasks.phrases import clock
from tasks.plan_answer import Answer, prices

WIDTH = 170
"""Columns where nobody says how wide the terminal is: a table that is piped is not cut."""
MACHINES = 16
"""Machines listed; all are in the JSON."""


def show(one: Answer, picture: str) -> None:
    """Print an answer on standard output; `picture` is where the Pareto plot is, empty where there is none.

    What was found comes last, where the eye is when all has scrolled by.
    """
    out = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    own, others = one.plan.ranked[: one.question.top], one.plan.alternatives[: one.question.top]
    _table(out, f"Layouts that fit, best first ({_counted(one)})", told.rows(own))
    _table(out, "Megatron's layouts, best first (case.framework: megatron-lm runs them)", told.rows(others))
    _table(out, "Peak memory of the fullest rank. Unit: GiB", told.memory_rows([*own, *others]))
    _table(out, f"One step of {one.plan.best.layout}", told.phase_rows(one.plan.best))
    _table(out, "Layouts refused", told.refusal_rows(one.plan))
    _table(out, "Refused, the nearest to fitting first", told.example_rows(one.plan))
    _cost(out, one)
    _machines(out, one)
    _changes(out, one)
    _arguments(out, one)
    _verdict(out, one, picture)


def headline(one: Answer) -> str:
    """The answer in one line."""
    best = one.plan.best
    money = "free" if one.machine.local else _dollars(best.usd)
    return (
        f"{_weights(one.recipe.model)} parameters, {best.layout} on {best.layout.world_size} "
        f"ranks of {where(one)}: {best.memory.total:.3g} GiB per rank, {best.step_seconds:.3g} s a step "
        f"({best.low:.3g} to {best.high:.3g}), {clock(best.total_seconds)}, {money}"
    )


def where(one: Answer) -> str:
    """The machines of the plan, as people say it."""
    return one.machine.name if one.machine.local else f"{one.nodes} x {one.machine.name}"


def machine_rows(candidates: Sequence[Offer], front: Sequence[Offer]) -> list[dict[str, Any]]:
    """Machines that can run it, the fastest first; those that nothing beats are marked."""
    ordered = sorted(planned(candidates), key=lambda one: one.best.total_seconds)
    return [
        {
            "": "*" if one in front else "",
            "machines": str(one),
            "GPUs": one.gpus,
            "layout": str(one.best.layout),
            "s/step": one.best.step_seconds,
            "time": told.duration(one.best.total_seconds),
            "USD": told.dollars(one.best.usd) or "?",
        }
        for one in ordered
    ]


def change_rows(changed: whatif.WhatIf) -> list[dict[str, Any]]:
    """A what-if as a table: the step as it is, the same layout on the changed machine, the best layout there."""
    there = ", ".join(f"{name} {factor:g}x" for name, factor in changed.factors.items())
    found = {"as it is": changed.before, there: changed.same, f"{there}, its best layout": changed.best}
    return [
        {
            "machine": what,
            "s/step": one.step_seconds,
            "change": f"{one.step_seconds / changed.before.step_seconds - 1:+.1%}",
            "layout": str(one.layout),
        }
        for what, one in found.items()
    ]


def binding_rows(changed: whatif.WhatIf) -> list[dict[str, Any]]:
    """How much of the step waits for each resource, that which binds first."""
    ordered = sorted(changed.elasticity.items(), key=lambda item: -item[1])
    return [{"the step waits for": name, "share": f"{share:.0%}"} for name, share in ordered]


def _verdict(out: Console, one: Answer, picture: str) -> None:
    """What was found, and what it rests on."""
    for asked, found in one.chosen.items():
        _line(out, f"[bold]{asked}[/]  {escape(_summed(found) if found else _none_does(one))}")
    _line(out, f"[bold]{escape(one.recipe.name)}[/]  {escape(headline(one))}")
    for note in (told.why(one.plan), *plan_answer.notes(one)):
        _line(out, f"[dim]·[/] {escape(note)}")
    if picture:
        _line(out, f"[dim]·[/] time x cost x GPUs as a picture: {escape(picture)}")


def _weights(model: Model) -> str:
    count = planner.parameters(model)
    return f"{count / 1e9:,.4g} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _summed(one: Offer) -> str:
    return f"{one}: {clock(one.best.total_seconds)}, {_dollars(one.best.usd)}"


def _none_does(one: Answer) -> str:
    """How far the nearest machines are from what was asked for."""
    quick, cheap = fastest(one.candidates), cheapest(one.candidates)
    told = [f"the {word} is {_summed(found)}" for word, found in (("fastest", quick), ("cheapest", cheap)) if found]
    return ", ".join(["no machines that were compared", *told])


def _counted(one: Answer) -> str:
    shown = min(one.question.top, len(one.plan.ranked))
    return f"{shown} of {len(one.plan.ranked)}; {one.plan.considered:,} considered"


def _cost(out: Console, one: Answer) -> None:
    if rows := told.bill_rows(one.plan.best):
        _table(out, f"Dollars on {where(one)}", rows)
        _line(out, f"[dim]  {escape(price_line(one))}[/]")


def price_line(one: Answer) -> str:
    """The prices a bill rests on, in one line."""
    return "; ".join(f"{row['what']} ${row['usd']:g} per {row['per']} ({row['as_of']})" for row in prices(one.machine))


def _machines(out: Console, one: Answer) -> None:
    rows = machine_rows(one.candidates, one.frontier)
    more = f", {MACHINES} of {len(rows)} shown" if len(rows) > MACHINES else ""
    _table(
        out, f"Machines, the fastest first (* nothing is at once faster, cheaper and smaller{more})", rows[:MACHINES]
    )
    if one.question.sweeps:
        for reason in refusals(one.candidates):
            _line(out, f"  [dim]{escape(reason)}[/]")


def _changes(out: Console, one: Answer) -> None:
    if one.changed:
        _table(out, "What if", change_rows(one.changed))
        _table(out, f"What binds is {one.changed.binds}", binding_rows(one.changed))


def _arguments(out: Console, one: Answer) -> None:
    """What the job is started with, and what Megatron would be."""
    known = told.arguments_json(one.recipe, one.plan.best.layout, one.nodes)
    _line(out, "\n[italic]The job's arguments[/]")
    _line(out, f"  {escape(known['command'])}")
    for name in ("parallel", "deepspeed"):
        if known[name]:
            _line(out, f"  {name}: {escape(json.dumps(known[name]))}")
    if one.plan.elsewhere:
        other = told.arguments_json(one.recipe, one.plan.elsewhere.layout, one.nodes)
        _line(
            out, f"\n[italic]Megatron's, for {escape(str(one.plan.elsewhere.layout))}[/]\n  {escape(other['command'])}"
        )
    _line(out, "")


def _line(out: Console, text: str) -> None:
    out.print(text, soft_wrap=True)


def _table(out: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    _line(out, f"\n[italic]{escape(title)}[/]")
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for name, value in rows[0].items():
        words = isinstance(value, str) and not value[:1].isdigit()
        drawn.add_column(escape(name), justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        drawn.add_row(*(escape(_text(value)) for value in row.values()))
    out.print(drawn)


def _dollars(usd: float | None) -> str:
    return "no price is known" if usd is None else f"${told.dollars(usd)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
