"""Splits of measured steps, and the planner's answers for rows it has not seen, got as a user gets them."""

import csv
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner import residual
from planner.calibrate import calibrate
from planner.keys import key_of
from planner.predict import table
from planner.profiles import Profiles
from planner.residual import Scales
from planner.rows import Row, read
from planner.schema import Floats

SHIPPED: Final = Path(__file__).parents[1] / "planner" / "tables" / "measured.csv"
OUTCOMES: Final = ("iter_s", "tok_s_gpu", "tflops_gpu", "mem_gib", "mem_kind", "derived_from", "usable")
"""Columns that were known only after a run, or say what was measured: empty in rows that are foretold."""
SIMULATED: Final = "vtrain_single_simulated"
"""A simulator's output, which is no measurement."""
PARTS: Final = 4
"""A quarter of the groups is held out."""
SEEDS: Final = 5

Mask = NDArray[np.bool_]
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """The measured steps of a table, and what splits and figures need of them; one element per row each."""

    all: list[Row]
    source: NDArray[np.str_]
    group: NDArray[np.str_]
    seconds: Floats
    """Measured; NaN where none was, or the table says it is of no use. Likewise memory, in GiB."""
    memory_gib: Floats
    experts: Mask
    ran_out: Mask

    @classmethod
    def of(cls, path: Path) -> "Rows":
        """The rows of a CSV table that are measurements; raises `BadTable`."""
        rows = [row for row in read(path).rows if row["source"] != SIMULATED and row["usable"] != "none"]
        timed = np.array(["time" in row["usable"] and bool(row["iter_s"]) for row in rows])
        return cls(
            all=rows,
            source=np.array([row["source"] for row in rows]),
            group=np.array([row["group"] for row in rows]),
            seconds=np.where(timed, [float(row["iter_s"] or "nan") for row in rows], np.nan),
            memory_gib=np.array([float(row["mem_gib"] or "nan") for row in rows]),
            experts=np.array([key_of(row).experts for row in rows]),
            ran_out=np.array([row["usable"] == "oom" for row in rows]),
        )

    @property
    def timed(self) -> Mask:
        """Rows with a time."""
        return np.isfinite(self.seconds)

    def sources(self) -> list[str]:
        """Their names, sorted."""
        return sorted(set(self.source.tolist()))

    def where(self, which: Mask) -> list[Row]:
        """The rows that a mask picks."""
        return [self.all[at] for at in np.flatnonzero(which)]

    def quarters(self, seed: int) -> list[Mask]:
        """All rows in four parts, by chance; rows of one group stay together."""
        shuffled = np.random.default_rng(seed).permutation(np.unique(self.group))
        return [np.isin(self.group, part) for part in np.array_split(shuffled, PARTS)]

    def trial(self, unseen: Mask, known: Mask | None = None, *, intervals: bool = False) -> "Trial":
        """Calibrate on `known` (else all the others) and foretell the unseen."""
        return Trial(self.where(~unseen if known is None else known), self.where(unseen), intervals=intervals)


@dataclass(frozen=True)
class Trial:
    """Rows to calibrate on, and rows to foretell."""

    known: Sequence[Row]
    unseen: Sequence[Row]
    intervals: bool = False
    """Whether the intervals are wanted too, which takes ten times as long."""
    scales: Mapping[str, Scales] = field(default_factory=dict)
    """Instead of the shipped ones."""


@dataclass(frozen=True)
class Told:
    """What the planner says of rows, one element each."""

    seconds: Floats
    low: Floats
    high: Floats
    gib: Floats
    fits: Mask
    profile: list[str]


def learned(rows: Sequence[Row], *, intervals: bool = False) -> Profiles:
    """Profiles of these rows, as `python -m planner calibrate` makes them."""
    return calibrate(rows, intervals=intervals)


def foretold(profiles: Profiles, rows: Sequence[Row]) -> Told:
    """What `python -m planner predict` writes for these rows, all that was measured blanked."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "rows.csv", Path(folder) / "out.csv"
        profiles.save(Path(folder))
        with asked.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(dict(row) | dict.fromkeys(OUTCOMES, "") for row in rows)
        table(Profiles.load(Path(folder)), asked, out)
        with out.open(newline="") as file:
            told = list(csv.DictReader(file))

    def column(name: str) -> Floats:
        return np.array([float(row[name]) for row in told])

    fits = np.array([row["fits"] == "true" for row in told])
    times = (column("iter_s"), column("iter_s_lo"), column("iter_s_hi"))
    return Told(*times, gib=column("mem_gib"), fits=fits, profile=[row["profile"] for row in told])


def answer(trial: Trial) -> Told:
    """Calibrate and foretell."""
    shipped = dict(residual.SCALES)
    residual.SCALES.update(trial.scales)
    try:
        return foretold(learned(trial.known, intervals=trial.intervals), trial.unseen)
    finally:
        residual.SCALES.update(shipped)


ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment in which NumPy keeps to one thread."""


@dataclass(frozen=True)
class Bench:
    """Processes of one thread that answer trials side by side; says on stderr how far they are."""

    jobs: int

    def answers(self, words: str, trials: Sequence[Trial]) -> list[Told]:
        """One answer per trial, in their order; `words` say on stderr what is being done."""
        return self.each(words, answer, trials)

    def each(self, words: str, work: Callable[[Trial], T], trials: Sequence[Trial]) -> list[T]:
        """What `work`, a function of a module, makes of each trial."""
        os.environ |= ONE_THREAD
        began, found = time.perf_counter(), list[T]()
        with ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn")) as pool:
            for told in pool.map(work, trials):
                found.append(told)
                print(f"\r{words}: {len(found)} of {len(trials)}", end="", file=sys.stderr, flush=True)
        print(f", {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return found


@dataclass(frozen=True)
class Line:
    """Figures of one kind of rows."""

    name: str
    n: int
    """How many rows (or other things) they are of."""
    figures: Mapping[str, float]
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Least and most that is aimed at, by figure."""

    def without(self, *names: str) -> "Line":
        """The line less some of its figures."""
        return replace(self, figures={name: value for name, value in self.figures.items() if name not in names})

    def met(self, name: str) -> bool:
        """Whether a figure is within its limits."""
        low, high = self.limits.get(name, (-np.inf, np.inf))
        return bool(low <= self.figures[name] <= high)


@dataclass(frozen=True)
class Section:
    """A table of the report."""

    title: str
    how: str
    """Which rows were held out, and what the figures are."""
    lines: Sequence[Line]


def at_most(value: float) -> tuple[float, float]:
    """A limit."""
    return -np.inf, value


def errors(told: Floats, measured: Floats) -> dict[str, float]:
    """Mean and median of the relative errors, and the mean ratio, of predictions; in percent."""
    off = 100 * np.abs(told / measured - 1)
    bias = 100 * (np.exp(np.mean(np.log(told / measured))) - 1)
    return {"MAPE": float(np.mean(off)), "median": float(np.median(off)), "bias": float(bias)}
