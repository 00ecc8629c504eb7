"""The table of docs/cases-matrix.md, written from what the tests recorded: cases × schedulers, and no cell is empty.

    CASTRA_MATRIX=.castra/matrix pytest tests                # the tests write what they proved below that folder
    python -m benchmarks.matrix .castra/matrix               # writes docs/cases-matrix.md
    python -m benchmarks.matrix .castra/matrix --check       # exit code 1 where the file says otherwise

Exit code 1, with a sentence each, also for a case of recipes/cases without a result on one of the schedulers, and for
results of a case there is not.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.training.cases.matrix import KINDS

ROOT: Final = Path(__file__).parents[1]
TABLE: Final = ROOT / "docs/cases-matrix.md"
CASES: Final = ROOT / "recipes/cases"
WORDS: Final = {"ran": "ran", "emulated": "emulated", "rendered": "rendered + arguments checked"}
"""How a cell was proved, the strongest first, and what the table calls it."""
REFERENCE: Final = {
    "1.megatron-lm": ("✅", "❓", "❓"),
    "2.nemo-launcher": ("✅", "❌", "❌"),
    "3.MPT": ("✅", "❓", "❓"),
    "4.DDP": ("✅", "❓", "❓"),
    "5.param-benchmark": ("✅", "❓", "❓"),
}
"""Slurm, EKS and AWS Batch as its README has them."""
OPENING: Final = """\
# Cases × schedulers

Written by `python -m benchmarks.matrix` from what the tests recorded, never by hand; CI fails where it is not what they
prove. Every case is one recipe of [recipes/cases](../recipes/cases), with no copy for a scheduler.

- **ran**: the program ran here for real, on CPUs, at the size that `--rehearse` makes; on `slurm`, as a job of a real
  Slurm whose nodes are network namespaces.
- **emulated**: it ran for real too, started by the adapter through an emulated AWS service on hosts of their own.
- **rendered + arguments checked**: every request and the program's exact command were made from the recipe; where the
  program is not Castra's own, its arguments were read by the pinned upstream's parser or schema. It did not run here.

Nothing in this table ran on a GPU.

"""


@dataclass(frozen=True, slots=True)
class Result:
    """What one test proved of a cell."""

    case: str
    kind: str
    how: str
    proof: str


def read(folder: Path) -> list[Result]:
    """The results that tests wrote below a folder; raises OSError where there are none."""
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({Result(**json.loads(line)) for line in lines}, key=lambda one: (one.case, one.kind, one.proof))


def strongest(results: Iterable[Result]) -> dict[tuple[str, str], Result]:
    """Of each cell, (case, kind), the strongest proof; of several, the first by its text."""
    found: dict[tuple[str, str], Result] = {}
    order = list(WORDS)
    for one in sorted(results, key=lambda one: (order.index(one.how), one.proof)):
        found.setdefault((one.case, one.kind), one)
    return found


def wrong(cases: Iterable[str], cells: Mapping[tuple[str, str], Result]) -> list[str]:
    """A sentence for every empty cell, and for every case that there is not."""
    known = list(cases)
    empty = [f"{case} has no result on {kind}" for case in known for kind in KINDS if (case, kind) not in cells]
    return empty + [f"recipes/cases has no {case}.yaml" for case in sorted({case for case, _ in cells} - {*known})]


def table(cases: Iterable[str], cells: Mapping[tuple[str, str], Result]) -> str:
    """The whole file: the matrix, the reference's, and what ran."""
    known = list(cases)
    rows = [[case, *(WORDS[cells[case, kind].how] for kind in KINDS)] for case in known]
    counts = {how: sum(one.how == how for one in cells.values()) for how in WORDS}
    told = ", ".join(f"{count} {WORDS[how]}" for how, count in counts.items())
    ran = [
        [case, kind, one.how, one.proof]
        for case in known
        for kind in KINDS
        if (one := cells[case, kind]).how != "rendered"
    ]
    return (
        OPENING
        + _rows(["case", *KINDS], rows)
        + f"\n{len(known)} cases, {len(known) * len(KINDS)} cells: {told}.\n"
        + "\n## The reference's\n\n"
        "[awsome-distributed-training](https://github.com/aws-samples/awsome-distributed-training), README.md of 26 "
        "October 2023 (commit 2fe126c8): ✅ tested, ❓ unknown, ❌ not there.\n\n"
        + _rows(["test case", "Slurm", "EKS", "AWS Batch"], [[name, *how] for name, how in REFERENCE.items()])
        + "\n## What ran, and which test shows it\n\n"
        + _rows(["case", "where", "how", "test"], ran)
    )


def _rows(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def main() -> int:
    """Write or check the table; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="what CASTRA_MATRIX was when the tests ran")
    options.add_argument("--check", action="store_true", help="compare, and write nothing")
    asked = options.parse_args()
    cases = sorted(path.stem for path in CASES.glob("*.yaml"))
    try:
        cells = strongest(read(asked.folder))
    except OSError as problem:
        sys.stderr.write(f"{asked.folder} has no results ({problem.strerror}); run the tests with CASTRA_MATRIX\n")
        return 1
    problems = wrong(cases, cells)
    if not problems and asked.check and (not TABLE.exists() or TABLE.read_text() != table(cases, cells)):
        problems = [f"{TABLE.name} is not what the tests prove: run `python -m benchmarks.matrix {asked.folder}`"]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    if not problems and not asked.check:
        TABLE.write_text(table(cases, cells))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
