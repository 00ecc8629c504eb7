"""How long a collective takes among some ranks: bytes over the narrowest link, and a latency for every hop."""

import numpy as np

from planner.schema import Floats


def ring(size: Floats, ranks: Floats, rate: Floats, latency: Floats | float, factor: Floats | float) -> Floats:
    """Seconds to reduce (factor 2), gather or scatter (factor 1) `size` bytes; nothing among a single rank.

    `rate` is in bytes per second through one member, `latency` in seconds for all hops together.
    """
    return np.where(ranks > 1, factor * (ranks - 1) / np.maximum(ranks, 1) * size / rate + latency, 0.0)


def group_rate(ranks: Floats, inside: Floats, links: Floats, network: Floats, per_node: Floats) -> Floats:
    """Bytes per second through one member of a group of `ranks`, `inside` of which share each node.

    A ring over several nodes passes each node's network once; the members of other groups on the node share it.
    """
    return np.where(ranks > inside, np.minimum(network * inside / per_node, links), links)
