"""The Pareto plot of an answer's machines, as a file or inside Markdown."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.offers import Offer, frontier, planned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 2
"""Machines that make a picture."""


def drawable(candidates: Sequence[Offer]) -> bool:
    """Whether there is anything to compare."""
    return len(_priced(candidates)) >= FEWEST


def write(candidates: Sequence[Offer], path: Path) -> None:
    """Draw time x cost x GPUs of the candidates into an SVG file; raises OSError."""
    from tasks import pictures  # matplotlib takes longer than the plan

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(pictures.svg(_drawn(candidates)))
    fresh.replace(path)


def markdown(candidates: Sequence[Offer]) -> str:
    """The same as a Markdown image."""
    from tasks import pictures

    return pictures.embedded(_drawn(candidates), "time, cost and GPUs")


def _drawn(candidates: Sequence[Offer]) -> "Figure":
    from tasks import pictures

    shown = _priced(candidates)
    places = [(one.best.total_seconds, one.usd) for one in shown]
    front = frontier(shown)
    marked = [index for index, one in enumerate(shown) if one in front]
    return pictures.pareto(places, [one.gpus for one in shown], [str(one) for one in shown], marked)


def _priced(candidates: Sequence[Offer]) -> list[Offer]:
    return [one for one in planned(candidates) if one.best.usd is not None]
