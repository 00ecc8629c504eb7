"""What a recipe will take, as artifacts of a run: layouts, memory, time, dollars, what was refused, arguments."""

import json
from collections.abc import Sequence
from typing import Any

import planner
from planner import report as told
from planner.memory import PARTS
from recipes.cluster import LocalCluster
from recipes.spec import Recipe
from tasks import plan_answer, plan_picture, plan_terminal, report
from tasks.machines import cheapest_on_aws, plan_of
from tasks.phrases import grid
from tasks.plan_answer import Answer
from tasks.plan_question import Question


def show(recipe: Recipe) -> str:
    """Show the plan in the UI and on the terminal; returns its headline. Raises `Refused` if it is over the budget."""
    answer = plan_answer.answer(recipe, Question())
    plan, top = answer.plan, answer.question.top
    report.table("plan", _rows(plan.ranked[:top]), "Layouts that fit, best first")
    if plan.alternatives:
        report.table("plan-megatron", _rows(plan.alternatives[:top]), "Megatron's (case.framework: megatron-lm)")
    report.table("refused-layouts", _refused(plan), "Layouts that were refused")
    report.table("machines", plan_terminal.machine_rows(answer.candidates, answer.frontier), "The same elsewhere")
    report.page("plan-summary", _page(answer), "The plan in short")
    for note in plan_answer.notes(answer):
        report.say(f"plan: {note}")
    plan_answer.check_budget(recipe, plan)
    return plan_terminal.headline(answer)


def bill(recipe: Recipe) -> list[dict[str, str]]:
    """What the run costs where it runs, and what the same training would cost on AWS. Unit: US dollars."""
    best = plan_of(recipe).best
    rows = [{"what": f"on AWS, planned: {what}", "usd": f"${usd:,.2f}"} for what, usd in best.bill.items()]
    rows += [{"what": "on AWS, planned", "usd": f"${best.usd:,.2f}"}] if best.usd is not None else []
    if isinstance(recipe.cluster, LocalCluster):
        rows.append({"what": "on this machine", "usd": "$0.00"})
        if there := cheapest_on_aws(recipe):
            name, estimate = there
            rows.append({"what": f"on AWS it would be about (one {name})", "usd": f"${estimate.usd:,.2f}"})
    return rows


def markdown(recipe: Recipe) -> str:
    """The plan in short, with its pictures, its bill and the job's arguments."""
    return _page(plan_answer.answer(recipe, Question()))


def _page(answer: Answer) -> str:
    return "\n\n".join(part for part in _parts(answer) if part)


def _parts(answer: Answer) -> list[str]:
    from tasks import pictures  # matplotlib costs half a second that a skipped step need not pay

    plan, best = answer.plan, answer.plan.best
    memory = [(name, gib) for name, gib in told.memory_json(best.memory).items() if gib > 0]
    phases = [(row["phase"], row["seconds"]) for row in told.phase_rows(best)]
    pareto = plan_picture.markdown(answer.candidates) if plan_picture.drawable(answer.candidates) else ""
    return [
        plan_terminal.headline(answer),
        told.why(plan),
        pictures.bars("memory per rank", "GiB", memory[-1:] + memory[:-1]),
        pictures.bars("one step", "seconds", phases),
        "".join(f"- {note}\n" for note in plan_answer.notes(answer)),
        grid(bill(answer.recipe)),
        plan_terminal.price_line(answer),
        pareto,
        _arguments(answer),
    ]


def _arguments(answer: Answer) -> str:
    known = told.arguments_json(answer.recipe, answer.plan.best.layout, answer.nodes)
    settled = {name: known[name] for name in ("parallel", "deepspeed") if known[name]}
    lines = [f"The job is started with\n\n```sh\n{known['command']}\n```"]
    lines += [f"```json\n{json.dumps(settled, indent=1)}\n```"] if settled else []
    if other := answer.plan.elsewhere:
        command = told.arguments_json(answer.recipe, other.layout, answer.nodes)["command"]
        lines.append(f"Megatron's, for {other.layout} (case.framework: megatron-lm runs it):\n\n```sh\n{command}\n```")
    return "\n\n".join(lines)


def _rows(estimates: Sequence[planner.Estimate]) -> list[dict[str, Any]]:
    """Layouts with what the fullest rank holds, in GiB."""
    shown = zip(told.rows(estimates), told.memory_rows(estimates), strict=True)
    return [row | {name: gib for name, gib in memory.items() if name in PARTS} for row, memory in shown]


def _refused(plan: planner.Plan) -> list[dict[str, Any]]:
    """How many each constraint refused, then some of those that were nearest to fitting."""
    examples = ({"refused by": row["why"], "layouts": row["layout"]} for row in told.example_rows(plan))
    return [*told.refusal_rows(plan), *examples]
