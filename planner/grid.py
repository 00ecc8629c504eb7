"""Configurations to be judged, many at a time: what is trained, by which software, cut up how."""

from dataclasses import dataclass

import numpy as np

from planner.model import Floats, Shape
from planner.software import Software


@dataclass(frozen=True, slots=True)
class Grid:
    """Configurations, one per element; every array broadcasts against the others."""

    shape: Shape
    software: Software
    micro: Floats
    """Sequences per rank and forward pass."""
    accumulation: Floats
    """Micro-batches per optimizer step."""
    ranks: Floats
    ranks_per_node: Floats
    recompute: Floats
    """Share of the forward pass that the backward pass does again, 0 to 1."""

    @property
    def tokens(self) -> Floats:
        """Tokens per rank and micro-batch."""
        return self.micro * self.shape.sequence

    def sharded(self, from_stage: int) -> Floats:
        """Over how many ranks a state is split that ZeRO splits from this stage on."""
        return np.where(self.software.stage >= from_stage, self.ranks, 1.0)
