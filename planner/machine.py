"""What the work runs on: accelerators, their memory, the links between them, the price of an hour."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.errors import NoProfile, PlanError
from planner.model import Floats

Precision = Literal["fp32", "bf16"]

ACHIEVABLE = 0.8
"""Share of the bf16 peak the largest matrix product reaches where nobody measured it: H100 0.80, B200 0.78, A100 0.87
(stas00/ml-engineering 744d01e)."""
PCIE_GB_PER_S = 12.0
"""Between accelerators without links of their own, one direction: NCCL through host memory reaches about half of the
25 GB/s that PCIe 4.0 x16 moves in practice. An assumption."""
CORE_TFLOPS = 0.13
"""fp32 peak of one CPU core: the largest NumPy matrix product measured on one Zen 5 core (AVX-512). A constant and no
measurement at start, so that the same recipe plans the same layout every time."""
MEMORY_GB_PER_S = 40.0
"""Memory bandwidth of one such core, measured by a streaming add over 256 MB."""
LOOPBACK_GB_PER_S = 0.8
"""gloo between processes of one machine: 107 MB of gradients took 138 ms on two ranks."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's share of the machine, as arrays: FLOP/s and bytes per second."""

    flops: Floats
    """Peak times the achievable share."""
    memory: Floats
    intra: Floats
    """To the other ranks of the node, one direction."""
    inter: Floats
    """Of the whole node to the others, one direction."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node. `None` means unknown."""

    name: str
    accelerator: str
    """Maker and model, as in 'NVIDIA H100'; it chooses the prior."""
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
    achievable: float | None = None
    """Share of the peak that a large matrix product reaches; None takes `ACHIEVABLE`."""
    price_usd_per_hour: float | None = None
    price_as_of: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    """'cpu' is this machine: its nodes are groups of processes that share its cores and its memory."""

    @property
    def local(self) -> bool:
        """Whether all nodes are this one machine."""
        return self.kind == "cpu"

    def share(self, nodes: int, processes_per_node: int) -> float:
        """What part of an accelerator (above 1: how many) one rank gets; raises `PlanError` if there are too few."""
        if nodes < 1 or processes_per_node < 1:
            raise PlanError(f"{nodes} nodes x {processes_per_node} processes were asked for: take at least 1 x 1.")
        if self.local:
            return self.accelerators / (nodes * processes_per_node)
        if processes_per_node > self.accelerators:
            raise PlanError(
                f"{self.name} has {self.accelerators} accelerators, {processes_per_node} processes per node were asked "
                f"for: use at most {self.accelerators}."
            )
        return 1.0

    def peak_tflops(self, precision: Precision) -> float:
        """Dense peak of one accelerator; raises `NoProfile` where it is unknown."""
        peaks = {"bf16": self.bf16_tflops, "fp32": self.fp32_tflops}
        peak = peaks[precision]
        if peak is None:
            known = [f"set train.precision: {other}, or " for other, figure in peaks.items() if figure is not None]
            raise NoProfile(f"no {precision} peak is known for {self.name}: {''.join(known)}take another type.")
        return peak

    def hardware(self, precision: Precision, share: float = 1.0) -> Hardware:
        """What one rank has to work with; raises `NoProfile` where a figure is missing."""
        peak = self.peak_tflops(precision)
        if self.hbm_gb_per_s is None or self.intra_gb_per_s is None:
            lacking = "memory bandwidth" if self.hbm_gb_per_s is None else "bandwidth between accelerators"
            raise NoProfile(
                f"no {lacking} is known for {self.name}: take a type with all figures, such as p5.48xlarge."
            )
        figures = (
            peak * 1e12 * (self.achievable or ACHIEVABLE) * share,
            self.hbm_gb_per_s * 1e9 * share,
            (self.intra_gb_per_s or PCIE_GB_PER_S) * 1e9,
            self.inter_gbps * 1e9 / 8,
        )
        return Hardware(*(np.asarray(figure, dtype=np.float64) for figure in figures))


def local_machine(cores: int, ram_gib: float) -> Machine:
    """This machine as a machine to plan for: each core an accelerator, the memory shared out evenly.

    `cores` and `ram_gib` are those of the whole machine. bf16 is given the fp32 peak, since most CPUs lack bf16 units.
    """
    return Machine(
        name="this machine",
        accelerator="CPU core",
        accelerators=cores,
        memory_gib=ram_gib / cores,
        bf16_tflops=CORE_TFLOPS,
        fp32_tflops=CORE_TFLOPS,
        hbm_gb_per_s=MEMORY_GB_PER_S,
        intra_gb_per_s=LOOPBACK_GB_PER_S,
        inter_gbps=LOOPBACK_GB_PER_S * 8,
        achievable=1.0,
        kind="cpu",
    )
