"""What a launcher of another framework's program gives: which version it is for, its exact arguments, its figures.

Standard library only: nodes run it, and the control plane shows what it gives before anything is paid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class CaseError(ValueError):
    """A plan cannot be told to a framework; the text is one sentence: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The version of a framework that a launcher is written for."""

    repository: str
    """owner/name on GitHub."""
    version: str
    """A commit or a tag."""
    licence: str
    folder: str
    """Where it lies in its container."""
    container: str = ""
    """An image that brings it, or all it needs, with its tag; empty where nobody publishes one."""
    package: str = ""
    """As pip installs it, `name==version`; empty where it is not on PyPI."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a job's files are as its nodes see them; empty is not there."""

    output: str
    folder: str
    """Where the framework lies."""
    dataset: str = ""
    initial: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """What starts a framework's program on every rank, once on every node, or on all ranks by MPI."""

    argv: tuple[str, ...]
    """A Python script or `-m module` first, which this Python runs, or a program of the node's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files it reads, below the job's output: name → content."""
    per: Literal["rank", "node", "mpi"] = "rank"
    """rank: torchrun starts it; node: once on each; mpi: mpirun starts it on every rank, see `training.cases.mpi`."""


class Launcher(Protocol):
    """A module of `training.cases`, named as the framework with _ for -."""

    UPSTREAM: Upstream

    def command(self, spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
        """The program's exact command for a recipe (as job.json has it, `parallel` resolved). Pure.

        Raises CaseError for a plan that the framework cannot carry out.
        """

    def measure(self, line: str) -> dict[str, float] | None:
        """What a line of its log says: step, and of loss, seconds, tokens_per_second, tflops, gbps what there is.

        Figures without a step are the next row of a measurement.
        """
