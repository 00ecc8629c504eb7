"""What every flow of the house shares: one run per recipe at a time, one sentence for a mistake, quick subflows."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import prefect
from prefect import Flow, tags
from prefect.client.schemas.objects import State
from prefect.exceptions import FailedRun
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Completed, Failed

import planner
from ami.base import ImageError
from clusters.base import Refused
from flows import _input
from recipes import Recipe
from store import open_store
from store.lease import lease
from tasks import ground, report
from tasks.check import NotAdmitted
from tasks.lineage import NotDone
from tasks.model import GateClosed
from tasks.policy import Interrupted

MISTAKES: tuple[type[Exception], ...] = (
    *_input.MISTAKES,
    *(GateClosed, ImageError, Interrupted, NotAdmitted, NotDone, planner.PlanError),
)
"""Failures whose text is a sentence for the user; everything else is a defect of ours and keeps its traceback."""

MOST_RESUMES = 6
"""A run that crashes every time is resumed no more often than this: each time may cost money."""

P = ParamSpec("P")
_held: set[str] = set()


def verb(name: str, description: str | None, run_name: str = "") -> Callable[[Callable[P, str]], Flow[P, Any]]:
    """Make a function a flow of the house. It returns the sentence that its run ends with.

    `run_name` is a template over the parameters; by default the verb and the recipe's name.
    """
    house = prefect.flow(name=name, description=description, flow_run_name=run_name or f"{name}-{{recipe.name}}")

    def wrap(work: Callable[P, str]) -> Flow[P, Any]:
        @functools.wraps(work)
        def told(*args: P.args, **kwargs: P.kwargs) -> State[Any]:
            try:
                return _told(name, work(*args, **kwargs))
            except MISTAKES as mistake:
                report.fail(str(mistake))
                return Failed(name=type(mistake).__name__, message=str(mistake))
            except FailedRun as failed:  # of a flow below this one, which said so already
                return Failed(message=str(failed))

        return house(told)

    return wrap


def _told(name: str, sentence: str) -> State[Any]:
    if prefect.runtime.flow_run.parent_flow_run_id:  # the end of a command is printed by the command
        report.say(f"{name}: {sentence}")
    return Completed(message=sentence)


@contextlib.contextmanager
def alone(recipe: Recipe) -> Iterator[Recipe]:
    """Hold the recipe's lease for the block, tag the run with its name; raises `Busy` if another run holds it.

    Yields the recipe narrowed to the capacity that stands for it, if any does.

    The step flows of a lifecycle run under the lifecycle's lease. Their heartbeats are off, because waiting for a
    heartbeat thread to end costs every subflow a second, and the run above them has one.
    """
    if (resumed := prefect.runtime.flow_run.run_count or 0) > MOST_RESUMES:
        raise Refused(
            f"this run was resumed {resumed - 1} times without reaching its end: look at its logs, run it anew"
        )
    with contextlib.ExitStack() as held:
        held.enter_context(tags(f"recipe:{recipe.name}"))
        if recipe.name not in _held:
            held.enter_context(lease(open_store(recipe.store), recipe.name))
            _held.add(recipe.name)
            held.callback(_held.discard, recipe.name)
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield ground.settled(recipe)
