"""AWS ParallelCluster 3.16: the configuration of a recipe's Slurm cluster, and its command line, run as a program.

The command line brings its own Python packages, so it lives in an environment of its own; CASTRA_PCLUSTER names it, or
`pcluster` is on PATH. At an emulator on this machine a stand-in of ours takes its place.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from clusters import catalog
from clusters.aws import ANYBODY, Site
from clusters.base import ClusterError, Refused, Unreachable
from clusters.capacity import Rung
from clusters.stacks.camp import subnet
from clusters.stacks.nodes import close_together
from clusters.stacks.parts import LOG_DAYS
from recipes.cluster import SlurmCluster
from recipes.spec import Recipe
from store.objects import in_s3

Part = dict[str, Any]
QUEUE: Final = "train"
OS: Final = "ubuntu2404"
USER: Final = "ubuntu"
MB_PER_S_PER_TIB: Final = 250
ROOT_GIB: Final = 200
IDLE_MINUTES: Final = 10
"""After which a node without a job is given back."""
MARKETS: Final = {"on-demand": "ONDEMAND", "reservation": "ONDEMAND", "spot": "SPOT", "block": "CAPACITY_BLOCK"}
SESSIONS: Final = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
START_SCRIPT: Final = "parallelcluster-start.sh"
"""Name in the camp's bucket."""
START: Final = """\
#!/bin/bash
# Turns on enroot and pyxis, which ParallelCluster's images have had since 3.11.1 but leave off.
set -euo pipefail
examples=/opt/parallelcluster/examples
install -d -m 1777 /var/enroot /run/enroot /run/pyxis
mkdir -p /etc/enroot
cat >/etc/enroot/enroot.conf <<'END'
ENROOT_RUNTIME_PATH /run/enroot/user-$(id -u)
ENROOT_CACHE_PATH   /var/enroot/cache-$(id -u)
ENROOT_DATA_PATH    /var/enroot/data-$(id -u)
ENROOT_RESTRICT_DEV yes
END
if [ -d /opt/slurm/etc ] && [ ! -e /opt/slurm/etc/plugstack.conf ]; then
  install -D -m 644 $examples/pyxis/pyxis.conf /opt/slurm/etc/plugstack.conf.d/pyxis.conf
  install -m 644 $examples/spank/plugstack.conf /opt/slurm/etc/plugstack.conf
fi
"""
CALL_S: Final = 900.0
CREATE_S: Final = 3600.0
"""A large cluster takes half an hour."""
FAR_PACE_S, NEAR_PACE_S = 20.0, 0.2
DRY_RUN_FINE: Final = "Request would have succeeded, but DryRun flag is set."
INSTALL: Final = "uv tool install --python 3.12 aws-parallelcluster==3.16.1 (it needs node), or set CASTRA_PCLUSTER"
Say = Callable[[str], None]


def configuration(
    recipe: Recipe,
    cluster: SlurmCluster,
    rung: Rung,
    outputs: Mapping[str, str],
    *,
    ssh_key: str = "",
    tags: Mapping[str, str] | None = None,
) -> Part:
    """What `pcluster create-cluster` is given for a recipe's cluster, with its instances got by the rung; pure.

    `outputs` are those of the camp's stack, and of the file system's if there is one; what is missing is told as
    `${Name}`. `ssh_key` names an EC2 key pair. With containers, `START` must lie in the bucket as `START_SCRIPT`.
    """
    ami, store = recipe.image.ami, recipe.store
    config: Part = {
        "Region": cluster.region,
        "Image": {"Os": OS} | ({"CustomAmi": ami} if ami else {}),
        "HeadNode": _head(cluster, outputs, store, ssh_key),
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {
                "ScaledownIdletime": IDLE_MINUTES,
                "QueueUpdateStrategy": "DRAIN",
                "CustomSlurmSettings": [{"MinJobAge": 24 * 3600}],  # without accounting: how long jobs are known
            },
            "SlurmQueues": [_queue(cluster, rung, outputs, store)],
        },
        "Monitoring": {
            "Logs": {"CloudWatch": {"Enabled": True, "RetentionInDays": LOG_DAYS, "DeletionPolicy": "Delete"}},
            "Dashboards": {"CloudWatch": {"Enabled": True}},
        },
        "Tags": [{"Key": key, "Value": value} for key, value in (tags or {}).items()],
    }
    return config | ({"SharedStorage": [_lustre(cluster, outputs)]} if cluster.lustre_gib else {})


