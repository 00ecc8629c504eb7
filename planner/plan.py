"""Plan a recipe: judge every layout, take the best or the one it prescribes, and say how they compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from planner import cost
from planner.errors import DoesNotDivide, DoesNotFit, PlanError
from planner.estimate import Estimate, Layout, Plan
from planner.judge import Site, Work, judge, shortlist
from planner.machine import Machine
from planner.own import AGAIN, layouts, own_layouts, prescribes
from planner.profiles import Profiles
from planner.refusal import axes_of, nothing_divides, too_big
from planner.search import Survey, survey
from planner.software import STRATEGIES

if TYPE_CHECKING:
    from recipes.spec import Recipe

COMFORTABLE: Final = 0.8
"""Share of a rank's memory. A layout that needs more may run out of memory, since the estimate may be wrong;"""
RISK: Final = 1.1
"""so it ranks as if it were this much slower."""
EDGE: Final = 1.2
"""A model that is cut up by tensor, pipeline or context parallelism has more that can go wrong, and is foretold from
other people's programs: it ranks as if it were this much slower."""
EQUAL: Final = 1.02
"""Steps within this ratio count as equally fast."""
SHOWN: Final = 40
"""Layouts that cut the model up, Castra's or Megatron's, that a plan estimates in full and lists."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What one training program can do."""

    wanted: Estimate
    ranked: list[Estimate]
    refused: list[Estimate]
    considered: int
    refused_by: Counter[str]


def plan(
    recipe: Recipe, machine: Machine, nodes: int, processes_per_node: int, profiles: Profiles | None = None
) -> Plan:
    """Judge every layout of a recipe on `nodes` machines and pick the best.

    Raises `DoesNotDivide`, `DoesNotFit` or `NoProfile` (each a `PlanError`), with one sentence for the user.
    """
    site = site_of(machine, nodes, processes_per_node, profiles)
    work = Work.of(recipe)
    chosen = _choose(recipe, work, site)
    others = _others(recipe, work, site)
    elsewhere = next(
        (one for one in others.ranked[:1] if one.step_seconds * EQUAL < chosen.ranked[0].step_seconds), None
    )
    return Plan(
        best=chosen.wanted,
        ranked=chosen.ranked,
        refused=chosen.refused,
        notes=[*_comparison(recipe, chosen.wanted, chosen.ranked[0]), *_basis(work, site, chosen.wanted)],
        considered=chosen.considered + others.considered,
        refused_by=dict((chosen.refused_by + others.refused_by).most_common()),
        elsewhere=elsewhere,
        alternatives=others.ranked,
        advice=[*_advice(recipe, work, site, chosen.ranked[0]), *_faster_elsewhere(chosen.ranked[0], elsewhere)],
    )


def aws_equivalent(recipe: Recipe, machine: Machine, nodes: int, profiles: Profiles | None = None) -> Estimate:
    """What the same training would take and cost on `nodes` such instances, in the layout that is best there.

    A small global batch may not divide over all accelerators: the rest idle, and are paid for. Raises `PlanError`.
    """
    batch = recipe.train.global_batch_size
    busy = (count for count in range(machine.accelerators, 1, -1) if batch % (nodes * count) == 0)
    free = recipe.model_copy(update={"parallel": type(recipe.parallel)()})
    return best_of(free, site_of(machine, nodes, next(busy, 1), profiles))


def best_of(recipe: Recipe, site: Site) -> Estimate:
    """`plan(...).best`, without the comparison with other programs and settings; raises `PlanError`."""
    return _choose(recipe, Work.of(recipe), site).wanted


def site_of(machine: Machine, nodes: int, processes_per_node: int, profiles: Profiles | None = None) -> Site:
    """Where a plan is made for; raises `PlanError` for counts that make no sense."""
    machine.share(nodes, processes_per_node)
    known = profiles or Profiles.shipped()
    return Site(machine=machine, profiles=known, nodes=nodes, processes_per_node=processes_per_node)


def _choose(recipe: Recipe, work: Work, site: Site) -> _Choice:
    return _megatron(recipe, work, site) if recipe.parallel.software == "megatron" else _own(recipe, work, site)


def _own(recipe: Recipe, work: Work, site: Site) -> _Choice:
    """Castra's own strategies."""
    listed = layouts(recipe, site)
    cut = [one for one in listed if one.world_size > one.dp]
    plain = [one for one in listed if one.world_size == one.dp]
    judged = judge(work, site, plain + shortlist(work, site, cut, SHOWN))
    ranked = _ranked([one for one in judged if one.fits], _room(site))
    refused = sorted((one for one in judged if not one.fits), key=lambda one: one.memory.total)
    wanted = next((one for one in ranked if prescribes(recipe, one.layout)), None)
    if wanted is None:
        leanest = next(one for one in refused if prescribes(recipe, one.layout))
        raise DoesNotFit(too_big(recipe, site, leanest))
    places = ("an accelerator" if one.why_not.startswith("needs") else "a node" for one in refused)
    reasons = Counter(f"does not fit into the memory of {place}" for place in places)
    return _Choice(wanted, ranked, refused, len(listed), reasons)


def _megatron(recipe: Recipe, work: Work, site: Site) -> _Choice:
    """Megatron's layouts: those the recipe leaves open, and all others to compare with."""
    ranks = [_ranks(site)]
    prescribed = survey(work, site, ranks, axes_of(recipe, work, site), SHOWN)
    if not prescribed.considered:
        raise DoesNotDivide(nothing_divides(recipe, work, prescribed.refused_by))
    if not prescribed.ranked:
        assert prescribed.leanest
        raise DoesNotFit(too_big(recipe, site, prescribed.leanest))
    free = survey(work, site, ranks, axes_of(None, work, site), SHOWN)
    ranked = sorted(free.ranked, key=lambda one: one.step_seconds)
    refused = [free.leanest] if free.leanest else []
    return _Choice(prescribed.ranked[0], ranked, refused, free.considered, free.refused_by)


