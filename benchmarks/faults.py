"""What befalls a run on AWS, on purpose: each fault in a life of its own on the emulator, and what came of it.

    python -m benchmarks.faults                 # all
    python -m benchmarks.faults down lost       # only these

Printed for each: whether the life completed, its seconds over those of an undisturbed one, submissions of its job, what
was left. Exit code 1 if a life failed, or left something.
"""

import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.failure_matrix import ground, life
from benchmarks.leftovers import leftovers, submissions
from tests.sky import client, tell

Env = dict[str, str]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    what: str
    rows: Callable[[str], Rows] = lambda _: []
    """What the emulator is told, from the recipe's name."""
    cluster: dict[str, Any] = field(default_factory=dict)
    loses: bool = False
    """The node of the job is taken away once it runs."""
    tries: int = 1
    """Submissions that are right."""


FAULTS: dict[str, Fault] = {
    "none": Fault("nothing"),
    "throttle": Fault(
        "three requests of every service are throttled",
        lambda _: [
            {"service": name, "operation": "*", "kind": "throttle", "times": 3}
            for name in ("cloudformation", "batch", "s3", "logs")
        ],
    ),
    "capacity": Fault(
        "no instances on rung 1 and rung 2",
        lambda _: [
            {"kind": "capacity", "instance_type": "p5.4xlarge", "zone": f"us-east-1{zone}", "times": 0} for zone in "ab"
        ],
        {"zones": ["us-east-1a", "us-east-1b"], "alternatives": ["g5.xlarge"], "patience_minutes": 0.1},
        tries=4,
    ),
    "rollback": Fault(
        "the fifth resource of the Batch stack fails once",
        lambda name: [
            {"kind": "fail", "stack": f"castra-{name}-batch", "resource": 5, "reason": "it was not to be", "times": 1}
        ],
    ),
    "s3": Fault(
        "S3 answers 500 five times to writes and five times to reads",
        lambda _: [
            {"service": "s3", "operation": name, "kind": "500", "times": 5, "skip": 3}
            for name in ("PutObject", "GetObject")
        ],
    ),
    "lost": Fault("the node of the job is gone", loses=True, tries=1),
    "answer": Fault(
        "the answer to the submission is lost",
        lambda _: [{"service": "batch", "operation": "SubmitJob", "kind": "lost", "times": 1}],
    ),
    "down": Fault("every API is down for 60 s, from 4 s on"),
}


def main(words: list[str]) -> int:
    """Run the faults; returns the exit code."""
    wanted = {name: FAULTS[name] for name in ["none", *(words or [name for name in FAULTS if name != "none"])]}
    bad, undisturbed = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="castra-faults-") as folder, ground(Path(folder)) as env:
        for name, fault in wanted.items():
            begun = time.monotonic()
            well, told = _suffer(Path(folder), env, name, fault)
            took = time.monotonic() - begun
            undisturbed = undisturbed or took
            bad += not well
            print(
                f"{name:9} {fault.what:62} {'ok' if well else 'BAD'}  {took / undisturbed:4.1f} ×  {told}", flush=True
            )
    return int(bad > 0)


def _suffer(folder: Path, env: Env, name: str, fault: Fault) -> tuple[bool, str]:
    place = folder / f"f-{name}"
    endpoint = env["AWS_ENDPOINT_URL"]
    tell(endpoint, "faults", method="DELETE")
    tell(endpoint, "faults", fault.rows(place.name))
    if name == "down":
        threading.Timer(4.0, tell, (endpoint, "faults", [{"kind": "down", "seconds": 60}])).start()
    if fault.loses:
        threading.Thread(target=_lose, args=(endpoint, place.name), daemon=True).start()
    ended = life(place, "batch", env, cluster=fault.cluster)
    tell(endpoint, "faults", method="DELETE")
    left, submitted = leftovers(endpoint, place.name), submissions(endpoint, place.name)
    well = ended == 0 and not left and submitted == fault.tries
    return well, f"{submitted} submitted, left: {', '.join(left) or 'nothing'}, exit code {ended}"


def _lose(endpoint: str, name: str) -> None:
    """Take the first node of the recipe's job away, as soon as there is one."""
    batch = client("batch", endpoint)
    while True:
        for queue in batch.describe_job_queues()["jobQueues"]:
            if name in queue["jobQueueName"]:
                for job in batch.list_jobs(jobQueue=queue["jobQueueName"], jobStatus="RUNNING")["jobSummaryList"]:
                    try:
                        tell(endpoint, "lose", {"job": job["jobId"], "node": 0})
                    except urllib.error.HTTPError:
                        continue
                    return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
