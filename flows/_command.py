"""The command line that every flow shares: `python -m flows.<verb> recipe.yaml [--set field=value] …`.

0 done    1 the run failed    2 the input is wrong    130 stopped by Ctrl-C
"""

import contextlib
import logging
import os
import signal
import sys
import traceback
from typing import Annotated, Any, Literal, cast

from cyclopts import Parameter
from prefect import Flow
from prefect.client.schemas.objects import State
from rich.markup import escape

from clusters import validators
from flows import _plan
from flows._house import MISTAKES
from flows._input import On, Real, RecipePath, Rehearse, Sets, launch, read, sentences
from flows._server import prefect_server
from tasks import machines, stack
from tasks.phrases import CONSOLE

Keep = Annotated[bool, Parameter("--keep", negative="", help="Leave what was provisioned standing until it expires.")]

Sky = Literal["emulated", "real"]
CREATE_NOTHING = ("check", "teardown")
"""Flows that serve any recipe, also one that cannot be run yet."""
START_NOTHING = (*CREATE_NOTHING, "provision")
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
        with sentences(MISTAKES):
            recipe = read(path, sets or [], kind=kind, shrink=shrink, keep=keep)
            if plan_only:
                sys.exit(_plan.tell(recipe))
            if flow.name != "check":  # it says it beside the rest
                validators.check(recipe)  # before anything is looked at, let alone created
            if flow.name not in CREATE_NOTHING:
                machines.check_launchable(recipe)
            if not real and flow.name not in START_NOTHING:
                machines.check_emulated(recipe)
            needed = stack.needs_aws(recipe, flow.name)
            sys.exit(execute(flow, {"recipe": recipe}, sky=REAL if real else EMULATED if needed else None))

    launch(run, flow.name, help_text)


def execute(flow: Flow[..., Any], parameters: dict[str, Any], *, sky: Sky | None) -> int:
    """Run a flow with everything it needs on this machine, for as long as it takes; returns the exit code.

    `sky` is which AWS the flow talks to, None if it does not.
    """
    _quiet_prefect()
    with contextlib.ExitStack() as services:
        if sky == EMULATED and not os.environ.get("AWS_ENDPOINT_URL"):
            services.enter_context(_emulator())
        url = prefect_server(CONSOLE)
        CONSOLE.print(f"[dim]watch: {url}/runs (as long as the run goes on)[/]", highlight=False)
        signal.signal(signal.SIGTERM, _terminated)
        state = cast("State[Any]", flow(**parameters, return_state=True))
    if state.is_completed():
        print(state.message)
        return 0
    error = getattr(state.data, "result", state.data)
    if isinstance(error, BaseException):  # a defect of ours, or Prefect's: a mistake would have been a sentence
        CONSOLE.print("".join(traceback.format_exception(error)), markup=False, highlight=False)
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
        CONSOLE.print(f"{mark} {escape(record.getMessage())}", highlight=False, soft_wrap=True)


def _quiet_prefect() -> None:
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs", ""):
        for handler in logging.getLogger(name).handlers:
            if "Console" in type(handler).__name__:
                handler.setLevel(logging.CRITICAL)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addHandler(_Story())
