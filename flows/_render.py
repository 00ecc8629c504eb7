"""`python -m flows.train RECIPE --render`: all that a training would be started with, and nothing is asked or made.

0 shown    2 the input is wrong
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clusters import render, validators
from flows._input import MISTAKES, Rehearse, Sets, launch, read, sentences
from planner import NoProfile, PlanError
from planner.arguments import arguments
from recipes import Recipe
from recipes.convert import KINDS
from tasks import machines
from tasks.phrases import CONSOLE
from training import cases

Shown = Annotated[Path, Parameter(help="The recipe, a YAML file.")]
Kind = Annotated[str | None, Parameter("--kind", help=f"As if its cluster were of this kind: {', '.join(KINDS)}.")]
Out = Annotated[Path | None, Parameter("--out", help="Write every request and file below this folder besides.")]
Only = Annotated[bool, Parameter("--render", negative="", help="Show all of it, and start nothing.")]


def command(help_text: str | None) -> None:
    """Show a recipe's training from the command line and exit."""

    def run(
        path: Shown,
        /,
        *,
        render: Only = True,
        kind: Kind = None,
        sets: Sets = None,
        shrink: Rehearse = False,
        out: Out = None,
    ) -> None:
        del render
        with sentences((*MISTAKES, PlanError)):
            recipe = read(path, sets or [], kind=None, shrink=shrink)
            show(recipe, kind or recipe.cluster.kind, out)

    launch(run, "train", help_text)


def show(recipe: Recipe, kind: str, out: Path | None = None) -> None:
    """Print what a recipe's training on a kind of cluster would be started with; `out` gets it all as files.

    Raises `RecipeError`, `Refused` or a `planner.PlanError`, each one sentence.
    """
    asked = render.as_kind(recipe, kind)
    validators.check(asked)
    machines.check_launchable(asked)
    here = kind == "local" and recipe.cluster.kind != "local"
    # what a cloud's recipe would be here has its own plan: this machine only stands in
    planned = machines.resolve(recipe if here else asked)
    resolved = render.stand_in(planned) if here else planned
    machines.command(resolved)  # refuses what the framework cannot do
    files = render.requests(resolved)
    for line in (*_settled(resolved, planned), *_program(resolved, planned, files), *_requests(kind, files)):
        print(line)
    if out is not None:
        written = render.write(resolved, out)
        CONSOLE.print(f"{len(written)} files in {out}: {written[0]} lists them", highlight=False, soft_wrap=True)


def _settled(recipe: Recipe, planned: Recipe) -> Iterator[str]:
    """Where it runs, and what the planner expects of it."""
    cluster = recipe.cluster
    where = getattr(cluster, "instance_type", "nodes of this machine")
    yield f"# {recipe.name} on {cluster.kind}: {cluster.nodes} x {where}"
    if cases.measures(recipe.case.framework, recipe.case.program):
        return
    try:
        best = machines.plan_of(planned).best
    except NoProfile as unknown:
        yield f"expected  {unknown}"
        return
    yield f"layout    {best.layout}"
    dollars = "" if best.usd is None else f", ${best.usd:,.0f}"
    yield (
        f"expected  {best.step_seconds:.3g} s/step, {best.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
        f"{best.memory.total:.1f} GiB of a rank's memory{dollars}"
    )


def _program(recipe: Recipe, planned: Recipe, files: dict[str, str]) -> Iterator[str]:
    """The command line, and the files it reads."""
    framework, nodes = recipe.case.framework, recipe.cluster.nodes
    yield ""
    if framework == "castra":
        yield f"# program: Castra's own, in {recipe.image.container or 'the image of ' + recipe.image.flavour}"
        told = arguments(recipe, machines.plan_of(planned).best.layout, nodes)
        words = ("-m", cases.MEASUREMENTS, "job.json") if recipe.case.program else told.program
        yield replace(told, program=words).command
        return
    upstream = cases.launcher(framework).UPSTREAM
    yield f"# program: {framework}, https://github.com/{upstream.repository} at {upstream.version} ({upstream.licence})"
    yield f"# container: {recipe.image.container or upstream.container or 'none is published'}"
    yield files["case/command.sh"].rstrip()
    for name, content in files.items():
        if name.startswith("case/") and name != "case/command.sh":
            yield from ("", f"# {name.removeprefix('case/')}", content.rstrip())


def _requests(kind: str, files: dict[str, str]) -> Iterator[str]:
    for name, content in files.items():
        if name.startswith(f"{kind}/"):
            yield from ("", f"# {name}", content.rstrip())
