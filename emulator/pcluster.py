"""ParallelCluster at the emulator: its command line, which asks the emulator, and its clusters, each a real Slurm.

    python -m emulator.pcluster create-cluster --cluster-name tiny --cluster-configuration tiny.yaml --region us-east-1
    python -m emulator.pcluster describe-cluster --cluster-name tiny --region us-east-1

Same words, same JSON, same exit codes as `pcluster`. Where namespaces and Slurm's packages are to be had, a cluster's
nodes are guests that run Slurm, a dead node is replaced, and describe-cluster says how its head is reached; elsewhere
a cluster is a record, and nothing can run on it.
"""

import argparse
import http.client
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from emulator import extension, guests, journal, launches, slurm
from emulator.aws import environment
from emulator.slurm import SlurmGuests

PAGE = "/castra/pcluster"
VERSION = "3.16.1"
DRY_RUN_FINE = "Request would have succeeded, but DryRun flag is set."
FOLDER = "CASTRA_EMULATOR_FOLDER"
REPLACED_S = 5.0
"""After which a dead node is replaced; ParallelCluster itself takes minutes."""
OPERATIONS = ("create-cluster", "describe-cluster", "update-cluster", "delete-cluster", "list-clusters")
EVENTS = "get-cluster-stack-events"
Json = dict[str, Any]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Refusal(Exception):
    """The command line answers with exit code 1 and this."""

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.told = {"message": message, **more}


@dataclass(eq=False)
class Cluster:
    """One cluster."""

    name: str
    region: str
    configuration: Json
    status: str = "CREATE_IN_PROGRESS"
    stack: str = ""
    head: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    failures: list[Json] = field(default_factory=list)
    created: str = field(default_factory=_now)
    slurm: SlurmGuests | None = None
    folder: Path = Path()
    _work: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nodes(self) -> int:
        """How many nodes its queues have at most."""
        queues = self.configuration["Scheduling"]["SlurmQueues"]
        return sum(one["MaxCount"] for queue in queues for one in queue["ComputeResources"])

    @property
    def partition(self) -> str:
        """Its first queue."""
        return str(self.configuration["Scheduling"]["SlurmQueues"][0]["Name"])

    def begin(self, verb: str, work: Callable[[], None]) -> None:
        """Do something to the cluster in the background, after what is under way; its status says how far that is."""
        doing = f"{verb}_IN_PROGRESS"
        self._becomes(doing)

        def done() -> None:
            ended, reason = f"{verb}_COMPLETE", ""
            with self._work:
                try:
                    work()
                except (RuntimeError, OSError, ValueError) as error:
                    ended, reason = f"{verb}_FAILED", str(error)
                    self.failures = [{"failureCode": "HeadNodeBootstrapFailure", "failureReason": reason}]
                if self.status == doing:
                    self._becomes(ended, reason)

        threading.Thread(target=done, daemon=True).start()

    def raise_slurm(self) -> None:
        """Start Slurm on guests, or start it anew with another number of nodes."""
        image = launches.layers(self.configuration.get("Image", {}).get("CustomAmi", ""))
        if not slurm.possible(with_packages=not image):
            return
        self.lower_slurm()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=os.environ.get(FOLDER)))
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        group = f"{self.region}/{self.name}"
        env = environment(endpoint)
        made = SlurmGuests(self.nodes, [self.folder], guests.pool(), group, self.partition, env, image=image)
        made.start()
        self.head |= {"privateIpAddress": made.head.address}
        self.slurm = made
        threading.Thread(target=self._replace, args=(made,), daemon=True).start()

    def lower_slurm(self) -> None:
        """End Slurm and its guests."""
        there, self.slurm = self.slurm, None
        if there:
            for name in re.findall(r"JobName=(\S+)", there.sh("scontrol --oneliner show job || true")):
                journal.taken("slurm", name)
            there.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _replace(self, running: SlurmGuests) -> None:
        """Put another machine in the place of a dead or drained one, as ParallelCluster's daemon on the head does."""
        while self.slurm is running:
            drained = [node for node, state in running.states().items() if state == "drained"]
            for node in running.nodes:
                if node in drained or not running.alive(node):
                    time.sleep(REPLACED_S)
                    if self.slurm is running:
                        running.replace(node)
            time.sleep(1.0)

    def _becomes(self, status: str, reason: str = "") -> None:
        self.status = status
        event = {"eventId": secrets.token_hex(8), "stackName": self.name, "stackId": self.stack, "timestamp": _now()}
        event |= {"logicalResourceId": self.name, "physicalResourceId": self.stack, "resourceStatus": status}
        event |= {"resourceType": "AWS::CloudFormation::Stack"} | ({"resourceStatusReason": reason} if reason else {})
        self.events.insert(0, event)


