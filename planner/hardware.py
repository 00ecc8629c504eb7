"""Accelerators by name: peaks, memory, links. Sources: NVIDIA's data sheets, clusters/instances.json for AWS's own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from planner.schema import PRECISIONS, Floats, Hardware

GIB: Final = 2.0**30
HOST_GB_PER_S: Final = 25.0
"""What PCIe 4.0 x16 moves in practice, one direction, between an accelerator and its host."""
NVME_GB_PER_S: Final = 2.0
"""What one of a node's NVMe drives reads: AWS promises 16 GB/s for the eight of a p4d.24xlarge (on its EC2 page). That
they write as fast is an assumption."""
PCIE_PEERS_GB_PER_S: Final = 12.0
"""Between accelerators without links of their own: NCCL through host memory reaches about half of that (assumed)."""


FACTS: Final = Path(__file__).parents[1] / "clusters" / "instances.json"
"""EC2's accelerator instances, as data: this room knows nothing of the room they lie in."""
CORE: Final = "CPU-core"
"""The accelerator that a core of a machine without any is."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator; dense peaks."""

    tflops16: float
    tflops32: float
    eight: float
    """Peak of 8-bit products over 16-bit ones (1 where there are none); likewise of 4-bit."""
    four: float
    memory_tb_per_s: float
    memory_gib: float
    multiprocessors: int
    links_gb_per_s: float
    """To its peers, one direction; 0 where there is only PCIe."""
    generation: str


ACCELERATORS: Final = {
    "V100-16": Accelerator(125, 15.7, 1, 1, 0.9, 16, 80, 150, "Volta"),
    "V100-32": Accelerator(125, 15.7, 1, 1, 0.9, 32, 80, 150, "Volta"),
    "T4": Accelerator(65, 8.1, 1, 1, 0.32, 15, 40, 0, "Turing"),
    "A10G": Accelerator(70, 31.2, 1, 1, 0.6, 22.5, 80, 0, "Ampere"),
    "A100-40": Accelerator(312, 19.5, 1, 1, 1.555, 40, 108, 300, "Ampere"),
    "A100-80": Accelerator(312, 19.5, 1, 1, 2.039, 80, 108, 300, "Ampere"),
    "A800-80": Accelerator(312, 19.5, 1, 1, 2.039, 80, 108, 200, "Ampere"),
    "L4": Accelerator(121, 30.3, 2, 2, 0.3, 22.5, 58, 0, "Ada"),
    "L40S": Accelerator(362, 91.6, 2, 2, 0.864, 45, 142, 0, "Ada"),
    "H100-80": Accelerator(989, 66.9, 2, 2, 3.35, 80, 132, 450, "Hopper"),
    "H100-96-500W": Accelerator(989, 66.9, 2, 2, 2.4, 96, 132, 450, "Hopper"),
    "H100-94": Accelerator(989, 66.9, 2, 2, 3.9, 94, 132, 450, "Hopper"),
    "H800-80": Accelerator(989, 66.9, 2, 2, 3.35, 80, 132, 200, "Hopper"),
    "H20": Accelerator(148, 44.0, 2, 2, 4.0, 96, 78, 450, "Hopper"),
    "H200": Accelerator(989, 66.9, 2, 2, 4.8, 141, 132, 450, "Hopper"),
    "GH200": Accelerator(989, 66.9, 2, 2, 4.0, 96, 132, 450, "Hopper"),
    "B200": Accelerator(2250, 80.0, 2, 4, 8.0, 180, 148, 900, "Blackwell"),
    "B300": Accelerator(2250, 80.0, 2, 6, 8.0, 270, 148, 900, "Blackwell"),
    "GB200": Accelerator(2450, 80.0, 2, 4, 8.0, 186, 148, 900, "Blackwell"),
    "GB300": Accelerator(2450, 80.0, 2, 6, 8.0, 270, 148, 900, "Blackwell"),
    CORE: Accelerator(0.13, 0.13, 1, 1, 0.04, 8, 1, 1.6, "CPU"),
}
"""By the name that tables of measured steps use: model and GB of memory. A CPU's core is one Zen 5 core (AVX-512):
its largest fp32 product in NumPy, a streaming add over 256 MB, gloo's all-reduce of some MB between two processes."""


def hardware(
    names: Sequence[str], precision: Floats, per_node: Floats, inter_gbps: Floats, host: Floats | float = HOST_GB_PER_S
) -> Hardware:
    """The columns for accelerators of `ACCELERATORS`; raises KeyError for another name."""
    kinds = [ACCELERATORS[name] for name in names]

    def column(field: str) -> Floats:
        return np.array([getattr(kind, field) for kind in kinds], dtype=np.float64)

    fp32 = precision == PRECISIONS.index("fp32")
    links = column("links_gb_per_s")
    return Hardware(
        flops=np.where(fp32, column("tflops32"), column("tflops16")) * 1e12,
        speedup=speedup(precision, column("eight"), column("four")),
        memory=column("memory_tb_per_s") * 1e12,
        capacity=column("memory_gib") * GIB,
        multiprocessors=column("multiprocessors"),
        intra=np.where(links > 0, links, PCIE_PEERS_GB_PER_S) * 1e9,
        inter=inter_gbps * 1e9 / 8,
        per_node=per_node,
        host=np.asarray(host, dtype=np.float64) * 1e9,
    )


def shared_out(machine: Hardware, names: Sequence[str], ranks: Floats) -> Hardware:
    """The same columns where a machine's CPU cores are shared out among its ranks, however many those are."""
    if CORE not in names:
        return machine
    ours = np.array([name == CORE for name in names])
    share = np.where(ours, machine.per_node / ranks, 1.0)
    whole = {name: getattr(machine, name) * share for name in ("flops", "memory", "capacity")}
    return replace(machine, **whole, per_node=np.where(ours, ranks, machine.per_node))


def speedup(precision: Floats, eight: Floats, four: Floats) -> Floats:
    """Peak of the products' precision over 16 bits, for places in `PRECISIONS`."""
    eights = precision >= PRECISIONS.index("fp8")
    return np.where(precision == PRECISIONS.index("nvfp4"), four, np.where(eights, eight, 1.0))
