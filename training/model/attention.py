"""One attention for every family: causal, with a sliding window, a soft cap, documents apart, a sequence over ranks.

transformers calls it by the name "castra"; the blocks hand it the batch's `Context`. A sequence that `cp` ranks share
is cut into 2 cp chunks, of which rank r holds chunk r and chunk 2 cp - 1 - r, so that all have the same number of
causal pairs; keys and values are gathered, queries stay (Llama Team, "The Llama 3 Herd of Models", 2024, 3.3.2).
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME: Final = "castra"
SCORES_AT_ONCE: Final = 2**28
"""Capped scores that exist at a time, where there are more: 1 GiB in fp32."""


class Context:
    """What attention must know of a batch besides queries, keys and values: who sees whom, and which part is ours."""

    def __init__(self, length: int, documents: Tensor | None = None, group: ProcessGroup | None = None) -> None:
        """Describe sequences of `length` tokens that the ranks of `group` share.

        `documents`, int64 [rows, length], numbers the document of each token; without it every token sees all before.
        """
        self.length, self.documents, self.group = length, documents, group
        self.starts, self.span = [0], length
        """Where this rank's spans of consecutive positions begin, and how long each is."""
        if group is not None:
            size, rank = distributed.get_world_size(group), distributed.get_rank(group)
            self.span = length // (2 * size)
            self.starts = [rank * self.span, (2 * size - 1 - rank) * self.span]
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's positions of a tensor [rows, length]."""
        if self.group is None:
            return whole
        return torch.cat([whole[:, start : start + self.span] for start in self.starts], 1)

    def positions(self, device: torch.device) -> Tensor:
        """Return the place of this rank's tokens within their documents, int64 [rows or 1, its tokens]."""
        index = torch.arange(self.length, device=device).unsqueeze(0)
        if self.documents is not None:
            begins = self.documents.diff(dim=1, prepend=self.documents[:, :1] - 1) != 0
            index = index - torch.where(begins, index, 0).cummax(1).values
        return self.mine(index)

    def prepare(self, windows: Iterable[int | None], device: torch.device) -> None:
        """Make the masks of blocks with these sliding windows, once for all of them."""
        for window in set(windows):
            for start in self.starts:
                self._masks[start, window] = visible(start, start + self.span, window, self.documents, device)

    def mask(self, start: int, window: int | None) -> Tensor | None:
        """Return who sees whom for the span that begins at `start`, as `visible` does."""
        return self._masks[start, window]


