"""How right, how lawful and how fast the planner is, on training steps that others measured and published.

    python -m benchmarks.planner                        # the rows shipped in planner/tables/measured.csv
    python -m benchmarks.planner public.csv --json f    # any table with its columns; the figures for programs too
    python -m benchmarks.planner --only time choosing   # some of the sections, named below
    python -m benchmarks.planner --tune                 # choose planner.residual.SCALES anew, and print them
    python -m benchmarks.planner --nested               # is it the scales that know? chosen in each training part only

Rows that are foretold were not calibrated on and have no measurement in them: they go through the two commands of
`python -m planner` as a user's would. Figures that miss what is aimed at are marked. Beside a peer: planner_peer.py.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.planner_figures import choosing, clusters, few, held_out, sizes
from benchmarks.planner_laws import laws
from benchmarks.planner_rows import SHIPPED, Bench, Line, Rows, Section
from benchmarks.planner_scales import nested, tuned
from benchmarks.planner_speed import speed
from planner.errors import PlanError

SECTIONS: Final[dict[str, Callable[[Rows, Bench], list[Section]]]] = {
    "time": held_out,
    "clusters": clusters,
    "few": few,
    "sizes": sizes,
    "choosing": choosing,
    "laws": laws,
    "speed": speed,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 2 if the table cannot be read."""
    asked = _parser().parse_args(argv)
    try:
        rows = Rows.of(asked.table)
    except PlanError as problem:
        print(f"benchmarks.planner: {problem}", file=sys.stderr)
        return 2
    bench = Bench(asked.jobs)
    if asked.tune:
        print(tuned(rows))
        return 0
    wanted = [nested] if asked.nested else [SECTIONS[name] for name in asked.only]
    print(f"{len(rows.all)} rows of {asked.table}, {int(rows.timed.sum())} of them timed")
    sections = []
    for section in wanted:
        for found in section(rows, bench):
            show(found)
            sections.append(found)
    if asked.json:
        told = [asdict(one) | {"lines": [_told(line) for line in one.lines]} for one in sections]
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def show(section: Section) -> None:
    """Print a section; figures out of their limits in brackets with these."""
    names = list(dict.fromkeys(name for line in section.lines for name in line.figures))
    table = Table(title=section.title, caption=section.how, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for name in ("n", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for line in section.lines:
        table.add_row(line.name, f"{line.n:,}", *(_cell(line, name) for name in names))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _cell(line: Line, name: str) -> str:
    if name not in line.figures:
        return ""
    low, high = line.limits.get(name, (None, None))
    text = _number(line.figures[name])
    if low is None or high is None:
        return text
    goal = f"{_number(low)} to {_number(high)}"
    goal = f"<= {_number(high)}" if low == float("-inf") else f">= {_number(low)}" if high == float("inf") else goal
    return f"{text} {'ok' if line.met(name) else 'NOT'} {goal}"


def _number(value: float) -> str:
    if value % 1 == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _told(line: Line) -> dict[str, object]:
    """A line as JSON has it, which knows no infinity."""
    limits = {name: [None if abs(one) == float("inf") else one for one in ends] for name, ends in line.limits.items()}
    met = {name: line.met(name) for name in line.limits}
    return {"name": line.name, "n": line.n, "figures": dict(line.figures), "limits": limits, "met": met}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED, help="measured steps; else the shipped ones")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections; else all")
    parser.add_argument("--tune", action="store_true", help="choose the residual's scales anew instead")
    parser.add_argument("--nested", action="store_true", help="choose them in each training part instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
