"""`python -m flows.plan` by hand: a plan in seconds, without Prefect, AWS or anything that is created.

0 planned    1 nothing meets the deadline or the budget    2 the input is wrong    130 stopped by Ctrl-C
"""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clusters import validators
from clusters.base import Refused
from flows._input import MISTAKES, On, Rehearse, Sets, launch, read, sentences
from planner import PlanError, whatif
from recipes import Recipe
from store.objects import state_folder
from tasks import plan_answer, plan_model, plan_picture, plan_question, plan_terminal
from tasks.phrases import CONSOLE
from tasks.plan_question import TOP, Question

Planned = Annotated[Path, Parameter(help="The recipe, a YAML file; or a Hugging Face config.json.")]
Instances = Annotated[
    str | None,
    Parameter("--instances", help="Compare instance types, as in p4d.24xlarge,p5.48xlarge."),
]
Nodes = Annotated[str | None, Parameter("--nodes", help="Compare numbers of nodes: 8, 4..64 or 4,8,16.")]
Deadline = Annotated[
    str | None, Parameter("--deadline", help="Name the cheapest machines that are done in time: 7d, 36h, 90min.")
]
Dollars = Annotated[
    float | None, Parameter("--max-usd", help="Name the fastest machines that cost no more. Unit: US dollars.")
]
SCALES = ", ".join(whatif.RESOURCES)
WhatIf = Annotated[
    str | None, Parameter("--what-if", help=f"Scale what a machine has, as in nvlink=2x,efa=0.5x: {SCALES}.")
]
Top = Annotated[int, Parameter("--top", help="How many layouts are shown.")]
Json = Annotated[bool, Parameter("--json", negative="", help="For programs: one JSON document, see docs/plan.md.")]
Picture = Annotated[Path | None, Parameter("--picture", help="Where the Pareto plot is written, as SVG.")]


def command(help_text: str | None) -> None:
    """Plan a recipe from the command line and exit with its code."""

    def run(  # noqa: PLR0913  a command's flags
        path: Planned,
        /,
        *,
        sets: Sets = None,
        shrink: Rehearse = False,
        kind: On = None,
        instances: Instances = None,
        nodes: Nodes = None,
        deadline: Deadline = None,
        max_usd: Dollars = None,
        what_if: WhatIf = None,
        top: Top = TOP,
        as_json: Json = False,
        picture: Picture = None,
    ) -> None:
        with sentences((*MISTAKES, PlanError)):
            question = Question(
                plan_question.instances(instances) if instances is not None else (),
                plan_question.nodes(nodes) if nodes is not None else (),
                plan_question.deadline(deadline) if deadline is not None else None,
                plan_question.dollars(max_usd) if max_usd is not None else None,
                whatif.parse(what_if) if what_if is not None else {},
                plan_question.top(top),
            )
            recipe = _recipe(path, sets or [], question, kind=kind, shrink=shrink)
            sys.exit(tell(recipe, question, picture=picture, as_json=as_json))

    launch(run, "plan", help_text)


def tell(
    recipe: Recipe, question: Question | None = None, *, picture: Path | None = None, as_json: bool = False
) -> int:
    """Print the answer to a question about a recipe; returns the exit code.

    Raises `Refused` or a `planner.PlanError` if there is no plan, or it is over the recipe's budget.
    """
    question = question or Question()
    if not question.sweeps:
        validators.check(recipe)
    found = plan_answer.answer(recipe, question)
    drawn = _draw(found, picture)
    if as_json:
        print(json.dumps(plan_answer.as_json(found, drawn), indent=1, allow_nan=False))
    else:
        plan_terminal.show(found, drawn)
    if not question.sweeps:
        plan_answer.check_budget(recipe, found.plan)
    return 1 if found.unmet else 0


def _recipe(path: Path, sets: list[str], question: Question, *, kind: str | None, shrink: bool) -> Recipe:
    if path.suffix == ".json":
        return plan_model.recipe_of(path, sets, question)
    return read(path, sets, kind=kind, shrink=shrink)


def _draw(found: plan_answer.Answer, picture: Path | None) -> str:
    """Write the picture, if there is anything to compare; returns where it is."""
    if not plan_picture.drawable(found.candidates):
        return ""
    path = picture or state_folder() / "plans" / f"{found.recipe.name}.svg"
    try:
        plan_picture.write(found.candidates, path)
    except OSError as error:
        if picture:
            raise Refused(f"--picture {path} cannot be written: {error.strerror}") from None
        told = f"no picture: {path} cannot be written ({error.strerror})"
        CONSOLE.print(told, style="dim", markup=False, highlight=False, soft_wrap=True)
        return ""
    return str(path)
