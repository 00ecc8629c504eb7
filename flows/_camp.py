"""The camp around a run's work: provisioned on the way in, struck on the way out, whatever happens in between."""

import contextlib
from collections.abc import Iterator

from flows.provision import provision
from flows.teardown import teardown
from recipes import Recipe
from tasks import report, stack


@contextlib.contextmanager
def camp(recipe: Recipe) -> Iterator[None]:
    """Provision for the length of the block.

    Leaving it by an exception, Ctrl-C or a cancellation strikes the camp at once and without Prefect, whose server may
    be what failed. A process that is killed outright strikes nothing: the next run or the reaper does, by the ledger.
    """
    try:
        provision(recipe)
        yield
    except BaseException:
        report.warn("striking the camp")
        stack.strike(recipe)
        raise
    teardown(recipe)
