"""The camp around a run's work: provisioned on the way in, struck on the way out, whatever happens in between."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from prefect.client.schemas.objects import State

from clusters.base import NoCapacity
from flows.provision import provision
from flows.teardown import teardown
from flows.validate import validate
from recipes import Recipe
from tasks import capacity, report, stack


@contextlib.contextmanager
def camp(recipe: Recipe, *, prove: bool) -> Iterator[Recipe]:
    """Provision for the length of the block; yields the recipe narrowed to the capacity that was got.

    With `prove` every node has to answer on the network: only then is it known that the instances are there.

    Leaving it by an exception, Ctrl-C or a cancellation strikes the camp at once and without Prefect, whose server may
    be what failed. A process that is killed outright strikes nothing: the next run or the reaper does, by the ledger.
    """
    try:
        yield _climb(recipe, prove=prove)
    except BaseException:
        report.warn("striking the camp")
        stack.strike(recipe)
        raise
    teardown(recipe)


def _climb(recipe: Recipe, *, prove: bool) -> Recipe:
    """Provision on the first rung of the capacity ladder that has instances; returns the recipe narrowed to it."""
    located = capacity.located(recipe)

    def stand(rung: Recipe) -> Recipe:
        state = cast("State[Any]", provision(rung, capacity.zones(located), return_state=True))
        if prove and state.is_completed():
            state = cast("State[Any]", validate(rung, return_state=True))
        if state.name == NoCapacity.__name__:
            raise NoCapacity(str(state.message))
        state.result()  # raises what went wrong, if anything
        return rung

    return capacity.climb(located, stand)
