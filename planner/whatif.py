"""What if the machine were another: which resource a layout waits for, and which layout would be best then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.errors import PlanError
from planner.estimate import Estimate, Layout
from planner.judge import Site, Work, configs_of, judge
from planner.machine import Machine
from planner.plan import best_of, site_of
from planner.profiles import Profiles
from planner.schema import Hardware
from planner.speed import step_seconds

if TYPE_CHECKING:
    from recipes.spec import Recipe

RESOURCES: Final = {
    "flops": "flops",
    "hbm": "memory",
    "nvlink": "intra",
    "efa": "inter",
    "pcie": "host",
    "capacity": "capacity",
}
"""What may be scaled: arithmetic, memory bandwidth, links in a node, network between nodes, host link, memory size."""
NUDGE: Final = 1.1
"""How much more of a resource is tried to see whether it binds."""
LIMIT: Final = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The same work on the machine as it is and as it might be."""

    factors: dict[str, float]
    """By the names of `RESOURCES`."""
    before: Estimate
    """The layout that is best, or prescribed, as things are; and the same layout there."""
    same: Estimate
    best: Estimate
    """The best layout there."""
    elasticity: dict[str, float]
    """How many per cent of `before`'s step one per cent more of a resource saves."""

    @property
    def binds(self) -> str:
        """The resource of which more would help most."""
        return max(self.elasticity, key=lambda name: self.elasticity[name])

    def __str__(self) -> str:
        """The answer in a sentence or two."""
        told = ", ".join(f"{name} x {factor:g}" for name, factor in self.factors.items())
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(self.elasticity.items(), key=_falling))
        new = "" if self.best.layout == self.same.layout else f"; best then: {self.best.layout}, {_seconds(self.best)}"
        return (
            f"with {told}: {_seconds(self.same)} instead of {_seconds(self.before)} for {self.before.layout}{new}. "
            f"What binds is {self.binds} (step time saved by more of each: {shares})."
        )


def parse(text: str) -> dict[str, float]:
    """'nvlink=2x,efa=0.5x' as factors by resource; raises `PlanError` with one sentence."""
    factors: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in RESOURCES or not equals:
            known = ", ".join(RESOURCES)
            raise PlanError(
                f"what-if: {part.strip()!r} is none of {known} with a factor: write it as nvlink=2x,efa=0.5x."
            )
        factors[name] = _factor(name, value)
    return factors


def what_if(
    recipe: Recipe,
    machine: Machine,
    nodes: int,
    processes_per_node: int,
    factors: Mapping[str, float],
    profiles: Profiles | None = None,
) -> WhatIf:
    """A recipe's plan if the machine had more or less of something; raises `PlanError`, also if it cannot run then."""
    site = site_of(machine, nodes, processes_per_node, profiles)
    return examine(Work.of(recipe), site, factors, lambda there: best_of(recipe, there))


def examine(work: Work, site: Site, factors: Mapping[str, float], best: Callable[[Site], Estimate]) -> WhatIf:
    """What `best` chooses here and there, and what its choice here waits for."""
    before, there = best(site), changed(site, factors)
    return WhatIf(
        factors=dict(factors),
        before=before,
        same=judge(work, there, [before.layout])[0],
        best=best(there),
        elasticity=elasticity(work, site, before.layout),
    )


def changed(site: Site, factors: Mapping[str, float]) -> Site:
    """The site with each resource multiplied by its factor."""

    def change(hardware: Hardware) -> Hardware:
        named = {RESOURCES[name]: factor for name, factor in factors.items()}
        return replace(hardware, **{field: getattr(hardware, field) * factor for field, factor in named.items()})

    return replace(site, change=change)


def elasticity(work: Work, site: Site, layout: Layout) -> dict[str, float]:
    """For each resource but capacity the share of the step, by the formulas, that waits for it (0 to 1)."""
    constants = site.profile(work, layout.software, layout.strategy).constants

    def logarithm(factors: Mapping[str, float]) -> float:
        return float(np.log(step_seconds(configs_of(work, changed(site, factors), [layout]), constants)).max())

    now = logarithm({})
    return {
        name: max((now - logarithm({name: NUDGE})) / np.log(NUDGE), 0.0) for name in RESOURCES if name != "capacity"
    }


def _factor(name: str, text: str) -> float:
    try:
        factor = float(text.lower().removesuffix("x"))
    except ValueError:
        factor = float("nan")
    if not LIMIT[0] <= factor <= LIMIT[1]:
        raise PlanError(f"what-if: {name}={text} is no factor: write a positive number, as in {name}=2x.")
    return factor


def _falling(item: tuple[str, float]) -> float:
    return -item[1]


def _seconds(one: Estimate) -> str:
    return f"{one.step_seconds:.3g} s/step"