def _others(recipe: Recipe, work: Work, site: Site) -> Survey:
    """What Megatron would do where the recipe's software is another; nothing on this machine."""
    if site.machine.local or recipe.parallel.software == "megatron":
        return Survey([], None, 0, Counter(), {})
    try:
        return survey(work, site, [_ranks(site)], axes_of(None, work, site), SHOWN)
    except PlanError:
        return Survey([], None, 0, Counter(), {})


def _ranks(site: Site) -> int:
    assert site.nodes
    assert site.processes_per_node
    return site.nodes * site.processes_per_node


def _room(site: Site) -> float:
    assert site.nodes
    assert site.processes_per_node
    return site.machine.memory_gib * site.machine.share(site.nodes, site.processes_per_node)


def _ranked(fitting: list[Estimate], room_gib: float) -> list[Estimate]:
    """Best first by speed and risk; of equally good layouts the simpler comes first, then the larger micro batch."""

    def slowness(one: Estimate) -> float:
        cut = one.layout.world_size > one.layout.dp
        return one.step_seconds * (RISK if one.memory.total > COMFORTABLE * room_gib else 1.0) * (EDGE if cut else 1.0)

    least = min(map(slowness, fitting), default=1.0)

    def rank(one: Estimate) -> tuple[int, int, int]:
        behind = math.floor(math.log(slowness(one) / least) / math.log(EQUAL))
        return behind, STRATEGIES.index(one.layout.strategy), -one.layout.micro_batch_size

    return sorted(fitting, key=rank)


def _comparison(recipe: Recipe, mine: Estimate, winner: Estimate) -> Iterator[str]:
    if recipe.parallel in (type(recipe.parallel)(), type(recipe.parallel)(software="megatron")):
        return
    if mine.layout == winner.layout:
        yield f"yours ({mine.layout}) is also the planner's choice."
    else:
        slower = mine.step_seconds / winner.step_seconds - 1
        yield (
            f"yours: {mine.step_seconds:.3g} s/step, {abs(slower):.0%} {'slower' if slower > 0 else 'faster'} than "
            f"{winner.layout} ({winner.step_seconds:.3g} s/step)."
        )


def _basis(work: Work, site: Site, best: Estimate) -> Iterator[str]:
    profile = site.profile(work, best.layout.software, best.layout.strategy)
    rests = f"times rest on {profile.steps} measured steps of {profile.key}"
    if not profile.steps:
        rests = f"nobody measured this on {site.machine.name} yet: times rest on other machines ({profile.key})"
    yield (
        f"{rests}; expect 9 of 10 runs to take "
        f"{best.low / best.step_seconds:.2f} to {best.high / best.step_seconds:.2f} times the estimate."
    )
    if site.profiles.achieved:
        yield _calibrated(work, site, best)
    if best.usd is not None:
        machine = site.machine
        yield (
            f"dollars: on demand, {machine.price_usd_per_hour:,.2f} per node and hour as of {machine.price_as_of}, "
            f"{cost.SETUP_HOURS * 60:.0f} minutes of set-up included; storage in us-east-1 as of {cost.PRICES.as_of}: "
            f"{cost.DISK_GIB} GiB of disk a node, checkpoints and export kept for a month."
        )


def _calibrated(work: Work, site: Site, best: Estimate) -> str:
    """What the cluster itself reached, and how long a step would be planned to take had nobody measured that."""
    plain = site.profiles.plain or replace(site.profiles, achieved=None)
    (before,) = judge(work, replace(site, profiles=plain), [best.layout])
    told = f"{site.profiles.achieved}; {before.step_seconds:.3g} s/step before, {best.step_seconds:.3g} after"
    return f"{told}; measured trainings count more." if site.profiles.plain else f"{told}."


def _advice(recipe: Recipe, work: Work, site: Site, winner: Estimate) -> Iterator[str]:
    """Whether another setting of recomputation would be faster."""
    if winner.layout.software == "megatron":
        return
    now = recipe.train.activation_checkpointing
    found: list[tuple[float, str, Estimate]] = []
    for setting in AGAIN.keys() - {now}:
        train = recipe.train.model_copy(update={"activation_checkpointing": setting})
        other = recipe.model_copy(update={"train": train, "parallel": type(recipe.parallel)()})
        judged = judge(work, site, _divided(other, site))
        found += [(one.step_seconds, str(setting).lower(), one) for one in judged if one.fits]
    seconds, words, best = min(found, key=lambda one: one[:2], default=(math.inf, "", winner))
    if seconds * EQUAL < winner.step_seconds:
        yield (
            f"train.activation_checkpointing {words} would be {_faster(best, winner)} faster: "
            f"{best.layout}, {seconds:.3g} s/step."
        )


def _divided(recipe: Recipe, site: Site) -> list[Layout]:
    """Data parallel layouts, where the batch divides over all ranks."""
    try:
        return own_layouts(recipe, site)
    except DoesNotDivide:
        return []


def _faster_elsewhere(winner: Estimate, elsewhere: Estimate | None) -> Iterable[str]:
    if elsewhere:
        yield (
            f"Megatron would be {_faster(elsewhere, winner)} faster: {elsewhere.layout}, {elsewhere.step_seconds:.3g} "
            "s/step (case.framework: megatron-lm runs it)."
        )


def _faster(one: Estimate, than: Estimate) -> str:
    return f"{than.step_seconds / one.step_seconds - 1:.0%}"
