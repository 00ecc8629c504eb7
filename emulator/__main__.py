"""Keep an emulator of AWS standing on this machine: `python -m emulator up | down | status`.

    eval "$(python -m emulator up --share ~/runs)"    # started, and this shell points at it
    python -m emulator status
    python -m emulator down                           # everything in it is gone

It listens on 127.0.0.1 only and survives the shell that started it. All is in its memory: nothing survives `down`.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3

from clusters.base import ClusterError
from emulator import aws, standing
from emulator.aws import REGION, Emulator
from store.objects import state_folder

JOB_STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED")


def main(argv: list[str] | None = None) -> int:
    """Do what is asked; 1 if it could not be done or, for `status` and `down`, if no emulator stands."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__, formatter_class=about)
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("up", help="start it unless it stands, print the environment that points at it")
    start.add_argument("--port", type=int, help="a free one by default")
    start.add_argument("--share", type=Path, action="append", default=[], help="a folder that its nodes see too")
    verbs.add_parser("down", help="end it, with everything in it")
    verbs.add_parser("status", help="where it is and what is in it")
    asked = parser.parse_args(argv)
    try:
        return _up(asked.port, asked.share) if asked.verb == "up" else {"down": _down, "status": _status}[asked.verb]()
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _up(port: int | None, share: list[Path]) -> int:
    stood = aws.standing()
    found = standing.up(port, share)
    if stood and (port or share):
        print(f"an emulator stands already, as it was started: {stood.endpoint}", file=sys.stderr)
    for name, value in aws.environment(found.endpoint).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _down() -> int:
    found = aws.standing()
    told = _contents(found) if found else ""
    if not standing.down():
        print(f"no emulator stands (looked in {state_folder()})")
        return 1
    print(f"ended; what was in it is gone: {told}")
    return 0


def _status() -> int:
    found = aws.standing()
    if found is None:
        print(f"no emulator stands (looked in {state_folder()}); start it: python -m emulator up")
        return 1
    print(f"{found.endpoint} (all in memory, region {REGION})\n{_contents(found)}")
    return 0


def _contents(emulator: Emulator) -> str:
    """What an emulator holds, in one line."""
    session = boto3.session.Session("castra", "castra", region_name=REGION)

    def client(service: str) -> Any:
        return session.client(service, endpoint_url=emulator.endpoint)  # type: ignore[call-overload]  # a name at run time

    stacks = client("cloudformation").describe_stacks()["Stacks"]
    told = [_counted("stacks", Counter(one["StackStatus"] for one in stacks))]
    looks: dict[str, Callable[[], Counter[str]]] = {
        "Batch jobs": lambda: _batch(client("batch")),
        "training jobs": lambda: Counter(
            one["TrainingJobStatus"] for one in client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
        ),
    }
    return "; ".join(told + [_counted(name, look()) for name, look in looks.items()])


def _batch(batch: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for queue in batch.describe_job_queues()["jobQueues"]:
        for state in JOB_STATES:
            found[state] += len(batch.list_jobs(jobQueue=queue["jobQueueName"], jobStatus=state)["jobSummaryList"])
    return +found


def _counted(what: str, counts: Counter[str]) -> str:
    if not counts:
        return f"no {what}"
    return f"{counts.total()} {what} ({', '.join(f'{count} {state}' for state, count in sorted(counts.items()))})"


if __name__ == "__main__":
    sys.exit(main())
