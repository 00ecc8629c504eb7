"""A real Slurm on guests: munge, slurmctld on a head, slurmd on every node, from the machine's own packages.

    with SlurmGuests(3, share=[folder]) as slurm:
        slurm.sh("sinfo")
        slurm.power_off("node-2")

Its settings make a dead node known within seconds and let a requeued job start at once; a real cluster takes minutes.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from emulator import guests
from emulator.guests import NamespaceGuest, Pool

HEAD = "head"
PACKAGES = ("slurmctld", "slurmd", "munged", "sbatch")
START_S = 60.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOGS = "/var/log/slurm"

# cred_expire is also how long a requeued job waits before it may start again (120 s if it is not set).
CONFIGURATION = """\
ClusterName=castra
SlurmctldHost=head
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=100000
SlurmdTimeout=5
SlurmctldTimeout=5
MessageTimeout=5
TCPTimeout=2
KillWait=3
BatchStartTimeout=10
CompleteWait=0
UnkillableStepTimeout=60
Waittime=0
ReturnToService=2
JobRequeue=1
MinJobAge=3600
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=/var/log/slurm/jobcomp.log
NodeName={nodes} NodeAddr={nodes} CPUs={cpus} RealMemory={memory_mib} State=UNKNOWN
PartitionName={partition} Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = """\
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
CgroupPlugin=cgroup/v1
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
"""
PREPARE = """set -e
mkdir -p /run/munge /var/log/munge /var/lib/munge /var/spool/slurmctld /var/spool/slurmd /var/log/slurm
chown munge: /run/munge /var/log/munge /var/lib/munge /etc/munge/munge.key
chown slurm: /var/spool/slurmctld /var/log/slurm
setpriv --reuid munge --regid munge --init-groups munged --num-threads 2
"""


def possible(*, with_packages: bool = True) -> bool:
    """Whether a Slurm can be run here: root, namespaces, and, unless an image has them, slurm-wlm and munge."""
    return guests.possible() and (not with_packages or all(map(shutil.which, PACKAGES)))


