"""What the work runs on: accelerators, their memory, the links between them, the price of an hour."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

import numpy as np

from planner.errors import NoProfile, PlanError
from planner.hardware import (
    ACCELERATORS,
    CORE,
    FACTS,
    GIB,
    HOST_GB_PER_S,
    NVME_GB_PER_S,
    PCIE_PEERS_GB_PER_S,
    Accelerator,
    speedup,
)
from planner.schema import PRECISIONS, Hardware

HOST_SHARE: Final = 0.9
"""Of a node's own memory a plan may fill so much: the rest is the system's, and the programs'."""
NODES_OVER_TCP: Final = 8
"""More nodes than this need EFA: over TCP their collectives wait for the kernel's network stack (an assumption)."""
CHIPS: Final = {
    "NVIDIA A100 40GB": "A100-40",
    "NVIDIA A100 80GB": "A100-80",
    "NVIDIA H100": "H100-80",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA B300": "B300",
    "NVIDIA T4": "T4",
    "NVIDIA A10G": "A10G",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
}
"""The catalogue's accelerators, by the names that tables of measured steps use."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node. `None` means unknown."""

    name: str
    accelerator: str
    """Maker and model, as in 'NVIDIA H100'; it chooses the profile."""
    accelerators: int
    memory_gib: float
    """Of one accelerator."""
    bf16_tflops: float | None
    """Dense peak of one accelerator."""
    fp32_tflops: float | None
    hbm_gb_per_s: float | None
    """Memory bandwidth of one accelerator. Unit: GB/s."""
    intra_gb_per_s: float | None
    """Links between the accelerators of the node, one direction each; 0 where there is only PCIe. Unit: GB/s."""
    inter_gbps: float
    """Network of the whole node, one direction. Unit: Gbit/s."""
    price_usd_per_hour: float | None = None
    price_as_of: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    """'cpu' is this machine: its nodes are groups of processes that share its cores and its memory."""
    efa_interfaces: int | None = None
    """Elastic Fabric Adapters; 0 where the type has none."""
    ram_gib: float | None = None
    """The node's own memory."""
    nvme_drives: int = 0
    nvme_gb: float = 0.0
    """Of all drives together. Unit: GB (10^9 bytes)."""

    @property
    def local(self) -> bool:
        """Whether all nodes are this one machine."""
        return self.kind == "cpu"

    @property
    def chip(self) -> str:
        """The accelerator's name in tables of measured steps, the catalogue's own where they do not have it."""
        if self.local:
            return CORE
        if self.accelerator == "NVIDIA V100":
            return "V100-32" if self.memory_gib > 16 else "V100-16"
        return CHIPS.get(self.accelerator, self.accelerator)

    @property
    def host_room_gib(self) -> float:
        """What a plan may fill of a node's own memory; unknown is enough."""
        return float("inf") if self.ram_gib is None else self.ram_gib * HOST_SHARE

    @property
    def disk_room_gib(self) -> float:
        """What a plan may fill of a node's NVMe drives."""
        return self.nvme_gb * 1e9 / GIB

    def share(self, nodes: int, processes_per_node: int) -> float:
        """What part of an accelerator (above 1: how many) one rank gets; raises `PlanError` for impossible counts."""
        if nodes < 1 or processes_per_node < 1:
            raise PlanError(f"{nodes} nodes x {processes_per_node} processes were asked for: take at least 1 x 1.")
        if self.local:
            return self.accelerators / (nodes * processes_per_node)
        if processes_per_node > self.accelerators:
            raise PlanError(
                f"{self.name} has {self.accelerators} accelerators, {processes_per_node} processes per node were asked "
                f"for: use at most {self.accelerators}."
            )
        if self.lacks_network(nodes):
            raise PlanError(
                f"{self.name} has no Elastic Fabric Adapter (EFA), {nodes} nodes cannot train together without: take "
                f"at most {NODES_OVER_TCP} nodes, or a type with EFA such as p5.48xlarge."
            )
        return 1.0

    def lacks_network(self, nodes: int) -> bool:
        """Whether that many nodes are too many for a type without EFA."""
        return self.efa_interfaces == 0 and nodes > NODES_OVER_TCP

    def peak_tflops(self, precision: str) -> float:
        """Dense peak of one accelerator in 32 bits, or in 16 for all else; raises `NoProfile` where it is unknown."""
        peaks = {"bf16": self.bf16_tflops, "fp32": self.fp32_tflops}
        if precision == "fp16" and self.chip in ACCELERATORS:
            return ACCELERATORS[self.chip].tflops16
        wanted = "fp32" if precision == "fp32" else "bf16"
        peak = peaks[wanted]
        if peak is None:
            known = [f"set train.precision: {other}, or " for other, figure in peaks.items() if figure is not None]
            raise NoProfile(f"no {precision} peak is known for {self.name}: {''.join(known)}take another type.")
        return peak

    def hardware(self, precision: str, nodes: int = 1, processes_per_node: int | None = None) -> Hardware:
        """What one rank has to work with, as columns without axes; raises `NoProfile` where a figure is missing."""
        processes = processes_per_node or self.accelerators
        share = self.share(nodes, processes) if self.local else 1.0
        chip = self._accelerator()
        peak = self.peak_tflops(precision)
        if self.hbm_gb_per_s is None or self.intra_gb_per_s is None:
            lacking = "memory bandwidth" if self.hbm_gb_per_s is None else "bandwidth between accelerators"
            raise NoProfile(
                f"no {lacking} is known for {self.name}: take a type with all figures, such as p5.48xlarge."
            )
        figures = {
            "flops": peak * 1e12 * share,
            "speedup": self._speedup(precision, chip),
            "memory": self.hbm_gb_per_s * 1e9 * share,
            "capacity": self.memory_gib * share * GIB,
            "multiprocessors": chip.multiprocessors,
            "intra": (self.intra_gb_per_s or PCIE_PEERS_GB_PER_S) * 1e9,
            "inter": self.inter_gbps * 1e9 / 8,
            "per_node": nodes * processes if self.local else processes,
            "host": (self.hbm_gb_per_s if self.local else HOST_GB_PER_S) * 1e9,
            "disk": NVME_GB_PER_S * max(self.nvme_drives, 1) / processes * 1e9,
        }
        return Hardware(**{name: np.asarray(figure, dtype=np.float64) for name, figure in figures.items()})

    def _accelerator(self) -> Accelerator:
        """What is known of the accelerator besides; raises `NoProfile` for one nobody measured."""
        if self.chip not in ACCELERATORS:
            kind = "Trainium" if "Trainium" in self.accelerator else self.accelerator
            raise NoProfile(f"{self.name} ({kind}) has no profile yet: calibrate with 3 measured steps.")
        return ACCELERATORS[self.chip]

    def _speedup(self, precision: str, chip: Accelerator) -> float:
        code = np.asarray(float(PRECISIONS.index(precision)))
        eight, four = np.asarray(chip.eight), np.asarray(chip.four)
        if (code >= PRECISIONS.index("fp8") and eight == 1) or (precision == "nvfp4" and four <= eight):
            raise NoProfile(f"{self.name} has no arithmetic for {precision}: set bf16, or take another type.")
        return float(speedup(code, eight, four))


