"""What a collective takes however little it moves, by accelerator: the curves' latencies as columns of the hardware."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from planner.hardware import ACCELERATORS, CORE
from planner.links import Links
from planner.schema import Hardware

CORE_LATENCY_S: Final = 1e-3
"""Of a collective between a CPU's cores (gloo)."""


def with_latencies(machine: Hardware, names: Sequence[str], links: Links) -> Hardware:
    """The same columns with what a collective takes inside a full node, and between two, however little it moves."""
    known = {name: _latencies(name, links) for name in sorted(set(names))}
    inside, between = np.array([known[name] for name in names]).T
    return replace(machine, intra_latency=inside, inter_latency=between)


def _latencies(name: str, links: Links) -> tuple[float, float]:
    if name == CORE:
        return CORE_LATENCY_S, CORE_LATENCY_S
    inside = links.inside(ACCELERATORS[name].generation)
    return inside.latency_s + 8 * inside.hop_s, links.between(ACCELERATORS[name].generation).latency_s
