"""From submission to the first line of a job's log, on every kind of cluster of this machine, over that of `local`.

    python -m benchmarks.submit_latency

The job prints a line and ends; the median of five. Slurm needs root and its packages.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from clusters.base import Cluster
from clusters.local import LocalCluster
from emulator import aws as emulated
from emulator import slurm
from tests.clusters import batch_yard, eks_yard, sagemaker_yard, slurm_yard
from tests.clusters.yard import Yard

ROUNDS = 5
KINDS: dict[str, Callable[[Path], Cluster]] = {
    "local": lambda folder: LocalCluster(folder / "jobs", grace_s=1),
    "slurm": slurm_yard.cluster,
    "batch": batch_yard.batch,
    "sagemaker": sagemaker_yard.sagemaker,
    "eks": eks_yard.eks,
}


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="castra-latency-") as place:
        folder = Path(place) / "yard"
        folder.mkdir()
        os.environ[emulated.SHARE] = place
        with emulated.running(Path(place), share=[Path(place)]) as running:
            os.environ |= emulated.environment(running.endpoint)
            yard, base = Yard(folder), 0.0
            for kind, make in KINDS.items():
                if kind == "slurm" and not slurm.possible():
                    print("slurm: not here")
                    continue
                cluster = make(folder)
                times = [_once(cluster, yard, f"{kind}-{number}") for number in range(ROUNDS)]
                sent, first, done = (statistics.median(column) for column in zip(*times, strict=True))
                base = base or first
                print(
                    f"{kind:10} submitted {sent:6.3f} s, first line {first:6.2f} s ({first / base:4.1f} × local), "
                    f"known to have ended {done:6.2f} s",
                    flush=True,
                )


def _once(cluster: Cluster, yard: Yard, name: str) -> tuple[float, float, float]:
    """Seconds until the submission was accepted, until the first line was read, until the end was known."""
    begun = time.perf_counter()
    job = cluster.submit(yard.job(name))
    sent = time.perf_counter() - begun
    while not cluster.logs(job)[0]:
        time.sleep(0.02)
    first = time.perf_counter() - begun
    while not cluster.status(job).state.done:
        time.sleep(0.02)
    return sent, first, time.perf_counter() - begun


if __name__ == "__main__":
    main()
