"""Cross entropy without the logits: slice by slice, with its gradients, over a vocabulary whole or cut among ranks."""

from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

LOGITS_AT_ONCE: Final = {"cpu": 2**19, "cuda": 2**26}
"""How many logits the loss holds at a time: 2 MB stay in a core's cache, 256 MB keep a GPU's matrix units busy."""
UNTRAINED: Final = -100
"""The target of a token that is not learned, as torch's own losses have it."""


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    shard: tuple[ProcessGroup, int] | None = None,
) -> Tensor:
    """Return the cross entropy (nats, fp32 scalar) of `hidden @ weight.T`, summed over the targets that are not -100.

    hidden [tokens, width], weight [vocabulary, width], targets int64 [tokens]. The logits are first capped to
    softcap * tanh(logits / softcap) (Gemma 2). With `shard`, the ranks of its group hold the same hidden and targets
    and each a slice of the weight's rows, cut as torch.chunk cuts a vocabulary of that size; each gets the whole sum
    and the whole gradient of hidden (Shoeybi et al., "Megatron-LM", 2019, section 3).
    """
    wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight))
    total: Tensor = LinearCrossEntropy.apply(hidden, weight, targets, (softcap, shard, wanted))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of `summed_cross_entropy`, whose logits never exist all at once.

    The gradient of a row of logits is softmax - onehot, so it is made in the forward pass, slice by slice. With a
    vocabulary of 128 k and 8 k tokens this saves over 8 GB; on a CPU it is faster because a slice stays in the cache.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, how: tuple[Any, ...]) -> Tensor:
        """Sum the loss and make the gradients that `how` wants: (softcap, shard, (of hidden, of weight))."""
        softcap, shard, (by_hidden, by_weight) = how
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        slopes = torch.empty(hidden.shape, dtype=kind, device=hidden.device) if by_hidden else None
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if by_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        matrix = weight.to(kind)
        head = _Head(len(weight), softcap, shard)
        with torch.autocast(device, enabled=False):
            for here in head.slices(len(targets), device):
                part = hidden[here].to(kind)
                nats, slope = head.loss_and_slope(part @ matrix.T, targets[here])
                loss += nats
                slope = slope.to(kind)
                if slopes is not None:
                    torch.mm(slope, matrix, out=slopes[here])
                if total is not None:
                    _add_product(total, slope.T, part)
        if shard is not None:
            distributed.all_reduce(loss, group=shard[0])
            if slopes is not None:
                distributed.all_reduce(slopes, group=shard[0])
        # fp16 has no room for a gradient before its loss scale
        kept = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        ctx.kinds = hidden.dtype, weight.dtype
        ctx.save_for_backward(slopes, None if total is None else total.to(kept))
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of hidden and weight, times `scale`; they are made once and used up here."""
        by_hidden, by_weight = (
            slope if slope is None else slope.mul_(scale).to(kind)
            for slope, kind in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        )
        return by_hidden, by_weight, None, None


class _Head:
    """The rows of the output embedding that this rank has, and how their logits become a loss."""

    def __init__(self, rows: int, softcap: float | None, shard: tuple[ProcessGroup, int] | None) -> None:
        self._softcap, self._rows, self._first, self._longest = softcap, rows, 0, rows
        self._group = None if shard is None else shard[0]
        if shard is not None:
            group, vocabulary = shard
            self._longest = -(-vocabulary // distributed.get_world_size(group))
            self._first = distributed.get_rank(group) * self._longest

    def slices(self, tokens: int, device: str) -> list[slice]:
        """Cut the tokens so that a slice's logits fit; alike on all ranks, however many rows each has."""
        step = max(64, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cpu"]) // self._longest)
        return [slice(start, start + step) for start in range(0, tokens, step)]

    def loss_and_slope(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the rows' summed cross entropy, and its gradient by the logits (both fp32)."""
        if self._softcap is not None:
            logits = logits.float().div_(self._softcap).tanh_()
            bend = 1 - logits.square()
            logits = logits.mul_(self._softcap)
        logs = self._log_softmax(logits)
        own = targets - self._first
        here = (own >= 0) & (own < self._rows) & (targets != UNTRAINED)
        place = torch.arange(len(targets), device=targets.device), own.clamp(0, max(0, self._rows - 1))
        nats = -(logs[place] * here).sum()
        slope = logs.exp_()
        slope[place] -= here.to(slope.dtype)
        slope.mul_((targets != UNTRAINED).unsqueeze(1))
        return nats, slope if self._softcap is None else slope.mul_(bend)

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Return the logarithms of the probabilities, over the vocabulary of all ranks."""
        if self._group is None:
            return torch.log_softmax(logits, 1, dtype=torch.float32)
        logits = logits.float()
        top = logits.amax(1, keepdim=True)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self._group)
        logits = logits - top
        weights = logits.exp().sum(1, keepdim=True)
        distributed.all_reduce(weights, group=self._group)
        return logits.sub_(weights.log_())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to an fp32 total."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
