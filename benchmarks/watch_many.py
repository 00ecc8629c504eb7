"""A thousand jobs watched by one watcher, beside a thousand that each ask for themselves.

python -m benchmarks.watch_many --jobs 1000 --seconds 20

The jobs wait in a queue of the emulated Batch that gets no instances. Printed: calls, calls a second, memory, how old
an answer was at most; and the same for jobs that are asked for one by one, as far as they got in the same time.
"""

import argparse
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusters import aws
from clusters.base import State, Status
from clusters.batch import BatchCluster
from clusters.watcher import Watcher
from emulator import aws as emulated
from tests.clusters import batch_yard

PACE_S = 2.0
LOOK_S = 0.5
"""Each job has a thread of its own that wants to know how it stands, this often."""


def main() -> None:
    """Submit the jobs, watch them both ways, print the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=20.0)
    told = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="castra-watch-") as folder, emulated.running(Path(folder)) as running:
        os.environ |= emulated.environment(running.endpoint)
        cluster, jobs = _waiting(Path(folder), told.jobs)
        watcher = Watcher(cluster, PACE_S)
        _report("one watcher", jobs, told.seconds, watcher.status)
        _report("each by itself", jobs, told.seconds, cluster.status)


def _waiting(folder: Path, count: int) -> tuple[BatchCluster, list[str]]:
    """The adapter, and the ids of jobs that wait for instances which do not come."""
    cluster = batch_yard.batch(folder)
    site = aws.here()
    batch_yard.scarce(site.endpoint)
    api: Any = aws.client(site, "batch")
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
    api.register_job_definition(
        jobDefinitionName="waits",
        type="container",
        containerProperties={"image": "python:3.11", "command": ["true"], "resourceRequirements": needs},
    )
    queue = batch_yard.provision(site.endpoint)
    begun = time.monotonic()
    jobs = [
        api.submit_job(jobName=f"waits-{number}", jobQueue=queue, jobDefinition="waits")["jobId"]
        for number in range(count)
    ]
    print(f"{count} jobs submitted in {time.monotonic() - begun:.1f} s")
    return cluster, jobs


def _report(name: str, jobs: list[str], seconds: float, ask: Callable[[str], Status]) -> None:
    calls, asked, oldest = [0], [0], [0.0]
    events = aws.client(aws.here(), "batch").meta.events

    def count(**_: Any) -> None:
        calls[0] += 1

    events.register("before-call.batch.*", count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    until = time.monotonic() + seconds

    def look(job: str) -> None:
        while time.monotonic() < until:
            begun = time.monotonic()
            assert ask(job).state is State.QUEUED
            oldest[0] = max(oldest[0], time.monotonic() - begun)
            asked[0] += 1
            time.sleep(LOOK_S)

    threads = [threading.Thread(target=look, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.unregister("before-call.batch.*", count)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{name:14}  {asked[0]:7} answers, {calls[0]:5} calls, {calls[0] / seconds:5.1f} a second, "
        f"longest wait {oldest[0]:.1f} s, {grown:+.0f} MiB"
    )


if __name__ == "__main__":
    main()
