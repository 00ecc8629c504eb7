"""What is asked of a plan besides the recipe: other machines, a deadline, a budget, other bandwidths."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from clusters.base import Refused

MOST_NODES = 4096
UNITS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
TOP = 12

_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(min|h|d|w)")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; nothing of it asks for the recipe's own plan."""

    instances: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    deadline_s: float | None = None
    max_usd: float | None = None
    what_if: Mapping[str, float] = field(default_factory=dict)
    """Factors by resource, of `planner.whatif.RESOURCES`."""
    top: int = TOP
    """Layouts shown."""

    @property
    def sweeps(self) -> bool:
        """Whether several machines are compared."""
        return bool(self.instances or self.nodes)


def instances(text: str) -> tuple[str, ...]:
    """Instance types, as in `p4d.24xlarge,p5.48xlarge`; raises `Refused`."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise Refused("--instances is empty: name instance types, as in p4d.24xlarge,p5.48xlarge")
    return tuple(dict.fromkeys(found))


def nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes, as in `4..64`, `8` or `4,8,16`; raises `Refused`."""
    counts: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise Refused(f"--nodes {text!r} is no number of nodes: write it as 8, as 4..64 or as 4,8,16")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last <= MOST_NODES:
            raise Refused(f"--nodes {part.strip()}: take from 1 to {MOST_NODES:,} nodes, the smaller number first")
        counts.update(range(first, last + 1))
    return tuple(sorted(counts))


def deadline(text: str) -> float:
    """Seconds of a duration, as in `7d`, `36h` or `90min`; raises `Refused`."""
    found = _DURATION.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise Refused(f"--deadline {text!r} is no duration: write it as 7d, 36h, 90min or 2w")
    return float(found[1]) * UNITS[found[2]]


def dollars(amount: float) -> float:
    """A budget in US dollars; raises `Refused`."""
    if not 0 < amount < float("inf"):
        raise Refused(f"--max-usd {amount:g}: give an amount above 0, as in 50000")
    return amount


def top(count: int) -> int:
    """How many layouts are shown; raises `Refused`."""
    if count < 1:
        raise Refused(f"--top {count}: show at least 1")
    return count
