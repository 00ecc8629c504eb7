"""How far the nodes' clocks are apart, measured over the network of the job.

The way of NTP (RFC 5905, section 8): who asks notes when it asked and when the answer came; the answer holds the
other's time, taken to be of the middle. The quickest of several rounds tells best, and half of it is the uncertainty.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from training.checks.finding import Finding
from training.ranks import World

ROUNDS: Final = 8
TOLERATED_S: Final = 1.0
"""Logs and leases of nodes are compared to about this."""
S3_S: Final = 900.0
"""How far a request's time may be off: S3 then answers RequestTimeTooSkewed."""


@dataclass(frozen=True, slots=True)
class Skew:
    """A clock against that of rank 0."""

    seconds: float
    """Ahead if positive."""
    uncertainty_s: float


def measure(world: World, now: Callable[[], int] = time.time_ns) -> list[Skew]:
    """Measure every rank's clock against rank 0's; the answer is rank 0's, [] elsewhere. `now` is in ns."""
    if world.rank:
        _answer(now)
        return []
    return [Skew(0.0, 0.0), *(_ask(rank, now) for rank in range(1, world.size))]


def judge(skews: dict[str, Skew]) -> list[Finding]:
    """Judge the clocks of nodes, by name, against their middle one: rank 0's own may be the wrong one."""
    if not skews:
        return []
    middle = sorted(skew.seconds for skew in skews.values())[len(skews) // 2]
    return [
        finding for node, skew in skews.items() for finding in _judge(node, skew.seconds - middle, skew.uncertainty_s)
    ]


def _judge(node: str, ahead: float, uncertainty: float) -> list[Finding]:
    off = abs(ahead) - uncertainty
    if off < TOLERATED_S:
        return []
    what = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others"
    todo = "start chrony (169.254.169.123 on EC2), and set the clock"
    return [Finding("refuse" if off >= S3_S else "warn", what, node, "clock", todo)]


def _ask(rank: int, now: Callable[[], int]) -> Skew:
    import torch
    from torch import distributed

    best: Skew | None = None
    theirs = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        asked, began = now(), time.perf_counter_ns()
        distributed.send(theirs, rank)
        distributed.recv(theirs, rank)
        took = time.perf_counter_ns() - began
        skew = Skew((int(theirs) - asked - took / 2) / 1e9, took / 2e9)
        best = skew if best is None or skew.uncertainty_s < best.uncertainty_s else best
    assert best is not None
    return best


def _answer(now: Callable[[], int]) -> None:
    import torch
    from torch import distributed

    told = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        distributed.recv(told, 0)
        told[0] = now()
        distributed.send(told, 0)
