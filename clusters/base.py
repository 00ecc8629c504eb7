"""What every cluster can do with a job: render it, submit it, watch it, stop it, find it again.

ClusterError            something about a cluster went wrong; its text is one sentence for the user
├── Refused             the job cannot run there, whatever the weather: never retried
├── NoCapacity          no instances are to be had there now: worth a try elsewhere
└── Unreachable         the cluster did not answer: worth another try
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class ClusterError(Exception):
    """Something about a cluster went wrong; the text is one sentence that says what, where and what to do."""


class Refused(ClusterError):
    """The job cannot run there as asked; trying again does not help."""


class NoCapacity(ClusterError):
    """The instances asked for are not to be had there now; another rung of the capacity ladder may have them."""


class Unreachable(ClusterError):
    """The cluster did not answer; trying again may help."""


class State(StrEnum):
    """The life of a job, in the same words for every cluster."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """A node or the cluster's record of the job is gone; nobody knows how the program ended."""
    TIMED_OUT = "timed out"

    @property
    def done(self) -> bool:
        """Whether the job will never change again."""
        return self not in (State.QUEUED, State.RUNNING)


Address = Mapping[str, str]
"""How to find a cluster again, flat enough for the ledger: `cluster` is its kind, the rest is the adapter's."""


@dataclass(frozen=True, slots=True)
class Job:
    """One program of `training/` on one or more nodes, told the same way to every cluster."""

    name: str
    """Derived from (recipe, step, fingerprint, attempt): the same work has the same name."""
    module: str
    """`training.run`: what `python -m` starts on the nodes."""
    config: Mapping[str, Any]
    """Becomes job.json, see `training.job.NodeJob`."""
    nodes: int = 1
    processes_per_node: int = 0
    """Ranks per node, started by torchrun; 0 starts plain Python, for programs that are one process."""
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: int = 24 * 3600
    """The job stops itself after this long, whether or not anybody watches."""
    restarts: int = 0
    """How often the cluster itself starts the whole gang again after a node was lost or a program crashed."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a job stands."""

    state: State
    reason: str = ""
    exit_code: int | None = None


class Cluster(Protocol):
    """An adapter. Every method but `render` may raise `Unreachable`."""

    def render(self, job: Job) -> dict[str, Any]:
        """The exact request `submit` would send. Pure: touches nothing, so it is the dry run."""

    def submit(self, job: Job) -> str:
        """Start the job and return its id. A job of that name that exists already is attached to, never doubled."""

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        """How jobs stand now, in as few calls as the cluster's API allows; a job nobody knows is `LOST`."""

    def status(self, job_id: str) -> Status:
        """How one job stands now."""

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        """The whole lines of the job's log from cursor `after` on, and the cursor to go on from.

        Each line comes once; the lines of a node come in its order and, if there are several nodes, begin with
        `[node<rank>] `. A job nobody knows has no lines. Empty lines may be left out: CloudWatch keeps none.
        """

    def cancel(self, job_id: str) -> None:
        """Ask the job to save and stop, and make it stop within seconds. Fine on a job that is done or unknown."""

    def find(self, name: str) -> str | None:
        """The id of the job of that name, None where there is none."""

    def quarantine(self, job_id: str, node: int, why: str) -> str:
        """Keep jobs from the machine that was node `node` of a job, and have the platform replace it where it does so.

        Returns what was done, in words; fine twice. Raises `Refused` where no other machine can take its place.
        """

    def forget(self, job_id: str) -> None:
        """Remove what the cluster keeps of an ended job (definitions, manifests), as far as its API can.

        Takes the name of a job, too, whose submission was interrupted; fine where there is nothing.
        """
