"""A node's place in its job, as the platform that started it tells: Slurm, AWS Batch, Kubernetes, SageMaker, or none.

| platform | what it tells, and where it is documented |
|---|---|
| slurm | SLURM_* of srun(1), "output environment variables" |
| batch | AWS_BATCH_*, AWS Batch user guide, "Multi-node parallel job environment variables" |
| kubernetes | JOB_COMPLETION_INDEX of an indexed Job; CASTRA_NODES and MASTER_ADDR of our manifests |
| kubeflow | PET_*, which Kubeflow's trainers set for torchrun |
| sagemaker | input/config/resourceconfig.json, SageMaker guide, "How SageMaker provides training information" |
"""

import contextlib
import json
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from training.process import JobError

MASTER_PORT = 29500
"""torchrun's default; the gang watch listens on the port after it."""
SIOCGIFADDR = 0x8915
"""From linux/sockios.h."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a job."""

    platform: str
    nodes: int
    rank: int
    master: str
    """The name or address of the node of rank 0, as the others find it; on rank 0 an address it may listen on."""
    job_id: str
    """The platform's name for the job, the same on all its nodes."""
    attempt: int
    """Counts from 1 as far as the platform tells."""
    port: int = MASTER_PORT

    @property
    def gang_port(self) -> int:
        """Where the gang watch of rank 0 listens."""
        return self.port + 1


def read(env: Mapping[str, str]) -> Node:
    """Return this node's place. Raises JobError when what the platform tells is not whole."""
    try:
        node = _told(env)
    except KeyError as lacking:
        raise JobError(f"the platform that started this node does not tell {lacking.args[0]}") from lacking
    except ValueError as problem:
        raise JobError(f"the platform that started this node tells nonsense: {problem}") from problem
    if not 0 <= node.rank < node.nodes:
        raise JobError(f"{node.platform} says that this is node {node.rank} of {node.nodes}")
    return replace(node, master="127.0.0.1") if node.nodes == 1 else node


def own_address(towards: str = "") -> str:
    """Return this machine's IPv4 address on the way to another; without one, that of the default route.

    Connecting a datagram socket sends nothing. Without a default route it is the first interface that is not loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((towards or "192.0.2.1", 9))  # TEST-NET-1 of RFC 5737 lies behind the default route
        return str(probe.getsockname()[0])
    return next((found for found in _interfaces().values() if not found.startswith("127.")), "127.0.0.1")


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address, or None if that cannot be told."""
    return next((name for name, found in _interfaces().items() if found == address), None)


def _told(env: Mapping[str, str]) -> Node:
    port = int(env.get("MASTER_PORT", MASTER_PORT))
    if "AWS_BATCH_JOB_NUM_NODES" in env:
        return _batch(env, port)
    if "JOB_COMPLETION_INDEX" in env and "CASTRA_NODES" in env:
        nodes, rank = int(env["CASTRA_NODES"]), int(env["JOB_COMPLETION_INDEX"])
        told = env["MASTER_ADDR"] if nodes > 1 else "127.0.0.1"
        attempt = int(env.get("CASTRA_ATTEMPT", 1))
        return Node("kubernetes", nodes, rank, _listening(told, rank), env.get("CASTRA_JOB", "job"), attempt, port)
    if "SLURM_JOB_ID" in env and "SLURM_NODEID" in env:
        return _slurm(env, port)
    if "PET_NNODES" in env and "PET_NODE_RANK" in env:
        nodes, rank = int(env["PET_NNODES"]), int(env["PET_NODE_RANK"])
        told = env["PET_MASTER_ADDR"] if "PET_MASTER_ADDR" in env else env["MASTER_ADDR"]
        attempt = int(env.get("CASTRA_ATTEMPT", 1))
        return Node("kubeflow", nodes, rank, _listening(told, rank), env.get("CASTRA_JOB", "job"), attempt, port)
    config = Path(env.get("SM_ROOT", "/opt/ml")) / "input/config/resourceconfig.json"
    if "TRAINING_JOB_NAME" in env and config.exists():
        return _sagemaker(json.loads(config.read_text()), env["TRAINING_JOB_NAME"], port)
    attempt = int(env.get("AWS_BATCH_JOB_ATTEMPT") or env.get("CASTRA_ATTEMPT") or 1)
    return Node("alone", 1, 0, "127.0.0.1", env.get("CASTRA_JOB", "job"), attempt, port)


def _batch(env: Mapping[str, str], port: int) -> Node:
    """The main node's end decides the job, so it is rank 0; it alone is not told its own address."""
    nodes, index, main = (int(env[f"AWS_BATCH_JOB_{name}"]) for name in ("NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX"))
    rank = 0 if index == main else index + 1 if index < main else index
    master = env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] if rank else own_address()
    job_id = env["AWS_BATCH_JOB_ID"].partition("#")[0]  # a child's is <id>#<index>
    return Node("batch", nodes, rank, master, job_id, int(env.get("AWS_BATCH_JOB_ATTEMPT", 1)), port)


def _slurm(env: Mapping[str, str], port: int) -> Node:
    """Node ids count within the step, where srun made one."""
    told = "STEP" if "SLURM_STEP_NODELIST" in env else "JOB"
    rank, nodes = int(env["SLURM_NODEID"]), int(env[f"SLURM_{told}_NUM_NODES"])
    master = _listening(_first(env[f"SLURM_{told}_NODELIST"]), rank)
    return Node("slurm", nodes, rank, master, env["SLURM_JOB_ID"], int(env.get("SLURM_RESTART_COUNT", 0)) + 1, port)


def _sagemaker(config: Mapping[str, object], job: str, port: int) -> Node:
    hosts, here = config.get("hosts"), config.get("current_host")
    if not isinstance(hosts, list) or here not in hosts:
        raise KeyError("hosts and current_host in resourceconfig.json")
    hosts.sort(key=lambda host: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", host)])
    rank = hosts.index(here)
    return Node("sagemaker", len(hosts), rank, _listening(hosts[0], rank), job, 1, port)


def _first(hosts: str) -> str:
    """Return the first of Slurm's compressed host names: `n[01-03,7]r[2-3],x` → `n01r2`; scontrol may not be here."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if not found:
        raise ValueError(f"no host in the node list {hosts!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found[0])


def _listening(master: str, rank: int) -> str:
    """Return where rank 0 listens: on the address it was told, else its own, for its name may mean loopback to it."""
    if rank:
        return master
    with contextlib.suppress(OSError):
        socket.inet_aton(master)
        return master
    return "127.0.0.1" if master == "localhost" else own_address()


def _interfaces() -> dict[str, str]:
    """The interfaces and their IPv4 addresses (Linux)."""
    found: dict[str, str] = {}
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
