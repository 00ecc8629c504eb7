"""When a task is tried again: only for what passes by itself, after growing pauses that do not keep step."""

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from clusters.base import Unreachable

PAUSE_S = 2.0
RETRIES = 6
"""With pauses that double they outlast two minutes of an API that is down."""


class Interrupted(Exception):
    """A job ended for a reason that starting it again can mend; it resumes from what it saved."""


def passing(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the failure is of the kind that passes: Prefect's `retry_condition_fn`."""
    return isinstance(state.data, Unreachable | Interrupted)


PATIENT: dict[str, Any] = {
    "retries": RETRIES,
    "retry_delay_seconds": exponential_backoff(PAUSE_S)(RETRIES),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": passing,
}
"""Options for a task that talks to a cluster or to AWS."""
