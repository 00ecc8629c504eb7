"""Kill -9 one rank, or all, of a training again and again, start it anew, and compare with an undisturbed run.

    python -m benchmarks.kills --kills 50
    python -m benchmarks.kills --kills 20 --strategy fsdp2 --ranks 4
    python -m benchmarks.kills --kills 0 --terms 20       # SIGTERM: it must save and end with 143

Ranks are forked from a warm process (tests/training/nursery.py), so that a start takes a second and a kill may fall
into the start, a step or the writing of a checkpoint. Prints what was hit and the totals; exit code 1 unless every loss
of every step and all weights are the undisturbed run's, bit for bit, and each step was done once.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.training.nursery import Nursery, Run, losses, result, spec, write_dataset, write_job

STEPS, EVERY = 400, 5


def main() -> int:
    """Run it; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--terms", type=int, default=0)
    options.add_argument("--strategy", default="ddp")
    options.add_argument("--parallel", default="{}", help="more of the recipe's parallel part, as JSON")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    told = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="castra-kills-") as place:
        folder, nursery = Path(place), Nursery()
        try:
            well = judge(nursery, folder, told)
        finally:
            nursery.close()
    return int(not well)


def judge(nursery: Nursery, folder: Path, told: argparse.Namespace) -> bool:
    """An undisturbed run and a disturbed one; returns whether they came to the same."""
    dataset, chance = write_dataset(folder / "dataset"), random.Random(told.seed)
    plan = spec(told.strategy, micro=2, steps=STEPS, checkpoint_every=EVERY)
    plan["parallel"] |= json.loads(told.parallel)
    whole = write_job(folder / "whole", plan, dataset=dataset)
    begun = time.monotonic()
    codes, run = nursery.run(whole, told.ranks)
    assert set(codes) == {0}, run.log.read_text()[-2000:]
    took = time.monotonic() - begun
    print(f"undisturbed: {STEPS} steps on {told.ranks} ranks of {told.strategy} in {took:.1f} s", flush=True)
    cut = write_job(folder / "cut", plan, dataset=dataset)
    kinds = disturb(nursery, cut, chance, took, told)
    same = losses(folder / "whole/out") == losses(folder / "cut/out")
    weights = [result(folder / name / "out")["weights_sha256"] for name in ("whole", "cut")]
    print(f"{dict(kinds)}; losses of {STEPS} steps equal: {same}; weights equal: {weights[0] == weights[1]}")
    return same and weights[0] == weights[1]


def disturb(nursery: Nursery, job: Path, chance: random.Random, took: float, told: argparse.Namespace) -> Counter[str]:
    """Start the job until it is done, ending it on the way as often as asked; returns what was done how often."""
    todo = ["kill"] * told.kills + ["term"] * told.terms
    chance.shuffle(todo)
    kinds: Counter[str] = Counter()
    slowest = 0.0
    for kind in todo:
        run = nursery.start(job, told.ranks)
        # the disturbed run must not come to its end before its last disturbance: each gets a fair part of the steps
        time.sleep(chance.uniform(0, 1.2 + 1.5 * took / len(todo)))
        begun = time.monotonic()
        what = strike(run, chance, kind)
        codes = run.wait()
        kinds[f"{what}, ended with {sorted(set(codes))}"] += 1
        slowest = max(slowest, (time.monotonic() - begun) * (kind == "term"))
        kinds["while a checkpoint was written"] += leftovers(job)
    codes, run = nursery.run(job, told.ranks)
    assert set(codes) == {0}, run.log.read_text()[-2000:]
    if told.terms:
        print(f"SIGTERM to the end of all ranks: {slowest:.2f} s at most")
    return kinds


def strike(run: Run, chance: random.Random, kind: str) -> str:
    """Send the signal to one rank or all; the others of a killed rank are ended as torchrun would."""
    alone = kind == "kill" and chance.random() < 0.5
    for pid in [chance.choice(run.pids)] if alone else run.pids:
        send(pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    if alone:
        time.sleep(chance.uniform(0, 0.3))
        for pid in run.pids:
            send(pid, signal.SIGKILL)
    return f"{kind} of {'one rank' if alone else 'all'}"


def leftovers(job: Path) -> int:
    """Whether a checkpoint that was being written is lying there."""
    return int(any((job.parent / "out/checkpoints").glob(".step-*")))


def send(pid: int, number: int) -> None:
    """Send a signal to a rank that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
