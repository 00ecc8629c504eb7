"""What a model makes of a text: the negative logarithm of the probability it gives to every token, added up."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from training.job import progress
from training.score.text import HeldOut

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

TOKENS_AT_ONCE: Final = 4096
"""Tokens per forward pass, at least one window: enough to keep the processor busy."""
Summed = Callable[["Tensor", "Tensor | None", "Tensor | None"], "Tensor"]
"""From int64 tokens [rows, length + 1], which targets count and the inputs' documents, to the sum in nats."""


def total_nats(model: "PreTrainedModel", held_out: HeldOut, length: int, end: int, precision: str = "fp32") -> float:
    """Return -log probability of all tokens that are paid for, in nats, of a network that `training.model` made.

    The first token follows `end`; windows have `length` tokens. `precision` is the recipe's.
    """
    import torch

    from training.model import NextTokenLoss

    objective = NextTokenLoss(model).eval()
    objective.autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return summed(objective, held_out, length, end)


def summed(objective: "nn.Module | Summed", held_out: HeldOut, length: int, end: int) -> float:
    """Add up an objective over the windows of held-out documents, on the GPU where there is one."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(objective, torch.nn.Module):
        objective.to(device)
    total, done, count = 0.0, 0, len(held_out.tokens)
    with torch.inference_mode():
        for tokens, mask, documents in _windows(held_out, length, end):
            total += float(objective(tokens.to(device), _moved(mask, device), _moved(documents, device)))
            done += tokens.shape[0] * (tokens.shape[1] - 1)
            progress(done, count, "token scored", bits_per_token=total / done / math.log(2))
    return total


def _windows(held_out: HeldOut, length: int, end: int) -> Iterator[tuple["Tensor", "Tensor | None", "Tensor | None"]]:
    """Yield windows of the stream, several at a time; the last one may be shorter."""
    import torch

    stream = np.concatenate([[end], held_out.tokens])
    count, whole = len(held_out.tokens), len(held_out.tokens) // length * length
    rows = max(1, TOKENS_AT_ONCE // length) * length
    # input i of the stream is the token before target i, so that its document is that of token i - 1
    numbers = None if held_out.begins is None else np.concatenate([[0], np.cumsum(held_out.begins)])
    for first in [*range(0, whole, rows), *([whole] if whole < count else [])]:
        last = min(first + rows, whole) if first < whole else count
        wide = length if first < whole else count - whole
        index = np.arange(first, last, wide)[:, None] + np.arange(wide + 1)
        mask = None if held_out.learned is None else torch.from_numpy(held_out.learned[index[:, :-1]])
        documents = None if numbers is None else torch.from_numpy(numbers[index[:, :-1]])
        yield torch.from_numpy(stream[index]), mask, documents


def _moved(part: "Tensor | None", device: Any) -> "Tensor | None":
    return None if part is None else part.to(device)
