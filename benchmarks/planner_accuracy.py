"""How right the planner is on training steps that others measured and published.

    python -m benchmarks.planner_accuracy                    # the rows shipped in planner/tables/measured.csv
    python -m benchmarks.planner_accuracy public.csv         # any table with its columns
    python -m benchmarks.planner_accuracy public.csv --write # choose the GPU constants anew, and keep the rows used

The constants are chosen on half of the rows that state everything (whole groups, by hash); "held out" are the others
and the rows whose source leaves something open. Bias is measured over predicted.
"""

import argparse
import csv
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from planner.calibrate import chosen_on, derive, ratios
from planner.measured import TABLE, Measured, Row, arrays, rows_in_scope, select
from planner.memory import breakdown
from planner.prior import TABLE as PRIORS
from planner.speed import Prior


def speed_lines(rows: Measured, priors: dict[str, Prior]) -> list[str]:
    """Accuracy of the step time, by generation, by source, seen and held out."""
    lines = [f"{'step time':34}{'rows':>6}{'MAPE %':>9}{'median %':>10}{'bias':>7}{'in interval %':>15}"]
    seen = chosen_on(rows)
    for family in np.unique(rows.family):
        for source in np.unique(rows.source[rows.family == family]):
            for words, half in (("chosen on", seen), ("held out", ~seen)):
                mine = select(rows, half & (rows.family == family) & (rows.source == source))
                if len(mine.seconds):
                    lines.append(_line(f"{family} {source}, {words}", mine, priors[str(family)]))
    for family in np.unique(rows.family):
        other = select(rows, rows.family != family)
        lines.append(_line(f"{family} constants on the others", other, priors[str(family)]))
    return lines


def memory_lines(rows: Measured) -> list[str]:
    """Predicted and measured memory of every row that has it."""
    measured = select(rows, ~np.isnan(rows.memory_gib))
    predicted = np.sum(list(breakdown(measured.grid, "gpu").values()), axis=0)
    off = predicted / measured.memory_gib - 1
    lines = [
        f"memory: {len(off)} rows, MAPE {100 * np.mean(np.abs(off)):.0f} %, mean error {100 * np.mean(off):+.0f} %"
    ]
    for source, mine, theirs in zip(measured.source, predicted, measured.memory_gib, strict=True):
        lines.append(f"  {source:32}{mine:8.1f} GiB predicted{theirs:8.1f} measured")
    return lines


def write(rows: list[Row], priors: dict[str, Prior]) -> None:
    """Keep the rows used, and the constants chosen on them; the columns and this machine's constants stay."""
    columns = TABLE.read_text().partition("\n")[0].split(",")
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    told = json.loads(PRIORS.read_text())
    told["priors"] |= {name: asdict(prior) for name, prior in priors.items()}
    PRIORS.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Print the report; 2 if the table cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", nargs="?", type=Path, default=TABLE, help="measured steps; default: the shipped ones")
    parser.add_argument("--write", action="store_true", help="replace planner/tables by what was found")
    asked = parser.parse_args(argv)
    try:
        kept, left_out = rows_in_scope(asked.table)
    except (OSError, ValueError) as problem:
        print(f"planner_accuracy: {problem}", file=sys.stderr)
        return 2
    rows = arrays(kept)
    priors = derive(rows)
    for name, prior in priors.items():
        print(f"{name}: " + ", ".join(f"{field} {value}" for field, value in asdict(prior).items()))
    print("\n".join(["", *speed_lines(rows, priors), "", *memory_lines(rows), "", _left_out(left_out)]))
    if asked.write:
        write(kept, priors)
    return 0


def _line(words: str, rows: Measured, prior: Prior) -> str:
    found = ratios(rows, prior)
    off = 100 * np.abs(1 / found - 1)
    native = rows.grid.software.deepspeed == 0
    low, high = (np.where(native, a, b) for a, b in zip(prior.interval, prior.deepspeed_interval, strict=True))
    inside = 100 * np.mean((low <= found) & (found <= high))
    bias = np.exp(np.mean(np.log(found)))
    return f"{words:34}{len(found):6}{np.mean(off):9.1f}{np.median(off):10.1f}{bias:7.2f}{inside:15.0f}"


def _left_out(reasons: Counter[str]) -> str:
    return "left out: " + (", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "none")


if __name__ == "__main__":
    sys.exit(main())
