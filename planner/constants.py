"""What a machine with its software reaches of its figures: a handful of constants, fitted to measured steps."""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from planner.schema import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """One value per configuration (or one for all)."""

    scale: Floats
    """Measured over modelled, of everything: data loading, stragglers, clocks."""
    gemm: Floats
    """Share of the peak that a large matrix product reaches."""
    attention: Floats
    """Share of the peak by flash attention."""
    memory: Floats
    """Share of the memory bandwidth by small kernels."""
    links: Floats
    """Share of the links inside a node by collectives; likewise of the network between nodes."""
    network: Floats
    hop_us: Floats
    """Latency of a collective per node it passes. Unit: microseconds."""
    overlap: Floats
    """Of the communication that could hide behind computation, how much does."""
    launch_us: Floats
    """Host's time to start one layer's forward pass. Unit: microseconds."""
    expert_us: Floats
    """Host's time to start the experts of one layer's forward pass, besides. Unit: microseconds."""
    fp8: Floats
    """Speed-up over 16 bits that 8-bit products reach, as a share of the peak's; likewise block-scaled and 4-bit."""
    block8: Floats
    fp4: Floats
    routing: Floats
    """Work around the experts (permuting, padding, imbalance), as a multiple of its bytes and products."""


BOUNDS: Final[dict[str, tuple[float, float, float]]] = {
    "scale": (1.03, 0.25, 8.0),
    "gemm": (0.80, 0.3, 0.97),
    "attention": (0.7, 0.05, 1.0),
    "memory": (0.75, 0.2, 1.3),
    "links": (0.8, 0.15, 1.2),
    "network": (0.75, 0.05, 1.6),
    "hop_us": (30.0, 0.2, 200.0),
    "overlap": (0.8, 0.0, 1.0),
    "launch_us": (250.0, 5.0, 4000.0),
    "expert_us": (1500.0, 5.0, 10000.0),
    "fp8": (0.75, 0.4, 1.2),
    "block8": (0.7, 0.3, 1.2),
    "fp4": (0.6, 0.2, 1.2),
    "routing": (1.0, 0.3, 6.0),
}
"""Where the search for each constant starts, and between which values it stays."""
NAMES: Final = tuple(field.name for field in fields(Constants))


def start(**values: float) -> Constants:
    """The constants nobody has measured anything for, except those given."""
    told = {name: values.get(name, BOUNDS[name][0]) for name in NAMES}
    return Constants(**{name: np.asarray(value, dtype=np.float64) for name, value in told.items()})
