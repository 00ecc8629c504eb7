"""The whole answer to a question about a recipe: its plan, other machines, what-ifs, as data and as JSON."""

from dataclasses import dataclass, field
from typing import Any

import planner
from clusters.base import Refused
from planner import cost, whatif
from planner import report as told
from planner.offers import Offer, cheapest, fastest, frontier
from recipes import Recipe
from recipes.cluster import LocalCluster
from recipes.planned import only_planned
from tasks import learning, machines
from tasks.plan_question import Question
from tasks.plan_sweep import moved, neighbours, sweep


@dataclass(frozen=True, slots=True)
class Answer:
    """What is shown of a plan."""

    recipe: Recipe
    machine: planner.Machine
    nodes: int
    plan: planner.Plan
    question: Question
    candidates: list[Offer]
    """Other machines, for comparison or because they were asked for."""
    chosen: dict[str, Offer | None] = field(default_factory=dict)
    """The answers to "which machine", by the words they were asked in; None where no machine does."""
    changed: whatif.WhatIf | None = None

    @property
    def frontier(self) -> list[Offer]:
        """The candidates that nothing beats in time and dollars."""
        return frontier(self.candidates)

    @property
    def unmet(self) -> list[str]:
        """What was asked for and no machine does."""
        return [asked for asked, found in self.chosen.items() if found is None]


def answer(recipe: Recipe, question: Question) -> Answer:
    """Plan a recipe, on the machines that were asked for if any were; raises `Refused` or a `planner.PlanError`."""
    if question.sweeps:
        return _elsewhere(recipe, question)
    found = machines.plan_of(recipe)
    around = _around(recipe)
    limited = question.deadline_s is not None or question.max_usd is not None
    return _answer(recipe, found, question, around, _choices(around, question) if limited else {})


def _elsewhere(recipe: Recipe, question: Question) -> Answer:
    """The plan on the machine that answers the question best."""
    types, counts = question.instances or _own_type(recipe), question.nodes or (recipe.cluster.nodes,)
    candidates = sweep(recipe, types, counts)
    chosen = _choices(candidates, question)
    one = next((found for found in chosen.values() if found), None) or frontier(candidates)[-1]
    there = moved(recipe, one.machine, one.nodes)
    return _answer(there, machines.plan_of(there), question, candidates, chosen)


def _answer(
    recipe: Recipe,
    plan: planner.Plan,
    question: Question,
    candidates: list[Offer],
    chosen: dict[str, Offer | None],
) -> Answer:
    machine, nodes, processes = machines.machine(recipe), recipe.cluster.nodes, machines.processes_per_node(recipe)
    changed = None
    if question.what_if:
        known = learning.lessons(recipe).profiles
        changed = whatif.what_if(recipe, machine, nodes, processes, question.what_if, known)
    return Answer(recipe, machine, nodes, plan, question, candidates, chosen, changed)


def _own_type(recipe: Recipe) -> tuple[str, ...]:
    if isinstance(recipe.cluster, LocalCluster):
        raise Refused(f"{recipe.name} is for this machine: add --instances, as in --instances p5.48xlarge")
    return (recipe.cluster.instance_type,)


def _around(recipe: Recipe) -> list[Offer]:
    """What a recipe's own machines are compared with; nothing where none of them can run it."""
    try:
        return sweep(recipe, *neighbours(recipe))
    except Refused:
        return []


def _choices(candidates: list[Offer], question: Question) -> dict[str, Offer | None]:
    found: dict[str, Offer | None] = {}
    if question.deadline_s is not None:
        found["cheapest that meets the deadline"] = cheapest(candidates, question.deadline_s)
    if question.max_usd is not None:
        found["fastest under the budget"] = fastest(candidates, question.max_usd)
    return found or {"cheapest": cheapest(candidates), "fastest": fastest(candidates)}


def check_budget(recipe: Recipe, plan: planner.Plan) -> None:
    """Raise `Refused` if a plan costs more than the recipe allows."""
    limit, usd = recipe.budget.max_usd, plan.best.usd
    if limit is not None and usd is not None and usd > limit:
        raise Refused(
            f"the plan costs ${usd:,.0f}, budget.max_usd is ${limit:,.0f}: train fewer steps (train.steps), use a "
            "cheaper instance type, or raise the budget"
        )


def as_json(one: Answer, picture: str) -> dict[str, Any]:
    """All of an answer for programs; docs/plan.md says what each key means."""
    return {
        **told.as_json(one.plan, one.recipe, one.machine, one.nodes, one.question.top),
        "prices": prices(one.machine),
        "candidates": [candidate_json(candidate) for candidate in one.candidates],
        "pareto": [candidate_json(candidate) for candidate in one.frontier],
        "chosen": {asked: found and candidate_json(found) for asked, found in one.chosen.items()},
        "what_if": one.changed and change_json(one.changed),
        "only_planned": only_planned(one.recipe),
        "picture": picture,
    }


def notes(one: Answer) -> list[str]:
    """What a reader should know: what cannot be run yet, what the figures rest on, what would be better."""
    beyond = only_planned(one.recipe)
    told = [f"planned, not yet run by Castra's own trainer: {', '.join(beyond)}."] if beyond else []
    return [*told, *one.plan.notes, *one.plan.advice]


def prices(machine: planner.Machine) -> list[dict[str, Any]]:
    """The prices a bill rests on, each with its date; nothing where nothing is paid."""
    if machine.price_usd_per_hour is None:
        return []
    hourly = {"what": machine.name, "usd": machine.price_usd_per_hour, "per": "hour, on demand"}
    shared = {"S3 Standard": cost.PRICES.s3, "EBS gp3": cost.PRICES.gp3, "FSx for Lustre": cost.PRICES.lustre}
    month = [
        {"what": what, "usd": usd, "per": "GB and month", "as_of": cost.PRICES.as_of} for what, usd in shared.items()
    ]
    return [hourly | {"as_of": machine.price_as_of}, *month]


def candidate_json(one: Offer) -> dict[str, Any]:
    """One machine of a sweep."""
    base = {"instance": one.machine, "nodes": one.nodes, "gpus": one.gpus, "why_not": one.why_not}
    return base | {"best": one.found and told.estimate_json(one.found)}


def change_json(changed: whatif.WhatIf) -> dict[str, Any]:
    """A what-if: the same layout before and after, the best one then, and what each resource's step waits for."""
    return {
        "factors": changed.factors,
        "before": told.estimate_json(changed.before),
        "same": told.estimate_json(changed.same),
        "best": told.estimate_json(changed.best),
        "elasticity": changed.elasticity,
        "binds": changed.binds,
    }
