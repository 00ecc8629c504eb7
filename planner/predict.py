"""Foretell the rows of a table: step time with its interval, peak memory, and whether it fits."""

import csv
from collections.abc import Sequence
from pathlib import Path

from planner.keys import Key, key_of
from planner.memory_fit import leanest
from planner.profiles import Prediction, Profiles
from planner.rows import Steps, read

COLUMNS = ("id", "iter_s", "iter_s_lo", "iter_s_hi", "mem_gib", "fits", "profile")


def predict(profiles: Profiles, steps: Steps, keys: Sequence[Key]) -> Prediction:
    """One prediction per row, of the fastest of the micro-batch sizes it may have had; `keys` are the rows'."""
    told = profiles.predict(steps.configs, [keys[row] for row in steps.own])
    seconds, first = steps.fastest(told.seconds)
    return Prediction(seconds, told.low[first], told.high[first])


def table(profiles: Profiles, path: Path, out: Path) -> int:
    """Foretell the rows of one CSV file into another; returns how many. Raises `BadTable`, OSError."""
    steps = read(path, profiles.links)
    keys = [key_of(row) for row in steps.rows]
    told = predict(profiles, steps, keys)
    words = [key.software for key in keys]
    gib = profiles.memory.predict(steps.configs, [words[row] for row in steps.own])
    fits = profiles.memory.fits(steps.configs, [words[row] for row in steps.own])
    lean = leanest(steps, gib)
    with out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for at, row in enumerate(steps.rows):
            times = (told.seconds[at], told.low[at], told.high[at], gib[lean[at]])
            writer.writerow(
                [
                    row["id"],
                    *(f"{value:.6g}" for value in times),
                    str(bool(fits[lean[at]])).lower(),
                    profiles.name(keys[at]),
                ]
            )
    return len(steps.rows)
