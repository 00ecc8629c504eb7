"""The planner beside other people's, on the same rows in the same run.

    python -m benchmarks.planner_peer                        # llm-analysis 0.2.2, from the package index
    python -m benchmarks.planner_peer --calculon SOURCE      # calculon too, from a folder with its source

Each gets an environment of its own under .tools/ and the dense rows it has words for. Peers answer as they come, and
with one factor for each source and precision, chosen on rows that are not judged; our rows are held out in four parts.
calculon is not in the package index (another project has its name there): git clone github.com/calculon-ai/calculon.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.planner import show
from benchmarks.planner_rows import ONE_THREAD, SHIPPED, Bench, Line, Mask, Rows, Section, Trial, errors, learned
from benchmarks.planner_speed import SWEEPS, run
from planner.errors import PlanError
from planner.keys import key_of
from planner.predict import predict
from planner.rows import steps
from planner.schema import Floats

HERE: Final = Path(__file__).parents[1]
TOOLS: Final = HERE / ".tools"
TIMES: Final = 3


@dataclass(frozen=True)
class Peer:
    """Another planner."""

    name: str
    packages: tuple[str, ...]
    """What goes into its environment."""
    words: tuple[str, ...] = ()
    """For its script."""

    def ask(self, rows: Rows, which: Mask) -> "Answers":
        """Its seconds for the rows that a mask picks; raises CalledProcessError."""
        python = _environment(self)
        script = HERE / "benchmarks" / "peers" / f"ask_{self.name.replace('-', '_')}.py"
        asked = json.dumps(rows.where(which))
        told = [
            json.loads(
                subprocess.run(
                    [python, script, *self.words],
                    input=asked,
                    env=os.environ | ONE_THREAD,
                    cwd=TOOLS,
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                ).stdout
            )
            for _ in range(TIMES)
        ]
        seconds = np.full(len(rows.all), np.nan)
        seconds[which] = [np.nan if one is None else one for one in told[0]["seconds"]]
        refused = Counter(reason for reason in told[0]["refused"] if reason)
        return Answers(seconds, refused, max(one["per_second"] for one in told))


@dataclass(frozen=True)
class Answers:
    """What a peer says."""

    seconds: Floats
    """One per row of the table, NaN where it was not asked or refused."""
    refused: Counter[str]
    per_second: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each peer; 2 if the table cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_peer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED, help="measured steps; else the shipped ones")
    parser.add_argument("--calculon", type=Path, metavar="SOURCE", help="a folder with calculon's source")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    asked = parser.parse_args(argv)
    try:
        rows = Rows.of(asked.table)
    except PlanError as problem:
        print(f"benchmarks.planner_peer: {problem}", file=sys.stderr)
        return 2
    peers = [Peer("llm-analysis", ("llm-analysis==0.2.2",))]
    if asked.calculon:
        source = asked.calculon.resolve()
        peers.append(Peer("calculon", (str(source), "pandas", "psutil"), (str(source),)))
    parts = rows.quarters(0)
    ours = _ours(rows, parts, Bench(asked.jobs))
    stated = np.array([bool(row["mbs"]) for row in rows.all])
    try:
        for peer in peers:
            answers = peer.ask(rows, rows.timed & stated & ~rows.experts)
            show(_beside(peer, answers, rows, parts, ours))
            print("it refuses: " + ", ".join(f"{count} rows ({why})" for why, count in answers.refused.most_common()))
    except subprocess.CalledProcessError as problem:
        print(f"benchmarks.planner_peer: {peer.name} cannot be installed or asked here: {problem}", file=sys.stderr)
        return 2
    show(_speeds(rows))
    return 0


def _environment(peer: Peer) -> Path:
    """The interpreter of a peer's environment, made if need be."""
    folder = TOOLS / peer.name
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"installing {', '.join(peer.packages)} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.packages], check=True, stdout=sys.stderr)
        (folder / "made").touch()
    return python


def _ours(rows: Rows, parts: Sequence[Mask], bench: Bench) -> Floats:
    """Our seconds for every row, none of which was calibrated on."""
    seconds = np.full(len(rows.all), np.nan)
    trials = [rows.trial(part) for part in parts]
    for part, told in zip(parts, bench.answers("ours, in four parts", trials), strict=True):
        seconds[part] = told.seconds
    return seconds


def _beside(peer: Peer, answers: Answers, rows: Rows, parts: Sequence[Mask], ours: Floats) -> Section:
    given = np.isfinite(answers.seconds)
    kind = np.array([f"{row['source']} {row['precision']}" for row in rows.all])
    scaled = answers.seconds.copy()
    for part in parts:
        for name in np.unique(kind[given & part]):
            mine, others = given & part & (kind == name), given & ~part & (kind == name)
            if np.any(others):
                scaled[mine] *= np.median(rows.seconds[others] / answers.seconds[others])

    def line(name: str, mine: Mask) -> Line:
        true = rows.seconds[mine]
        told = {"as it comes": answers.seconds, "with a factor": scaled, "ours": ours}
        found = {who: errors(seconds[mine], true) for who, seconds in told.items()}
        figures = {f"{who}: {what}": one[what] for who, one in found.items() for what in ("MAPE", "median")}
        return Line(name, len(true), figures)

    lines = [line(name, mine) for name in rows.sources() if np.any(mine := given & (rows.source == name))]
    lines.append(line("pooled", given))
    how = f"{answers.per_second:,.0f} configurations/s, best of {TIMES}; dense rows it has words for; errors in %"
    return Section(f"{peer.name} and ours on the same rows", how, lines)


def _speeds(rows: Rows) -> Section:
    """Ours: a sweep by the formulas, and single rows with residual and interval, each on one thread."""
    told = json.loads(run("benchmarks.planner_speed", *next(iter(SWEEPS.values())).split())[1])
    sweep = Line(
        "ours, swept: time and memory", told["considered"], {"per second": told["considered"] / told["seconds"]}
    )
    trial = Trial(rows.where(~rows.quarters(0)[0]), rows.all)
    profiles, found = learned(trial.known), steps(trial.unseen)
    keys, took = [key_of(row) for row in found.rows], list[float]()
    for _ in range(TIMES):
        began = time.perf_counter()
        predict(profiles, found, keys)
        took.append(time.perf_counter() - began)
    each = Line("ours, row by row: residual and interval", len(keys), {"per second": len(keys) / min(took)})
    return Section("How many configurations a second", f"best of several; load {os.getloadavg()[0]:.1f}", [sweep, each])


if __name__ == "__main__":
    sys.exit(main())
