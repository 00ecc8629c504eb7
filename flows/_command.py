"""The command line that every flow shares: `python -m flows.<verb> recipe.yaml [--set field=value] …`.

0 done    1 the run failed    2 the input is wrong    130 stopped by Ctrl-C
"""

import contextlib
import logging
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import cyclopts
from cyclopts import Parameter
from prefect import Flow
from prefect.client.schemas.objects import State
from rich.markup import escape

from clusters import validators
from flows._house import MISTAKES
from flows._server import prefect_server
from recipes import Recipe
from recipes.convert import KINDS, on
from recipes.load import load
from recipes.rehearse import rehearse
from tasks import machines, report, stack

RecipePath = Annotated[Path, Parameter(help="The recipe, a YAML file.")]
Sets = Annotated[
    list[str] | None, Parameter("--set", negative="", help="Change a field: train.steps=200. Can be given again.")
]
Rehearse = Annotated[
    bool, Parameter("--rehearse", negative="", help="Shrink the recipe to two nodes on this machine: nothing is paid.")
]
On = Annotated[
    str | None,
    Parameter("--on", help=f"Run it on another kind of cluster: {', '.join(KINDS)}; with --rehearse, emulated."),
]
Real = Annotated[
    bool,
    Parameter("--aws", negative="", help="On AWS itself, with your credentials, for money; else AWS is emulated."),
]
Keep = Annotated[bool, Parameter("--keep", negative="", help="Leave what was provisioned standing until it expires.")]

Sky = Literal["emulated", "real"]
HARMLESS = ("plan", "check", "provision", "teardown")
"""Flows that start no ranks."""
EMULATED: Sky = "emulated"
REAL: Sky = "real"
PlanOnly = Annotated[bool, Parameter("--plan-only", negative="", help="Say what it will take, and do nothing else.")]


def command(flow: Flow[..., Any], help_text: str | None) -> None:
    """Run a flow of one recipe from the command line and exit with its code."""

    def run(  # noqa: PLR0913  a command's flags
        path: RecipePath,
        /,
        *,
        sets: Sets = None,
        shrink: Rehearse = False,
        kind: On = None,
        keep: Keep = False,
        plan_only: PlanOnly = False,
        real: Real = False,
    ) -> None:
        with sentences():
            recipe = read(path, sets or [], kind=kind, shrink=shrink, keep=keep)
            wanted = import_module("flows.plan").plan if plan_only else flow
            if wanted.name not in ("plan", "check"):  # they say it beside the rest
                validators.check(recipe)  # before anything is looked at, let alone created
            if not real and wanted.name not in HARMLESS:
                machines.check_emulated(recipe)
            needed = stack.needs_aws(recipe, wanted.name)
            sys.exit(execute(wanted, {"recipe": recipe}, sky=REAL if real else EMULATED if needed else None))

    launch(run, flow.name, help_text)


def launch(run: Any, name: str, help_text: str | None) -> None:
    """Parse the command line for `run`, with help and errors in the house's style."""
    app = cyclopts.App(name=f"python -m flows.{name}", help=help_text, help_format="plaintext", version_flags=[])
    app.default(run)
    app()


@contextlib.contextmanager
def sentences() -> Any:
    """Turn a user's mistake into one sentence on standard error and exit code 2."""
    try:
        yield
    except MISTAKES as mistake:
        _refuse(str(mistake))
    except OSError as error:  # Castra's own folder on this machine: everything else tells its own sentence
        place = error.filename or "the disk"
        _refuse(f"{place}: {error.strerror}; work in a folder you may write to, or set CASTRA_STATE to one")
    except KeyboardInterrupt:
        report.CONSOLE.print("[bold red]✗[/] stopped", highlight=False)
        sys.exit(130)


def _refuse(sentence: str) -> NoReturn:
    report.CONSOLE.print(f"[bold red]✗[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def read(path: Path, sets: list[str], *, kind: str | None, shrink: bool, keep: bool) -> Recipe:
    """Load a recipe as the command line asks for it; raises `RecipeError`."""
    recipe = load(path, sets)
    if shrink:
        recipe, notes = rehearse(recipe)
        for note in notes:
            report.CONSOLE.print(f"  rehearsal: {note}", highlight=False, soft_wrap=True)
    if kind:
        recipe = on(recipe, kind, small=shrink)
    return recipe.model_copy(update={"keep": True}) if keep else recipe


def execute(flow: Flow[..., Any], parameters: dict[str, Any], *, sky: Sky | None) -> int:
    """Run a flow with everything it needs on this machine, for as long as it takes; returns the exit code.

    `sky` is which AWS the flow talks to, None if it does not.
    """
    _quiet_prefect()
    with contextlib.ExitStack() as services:
        if sky == EMULATED and not os.environ.get("AWS_ENDPOINT_URL"):
            services.enter_context(_emulator())
        url = prefect_server(report.CONSOLE)
        report.CONSOLE.print(f"[dim]watch: {url}/runs (as long as the run goes on)[/]", highlight=False)
        signal.signal(signal.SIGTERM, _terminated)
        state = cast("State[Any]", flow(**parameters, return_state=True))
    if state.is_completed():
        print(state.message)
        return 0
    error = getattr(state.data, "result", state.data)
    if isinstance(error, BaseException):  # a defect of ours, or Prefect's: a mistake would have been a sentence
        report.CONSOLE.print("".join(traceback.format_exception(error)), markup=False, highlight=False)
    return 1


@contextlib.contextmanager
def _emulator() -> Any:
    """The emulator that stands (`python -m emulator up`), or one for as long as the flow goes on."""
    from emulator import aws as emulated  # the only place where a flow's process knows that AWS may not be AWS

    with contextlib.ExitStack() as life:
        running = emulated.standing() or life.enter_context(emulated.running())
        os.environ.update(emulated.environment(running.endpoint))
        yield


def _terminated(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


class _Story(logging.Handler):
    """Prints the lines that are meant for people; Prefect's own stay in the UI."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "castra", False):
            return
        mark = "[bold red]✗[/]" if record.levelno >= logging.ERROR else "[dim]·[/]"
        report.CONSOLE.print(f"{mark} {escape(record.getMessage())}", highlight=False, soft_wrap=True)


def _quiet_prefect() -> None:
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs", ""):
        for handler in logging.getLogger(name).handlers:
            if "Console" in type(handler).__name__:
                handler.setLevel(logging.CRITICAL)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addHandler(_Story())