class SlurmGuests:
    """A head and `nodes` compute nodes, `node-1` and so on; call `start`, or use it as a context."""

    def __init__(  # noqa: PLR0913  what a cluster is made of
        self,
        nodes: int,
        share: Iterable[str | Path] = (),
        pool: Pool | None = None,
        name: str = "slurm",
        partition: str = "train",
        env: Mapping[str, str] | None = None,
        *,
        image: Sequence[Path] = (),
    ) -> None:
        """`share` are folders of all its hosts; `name` keeps clusters in one pool apart; `env` is set on the head.

        `image` are the layers of a machine image that its hosts run, by default this machine's disk.
        """
        self.nodes = [f"node-{number}" for number in range(1, nodes + 1)]
        self.partition, self.name = partition, name
        self._own = pool is None
        self.pool, self.share, self.image = pool or Pool(), list(share), list(image)
        self._key = secrets.token_hex(64)
        self.env = {"PATH": f"{sys.prefix}/bin:{SYSTEM_PATH}", "HOME": "/root", "LANG": "C.UTF-8", **(env or {})}
        self._guests: dict[str, NamespaceGuest] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def head(self) -> NamespaceGuest:
        """The head."""
        return self._guests[HEAD]

    def start(self) -> None:
        """Boot everything and wait until all nodes are idle; raises `RuntimeError` with the daemons' logs."""
        if not possible(with_packages=not self.image):
            raise RuntimeError("no Slurm can be run here: be root and apt-get install slurm-wlm munge iproute2")
        try:
            self._boot(HEAD)
            self.start_controller()
            for node in self.nodes:
                self._boot(node)
                self._daemon(node, "slurmd -D")
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything."""
        for guest in self._guests.values():
            guest.stop()
        if self._own:
            self.pool.close()

    def reach(self) -> list[str]:
        """The words before a command, one string of shell, that run it on the head with the head's environment."""
        env = ["env", "-i", *(f"{name}={value}" for name, value in self.env.items())]
        return [*self.head.enter(), *env, "bash", "-c"]

    def sh(self, command: str, timeout_s: float = 60.0) -> str:
        """What a shell command says on the head; raises `RuntimeError` if it fails."""
        done = subprocess.run(
            [*self.reach(), command], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"`{command}` failed on the head ({done.returncode}): {done.stdout}{done.stderr}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """The state of every node, as sinfo says it; nothing while the controller does not answer."""
        try:
            rows = [line.split() for line in self.sh("sinfo --noheader --Node --format='%N %T'").splitlines()]
        except RuntimeError:
            return {}
        return {row[0]: row[1] for row in rows}

    def wait_idle(self, nodes: Iterable[str] | None = None, timeout_s: float = START_S) -> None:
        """Wait until these nodes, or all, are idle; raises `RuntimeError` if they do not become so."""
        wanted = dict.fromkeys(nodes or self.nodes, "idle")
        until = time.monotonic() + timeout_s
        while not wanted.items() <= (states := self.states()).items():
            if time.monotonic() > until:
                raise RuntimeError(f"Slurm's nodes are {states}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        alive = [guest for guest in self._guests.values() if guest.alive]
        found = [path for one in alive for path in sorted(Path(f"/proc/{one.pid}/root{LOGS}").glob("slurm*.log"))]
        return "\n".join(f"== {path}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in found)

    def alive(self, node: str) -> bool:
        """Whether a node is switched on."""
        return self._guests[node].alive

    def power_off(self, node: str) -> None:
        """Pull a node's plug."""
        self._guests[node].power_off()

    def power_on(self, node: str) -> None:
        """Replace a node by a fresh one of its name."""
        self._boot(node)
        self._daemon(node, "slurmd -D -b")

    def replace(self, node: str) -> None:
        """Put a fresh node in the place of one that is dead or drained."""
        if self.alive(node):
            self.power_off(node)
        self.power_on(node)
        self.sh(f"scontrol update nodename={node} state=resume || true")  # which of a dead one is refused

    def start_controller(self, forgetful: bool = False) -> None:
        """Start slurmctld, which finds the state it had, or forgets it."""
        self._daemon(HEAD, "slurmctld -D -i -c" if forgetful else "slurmctld -D -i")

    def stop_controller(self) -> None:
        """Stop slurmctld; it saves its state."""
        self.sh("pkill -x slurmctld; while pgrep -x slurmctld >/dev/null; do sleep 0.05; done")

    def _boot(self, name: str) -> None:
        guest = self.pool.boot(name, self.name, self.share, self.image)
        assert isinstance(guest, NamespaceGuest)
        self._guests[name] = guest
        if self.image:  # an image has no key: a cluster brings its own
            guest.write("/etc/munge/munge.key", self._key, 0o400)
        cgroups = guests.has_cgroups()
        guest.write("/etc/slurm/slurm.conf", self._configuration(cgroups))
        if cgroups:
            guest.write("/etc/slurm/cgroup.conf", CGROUPS)
        self._run(guest, PREPARE)

    def _configuration(self, cgroups: bool) -> str:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return CONFIGURATION.format(
            nodes=f"node-[1-{len(self.nodes)}]",
            cpus=os.cpu_count(),
            memory_mib=memory // 2**21,
            partition=self.partition,
            # without cgroups what has left a job's sessions outlives it
            proctrack="cgroup" if cgroups else "linuxproc",
            task="cgroup" if cgroups else "none",
        )

    def _daemon(self, name: str, command: str) -> None:
        daemon = command.split(maxsplit=1)[0]
        self._run(self._guests[name], f"setsid {command} </dev/null >{LOGS}/{daemon}.out.log 2>&1 &")

    def _run(self, guest: NamespaceGuest, script: str) -> None:
        done = subprocess.run(
            [*guest.enter(), "bash", "-c", script],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"guest {guest.name}: {done.stderr.strip()}")
