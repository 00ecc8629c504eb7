"""The loss on held-out data while the training goes on, the same number in every layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.loader import TokenBatches
from training.ranks import World

if TYPE_CHECKING:
    from training.parallel import Engine, Layout, Rows, Share


class HeldOut:
    """The held-out sequences this rank looks at."""

    def __init__(self, dataset: Path, train: dict[str, Any], layout: "Layout", share: "Share", world: World) -> None:
        """Take `train.eval_sequences` sequences, or all there are. Raises SourceError when there are none."""
        batches = TokenBatches(dataset, 1, 0, "held_out")
        count = min(train["eval_sequences"], batches.sequences)
        at_once = layout.data * share.micro
        mine = range(layout.data_rank, -(-count // at_once) * at_once, layout.data)
        self._rows = _rows(batches, mine, count, world)

    def loss(self, engine: "Engine", world: World) -> float:
        """Return the mean loss of all learned targets (nats); every rank must call it."""
        from torch import distributed

        part = engine.evaluate(self._rows).double().reshape(1)
        if world.size > 1:
            distributed.all_reduce(part)
        return float(part) / max(1, self._rows.targets)


def _rows(batches: TokenBatches, mine: range, count: int, world: World) -> "Rows":
    """Read the sequences `mine`; those from `count` on are none, but keep all ranks at work alike."""
    import torch

    from training.parallel import Rows

    every = [batches.batch(index) for index in range(count)]
    here = [every[index if index < count else 0] for index in mine]
    length = batches.sequence_length
    masks = [np.ones((1, length), np.bool_) if batch.mask is None else batch.mask for batch in here]
    learned = [mask & (index < count) for index, mask in zip(mine, masks, strict=True)]
    documents = [batch.documents for batch in here if batch.documents is not None]

    def moved(parts: list[Any]) -> Any:
        return torch.from_numpy(np.concatenate(parts)).to(world.device)

    targets = sum(batch.targets for batch in every)
    tokens = moved([batch.tokens for batch in here])
    return Rows(tokens, moved(learned), moved(documents) if documents else None, targets)
