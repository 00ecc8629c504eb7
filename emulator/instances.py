"""What EC2's instance types hold, for the schedulers of the emulator: moto's copy of EC2's own figures."""

from dataclasses import dataclass
from functools import cache

OPTIMAL = ("c5", "m5", "r5")
"""Families that stand for AWS Batch's `optimal`, which chooses among C, M and R."""
USABLE = 0.97
"""Share of an instance's memory that is left when the system and the agent have theirs."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one instance has for jobs."""

    type: str
    vcpus: int
    memory_mib: int
    gpus: int


@cache
def expanded(name: str) -> tuple[str, ...]:
    """The instance types that a name in a compute environment stands for: a type, a family, `optimal`; () if none."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    if name in INSTANCE_TYPES:
        return (name,)
    families = OPTIMAL if name in ("optimal", "default_x86_64") else (name,)
    return tuple(sorted(known for known in INSTANCE_TYPES if known.partition(".")[0] in families))


@cache
def room(instance_type: str) -> Room:
    """What an instance of that type has; the type must be known."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    facts = INSTANCE_TYPES[instance_type]
    gpus = sum(one["Count"] for one in facts.get("GpuInfo", {}).get("Gpus", []))
    memory = int(facts["MemoryInfo"]["SizeInMiB"] * USABLE)
    return Room(instance_type, facts["VCpuInfo"]["DefaultVCpus"], memory, gpus)
