"""Kill a lifecycle at random moments with SIGKILL, run it again, and count what differs and what is left.

    python -m benchmarks.chaos --rounds 20

Each round: a fresh store; one run killed after a random share of an undisturbed run's time; a moment to clean up; one
run to the end. Prints one line a round and the totals. Exit code 1 if a rerun failed, a process stayed, or the exported
weights differ from the undisturbed run's.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = """
name: chaos
data: {max_documents: 300, sequence_length: 64}
model: {hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, ffn_size: 128, vocab_size: 512}
train: {steps: 120, global_batch_size: 8, warmup_steps: 5, checkpoint_every: 30}
score: {max_tokens: 5000, must_beat: [unigram]}
serve: {max_new_tokens: 8}
"""
CLEAN_UP_S = 12.0
"""The keeper's grace (8 s) and a little more."""


def main() -> int:
    """Run the rounds; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    told = options.parse_args()
    chance = random.Random(told.seed)
    with tempfile.TemporaryDirectory(prefix="castra-chaos-") as place:
        begun = time.monotonic()
        wanted = finish(Path(place) / "undisturbed")
        undisturbed = time.monotonic() - begun
        print(f"undisturbed: {undisturbed:.1f} s, weights {wanted[:12]}", flush=True)
        bad = sum(not one(Path(place) / f"{n}", chance.uniform(0, undisturbed), wanted) for n in range(told.rounds))
    print(f"{told.rounds - bad} of {told.rounds} rounds finished with the same weights and no process left")
    return int(bad > 0)


def one(place: Path, after_s: float, wanted: str) -> bool:
    """One round: kill after `after_s` seconds, rerun; returns whether all was well."""
    run = start(place)
    time.sleep(after_s)
    run.send_signal(signal.SIGKILL)
    run.wait()
    left_killed = left(place, CLEAN_UP_S)
    begun = time.monotonic()
    got = finish(place)
    took, left_done = time.monotonic() - begun, left(place, 2.0)
    well = got == wanted and not left_killed and not left_done
    print(
        f"{place.name}: killed after {after_s:5.1f} s, {len(left_killed)} processes left; rerun {took:5.1f} s, "
        f"{len(left_done)} left, weights {'same' if got == wanted else got or 'MISSING'}",
        flush=True,
    )
    return well


def start(place: Path) -> subprocess.Popen[bytes]:
    """Start the lifecycle with all of its state under `place`."""
    place.mkdir(parents=True, exist_ok=True)
    recipe = place / "chaos.yaml"
    recipe.write_text(f"{RECIPE}store: {place / 'store'}\n")
    env = os.environ | {"CASTRA_STATE": str(place / "state")}
    with (place / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "flows.lifecycle", str(recipe)], env=env, stdout=log, stderr=log)


def finish(place: Path) -> str:
    """Run the lifecycle to its end; returns the SHA-256 of the exported weights, "" if it failed."""
    if start(place).wait() != 0:
        print((place / "log").read_text()[-2000:])
        return ""
    (manifest,) = (place / "store" / "export").glob("*/manifest.json")
    return str(json.loads(manifest.read_text())["facts"]["weights_sha256"])


def left(place: Path, patience_s: float) -> list[int]:
    """The processes that belong to `place` still after `patience_s` seconds at most."""
    until = time.monotonic() + patience_s
    while (found := _processes(f"CASTRA_STATE={place / 'state'}".encode())) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _processes(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


if __name__ == "__main__":
    sys.exit(main())
