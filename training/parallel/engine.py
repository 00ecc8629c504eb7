"""What every way of spreading a model can do, and what those of torch's own have in common."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from training.checkpoint.piece import Piece
from training.parallel.mesh import Layout, Rows
from training.parallel.precision import LossScale
from training.parallel.states import (
    Named,
    adamw,
    clipping,
    make_moments,
    pieces,
    scale_gradients,
    set_rate,
    set_updates,
    square,
)


class Engine(Protocol):
    """A model whose states are spread over the ranks, ready to train."""

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Make the gradients of the mean loss over a global batch, from this rank's rows of it.

        Returns two scalars whose sums over all ranks are the loss (sum over all learned targets, nats) and the squared
        norm of the gradients.
        """

    def overflowed(self) -> bool:
        """Say that the norm was not finite; return whether that was an fp16 overflow, which a smaller scale cures."""

    def update(self, rate: float, norm: float) -> None:
        """Clip the gradients, whose global norm is `norm`, let AdamW step at learning rate `rate`, forget them."""

    def discard(self) -> None:
        """Forget the gradients; nothing changes."""

    def evaluate(self, rows: Rows) -> Tensor:
        """Return the loss of these rows as `gradients` does, without any."""

    def settle(self, rows: Rows) -> None:
        """Go once through a step's communication, changing no weight, where the first step differs from the others."""

    def pieces(self) -> Iterator[Piece]:
        """Tell this rank's part of every trained weight and of its moments; what is written there is trained on."""

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the pieces; JSON, the same on all ranks."""

    def restore(self, extra: dict[str, Any]) -> None:
        """Go on from what was written into the pieces and what `extra` returned when they were saved."""


class Optimised:
    """The half of an engine that has weights with gradients of their own, and torch's AdamW."""

    def __init__(self, weights: Named, train: dict[str, Any], layout: Layout) -> None:
        self._weights, self._layout, self._clip = weights, layout, train["grad_clip"]
        self._optimizer = adamw(weights.values(), train)
        make_moments(self._optimizer)
        self._updates = 0
        self._scale = LossScale() if train["precision"] == "fp16" else None

    @property
    def _factor(self) -> float:
        return self._scale.value if self._scale else 1.0

    def _square(self) -> Tensor:
        ranks = self._layout.size // self._layout.pp
        return square(self._weights.values(), ranks) / self._factor**2

    def overflowed(self) -> bool:
        return self._scale is not None and self._scale.shrink()

    def update(self, rate: float, norm: float) -> None:
        scale_gradients(self._weights.values(), clipping(norm, self._clip) / self._factor)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._updates += 1
        if self._scale:
            self._scale.grow()
        self.discard()

    def discard(self) -> None:
        self._optimizer.zero_grad()

    def pieces(self) -> Iterator[Piece]:
        return pieces(self._weights, self._optimizer, self._layout)

    def extra(self) -> dict[str, Any]:
        return {"updates": self._updates} | (self._scale.told() if self._scale else {})

    def restore(self, extra: dict[str, Any]) -> None:
        self._updates = extra["updates"]
        set_updates(self._optimizer, self._updates)
        if self._scale:
            self._scale.restore(extra)