def visible(start: int, stop: int, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which of the keys first..stop the queries start..stop see, bool [rows or 1, 1, queries, keys].

    The first key is `first_key(start, window)`. None means all those up to the query itself, counted from 0: plain
    causal attention, for which no mask need exist.
    """
    first = first_key(start, window)
    if start == 0 and documents is None and (window is None or window >= stop):
        return None
    queries = torch.arange(start, stop, device=device).unsqueeze(1)
    keys = torch.arange(first, stop, device=device)
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if documents is None:
        return seen[None, None]
    return (seen & (documents[:, start:stop, None] == documents[:, None, first:stop])).unsqueeze(1)


def first_key(start: int, window: int | None) -> int:
    """Return the first key that any query from `start` on sees; a token's window counts itself."""
    return 0 if window is None else max(0, start - window + 1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attend: query [rows, heads, queries, width], key and value [rows, key heads, keys, width].

    transformers tells `scaling`, `dropout`, `sliding_window` and `softcap` by name; Castra's blocks tell `context`.
    Returns [rows, queries, heads, width]. A mask is given only by transformers, for padded prompts.
    """
    del module
    score = {name: told.get(name) for name in ("scaling", "softcap")}
    context: Context | None = told.get("context")
    window: int | None = told.get("sliding_window")
    if context is None:
        return _alone(query, key, value, attention_mask, window, score).transpose(1, 2), None
    if context.group is not None:
        # autocast rotates keys in fp32 and attends in 16 bits: only those travel
        key, value = gather_sequence(torch.stack((key.to(value.dtype), value)), context.group)
    parts = []
    for start, queries in zip(context.starts, torch.split(query, context.span, 2), strict=True):
        seen = slice(first_key(start, window), start + context.span)
        parts.append(_score(queries, key[:, :, seen], value[:, :, seen], context.mask(start, window), **score))
    return torch.cat(parts, 2).transpose(1, 2), None


def _alone(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None, score: dict[str, Any]
) -> Tensor:
    """Attend as transformers' own forward pass and generation ask for it: the queries are the last of the keys."""
    stop = key.shape[2]
    start = stop - query.shape[2]
    if mask is None:
        mask = visible(start, stop, window, None, query.device)
        seen = slice(first_key(start, window), stop)
        key, value = key[:, :, seen], value[:, :, seen]
    return _score(query, key, value, mask, **score)


def _score(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Return softmax(query key^T) value where `mask` allows, or causally without one."""
    groups = query.shape[1] // key.shape[1]
    if softcap is None and mask is None:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
    if groups > 1:
        key, value = (every.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for every in (key, value))
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return _capped(query, key, value, mask, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """Attend with scores cap * tanh(score / cap) (Gemma Team, "Gemma 2", 2024, section 2): no fused kernel has it.

    Where there are many scores they are made for a few queries at a time, and again in the backward pass.
    """
    rows, heads, queries, _ = query.shape
    if mask is None:
        mask = torch.ones((queries, queries), dtype=torch.bool, device=query.device).tril()[None, None]
    step = max(64, SCORES_AT_ONCE // (rows * heads * key.shape[2]))
    if queries <= step:
        return _few_capped(query, key, value, mask, scaling, softcap)
    parts = [
        checkpoint(_few_capped, some, key, value, seen, scaling, softcap, use_reentrant=False, preserve_rng_state=False)
        for some, seen in zip(torch.split(query, step, 2), torch.split(mask, step, 2), strict=True)
    ]
    return torch.cat(parts, 2)


def _few_capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    scores = (query @ key.transpose(2, 3) * (scaling / softcap)).tanh() * softcap
    return scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def gather_sequence(shared: Tensor, group: ProcessGroup) -> Tensor:
    """Return the whole sequence, [two, rows, heads, length, width], of which every rank of `group` has two chunks."""
    whole: Tensor = _Gather.apply(shared, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return whole


class _Gather(torch.autograd.Function):
    """All-gather of the chunks in the order of the sequence; backward, a reduce-scatter of their gradients."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        size = distributed.get_world_size(group)
        every = [torch.empty_like(shared) for _ in range(size)]
        distributed.all_gather(every, shared.contiguous(), group=group)
        chunks = [chunk for rank in every for chunk in rank.chunk(2, 3)]
        return torch.cat([chunks[place] for place in _by_sequence(size)], 3)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        size = distributed.get_world_size(ctx.group)
        chunks = slope.chunk(2 * size, 3)
        order = _by_sequence(size)
        by_rank = [chunks[order.index(place)] for place in range(2 * size)]
        pairs = [torch.cat(by_rank[2 * rank : 2 * rank + 2], 3) for rank in range(size)]
        mine = torch.empty_like(pairs[0])
        distributed.reduce_scatter(mine, pairs, group=ctx.group)
        return mine, None


def _by_sequence(size: int) -> list[int]:
    """Return, chunk by chunk of a sequence, where it is in the list of every rank's two chunks."""
    return [2 * place if place < size else 2 * (2 * size - 1 - place) + 1 for place in range(2 * size)]


def _mask(*shape: Any, attention_mask: Tensor | None = None, **told: Any) -> Tensor | None:
    """Make no mask for transformers, unless a prompt is padded."""
    if attention_mask is None:
        return None
    return sdpa_mask(*shape, attention_mask=attention_mask, **told)  # type: ignore[no-any-return]  # untyped


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _mask)