_clusters: dict[tuple[str, str], Cluster] = {}
_lock = threading.RLock()


def answer(told: Any) -> Json:
    """The page of the command line: `{"code": exit code, "answer": what it prints}`."""
    try:
        with _lock:
            return {"code": 0, "answer": _operations()[told["operation"]](told)}
    except Refusal as refusal:
        return {"code": 1, "answer": refusal.told}
    except (LookupError, TypeError) as error:
        raise ValueError(f"not a request to ParallelCluster: {error!r}") from error


extension.PAGES[PAGE] = answer


def _operations() -> Mapping[str, Callable[[Any], Json]]:
    works = (_create, _describe, _update, _delete, _list)
    return dict(zip(OPERATIONS, works, strict=True)) | {EVENTS: _events, "power-off": _power_off}


def _create(told: Any) -> Json:
    name, region, config = told["cluster-name"], told["region"], told["cluster-configuration"]
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]{1,59}", name):
        raise Refusal(f"Bad Request: '{name}' does not match '^[a-zA-Z][a-zA-Z0-9-]+$'")
    if (region, name) in _clusters:
        raise Refusal(f"Cluster {name} already exists.")
    _validate(config)
    if told.get("dryrun") == "true":
        raise Refusal(DRY_RUN_FINE)
    made = Cluster(name, region, config)
    made.stack = f"arn:aws:cloudformation:{region}:123456789012:stack/{name}/{secrets.token_hex(8)}"
    made.head = {
        "instanceId": f"i-{secrets.token_hex(8)}1",
        "instanceType": config["HeadNode"]["InstanceType"],
        "launchTime": made.created,
        "privateIpAddress": "127.0.0.1",
        "state": "running",
    }
    _clusters[region, name] = made
    made.begin("CREATE", made.raise_slurm)
    return {"cluster": _summary(made)}


def _describe(told: Any) -> Json:
    found = _found(told)
    tags = [{"key": tag["Key"], "value": tag["Value"]} for tag in found.configuration.get("Tags", [])]
    about = _summary(found) | {
        "cloudFormationStackStatus": found.status,
        "creationTime": found.created,
        "lastUpdatedTime": found.events[0]["timestamp"],
        "computeFleetStatus": "RUNNING",
        "tags": [*tags, {"key": "parallelcluster:cluster-name", "value": found.name}],
        "failures": found.failures,
    }
    about |= {"headNode": found.head} if found.status.endswith("COMPLETE") else {}
    if found.slurm and not found.status.startswith("DELETE"):
        jobs, reach = str(found.folder / "jobs"), json.dumps(found.slurm.reach())
        about |= {"reach": reach, "folder": jobs, "python": sys.executable, "gpus": "0"}
    return about


def _update(told: Any) -> Json:
    found, config = _found(told), told["cluster-configuration"]
    if found.status.endswith("IN_PROGRESS"):
        raise Refusal(f"Cannot execute update while stack is in {found.status} status.")
    if config == found.configuration:
        raise Refusal("No changes found in your cluster configuration.")
    _validate(config)
    before = found.nodes
    found.configuration = config
    found.begin("UPDATE", found.raise_slurm if found.nodes != before else lambda: None)
    return {"cluster": _summary(found), "changeSet": []}


def _delete(told: Any) -> Json:
    found = _found(told)

    def work() -> None:
        found.lower_slurm()
        del _clusters[found.region, found.name]

    if found.status != "DELETE_IN_PROGRESS":
        found.begin("DELETE", work)
    return {"cluster": _summary(found)}