def cluster_name(run: str) -> str:
    """The name of a run's cluster; its stack has the same."""
    return f"castra-{run}"


def describe(site: Site, name: str) -> Part | None:
    """What `pcluster describe-cluster` says, None where there is no such cluster; raises `ClusterError`."""
    code, told = _call(site, "describe-cluster", "--cluster-name", name)
    if code and "does not exist" in told.get("message", ""):
        return None
    return _good(code, told, f"describe cluster {name}")


def standing(site: Site) -> list[str]:
    """The names of all clusters in the region, those of others too; raises `ClusterError`."""
    told = _good(*_call(site, "list-clusters"), "list clusters")
    return [str(one["clusterName"]) for one in told["clusters"]]


def check(site: Site, name: str, config: Mapping[str, Any], *suppressed: str) -> list[str]:
    """What ParallelCluster's own validators say against a configuration, by a dry run; nothing if it is fine.

    `suppressed` are validators left out, as `type:KeyPairValidator`.
    """
    more = ["--suppress-validators", *suppressed] if suppressed else []
    with _file(config) as path:
        code, told = _call(
            site, "create-cluster", "--cluster-name", name, "--cluster-configuration", path, "--dryrun", "true", *more
        )
    if told.get("message") == DRY_RUN_FINE:  # success is exit code 1, too
        return []
    problems = told.get("configurationValidationErrors", [])
    return [f"{one['type']}: {one['message']}" for one in problems] or [str(told.get("message", f"exit code {code}"))]


def create(site: Site, name: str, config: Mapping[str, Any], say: Say) -> Part:
    """Make the cluster unless it stands, wait until it does, and return what `describe` says of it.

    A cluster whose creation failed is deleted and made anew. Raises `ClusterError` with the reasons.
    """
    there = describe(site, name)
    if there and there["clusterStatus"] == "DELETE_IN_PROGRESS":
        there = _wait(site, name, say)
    if there and there["clusterStatus"] in ("CREATE_FAILED", "DELETE_FAILED"):
        say(f"cluster {name} stands as {there['clusterStatus']}: deleted, to be made anew")
        delete(site, name, say)
        there = None
    if there is None:
        with _file(config) as path:
            told = _call(site, "create-cluster", "--cluster-name", name, "--cluster-configuration", path)
        _good(*told, f"create cluster {name}")
    return _complete(name, _wait(site, name, say))


def update(site: Site, name: str, config: Mapping[str, Any], say: Say) -> Part:
    """Change the cluster to the configuration and wait; no change is fine. Raises `ClusterError`."""
    with _file(config) as path:
        code, told = _call(site, "update-cluster", "--cluster-name", name, "--cluster-configuration", path)
    if not code or "No changes found" not in told.get("message", ""):
        _good(code, told, f"update cluster {name}")
    return _complete(name, _wait(site, name, say))


def delete(site: Site, name: str, say: Say) -> None:
    """Delete the cluster and wait until it is gone; fine where there is none. Raises `ClusterError`."""
    there = describe(site, name)
    if there is None:
        return
    if there["clusterStatus"] != "DELETE_IN_PROGRESS":
        _good(*_call(site, "delete-cluster", "--cluster-name", name), f"delete cluster {name}")
    left = _wait(site, name, say)
    if left is not None:
        raise ClusterError(f"cluster {name} cannot be deleted: it is {left['clusterStatus']}; see its stack's events")


def outputs(described: Mapping[str, Any], cluster: SlurmCluster, run: str) -> dict[str, str]:
    """What a cluster's address needs beside the recipe: `reach`, `folder`, `partition` and `HeadNode`.

    The emulator's stand-in says itself how it is reached, and what its nodes have.
    """
    head = described.get("headNode", {})
    told = {"partition": QUEUE, "HeadNode": str(head.get("instanceId", "${HeadNode}"))}
    if "reach" in described:
        return told | {name: str(described[name]) for name in ("reach", "folder", "python", "gpus")}
    told["reach"] = json.dumps(_ssh(head, cluster.region))
    # /home is the head's own disk, which ParallelCluster shares with all nodes
    return told | ({} if cluster.lustre_gib else {"folder": f"/home/{USER}/castra/{run}"})


