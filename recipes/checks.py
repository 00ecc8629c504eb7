"""What a cluster must prove before it is paid to train."""

from typing import Annotated, Literal

from pydantic import Field

from recipes.part import Part, Size


class Checks(Part):
    """The proof of a cluster, and what happens to a node that fails it."""

    level: Literal["network", "quick", "full"] = Field(
        "quick",
        description="Execution. network: collectives only; quick: and every node's software, GPUs, EFA, disks and "
        "clock; full: and DCGM's long diagnosis, storage under load, and the measurements that calibrate the planner.",
    )
    largest_mib: Size = Field(
        "auto",
        description="Execution. Largest message of the collective sweep; auto is 16 on CPUs and 2048 on GPUs. "
        "Unit: MiB.",
    )
    min_line_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Execution. Share of the network's line rate that large all-reduces must reach; empty takes the "
        "instance catalogue's.",
    )
    replace: int = Field(
        1,
        ge=0,
        description="Execution. Nodes at most that are quarantined and replaced when they fail a check; 0 refuses.",
    )
