"""Pipeline stages over ranks, 1F1B or interleaved (Narayanan et al., arXiv:2104.04473), each cut up by FSDP2 and tp."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from training.checkpoint.piece import Piece
from training.model import NextTokenLoss
from training.parallel.engine import Optimised
from training.parallel.mesh import Layout, Rows, Share
from training.parallel.precision import LOW
from training.parallel.states import local, pieces, square, trained
from training.process import JobError


class Part(nn.Module):
    """A stage as torch's schedules call it: what the stage before gave, and the batch."""

    def __init__(self, objective: NextTokenLoss, index: int) -> None:
        """Take the model's `index`-th stage."""
        super().__init__()
        self.objective, self.index = objective, index

    def forward(
        self, *before: Tensor, tokens: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return hidden states or, from the last stage, the micro-batch's loss as [1]."""
        hidden = None if self.objective.first else before[0]
        given: Tensor = self.objective(tokens, mask, documents, hidden=hidden)
        return given.view(1) if self.objective.last else given


class Pipelined(Optimised):
    """Several stages of a model on every rank of a pp group, whose micro-batches follow each other."""

    def __init__(self, parts: list[Part], length: int, train: dict[str, Any], share: Share, layout: Layout) -> None:
        """Train this rank's stages, the model's first of them first, on sequences of `length` tokens."""
        weights = {name: weight for part in parts for name, weight in trained(part.objective).items()}
        super().__init__(weights, train, layout)
        self._parts, self._micro = parts, share.micro
        self._ranks, self._counts = layout.data * layout.cp, layout.place["tp"] == 0
        self._shape = (share.micro, length // (layout.cp * layout.tp), parts[0].objective.model.config.hidden_size)
        self._dtype = LOW.get(train["precision"], torch.float32)
        self._device = next(iter(weights.values())).device
        self._group = layout.mesh["pp"].get_group()
        self._first, self._last = layout.place["pp"] == 0, layout.place["pp"] == layout.pp - 1
        shared = [part.objective.shared for part in parts]
        self._shared = [weight for weight in shared if weight is not None and weight.requires_grad]
        self._copied = {id(weight) for weight in self._shared} if self._last else set()
        self._losses: list[Tensor] = []
        self._weight = 1.0
        self._schedule = self._make_schedule(share.accumulation)

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor]:
        self._weight = self._factor * self._ranks / max(1, rows.targets)
        self._losses.clear()
        batch = {"tokens": rows.tokens, "mask": rows.mask, "documents": rows.documents}
        given = {name: tensor for name, tensor in batch.items() if tensor is not None}
        inputs = [rows.tokens] if self._first else []
        target = {"target": rows.tokens} if self._last else {}
        self._schedule.step(*inputs, **target, **given, return_outputs=False)
        self._add_up_shared()
        total = torch.stack(self._losses).sum() if self._losses else torch.zeros((), device=self._device)
        return total * self._counts, self._square()

    def settle(self, rows: Rows) -> None:
        """Do nothing: FSDP2's groups do not move after the first step."""

    def evaluate(self, rows: Rows) -> Tensor:
        total = torch.zeros((), device=self._device)
        with torch.no_grad():
            for part in rows.cut(self._micro):
                total += self._pass_through(part)
        return total * self._counts

    def pieces(self) -> Iterator[Piece]:
        copied = {name for name, weight in self._weights.items() if id(weight) in self._copied}
        for piece in pieces(self._weights, self._optimizer, self._layout):
            yield replace(piece, owner=False) if piece.name.rpartition("/")[2] in copied else piece

    def _square(self) -> Tensor:
        counted = [weight for weight in self._weights.values() if id(weight) not in self._copied]
        return square(counted, self._layout.size // self._layout.pp) / self._factor**2

    def _make_schedule(self, micro_batches: int) -> Any:
        count = self._layout.pp * self._layout.vpp
        stages = [self._stage(part, count) for part in self._parts]
        if self._layout.vpp > 1:
            return ScheduleInterleaved1F1B([*stages], micro_batches, loss_fn=self._loss, scale_grads=False)
        return Schedule1F1B(stages[0], micro_batches, loss_fn=self._loss, scale_grads=False)

    def _stage(self, part: Part, count: int) -> PipelineStage:
        """Tell torch the shapes that travel, which it would have to find out by a trial otherwise."""
        index, objective = part.index, part.objective
        hidden = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        tokens = torch.empty((self._micro, 2), dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        inputs, outputs = tokens if objective.first else hidden, loss if objective.last else hidden
        return PipelineStage(part, index, count, self._device, inputs, outputs, group=self._group)

    def _loss(self, given: Tensor, target: Tensor) -> Tensor:
        del target  # the last stage had it already
        self._losses.append(given.detach().sum())
        return given.sum() * self._weight

    def _add_up_shared(self) -> None:
        """Sum the gradients of a tied embedding's two copies, on the first and on the last stage."""
        for weight in self._shared:
            assert weight.grad is not None
            mine = local(weight.grad)
            other = torch.empty_like(mine)
            peer = distributed.get_global_rank(self._group, self._layout.pp - 1 if self._first else 0)
            ops = [distributed.P2POp(distributed.isend, mine, peer), distributed.P2POp(distributed.irecv, other, peer)]
            for work in distributed.batch_isend_irecv(ops):
                work.wait()
            mine += other

    def _pass_through(self, rows: Rows) -> Tensor:
        """Return the loss of a micro-batch (0 but on the last stage), handing hidden states on by hand."""
        place, ranks = self._layout.place["pp"], self._layout.pp
        before, after = ((place + step) % ranks for step in (-1, 1))
        shape = (len(rows.tokens), *self._shape[1:])
        given = torch.zeros((), device=self._device)
        for part in self._parts:
            hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
            if not part.objective.first:
                distributed.recv(hidden, distributed.get_global_rank(self._group, before))
            given = part(hidden, tokens=rows.tokens, mask=rows.mask, documents=rows.documents)
            if not part.objective.last:
                distributed.send(given.contiguous(), distributed.get_global_rank(self._group, after))
                given = torch.zeros((), device=self._device)
        return given.sum()


def check(share: Share, layout: Layout, layers: int) -> None:
    """Raise JobError unless there are micro-batches and layers enough for the stages."""
    stages = layout.pp * layout.vpp
    if layers < stages:
        raise JobError(f"model.layers ({layers}) is below parallel.pp x vpp ({stages}); lower parallel.pp or vpp")
    at_least = f"train.global_batch_size or lower parallel.micro_batch_size ({share.accumulation} micro-batches now)"
    if share.accumulation < layout.pp:
        raise JobError(f"a pipeline of {layout.pp} stages needs as many micro-batches; raise {at_least}")
    if layout.vpp > 1 and share.accumulation % layout.pp:
        raise JobError(f"interleaving needs a multiple of {layout.pp} (parallel.pp) micro-batches; change {at_least}")
