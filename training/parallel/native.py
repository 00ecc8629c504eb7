"""torch's own: one process, DDP, or FSDP2 (full or hybrid) with tensor and context parallel axes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from training.model import NextTokenLoss
from training.parallel.engine import Optimised
from training.parallel.mesh import Layout, Rows, Share
from training.parallel.precision import LOW
from training.parallel.states import trained
from training.ranks import World


class Native(Optimised):
    """A whole model on every data parallel rank, or on every group of them."""

    def __init__(
        self, module: nn.Module, objective: NextTokenLoss, train: dict[str, Any], share: Share, layout: Layout
    ) -> None:
        """Train `objective`, of which `module` is the spread form."""
        super().__init__(trained(objective), train, layout)
        self._module, self._micro = module, share.micro
        # DDP and FSDP2 divide the ranks' sum by their number
        self._ranks = layout.data * layout.cp
        self._counts = layout.place["tp"] == 0

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor]:
        total = self._accumulate(rows)
        return total, self._square()

    def settle(self, rows: Rows) -> None:
        if isinstance(self._module, DistributedDataParallel) and self._layout.size > 2:
            self._accumulate(rows)
            self.discard()

    def evaluate(self, rows: Rows) -> Tensor:
        with torch.no_grad():
            losses = [self._module(part.tokens, part.mask, part.documents) for part in rows.cut(self._micro)]
        return torch.stack(losses).sum() * self._counts

    def _accumulate(self, rows: Rows) -> Tensor:
        parts = rows.cut(self._micro)
        weight = self._factor * self._ranks / max(1, rows.targets)
        total = torch.zeros((), device=rows.tokens.device)
        for number, part in enumerate(parts, 1):
            with self._communicate(number == len(parts)):
                loss = self._module(part.tokens, part.mask, part.documents)
                (loss * weight).backward()
            total += loss.detach()
        return total * self._counts

    def _communicate(self, now: bool) -> AbstractContextManager[None]:
        """Sum gradients over the ranks in the last micro-batch only."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(now)
        elif isinstance(self._module, DistributedDataParallel) and not now:
            return cast("AbstractContextManager[None]", self._module.no_sync())
        return nullcontext()


def replicated(objective: NextTokenLoss, precision: str, world: World) -> nn.Module:
    """Move an objective to the device, and copy it with DDP where there are several ranks."""
    objective.to(world.device).autocast = LOW.get(precision)
    if world.size == 1:
        return objective
    return DistributedDataParallel(objective, gradient_as_bucket_view=True, broadcast_buffers=False)


def sharded(module: nn.Module, blocks: list[nn.Module], precision: str, layout: Layout) -> None:
    """Cut a module up with FSDP2, in place: a group of weights per decoder block, and one of the others."""
    low = LOW.get(precision)
    kinds = MixedPrecisionPolicy(low, torch.float32) if low else MixedPrecisionPolicy()
    ranks = layout.dp_shard * layout.cp

    def place(weight: nn.Parameter) -> Shard | None:
        """Cut experts up by the rows of their matrices: there may be more ranks than experts."""
        return Shard(1) if weight.ndim > 2 and weight.shape[1] % ranks == 0 else None

    for block in blocks:
        fully_shard(block, mesh=layout.sharding, mp_policy=kinds, shard_placement_fn=place)
    fully_shard(module, mesh=layout.sharding, mp_policy=kinds, shard_placement_fn=place)
