"""The collectives of the sweep over torch.distributed, each with data whose result is known to the last bit.

Sizes are counted, and bandwidths follow, as in nccl-tests (see `training.checks.bandwidth`). gloo has them all in the
forms used here since torch 2.3; its reduce-scatter is an all-reduce of which every rank keeps its part
(pytorch/pytorch#118911), and that is what is measured, because it is what a training run on gloo pays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from training.ranks import World

if TYPE_CHECKING:
    import torch

ITEM: Final = 4
"""Bytes of a float32, the type of all of them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One collective on one size, ready to run any number of times."""

    size: int
    """Bytes that count, what was asked for rounded down to whole elements per rank."""
    run: Callable[[], None]
    wrong: Callable[[], int]
    """Elements of this rank that are not what they must be after the first run."""
    forget: Callable[[], None]
    """Zero what would grow from run to run."""


def _nothing() -> None:
    pass


def _pattern(elements: int, world: World) -> "torch.Tensor":
    """Small whole numbers, different at neighbouring places: their sums are exact in float32 up to 5,000 ranks."""
    import torch

    return torch.arange(elements, dtype=torch.int32, device=world.device).remainder_(97).float()


def _by_rank(world: World) -> "torch.Tensor":
    """0, 1, 2, … as a column: what tells the pieces of the ranks apart."""
    import torch

    return torch.arange(world.size, dtype=torch.float32, device=world.device)[:, None]


def _wrong(found: "torch.Tensor", right: "torch.Tensor") -> int:
    return int((found != right).sum())


def _all_reduce(elements: int, world: World) -> Trial:
    from torch import distributed

    total = _pattern(elements, world) + world.rank
    addend = world.size * (world.size - 1) / 2
    return Trial(
        total.nbytes,
        lambda: _done(distributed.all_reduce(total)),
        lambda: _wrong(total, _pattern(elements, world) * world.size + addend),
        lambda: _done(total.zero_()),
    )


def _all_gather(elements: int, world: World) -> Trial:
    import torch
    from torch import distributed

    mine = _pattern(elements // world.size, world) + world.rank
    every = torch.empty(mine.numel() * world.size, device=world.device)
    return Trial(
        every.nbytes,
        lambda: _done(distributed.all_gather_into_tensor(every, mine)),
        lambda: _wrong(every.view(world.size, -1), _pattern(mine.numel(), world) + _by_rank(world)),
        _nothing,
    )


def _reduce_scatter(elements: int, world: World) -> Trial:
    import torch
    from torch import distributed

    piece = elements // world.size
    addend = world.size * (world.size - 1) / 2
    every = _pattern(piece * world.size, world) + world.rank
    mine = torch.empty(piece, device=world.device)

    def wrong() -> int:
        right = _pattern(piece * world.size, world)[world.rank * piece : (world.rank + 1) * piece]
        return _wrong(mine, right * world.size + addend)

    return Trial(every.nbytes, lambda: _done(distributed.reduce_scatter_tensor(mine, every)), wrong, _nothing)


def _all_to_all(elements: int, world: World) -> Trial:
    import torch
    from torch import distributed

    pattern = _pattern(elements // world.size, world)
    sent = (pattern + _by_rank(world) + world.rank * world.size).view(-1)
    got = torch.empty_like(sent)
    return Trial(
        sent.nbytes,
        lambda: _done(distributed.all_to_all_single(got, sent)),
        lambda: _wrong(got.view(world.size, -1), pattern + _by_rank(world) * world.size + world.rank),
        _nothing,
    )


def _send_recv(elements: int, world: World) -> Trial:
    """Every rank sends to the next and receives from the one before, at once."""
    import torch

    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent = _pattern(elements, world) + world.rank
    got = torch.empty_like(sent)
    return Trial(
        sent.nbytes,
        lambda: exchange(sent, after, got, before),
        lambda: _wrong(got, _pattern(elements, world) + before),
        _nothing,
    )


def exchange(sent: "torch.Tensor", to: int, got: "torch.Tensor", of: int) -> None:
    """Send to one rank while receiving from one; both end with both directions done."""
    from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

    for work in batch_isend_irecv([P2POp(isend, sent, to), P2POp(irecv, got, of)]):
        work.wait()


def _done(_: object) -> None:
    """Drop what an operation returns."""


TRIALS: Final[dict[str, Callable[[int, World], Trial]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


def trial(collective: str, size: int, world: World) -> Trial:
    """Prepare a collective of about `size` bytes, which must be room for an element per rank."""
    return TRIALS[collective](size // ITEM, world)


def possible(world: World) -> list[str]:
    """Return the collectives these ranks can do: one rank has nobody to send to."""
    return [collective for collective in TRIALS if world.size > 1 or collective != "send_recv"]
