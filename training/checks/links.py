"""The links between ranks: all-reduce inside every node and over all nodes, and one message from rank to rank."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from training.checks.micro import Clock
from training.ranks import World

if TYPE_CHECKING:
    import torch

SIZES: Final = {"cpu": (64 << 10, 1 << 20, 8 << 20), "cuda": (1 << 20, 64 << 20, 512 << 20)}
"""Bytes of a message, by device."""
SAMPLES: Final = 5
INSIDE, BETWEEN = "inside", "between"
Told = dict[str, Any]


class Links:
    """Measures the links; every rank makes one, and walks through `measured` with the others."""

    def __init__(self, world: World) -> None:
        from torch import distributed

        self._world, self._per_node = world, world.size // world.nodes
        self._sizes = SIZES[world.device.type]
        groups = [self._group(node) for node in range(world.nodes)] if self._inside else []
        self._node = groups[world.node] if groups else distributed.group.WORLD

    @staticmethod
    def count(world: World) -> int:
        """How many measurements `measured` has."""
        places = (world.size > world.nodes) + (world.nodes > 1)
        return 2 * places * len(SIZES[world.device.type])

    def measured(self) -> Iterator[tuple[str, str, Told | None]]:
        """What, of how many bytes, and this rank's seconds and GB/s, one direction; None where it only looks on."""
        for size in self._sizes:
            shape = f"{size >> 10} KiB"
            if self._inside:
                yield f"all_reduce {INSIDE}", shape, self._all_reduce(size, self._node, self._per_node)
                mine = self._world.local_rank
                yield f"send_recv {INSIDE}", shape, self._send(size, mine ^ 1, mine ^ 1 < self._per_node)
            if self._world.nodes > 1:
                yield f"all_reduce {BETWEEN}", shape, self._all_reduce(size, None, self._world.nodes)
                node = self._world.node ^ 1
                takes_part = self._world.local_rank == 0 and node < self._world.nodes
                yield f"send_recv {BETWEEN}", shape, self._send(size, node, takes_part, far=True)

    @property
    def _inside(self) -> bool:
        return self._per_node > 1

    def _group(self, node: int) -> Any:
        from torch import distributed

        return distributed.new_group(list(range(node * self._per_node, (node + 1) * self._per_node)))

    def _all_reduce(self, size: int, group: Any, members: int) -> Told:
        from torch import distributed

        array = self._array(size)
        seconds = self._timed(lambda: distributed.all_reduce(array, group=group))
        return {"seconds": seconds, "gb_per_s": size * 2 * (members - 1) / members / seconds / 1e9}

    def _send(self, size: int, peer: int, takes_part: bool, *, far: bool = False) -> Told | None:
        """There and back: half of that is one way. Pairs are of neighbours, all at once."""
        from torch import distributed

        world, array = self._world, self._array(size)
        other = peer * self._per_node if far else world.node * self._per_node + peer
        steps = [distributed.send, distributed.recv] if world.rank < other else [distributed.recv, distributed.send]

        def go() -> None:
            for step in steps:
                step(array, other)

        seconds = self._timed(go if takes_part else lambda: None) / 2
        return {"seconds": seconds, "gb_per_s": size / seconds / 1e9} if takes_part else None

    def _timed(self, go: Callable[[], object]) -> float:
        """The median of as many goes on every rank, since they are made together."""
        clock, samples = Clock(self._world.device), []
        for _ in range(SAMPLES + 1):
            self._world.barrier()
            clock.wait()
            began = time.perf_counter()
            go()
            clock.wait()
            samples.append(time.perf_counter() - began)
        return median(samples[1:])

    def _array(self, size: int) -> "torch.Tensor":
        import torch

        return torch.zeros(size // 4, device=self._world.device)
