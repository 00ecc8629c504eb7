"""Figures as people say them, and the terminal they are said on; what a command needs before, or without, Prefect."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

CONSOLE = Console(stderr=True)


def clock(seconds: float) -> str:
    """A duration as people say it: `45 s`, `3 min 20 s`, `2 h 05 min`, `4.2 days`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole / 86400:.1f} days"


def count(number: int, noun: str) -> str:
    """A number of things: `1 node`, `3 nodes`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def size(count: float) -> str:
    """A number of bytes as people say it, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def grid(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return "_none_\n"
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([cell(row[name]) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(str(one) for one in line)} |\n" for line in lines)


def cell(value: Any) -> Any:
    """A value as a table shows it: five digits are enough."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
