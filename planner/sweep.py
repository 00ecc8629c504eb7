"""Sweep the layouts of a model over numbers of GPUs: `python -m planner sweep`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, Final

from planner import request
from planner.errors import DoesNotDivide, DoesNotFit, PlanError
from planner.estimate import Estimate
from planner.judge import Site
from planner.offers import Offer, cheapest, fastest, frontier
from planner.request import SIZES, Request
from planner.search import Survey, survey
from planner.whatif import examine

HEAD: Final = "  GPUs   s/step     90 % interval tok/s/GPU    MFU    GiB    days          USD  layout"


def main(argv: list[str] | None = None) -> int:
    """Print the best layouts of a model on a range of GPU counts; 2, with one sentence, for what cannot be."""
    try:
        asked = request.read(argv)
        answer = _answer(asked)
    except PlanError as problem:
        print(f"sweep: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(answer, indent=1) if asked.json else _text(answer))
    return 0


def _answer(asked: Request) -> dict[str, Any]:
    """The sweep as plain values; raises `PlanError` where nothing is left."""
    found = _survey(asked, asked.site)
    refused = found.refused_by + Counter({"more nodes than a type without EFA can join": asked.cut_off})
    offers = _offers(asked.site, found)
    return {
        **_question(asked),
        "considered": found.considered,
        "seconds": found.seconds,
        "configurations_per_second": found.considered / found.seconds,
        "best": [_row(asked.site, one) for one in found.ranked[: asked.top]],
        "rejected": dict(refused.most_common()),
        "pareto": [_row(asked.site, one.best) for one in frontier(offers)],
        "chosen": _chosen(asked, offers),
        "what_if": _what_if(asked),
    }


def _question(asked: Request) -> dict[str, Any]:
    work, machine = asked.work, asked.site.machine
    return {
        "model": asked.model,
        "parameters": work.extras.parameters,
        "instance": machine.name,
        "gpus": [asked.ranks[0], asked.ranks[-1]],
        "global_batch": work.batch,
        "sequence": int(work.shape.sequence),
        "steps": work.steps,
        "precision": work.precision,
        "profile": asked.site.profile(work, "megatron", "").key,
        "price_as_of": machine.price_as_of,
    }


def _survey(asked: Request, site: Site) -> Survey:
    """All layouts there; raises `PlanError` if none is left."""
    found = survey(asked.work, site, asked.ranks, asked.axes, max(asked.top, 10), each=True)
    if not found.ranked:
        raise _nothing(asked, found)
    return found


def _nothing(asked: Request, found: Survey) -> PlanError:
    """Why no layout is left, in one sentence."""
    if found.leanest is None:
        pins = "".join(f", {name} {size[0]}" for name in SIZES if len(size := getattr(asked.axes, name)) == 1 < size[0])
        reasons = "; ".join(f"{reason} ({count})" for reason, count in found.refused_by.most_common(3))
        return DoesNotDivide(f"{asked.model} has no layout on {asked.gpus} GPUs{pins}: {reasons}.")
    lean = found.leanest
    return DoesNotFit(
        f"{asked.model} does not fit on {asked.gpus} GPUs of {asked.site.machine.name}: the leanest of "
        f"{found.considered} layouts, {lean.layout}, {lean.why_not}; take more GPUs, or GPUs with more memory."
    )


def _offers(site: Site, found: Survey) -> list[Offer]:
    """The best on each number of GPUs."""
    best = {one.layout.world_size: one for one in reversed(found.ranked)}
    return [
        Offer(site.machine.name, site.nodes_of(one.layout), gpus, one) for gpus, one in (found.fastest | best).items()
    ]


def _chosen(asked: Request, offers: list[Offer]) -> dict[str, Any]:
    """What answers the limits that were set; None where nothing does."""
    found: dict[str, Offer | None] = {}
    if asked.deadline_s is not None:
        found["cheapest that meets the deadline"] = cheapest(offers, asked.deadline_s)
    if asked.max_usd is not None:
        found["fastest under the budget"] = fastest(offers, asked.max_usd)
    return {name: one and _row(asked.site, one.best) for name, one in found.items()}


def _row(site: Site, one: Estimate) -> dict[str, Any]:
    from planner.report import estimate_json  # knows recipes, whose library takes a while to load

    return {"gpus": one.layout.world_size, "nodes": site.nodes_of(one.layout), **estimate_json(one)}


def _what_if(asked: Request) -> dict[str, Any] | None:
    if not asked.what_if:
        return None
    told = examine(asked.work, asked.site, asked.what_if, lambda there: _survey(asked, there).ranked[0])
    rows = {name: _row(asked.site, getattr(told, name)) for name in ("before", "same", "best")}
    return {"text": str(told), "factors": told.factors, "binds": told.binds, "elasticity": told.elasticity, **rows}


def _text(answer: dict[str, Any]) -> str:
    """The answer for people, without colours."""
    lines = [
        f"{answer['model']} ({answer['parameters'] / 1e9:,.1f} B parameters) on {answer['instance']}, "
        f"{answer['gpus'][0]} to {answer['gpus'][1]} GPUs: {answer['considered']:,} layouts in "
        f"{answer['seconds'] * 1000:.0f} ms ({answer['configurations_per_second'] / 1e6:.1f} M/s)",
        f"{answer['global_batch']} sequences of {answer['sequence']} tokens a step, {answer['steps']:,} steps, "
        f"{answer['precision']}, profile {answer['profile']}",
        "",
        HEAD,
        *map(_line, answer["best"]),
        "",
        *(f"rejected {count:>10,}  {reason}" for reason, count in answer["rejected"].items()),
    ]
    for name, row in answer["chosen"].items():
        lines += ["", f"{name}:", _line(row) if row else "  none"]
    return "\n".join(lines + (["", answer["what_if"]["text"]] if answer["what_if"] else []))


def _line(row: dict[str, Any]) -> str:
    usd = "" if row["usd"] is None else f"{row['usd']:,.0f}"
    mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return (
        f"{row['gpus']:>6} {row['step_seconds']:>8.4g} {row['low']:>7.3g} to {row['high']:<6.3g} "
        f"{row['tokens_per_second_per_gpu']:>9,.0f} {mfu:>6} {row['memory_gib']['total']:>6.1f} {row['days']:>7.2f} "
        f"{usd:>12}  {row['layout']['text']}"
    )