def _head(cluster: SlurmCluster, outputs: Mapping[str, str], store: str, ssh_key: str) -> Part:
    head: Part = {
        "InstanceType": cluster.head_instance_type,
        "Networking": {"SubnetId": _told(outputs, "PublicSubnet"), **_groups(outputs)},
        "LocalStorage": {"RootVolume": {"Size": ROOT_GIB, "Encrypted": True}},
        "Iam": _rights(cluster, outputs, store),
        "Imds": {"Secured": True},
    }
    head |= {"Ssh": {"KeyName": ssh_key}} if ssh_key else {}
    return head | _start(cluster, outputs)


def _queue(cluster: SlurmCluster, rung: Rung, outputs: Mapping[str, str], store: str) -> Part:
    """The one queue: all nodes of one type, in one zone, given to one job at a time."""
    instance = catalog.find(rung.instance_type)
    reserved = rung.market in ("block", "reservation")
    nodes: Part = {
        "Name": "nodes",
        "InstanceType": rung.instance_type,
        "MinCount": cluster.nodes if reserved else 0,  # what is reserved is paid for anyway
        "MaxCount": cluster.nodes,
        "Efa": {"Enabled": instance.efa_interfaces > 0},
    }
    nodes |= {"CapacityReservationTarget": {"CapacityReservationId": rung.id}} if reserved else {}
    private = outputs.get(subnet(rung.zone)) or _told(outputs, "PrivateSubnet")
    settings: Part = {"LocalStorage": {"RootVolume": {"Size": ROOT_GIB, "Encrypted": True}}}
    settings["LocalStorage"] |= {"EphemeralVolume": {"MountDir": "/scratch"}} if instance.nvme_drives else {}
    networking: Part = {"SubnetIds": [private], **_groups(outputs)}
    if rung.market != "block":  # a block is in one place already, and refuses a group even by name
        networking["PlacementGroup"] = {"Enabled": close_together(cluster, rung)}
    return {
        "Name": QUEUE,
        "CapacityType": MARKETS[rung.market],
        "JobExclusiveAllocation": True,
        "Networking": networking,
        "ComputeResources": [nodes],
        "ComputeSettings": settings,
        "HealthChecks": {"Gpu": {"Enabled": instance.accelerator.startswith("NVIDIA")}},
        "Iam": _rights(cluster, outputs, store),
        **_start(cluster, outputs),
    }


def _lustre(cluster: SlurmCluster, outputs: Mapping[str, str]) -> Part:
    """The file system of our stack, or one that comes and goes with the cluster."""
    own = {
        "StorageCapacity": cluster.lustre_gib,
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": MB_PER_S_PER_TIB,
        "DataCompressionType": "LZ4",
        "DeletionPolicy": "Delete",
    }
    settings = {"FileSystemId": outputs["FileSystem"]} if "FileSystem" in outputs else own
    return {"MountDir": "/fsx", "Name": "fsx", "StorageType": "FsxLustre", "FsxLustreSettings": settings}


def _groups(outputs: Mapping[str, str]) -> Part:
    """Beside ParallelCluster's own, the camp's group, in which the file system is."""
    return {"AdditionalSecurityGroups": [_told(outputs, "SecurityGroup")]}


def _rights(cluster: SlurmCluster, outputs: Mapping[str, str], store: str) -> Part:
    access = []
    if place := in_s3(store):
        bucket, prefix = place
        access = [{"BucketName": bucket, "EnableWriteAccess": True, "KeyName": f"{prefix}/*" if prefix else "*"}]
    if cluster.containers:
        access.append({"BucketName": _told(outputs, "Bucket"), "KeyName": START_SCRIPT})
    return {"AdditionalIamPolicies": [{"Policy": SESSIONS}]} | ({"S3Access": access} if access else {})


def _start(cluster: SlurmCluster, outputs: Mapping[str, str]) -> Part:
    if not cluster.containers:
        return {}
    return {"CustomActions": {"OnNodeConfigured": {"Script": f"s3://{_told(outputs, 'Bucket')}/{START_SCRIPT}"}}}


def _told(outputs: Mapping[str, str], name: str) -> str:
    return outputs.get(name, f"${{{name}}}")


