"""From a checkpoint into the tensors of a run, whatever its layout and whatever layout wrote it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from training.checkpoint.image import type_name
from training.checkpoint.piece import Box, Piece
from training.checkpoint.reader import TYPES, Array, Reader
from training.process import JobError

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK: Final = 64 << 20
"""Bytes that are on their way to a device at once."""


def load(checkpoint: Path, pieces: Iterable[Piece]) -> None:
    """Fill the pieces of this rank, each before the next is asked for; those of other ranks do not matter.

    A piece that is not as the file has it (in a GPU's memory, of another type, not contiguous) takes at most `BLOCK`
    bytes more at a time. Raises JobError when the checkpoint lacks a tensor, or has it in another shape.
    """
    with Reader(checkpoint) as reader:
        for piece in pieces:
            if (shape := reader.shape(piece.name)) != tuple(piece.shape):
                raise JobError(f"{checkpoint} has {piece.name} in shape {[*shape]}, and this run in {[*piece.shape]}")
            for box, view in piece.boxes():
                _fill(reader, piece.name, box, view.detach())


def load_weights(checkpoint: Path, model: "nn.Module") -> None:
    """Copy the weights of a checkpoint, whatever layout wrote it, into a plain model of one process.

    Weights that are one (tied) are there under one of their names; frozen ones may be missing. Raises JobError.
    """
    with Reader(checkpoint) as reader:
        there = set(reader.names())
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    pieces = []
    for weight, called in names.items():
        known = [name for name in called if name in there]
        if known:
            pieces.append(Piece(known[0], tuple(weight.shape), (0,) * weight.ndim, weight))
        elif weight.requires_grad:
            raise JobError(f"{checkpoint} has no tensor {called[0]}")
    load(checkpoint, pieces)


def _fill(reader: Reader, name: str, box: Box, view: "Tensor") -> None:
    import torch

    kind = reader.dtype(name)
    if view.device.type == "cpu" and view.is_contiguous() and type_name(view.dtype) == kind:
        bits = view.view(torch.int16) if kind == "BF16" else view
        reader.read(name, box, bits.numpy().view(TYPES[kind]))
        return
    for part, target in _blocks(box, view):
        values: Any = torch.from_numpy(_signed(reader.read(name, part)))
        target.copy_(values.view(torch.bfloat16) if kind == "BF16" else values)


def _blocks(box: Box, view: "Tensor") -> Iterator[tuple[Box, "Tensor"]]:
    """Cut a box into ones of at most `BLOCK` bytes (of 4 each), by its first dimension that can be cut."""
    cut = next((index for index, size in enumerate(view.shape) if size > 1), None)
    if cut is None or view.numel() * 4 <= BLOCK:
        yield box, view
        return
    size = view.shape[cut]
    step = max(1, size * BLOCK // (view.numel() * 4))
    for begin in range(0, size, step):
        end, first = min(begin + step, size), box[cut][0]
        part = (*box[:cut], (first + begin, first + end), *box[cut + 1 :])
        yield from _blocks(part, view.narrow(cut, begin, end - begin))


def _signed(values: Array) -> Array:
    """Return the bits of bfloat16 as signed integers, the only ones of two bytes torch can reinterpret."""
    return values.view("<i2") if values.dtype == "<u2" else values
