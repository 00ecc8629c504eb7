"""The planner for programs: learn from measured steps, foretell others, sweep layouts, say what to measure next.

    python -m planner calibrate --rows ROWS.csv --collectives C.csv --out PROFILES
    python -m planner predict --profiles PROFILES --rows ROWS.csv --out OUT.csv
    python -m planner sweep --model MODEL.yaml --instance p5.48xlarge --gpus 64..512 --json
    python -m planner suggest --profiles PROFILES --rows ROWS.csv

ROWS has the columns of tables/measured.csv (see README.md); what was not measured is empty. The exit code is 2, with
one sentence, where something is wrong with the request.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from planner.errors import PlanError

ELSEWHERE: Final = {"sweep": "planner.sweep", "suggest": "planner.suggest"}
"""Commands that parse their own arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in ELSEWHERE:
            return int(import_module(ELSEWHERE[words[0]]).main(words[1:]))
        return _here(words)
    except BrokenPipeError:  # whoever read us has enough
        return 0
    except (PlanError, OSError) as problem:
        print(f"planner: {problem}", file=sys.stderr)
        return 2


def _here(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m planner", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True, metavar="calibrate | predict | sweep | suggest")
    learn = commands.add_parser("calibrate", help="learn profiles from measured steps")
    learn.add_argument("--rows", type=Path, required=True, nargs="+", help="measured steps, one CSV or several")
    learn.add_argument("--collectives", type=Path, required=True, help="measured collectives, CSV")
    learn.add_argument("--out", type=Path, required=True, help="folder for the profiles")
    foretell = commands.add_parser("predict", help="foretell rows without measurements")
    foretell.add_argument("--profiles", type=Path, required=True, help="folder that calibrate wrote")
    foretell.add_argument("--rows", type=Path, required=True, help="rows to foretell, CSV")
    foretell.add_argument("--out", type=Path, required=True, help="where the predictions go, CSV")
    asked = parser.parse_args(words)
    return _calibrate(asked) if asked.command == "calibrate" else _predict(asked)


def _calibrate(asked: argparse.Namespace) -> int:
    from planner import links
    from planner.calibrate import calibrate
    from planner.rows import read

    curves = links.fit(links.read(asked.collectives))
    rows = [row for path in asked.rows for row in read(path, curves).rows]
    profiles = calibrate(rows, curves)
    profiles.save(asked.out)
    print(f"{len(profiles.own)} profiles from {len(rows)} rows are in {asked.out}")
    return 0


def _predict(asked: argparse.Namespace) -> int:
    from planner.predict import table
    from planner.profiles import Profiles

    count = table(Profiles.load(asked.profiles), asked.rows, asked.out)
    print(f"{count} rows are foretold in {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