def _list(told: Any) -> Json:
    return {"clusters": [_summary(one) for one in _clusters.values() if one.region == told["region"]]}


def _events(told: Any) -> Json:
    return {"events": _found(told).events}


def _power_off(told: Any) -> Json:
    """A fault to order: a node dies."""
    found = _found(told)
    if found.slurm is None:
        raise Refusal(f"Cluster {found.name} has no nodes here.")
    found.slurm.power_off(told["node"])
    return {}


def _found(told: Any) -> Cluster:
    if (found := _clusters.get((told["region"], told["cluster-name"]))) is None:
        raise Refusal(f"Cluster '{told['cluster-name']}' does not exist or belongs to an incompatible ParallelCluster.")
    return found


def _summary(one: Cluster) -> Json:
    return {
        "clusterName": one.name,
        "region": one.region,
        "version": VERSION,
        "cloudformationStackArn": one.stack,
        "cloudformationStackStatus": one.status,
        "clusterStatus": one.status,
        "scheduler": {"type": "slurm"},
    }


def _validate(config: Any) -> None:
    """What the real validators find that a recipe can bring about."""
    try:
        queues = config["Scheduling"]["SlurmQueues"]
        wrong = [message for queue in queues for message in _problems(queue)]
        config["Image"]["Os"], config["HeadNode"]["InstanceType"], config["HeadNode"]["Networking"]["SubnetId"]
    except (LookupError, TypeError) as error:
        wrong = [f"ConfigSchemaValidator: missing data for required field {error}"]
    if wrong:
        rows = [
            {"level": "ERROR", "type": told.partition(":")[0], "message": told.partition(": ")[2]} for told in wrong
        ]
        raise Refusal("Invalid cluster configuration.", configurationValidationErrors=rows)


def _problems(queue: Any) -> list[str]:
    from emulator import reservations

    wrong = []
    block = queue.get("CapacityType") == "CAPACITY_BLOCK"
    if block and queue["Networking"].get("PlacementGroup", {}).get("Enabled"):
        wrong.append("PlacementGroupCapacityTypeValidator: a placement group cannot be used with a capacity block")
    for nodes in queue["ComputeResources"]:
        reserved = nodes.get("CapacityReservationTarget", {}).get("CapacityReservationId")
        if block and not reserved:
            wrong.append("CapacityTypeValidator: a capacity block needs the id of its reservation")
        if reserved and reservations.find(reserved) is None:
            wrong.append(f"CapacityReservationValidator: The capacity reservation '{reserved}' does not exist")
    return wrong


def main(argv: list[str]) -> int:
    """Ask the emulator at AWS_ENDPOINT_URL, print its answer, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m emulator.pcluster")
    parser.add_argument("operation", choices=[*OPERATIONS, EVENTS])
    parser.add_argument("--cluster-name", "-n")
    parser.add_argument("--cluster-configuration", "-c", type=Path)
    parser.add_argument("--region", "-r", default=os.environ.get("AWS_REGION", "us-east-1"))
    parser.add_argument("--dryrun", choices=["true", "false"], default="false")
    parser.add_argument("--suppress-validators", nargs="+")
    told = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(argv)).items()}
    if path := told.pop("cluster-configuration"):
        import yaml

        told["cluster-configuration"] = yaml.safe_load(path.read_text())
    answered = _ask(os.environ["AWS_ENDPOINT_URL"], told)
    print(json.dumps(answered["answer"], indent=2))
    return int(answered["code"])


def _ask(endpoint: str, told: Json) -> Json:
    place = urlsplit(endpoint)
    line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        line.request("POST", PAGE, json.dumps(told), {"Content-Type": "application/json"})
        answered: Json = json.loads(line.getresponse().read())
    except OSError as error:
        return {"code": 1, "answer": {"message": f"EndpointConnectionError: {endpoint}: {error}"}}
    finally:
        line.close()
    return answered if "code" in answered else {"code": 1, "answer": answered}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