def local_machine(cores: int, ram_gib: float) -> Machine:
    """This machine as a machine to plan for: each core an accelerator, the memory shared out evenly.

    `cores` and `ram_gib` are those of the whole machine. A core's figures are constants and no measurement at start, so
    that the same recipe plans the same layout every time; bf16 has the fp32 peak, since most CPUs lack units for it.
    """
    core = ACCELERATORS[CORE]
    return Machine(
        name="this machine",
        accelerator="CPU core",
        accelerators=cores,
        memory_gib=ram_gib / cores,
        bf16_tflops=core.tflops16,
        fp32_tflops=core.tflops32,
        hbm_gb_per_s=core.memory_tb_per_s * 1000,
        intra_gb_per_s=core.links_gb_per_s,
        inter_gbps=core.links_gb_per_s * 8,
        kind="cpu",
        ram_gib=ram_gib,
    )


def instance(name: str, facts: Path = FACTS) -> Machine:
    """One of the catalogue's instance types by its EC2 name; raises `PlanError`, naming the nearest, for another."""
    told = json.loads(facts.read_text())
    known = told["instances"]
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`python -m clusters.catalog` lists them."
        raise PlanError(f"{name!r} is not an accelerator instance type known here: {hint}")
    type_, chip = known[name], told["accelerators"][known[name]["accelerator"]]
    return Machine(
        name=name,
        accelerator=type_["accelerator"],
        accelerators=type_["accelerators"],
        memory_gib=type_["accelerator_memory_gib"],
        bf16_tflops=chip["bf16_tflops"],
        fp32_tflops=chip["fp32_tflops"],
        hbm_gb_per_s=chip["hbm_gb_per_s"],
        intra_gb_per_s=chip["nvlink_gb_per_s"],
        inter_gbps=type_["network_gbps"],
        price_usd_per_hour=type_["price_usd_per_hour"],
        price_as_of=told["as_of"]["prices"],
        efa_interfaces=type_["efa_interfaces"],
        ram_gib=type_["ram_gib"],
        nvme_drives=type_["nvme_drives"],
        nvme_gb=type_["nvme_drives"] * type_["nvme_gb_each"],
    )
