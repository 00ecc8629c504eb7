"""mpirun over the nodes of a job, without ssh: every other node lets rank 0's in by a door of its own, with a secret.

mpirun starts its daemons through a launch agent, ssh by default. Here the agent is `training.cases.reach`, which asks
the node's door: a listener on the node's own address, that knows the job's secret, starts one daemon for who proves to
know it too, and ends what it started with the connection, as with the job. The secret is made anew by rank 0 and told
through torchrun's store; over the network goes only an HMAC of each connection's own challenge.

Proven with Open MPI 4.1 (option plm_rsh_agent); Open MPI 5 calls it plm_ssh_agent, and is given that too.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from training import contract
from training.cases.base import Command
from training.cases.meeting import Meeting, without_torchrun
from training.process import JobError

NODES: Final = "CASTRA_MPI_NODES"
"""Names the file in which the launch agent finds the doors and the secret."""
AMAZONS: Final = ("/opt/amazon/openmpi/bin", "/opt/amazon/openmpi5/bin")
"""Where the EFA installer puts Open MPI."""
PASSED_ON: Final = ("NCCL_", "FI_", "UCX_", "LD_LIBRARY_PATH", "PATH", "CUDA_")
"""Variables, by how they begin, that the ranks elsewhere get from here."""
SCHEDULERS: Final = ("SLURM_", "PMI_", "PMIX_")
"""Variables, by how they begin, by which mpirun would take itself for a part of a scheduler."""
LONGEST: Final = 1 << 20
"""Bytes of a request at most."""
PATIENCE_S: Final = 30.0
"""For a greeting, in seconds."""


class Door:
    """Starts on this node what who knows the secret asks for, and ends it with the connection."""

    def __init__(self, address: str, secret: str, env: Mapping[str, str]) -> None:
        self._secret, self._env = secret, dict(env)
        self._started: set[subprocess.Popen[bytes]] = set()
        self._listener = socket.create_server((address, 0))
        self.place: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more, and end what was started."""
        self._listener.close()
        for child in list(self._started):
            _end(child)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                threading.Thread(target=self._welcome, args=(guest,), daemon=True).start()

    def _welcome(self, guest: socket.socket) -> None:
        """One connection: challenge, proof with the command, exit code; until the guest goes or the command ends."""
        with guest, contextlib.suppress(OSError, ValueError, KeyError):
            guest.settimeout(PATIENCE_S)
            challenge = secrets.token_hex(16)
            guest.sendall(f"{challenge}\n".encode())
            asked = json.loads(read_line(guest))
            command = str(asked["command"])
            if not hmac.compare_digest(str(asked["proof"]), proof(self._secret, challenge, command)):
                return
            guest.settimeout(None)
            guest.sendall(f"{self._run(command, guest)}\n".encode())

    def _run(self, command: str, guest: socket.socket) -> int:
        started = subprocess.Popen(
            ["/bin/sh", "-c", command], env=self._env, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._started.add(started)
        threading.Thread(target=_end_with, args=(started, guest), daemon=True).start()
        code = started.wait()
        self._started.discard(started)
        return code


def proof(secret: str, challenge: str, command: str) -> str:
    """What shows that whoever sends a command knows the secret, for this one connection."""
    return hmac.new(secret.encode(), f"{challenge}\n{command}".encode(), hashlib.sha256).hexdigest()


def read_line(there: socket.socket) -> str:
    """A line from a connection; raises OSError where it ends before, or is too long."""
    told = b""
    while not told.endswith(b"\n"):
        some = there.recv(4096)
        if not some or len(told) > LONGEST:
            raise ConnectionError("the connection ended before its line did")
        told += some
    return told.decode()


@contextlib.contextmanager
def gang(
    argv: list[str], told: Command, ranks_per_node: int, meeting: Meeting
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The mpirun that starts a program on all ranks and its environment, on rank 0; no words elsewhere, at its end.

    Every node's one process must enter it. Raises JobError where there is no mpirun.
    """
    own = {name: value for name, value in without_torchrun(os.environ).items() if not name.startswith(SCHEDULERS)}
    env = {**own, **told.env, **_settings(), "PATH": _path()}
    if meeting.rank:
        yield from _let_in(env, meeting)
        return
    nodes: dict[str, Any] = {"secret": secrets.token_hex(32)}
    meeting.put("mpi-secret", nodes["secret"])
    here = contract.own_address(meeting.address)
    doors = [meeting.get(f"mpi-door-{rank}") for rank in range(1, meeting.size)]
    nodes["doors"] = dict(doors)
    with tempfile.TemporaryDirectory(prefix="castra-mpi-") as folder:
        hosts, known = Path(folder, "hosts"), Path(folder, "nodes.json")
        hosts.write_text("".join(f"{host} slots={ranks_per_node}\n" for host in (here, *nodes["doors"])))
        known.touch(0o600)
        known.write_text(json.dumps(nodes))
        try:
            yield mpirun(argv, told, hosts, ranks_per_node * meeting.size), env | {NODES: str(known)}
        finally:
            meeting.put("mpi-end", True)


def _let_in(env: Mapping[str, str], meeting: Meeting) -> Iterator[tuple[list[str], dict[str, str]]]:
    door = Door(contract.own_address(meeting.address), meeting.get("mpi-secret"), env)
    try:
        meeting.put(f"mpi-door-{meeting.rank}", door.place)
        meeting.get("mpi-end")
    finally:
        door.close()
    yield [], {}


def mpirun(argv: list[str], told: Command, hosts: Path, ranks: int) -> list[str]:
    """The words of mpirun for a program on so many ranks; raises JobError where there is none."""
    if (program := shutil.which("mpirun", path=_path())) is None:
        raise JobError("there is no mpirun here: install Open MPI (the EFA installer brings it), or name another image")
    passed = [name for name in sorted({*os.environ, *told.env}) if name.startswith(PASSED_ON) or name in told.env]
    return [
        program,
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        *("--np", str(ranks), "--hostfile", str(hosts), "--bind-to", "none", "--leave-session-attached"),
        *(word for name in passed for word in ("-x", name)),
        *argv,
    ]


def _settings() -> dict[str, str]:
    """What Open MPI is told by its variables, 4 and 5 each by its own: no scheduler's launcher, no other network."""
    agent = f"{sys.executable} -m training.cases.reach"
    four = {"plm": "rsh", "plm_rsh_agent": agent, "plm_rsh_no_tree_spawn": "1", "pml": "ob1", "btl": "tcp,self"}
    five = {"plm": "ssh", "plm_ssh_agent": agent, "plm_ssh_no_tree_spawn": "1"}
    if network := os.environ.get("NCCL_SOCKET_IFNAME"):
        four |= {"oob_tcp_if_include": network, "btl_tcp_if_include": network}
        five |= {"oob_tcp_if_include": network}
    return {f"OMPI_MCA_{name}": told for name, told in four.items()} | {
        f"PRTE_MCA_{name}": told for name, told in five.items()
    }


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *AMAZONS])


def _end_with(child: subprocess.Popen[bytes], guest: socket.socket) -> None:
    """End a command once who asked for it is gone."""
    with contextlib.suppress(OSError):
        while guest.recv(4096):
            pass
    _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