def _ssh(head: Mapping[str, Any], region: str) -> list[str]:
    """By its public address, or through Session Manager where it has none; the key is the user's own affair."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"]
    if address := head.get("publicIpAddress"):
        return [*words, f"{USER}@{address}"]
    session = f"aws ssm start-session --region {region} --target %h --document-name AWS-StartSSHSession"
    instance = head.get("instanceId", "${HeadNode}")
    return [*words, "-o", f"ProxyCommand={session} --parameters portNumber=%p", f"{USER}@{instance}"]


def command(site: Site) -> list[str]:
    """The words that start the command line; raises `Refused` if it is not installed."""
    if told := os.environ.get("CASTRA_PCLUSTER"):
        return shlex.split(told)
    if site.memory:
        return [sys.executable, "-m", "emulator.pcluster"]
    if found := shutil.which("pcluster"):
        return [found]
    raise Refused(f"AWS ParallelCluster's command line is not installed: {INSTALL}")


def _call(site: Site, *words: str) -> tuple[int, Part]:
    """Run the command line; its exit code and its answer. Raises `Refused`, `Unreachable` or `ClusterError`."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"AWS_ENDPOINT_URL": site.endpoint} if site.endpoint else {}
    env |= {"AWS_ACCESS_KEY_ID": ANYBODY, "AWS_SECRET_ACCESS_KEY": ANYBODY} if site.memory else {}
    argv = [*command(site), *words, "--region", site.region]
    try:
        done = subprocess.run(
            argv, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=CALL_S, check=False
        )
    except FileNotFoundError:
        raise Refused(f"CASTRA_PCLUSTER names {argv[0]}, which is not there: {INSTALL}") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"pcluster {words[0]} does not end within {CALL_S:.0f} s; run again") from None
    try:
        told = json.loads(done.stdout)
        return done.returncode, told if isinstance(told, dict) else {"message": str(told)}
    except ValueError:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ClusterError(f"pcluster {words[0]} failed: {' '.join(last) or f'exit code {done.returncode}'}") from None


def _good(code: int, told: Part, doing: str) -> Part:
    if not code:
        return told
    message = str(told.get("message", f"exit code {code}"))
    problems = [f"{one['type']}: {one['message']}" for one in told.get("configurationValidationErrors", [])]
    if problems:
        raise Refused(f"{doing}: ParallelCluster refuses the configuration: {'; '.join(problems)}")
    if any(word in message for word in ("Throttling", "Rate exceeded", "Limit", "EndpointConnectionError")):
        raise Unreachable(f"{doing}: {message}; run again in a moment")
    raise ClusterError(f"{doing}: {message}")


def _complete(name: str, told: Part | None) -> Part:
    status = told["clusterStatus"] if told else "gone"
    if told and status in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
        return told
    reasons = [str(one.get("failureReason")) for one in (told or {}).get("failures", [])]
    raise ClusterError(f"cluster {name} is {status}: {'; '.join(reasons) or 'see the events of its stack'}")


def _wait(site: Site, name: str, say: Say) -> Part | None:
    """Wait until nothing happens to the cluster any more, and say what did; None if it is gone."""
    pace_s = NEAR_PACE_S if site.memory else FAR_PACE_S
    until = time.monotonic() + CREATE_S
    seen: set[str] = set()
    while (told := describe(site, name)) and told["clusterStatus"].endswith("_IN_PROGRESS"):
        for event in _events(site, name):
            if event["eventId"] not in seen:
                seen.add(event["eventId"])
                reason = f": {event['resourceStatusReason']}" if event.get("resourceStatusReason") else ""
                say(f"{event['resourceStatus']} {event['logicalResourceId']}{reason}")
        if time.monotonic() > until:
            raise Unreachable(f"cluster {name} is {told['clusterStatus']} for {CREATE_S / 60:.0f} minutes; run again")
        time.sleep(pace_s)
    say(f"cluster {name}: {told['clusterStatus'] if told else 'deleted'}")
    return told


def _events(site: Site, name: str) -> list[dict[str, str]]:
    """The events of the cluster's stack, the oldest first; none where there is no stack yet."""
    code, told = _call(site, "get-cluster-stack-events", "--cluster-name", name)
    events: list[dict[str, str]] = [] if code else told.get("events", [])
    return events[::-1]


@contextlib.contextmanager
def _file(config: Mapping[str, Any]) -> Iterator[str]:
    """The path of a configuration as a file, which the command line wants; JSON is YAML."""
    with tempfile.TemporaryDirectory(prefix="castra-") as folder:
        path = Path(folder, "cluster.yaml")
        path.write_text(json.dumps(config, indent=1))
        yield str(path)
