"""One node's report: everything the checks know to ask of a machine, and what is wrong by itself."""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Self

from training.checks import accelerators, dcgm, disks, efa, host, kernel_log, software, storage, topology
from training.checks.clock import Skew
from training.checks.disks import Disk
from training.checks.finding import Finding
from training.checks.machine import Hung, Machine, within
from training.checks.storage import Speed
from training.job import NodeJob
from training.process import JobError

PATIENCE_S: Final = 300.0
"""For the slowest node: several of its tools may hang, each for its own patience."""
LEVELS: Final = ("network", "quick", "full")
SPEED_S: Final = 60.0
"""For the speed of one place: it takes 8 s where nothing hangs."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What each node should have; nothing is expected of what is empty."""

    accelerator: str = ""
    """As clusters/instances.json names it: `NVIDIA A100 80GB`."""
    accelerators: int = 0
    efa_interfaces: int = 0
    lustre: str = ""
    """The path of the Lustre file system."""
    s3: str = ""
    """`s3://bucket/prefix` where the speed may be measured."""
    dcgm_level: int = 3
    """Of DCGM's diagnosis in a full check: 2, 3 or 4."""

    @classmethod
    def read(cls, told: Any) -> Self:
        """Read spec["expected"]; what it has beside is for others. Raises JobError."""
        if not isinstance(told, dict):
            raise JobError(f"what is expected of nodes must be a mapping, and is {told!r}")
        known = {one.name: told[one.name] for one in fields(cls) if told.get(one.name) is not None}
        for one in fields(cls):
            if one.name in known and type(known[one.name]) is not type(one.default):
                raise JobError(f"expected.{one.name} is {known[one.name]!r}, it must be {type(one.default).__name__}")
        if known.get("dcgm_level", 3) not in (2, 3, 4):
            raise JobError(f"expected.dcgm_level is {known['dcgm_level']}, it must be 2, 3 or 4")
        return cls(**known)


@dataclass(slots=True)
class Report:
    """What one node tells."""

    host: str
    boot: str
    software: dict[str, str]
    image: dict[str, Any]
    machine: dict[str, Any]
    gpus: list[dict[str, Any]]
    efa: dict[str, Any]
    cards: list[str]
    topology: dict[str, Any]
    disks: list[dict[str, Any]]
    speeds: list[Speed]
    alike: dict[str, str]
    """What nodes of one type have alike."""
    findings: list[Finding]
    seconds: float = 0.0

    def told(self, node: int, skew: Skew | None, findings: list[Finding]) -> dict[str, Any]:
        """For result.json."""
        return {
            "node": node,
            "host": self.host,
            "software": self.software,
            "image": self.image,
            "machine": self.machine,
            "gpus": self.gpus,
            "efa": self.efa,
            "topology": self.topology,
            "disks": {"mounts": self.disks, "speeds": [speed.told() for speed in self.speeds]},
            "clock": asdict(skew) if skew else {},
            "seconds": self.seconds,
            "findings": [asdict(finding) for finding in findings],
        }


@dataclass(frozen=True, slots=True)
class Examination:
    """How to examine a node."""

    expected: Expected = field(default_factory=Expected)
    full: bool = False
    nodes: int = 1
    writable: tuple[str, ...] = ()
    """Where the job writes."""
    machine: Machine = field(default_factory=Machine)
    speed_s: float = storage.SECONDS
    """How long writing and reading is measured, each, at each place."""

    @classmethod
    def of(cls, job: NodeJob, nodes: int) -> Self:
        """Read what a job asks for. Raises JobError."""
        level = job.spec.get("checks", {}).get("level", "quick")
        if level not in LEVELS:
            raise JobError(f"checks.level is {level!r}, it must be one of {', '.join(LEVELS)}")
        expected = Expected.read(job.spec.get("expected", {}))
        return cls(expected, level == "full", nodes, (str(job.output), scratch()))

    @property
    def patience_s(self) -> float:
        """How long peers wait for this one's report."""
        return PATIENCE_S + (dcgm.PATIENCE_S[self.expected.dcgm_level] if self.full else 0)

    def make(self) -> Report:
        """Examine this node."""
        began, machine, expected = time.monotonic(), self.machine, self.expected
        log = kernel_log.lines(machine)
        found = accelerators.examine(machine, expected.accelerator, expected.accelerators, log or ())
        adapters = efa.look(machine)
        here, image = software.versions(machine), software.image(machine)
        seen = host.look(machine)
        gpus = [(gpu.name, gpu.address) for gpu in found.gpus]
        places = topology.look(machine, gpus, [(card.name, card.address) for card in adapters.cards])
        mounts = disks.look(machine, (*self.writable, *filter(None, [expected.lustre])))
        speeds = self._speeds(mounts)
        findings = [
            *software.against_image(here, image),
            *found.findings,
            *(accelerators.diagnose(machine, expected.dcgm_level) if self.full and found.gpus else ()),
            *efa.judge(adapters, expected.efa_interfaces, gpus=bool(found.gpus), locked=efa.lockable()),
            *host.judge(seen, gpus=bool(found.gpus), nodes=self.nodes),
            *disks.judge(mounts, expected.lustre),
            *disks.judge_nvme(machine),
            *kernel_log.unreadable(log),
            *kernel_log.judge(log or ()),
            *kernel_log.judge_edac(machine),
        ]
        firmware = ", ".join(sorted({card.firmware for card in adapters.cards})) or "none"
        alike = here | found.alike() | host.alike(seen) | {
            "topology": topology.alike(places), "efa_firmware": firmware, "image": str(image.get("flavour", "none")),
        }  # fmt: skip
        return Report(
            socket.gethostname(), seen["boot"], here, image, seen, found.told(), adapters.told(), adapters.names,
            places, [disk.told() for disk in mounts], speeds, alike, merged(findings), time.monotonic() - began,
        )  # fmt: skip

    def _speeds(self, mounts: list[Disk]) -> list[Speed]:
        """Measure the disks where the job writes, told by their mount, and S3, if that was asked for."""
        if not self.full:
            return []

        def objects(url: str) -> Speed:
            return storage.s3(url, seconds=self.speed_s)

        found = [
            replace(_bounded(disk.folder, lambda path: storage.folder(path, seconds=self.speed_s)), where=disk.mount)
            for disk in mounts
            if disk.to_write and not disk.problem
        ]
        return [*found, *([_bounded(self.expected.s3, objects)] if self.expected.s3 else [])]


def scratch() -> str:
    """This node's own folder for a job's files."""
    return os.environ.get("CASTRA_SCRATCH", tempfile.gettempdir())


def merged(findings: list[Finding]) -> list[Finding]:
    """Tell once what several devices share; the gravest first."""
    devices: dict[Finding, list[str]] = {}
    for finding in findings:
        devices.setdefault(replace(finding, device=""), []).append(finding.device)
    one = [replace(finding, device=", ".join(filter(None, dict.fromkeys(on)))) for finding, on in devices.items()]
    return sorted(one, key=lambda finding: finding.gravity)


def _bounded(where: str, measure: Callable[[str], Speed]) -> Speed:
    try:
        return within(SPEED_S, where, lambda: measure(where))
    except Hung as problem:
        return Speed(where, 0, 0, 0, str(problem))
