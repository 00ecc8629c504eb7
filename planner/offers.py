"""The same training on other machines: which is cheapest in time, which is fastest for the money, which trade."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.cost import SETUP_HOURS
from planner.errors import PlanError
from planner.estimate import Estimate
from planner.machine import Machine
from planner.plan import best_of, site_of
from planner.profiles import Profiles
from planner.schema import Floats

if TYPE_CHECKING:
    from recipes.spec import Recipe


@dataclass(frozen=True, slots=True)
class Offer:
    """A type of machine and how many, with the best plan there, or the sentence that says why there is none."""

    machine: str
    nodes: int
    gpus: int
    """Accelerators at work."""
    found: Estimate | None = None
    why_not: str = ""
    kind: str = ""
    """Of what is against it: machines with the same trouble are told of together."""

    @property
    def best(self) -> Estimate:
        """The layout that would be launched; only of one that can run it."""
        assert self.found
        return self.found

    @property
    def usd(self) -> float:
        """What it costs; infinite where no price is known."""
        return float("inf") if self.best.usd is None else self.best.usd

    @property
    def measures(self) -> tuple[float, float, int]:
        """Seconds, dollars and accelerators: the less the better."""
        return self.best.total_seconds, self.usd, self.gpus

    def __str__(self) -> str:
        """As people say it: 8 x p5.48xlarge."""
        return f"{self.nodes} x {self.machine}"


def judged(recipe: Recipe, machine: Machine, nodes: Iterable[int], profiles: Profiles) -> Iterator[Offer]:
    """The recipe on each number of such machines, one process per accelerator, in the layout that is best there."""
    for count in nodes:
        gpus = count * machine.accelerators
        try:
            best = best_of(recipe, site_of(machine, count, machine.accelerators, profiles))
        except PlanError as error:
            yield Offer(machine.name, count, gpus, why_not=str(error), kind=type(error).__name__)
        else:
            yield Offer(machine.name, count, gpus, best)


def planned(offers: Iterable[Offer]) -> list[Offer]:
    """Those that can run it."""
    return [one for one in offers if one.found]


def refusals(offers: Iterable[Offer]) -> list[str]:
    """What is against those that cannot run it: a sentence for each type of machine and kind of trouble."""
    groups: dict[tuple[str, str], list[Offer]] = {}
    for one in offers:
        if one.found is None:
            groups.setdefault((one.machine, one.kind), []).append(one)
    return [
        f"{spans([one.nodes for one in group])} x {group[0].machine}: {group[0].why_not}" for group in groups.values()
    ]


def spans(numbers: Sequence[int]) -> str:
    """Whole numbers in rising order as people say them: 5 to 7, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def cheapest(offers: Iterable[Offer], deadline_s: float | None = None) -> Offer | None:
    """The cheapest that is done in so many seconds, set-up included; None if none is. It has a known price."""
    latest = float("inf") if deadline_s is None else deadline_s - SETUP_HOURS * 3600
    able = [one for one in planned(offers) if one.best.total_seconds <= latest and one.best.usd is not None]
    return min(able, key=lambda one: (one.usd, one.best.total_seconds), default=None)


def fastest(offers: Iterable[Offer], max_usd: float | None = None) -> Offer | None:
    """The fastest that costs at most so many dollars; None if none does."""
    able = [one for one in planned(offers) if max_usd is None or one.usd <= max_usd]
    return min(able, key=lambda one: (one.best.total_seconds, one.usd), default=None)


def frontier(offers: Iterable[Offer]) -> list[Offer]:
    """Those that no other beats in time, dollars and accelerators at once, the fastest first.

    One without a known price is beaten by any that has one.
    """
    able = planned(offers)
    compared = sorted([one for one in able if one.best.usd is not None] or able, key=lambda one: one.measures)
    points = np.array([one.measures for one in compared]).reshape(-1, 3)
    # Sorted so, an offer can be beaten only by one before it.
    return [one for place, one in enumerate(compared) if not _beaten(points[:place], points[place])]


def _beaten(others: Floats, point: Floats) -> bool:
    return bool(np.any(np.all(others <= point, axis=1) & np.any(others < point, axis=1)))
