"""What people see of a run: log lines, and Prefect artifacts (tables, pages, progress with an ETA) beside them.

An artifact is never worth a run: if the server is away for a moment, the artifact is lost and the work goes on.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import MissingContextError, PrefectException
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tasks.phrases import CONSOLE, cell, clock

T = TypeVar("T")

FOR_PEOPLE = {"castra": True}
"""Marks the log records that a terminal shows; the rest is Prefect's own."""


def say(text: str) -> None:
    """Log a line of the run's story, in the UI and on the terminal."""
    _logger().info(text, extra=FOR_PEOPLE)


def warn(text: str) -> None:
    """Log a line that a person should act on."""
    _logger().warning(text, extra=FOR_PEOPLE)


def relay(lines: Sequence[str]) -> None:
    """Log the lines of a job, in the UI only."""
    for line in lines:
        _logger().info(line)


def _logger() -> Any:
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("castra")


def table(key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """Show rows as a searchable grid. `key` is stable over runs, so that the artifact has a history."""
    cells = [{name: cell(value) for name, value in row.items()} for row in rows]
    _at_leisure(lambda: create_table_artifact(key=key, table=cells, description=description))


def page(key: str, markdown: str, description: str) -> UUID | None:
    """Show a page of Markdown; returns its id for `rewrite`, None if the server is away."""
    made = _at_leisure(lambda: create_markdown_artifact(key=key, markdown=markdown, description=description))
    return made if isinstance(made, UUID) else None


def links(found: Sequence[tuple[str, str]], what: str) -> None:
    """Show where else there is something to see of `what`, as titles and URLs; nothing where there is nothing."""
    if found:
        page("links", "".join(f"- [{title}]({url})\n" for title, url in found), f"Where to look: {what}")


def rewrite(artifact: UUID | None, markdown: str) -> None:
    """Replace the text of a page, so that one that changes with the run stays one artifact."""
    if artifact is not None:
        update = ArtifactUpdate(data=markdown)
        _at_leisure(lambda: get_client(sync_client=True).update_artifact(artifact, update))


class Bar:
    """Progress of one piece of work: a Prefect progress artifact, and a bar where there is a terminal."""

    UPDATE_S = 2.0

    def __init__(self, key: str, bar: Progress) -> None:
        self._bar, self._key = bar, key
        self._task = bar.add_task(key, total=None)
        self._artifact = _at_leisure(lambda: create_progress_artifact(progress=0.0, key=key, description="starting"))
        self._begun, self._shown, self._first = time.monotonic(), 0.0, 0.0

    def update(self, done: float, total: float, text: str) -> None:
        """Show that `done` of `total` is done; `text` says what and how it goes."""
        now = time.monotonic()
        if not self._shown:
            self._begun, self._first = now, done
        self._bar.update(self._task, completed=done, total=total, description=f"{self._key}  {text}")
        if now - self._shown >= self.UPDATE_S or done >= total:
            self._shown = now
            self._report(100 * done / max(total, 1), f"{text}{self._eta(done, total, now)}")

    def finish(self) -> None:
        """Show that all is done, whatever was the last that was told."""
        self._report(100.0, f"done in {clock(time.monotonic() - self._begun)}")

    def _eta(self, done: float, total: float, now: float) -> str:
        if done <= self._first or done >= total:
            return ""
        left = (now - self._begun) * (total - done) / (done - self._first)
        return f", about {clock(left)} left"

    def _report(self, percent: float, text: str) -> None:
        if isinstance(artifact := self._artifact, UUID):
            _at_leisure(lambda: update_progress_artifact(artifact, min(percent, 100.0), text))


@contextlib.contextmanager
def progress(key: str) -> Iterator[Bar]:
    """Show a progress bar for the length of the block."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    shown = Progress(*columns, TimeRemainingColumn(), console=CONSOLE, transient=True, disable=not sys.stderr.isatty())
    with shown as terminal:
        bar = Bar(key, terminal)
        yield bar
        bar.finish()


def _at_leisure(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except (httpx.HTTPError, PrefectException, OSError) as error:
        logging.getLogger("castra").debug("an artifact was lost: %s", error)
        return None


def fail(text: str) -> None:
    """Log why the run ends here."""
    _logger().error(text, extra=FOR_PEOPLE)
