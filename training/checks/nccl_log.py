"""Read what nccl-tests printed, and what NCCL said of the network it chose: `python -m training.checks.nccl_log`.

    python -m training.checks.nccl_log run.log --ranks 16 --nodes 2 --line 400 --provider efa

prints what the log proves and what speaks against it. Every program of nccl-tests is understood, from the tables of
2019 (an `error` column) to those of 2.18 (`#wrong`, a version line), behind the prefixes of mpirun and srun.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from training.checks.bandwidth import Row, ranks_range
from training.checks.fabric import Fabric, fabrics
from training.checks.gate import Expected, Seen, counted, judge

ROUNDING: Final = 0.005
"""nccl-tests prints bandwidths with two decimals."""
PROGRAMS: Final = {"alltoall": "all_to_all", "alltoallv": "all_to_all", "sendrecv": "send_recv"}
"""Programs whose collective has another name here."""
TYPES: Final = "u?int(?:8|32|64)|half|float|double|bfloat16|f8e[45]m[23]|char"
TABLE: Final = re.compile(rf"(?<![\d.])(\d+)\s+(\d+)\s+(?:{TYPES})\s+(.*)")
RANK: Final = re.compile(r"Rank\s+(\d+)(?:\s+Group\s+\d+)?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)")
HEADER: Final = re.compile(r"nThread \d+ nGpus \d+ minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)")
NAMED: Final = re.compile(r"\b([a-z]+(?:_[a-z]+)*)_perf(?:_mpi)?\b")
VERSION: Final = re.compile(r"nccl-tests version (\S+)")
END: Final = re.compile(r"Out of bounds values\s*:\s*(\d+)")


@dataclass(slots=True)
class Run:
    """One run of one program of nccl-tests."""

    collective: str
    rows: list[Row] = field(default_factory=list)
    members: list[tuple[int, str, int]] = field(default_factory=list)
    """Rank, host and device of every rank that was listed."""
    version: str = ""
    signature: tuple[str, ...] = ()
    """The columns between type and times: operation, root, both or none."""
    sizes: tuple[int, int, int] | None = None
    """Smallest and largest size asked for, in bytes, and how many sizes that makes."""
    counts_wrong: bool = False
    """Whether the table counts wrong elements, or tells a deviation that may be rounding."""
    out_of_bounds: int | None = None
    """What the program itself found wrong, once it came to its end."""
    garbled: int = 0
    """Lines of the table that are not whole."""
    abridged: bool = False
    """Whether whoever published the log left lines out."""

    def seen(self, fabrics: Mapping[str, Fabric]) -> Seen:
        """Return what the log says besides its rows."""
        ranks = [rank for rank, _, _ in self.members]
        alone = len(ranks) - len(set(ranks))
        whole = not self.abridged and not alone
        return Seen(
            ranks=len(ranks) if ranks and whole else None,
            hosts=tuple(sorted({host for _, host, _ in self.members})) if whole else (),
            fabrics=fabrics,
            gaps=tuple(self.gaps),
            out_of_bounds=self.out_of_bounds or 0,
            alone=alone + 1 if alone else 0,
        )

    @property
    def gaps(self) -> Iterator[str]:
        """What is missing from the table, or out of order."""
        if self.garbled:
            yield f"{self.garbled} lines of the table of {self.collective} are cut off"
        if not self.rows:
            yield f"the table of {self.collective} has no row"
            return
        sizes = [row["bytes"] for row in self.rows if not row.get("in_place")]
        if sizes != sorted(sizes):
            yield f"the sizes of {self.collective} are out of order, as where several runs write into one log"
        if self.sizes and not self.abridged and len(sizes) < self.sizes[2]:
            yield (
                f"{self.collective} ends after {len(sizes)} of {self.sizes[2]} sizes, at {sizes[-1]:,} bytes: "
                "the run was cut short"
            )


@dataclass(frozen=True, slots=True)
class Log:
    """All that a log holds."""

    runs: list[Run]
    fabrics: Mapping[str, Fabric]
    """By host, what NCCL said of its network."""


def read(text: str) -> Log:
    """Read a log; one without any table has no runs."""
    runs: list[Run] = []
    named = ""
    for line in text.splitlines():
        if found := NAMED.search(line):
            named = PROGRAMS.get(found[1], found[1])
        if not runs or _begins(line, runs[-1]):
            runs.append(Run(named))
        _take(line, runs[-1])
    tests = [run for run in runs if run.rows or run.members or run.sizes]
    for run in tests:
        run.collective = run.collective or _guess(run)
        for row in run.rows:
            row["collective"] = run.collective
    return Log(tests, fabrics(text))


def _begins(line: str, run: Run) -> bool:
    """Whether a line is the first of another run."""
    starts = "nccl-tests version" in line or "Collective test starting" in line or ("algbw" in line and "busbw" in line)
    return bool(run.rows) and (starts or bool(HEADER.search(line)))


def _take(line: str, run: Run) -> None:
    """Add to a run what a line of its log says."""
    if found := TABLE.search(line):
        _take_row(int(found[1]), found[3].split(), run)
    elif found := RANK.search(line):
        run.members.append((int(found[1]), found[2], int(found[3])))
    elif found := HEADER.search(line):
        run.sizes = _sizes(int(found[1]), int(found[2]), int(found[3]), found[4] == "factor")
    elif found := VERSION.search(line):
        run.version = found[1]
    elif found := END.search(line):
        run.out_of_bounds = int(found[1])
    elif "#wrong" in line:
        run.counts_wrong = True
    elif line.strip(" #") in ("...", "......"):
        run.abridged = True
    elif (found := NAMED.search(line)) and "starting" in line:
        run.collective = PROGRAMS.get(found[1], found[1])


def _take_row(size: int, words: list[str], run: Run) -> None:
    """Add the two measurements of a line: out of place and in place, each of time, two bandwidths and errors."""
    try:
        figures = [None if word == "N/A" else float(word) for word in words[-8:]]
        rows = [_row(size, figures[:4], run, in_place=False), _row(size, figures[4:], run, in_place=True)]
    except ValueError:
        run.garbled += 1
    else:
        run.signature = tuple(words[:-8])
        run.rows += rows


def _row(size: int, figures: list[float | None], run: Run, *, in_place: bool) -> Row:
    """Return one measurement; raises ValueError if the figures are not those of one."""
    time, algbw, busbw, wrong = figures
    if time is None or algbw is None or busbw is None:
        raise ValueError
    return Row(
        collective=run.collective,
        bytes=size,
        seconds=time / 1e6,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        wrong=int(wrong) if run.counts_wrong and wrong is not None else None,
        in_place=in_place,
        rounding=ROUNDING,
    )


def _sizes(smallest: int, largest: int, step: int, by_factor: bool) -> tuple[int, int, int]:
    """Return the sizes asked for, and their number."""
    if not by_factor:
        return smallest, largest, (largest - smallest) // max(step, 1) + 1
    count, size = 1, max(smallest, 1)
    while step > 1 and size * step <= largest:
        count, size = count + 1, size * step
    return smallest, largest, count


def _guess(run: Run) -> str:
    """Name the collective of a table that does not: by operation, root, and what busbw is of algbw."""
    if not run.rows:
        return "nccl-tests"
    sums = any(word.isalpha() and word != "none" for word in run.signature)
    if run.signature and run.signature[-1].isdigit():
        return "reduce" if sums else "broadcast"
    if not sums:
        return "all_gather"  # or an all-to-all, whose factor is the same
    checked = {row.get("in_place"): row.get("wrong") for row in run.rows}
    if checked.get(False) is not None and checked.get(True) is None:
        return "send_recv"  # has no form in place, so that nobody checks that
    large = [row["busbw_gbps"] / row["algbw_gbps"] for row in run.rows if row["algbw_gbps"] > 1]
    return "reduce_scatter" if 0.01 < max(large, default=1.0) < 0.99 else "all_reduce"


def main(argv: list[str] | None = None) -> int:
    """Print what a log proves: 0 if it admits, 1 if it speaks against the cluster, 2 if there is nothing to read."""
    asked = _arguments().parse_args(argv)
    try:
        log = read(asked.log.read_text(errors="replace"))
    except OSError as problem:
        print(f"{asked.log} cannot be read: {problem.strerror}", file=sys.stderr)
        return 2
    if not log.runs and not log.fabrics:
        print(f"{asked.log} holds nothing of nccl-tests or NCCL: give the output of all_reduce_perf", file=sys.stderr)
        return 2
    refused = False
    runs: list[Run | None] = [*log.runs]
    for run in runs or [None]:
        seen = run.seen(log.fabrics) if run else Seen(fabrics=log.fabrics)
        ranks, nodes = asked.ranks or seen.ranks, asked.nodes or len(seen.hosts) or None
        expected = Expected(ranks, nodes, asked.provider, asked.line, asked.fraction, asked.nics)
        print(_told(run, log) if run else _through(log))
        for finding in judge(run.rows if run else [], expected, seen):
            print(f"  {finding.severity}: {': '.join(filter(None, (finding.node, finding.what)))}; {finding.todo}")
            refused = refused or finding.severity == "refuse"
    unjudged = (
        " of what was asked; give --ranks and --nodes to have it judged" if not (asked.ranks and asked.nodes) else ""
    )
    print("refused" if refused else f"nothing speaks against it{unjudged}")
    return 1 if refused else 0


def _told(run: Run, log: Log) -> str:
    """One line on a run."""
    best = max((row["busbw_gbps"] for row in run.rows), default=0.0)
    low, high = ranks_range(run.rows)
    ranks = "tells no ranks" if (low, high) == (1, math.inf) else counted(low, high)
    largest = max((row["bytes"] for row in run.rows), default=0)
    return (
        f"{run.collective}: {len(run.rows)} measurements up to {largest:,} bytes, best bus bandwidth {best:g} GB/s, "
        f"busbw/algbw: {ranks}; {_through(log)}"
    )


def _through(log: Log) -> str:
    """Say what the traffic went through."""
    if not log.fabrics:
        return "no line of NCCL's own"
    return ", ".join(f"{host} uses {fabric.provider or '?'}" for host, fabric in sorted(log.fabrics.items())[:4])


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.checks.nccl_log", description=__doc__.split(":")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--ranks", type=int, help="ranks the job has (default: what the log lists)")
    parser.add_argument("--nodes", type=int, help="nodes the job has (default: what the log lists)")
    parser.add_argument("--provider", help="network NCCL must use, as in efa")
    parser.add_argument("--nics", type=int, help="network interfaces every node must have")
    parser.add_argument("--line", type=float, metavar="GB/s", help="line rate of one node, one direction; p5: 400")
    parser.add_argument("--fraction", type=float, help="share of it that an all-reduce of 2 GiB must reach (0.5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
