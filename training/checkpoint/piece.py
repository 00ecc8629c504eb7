"""What a rank holds of a tensor: a box of it, or a flat range, which is cut into boxes too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""Of each dimension, where it begins and where it ends (exclusive)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one tensor; what is loaded is written into `local`, in place.

    `name` is the parameter's Hugging Face name, or "exp_avg/<name>", "exp_avg_sq/<name>"; `shape` that of the whole
    tensor. `local` (any device) is the n-d box that begins at `offset` or, where `flat` is given, the 1-d range of the
    row-major tensor that begins there (and `offset` is not used). Of ranks with the same part exactly one is its
    `owner`, who saves it.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: "Tensor"
    owner: bool = True
    flat: int | None = None

    def boxes(self) -> Iterator[tuple[Box, "Tensor"]]:
        """Return the boxes this part consists of, each with the view of `local` that holds it; none if it is empty."""
        if self.flat is None:
            box = tuple((begin, begin + size) for begin, size in zip(self.offset, self.local.shape, strict=True))
            if volume(box):
                yield box, self.local
            return
        done = 0
        for box in boxes_of_range(self.shape, self.flat, self.flat + self.local.numel()):
            size = volume(box)
            yield box, self.local[done : done + size].view([end - begin for begin, end in box])
            done += size


def volume(box: Box) -> int:
    """Return how many elements a box has; one of no dimensions has one."""
    return math.prod(end - begin for begin, end in box)


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is the whole tensor."""
    return tuple((0, size) for size in shape)


def common(one: Box, other: Box) -> Box | None:
    """Return the elements both boxes have, or None if there are none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Cut elements begin..end-1 of a row-major tensor into at most 2 * dimensions - 1 boxes, in their order."""
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    return (((row, row + 1), *inner) for inner in boxes_of_range(shape[1:], begin, end))
