"""What Prefect costs us: the steps of a finished life as flows, against the same steps called as plain functions.

    python -m benchmarks.flow_overhead recipes/rehearsal.yaml      # a recipe whose life is done

Both do the same look-ups, in one process and with one server, alternating; prints the medians.
"""

import statistics
import sys
import time
from pathlib import Path

from prefect import flow, task

from flows._house import alone
from flows._input import read
from flows._server import prefect_server
from flows.export import export
from flows.preprocess import preprocess
from flows.score import score
from flows.serve import serve
from flows.train import train
from recipes import Recipe
from tasks.lineage import STEPS, trace
from tasks.phrases import CONSOLE

ROUNDS = 5
TASKS = 50


@task
def nothing() -> None:
    """A task without work."""


@flow
def steps(recipe: Recipe) -> float:
    """The step flows of a life; returns seconds."""
    with alone(recipe):
        begun = time.perf_counter()
        for step in (preprocess, train, score, export, serve):
            step(recipe)
        return time.perf_counter() - begun


@flow
def tasks_only() -> float:
    """Tasks without work; returns milliseconds per task."""
    begun = time.perf_counter()
    for _ in range(TASKS):
        nothing()
    return (time.perf_counter() - begun) / TASKS * 1e3


def plain(recipe: Recipe) -> float:
    """The same look-ups as plain calls; returns seconds."""
    begun = time.perf_counter()
    for step in STEPS:
        trace(recipe).done(step)
    return time.perf_counter() - begun


def main() -> None:
    """Print what a flow and a task cost over a plain call."""
    recipe = read(Path(sys.argv[1]), [], kind=None, shrink=False, keep=False)
    prefect_server(CONSOLE)
    steps(recipe)  # the first run opens connections
    rounds = [(steps(recipe), plain(recipe), tasks_only()) for _ in range(ROUNDS)]
    as_flows, as_calls, per_task = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"{len(STEPS)} steps as flows {as_flows * 1e3:.0f} ms, as plain calls {as_calls * 1e3:.0f} ms")
    print(
        f"over the work: {(as_flows - as_calls) / len(STEPS) * 1e3:.0f} ms per flow, {per_task:.1f} ms per empty task"
    )


if __name__ == "__main__":
    main()
