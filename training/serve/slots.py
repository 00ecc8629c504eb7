"""Keys and values of many sequences at once, each in a slot of its own, and the forward passes over them.

Sequences of any length answer together: each step reads one more part of one prompt, and one more token of every
answer that is under way. Every rank runs the same steps, told by the first.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch

CHUNK: Final = 512
"""Ids of a prompt read in one step, so that answers under way are not held up for long."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step reads: a part of one prompt, and the last token of answers.

    slot, start, ids: the prompt's slot, where the part begins in it, and its ids. rows: (slot, place, id) per answer.
    """

    slot: int = 0
    start: int = 0
    ids: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)


class Slots:
    """A transformers model with room for `count` sequences of up to `length` tokens."""

    def __init__(self, model: Any, count: int, length: int) -> None:
        self._model, self._count, self._length = model, count, length
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows = self._places = torch.empty(0, dtype=torch.long)
        self._reach = 0

    @torch.inference_mode()
    def run(self, step: Step) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the logits after the prompt's part, float32 [vocabulary], and after answers, [rows, vocabulary]."""
        part = self._forward([step.slot], [step.start], [step.ids])[0] if step.ids else None
        if not step.rows:
            return part, None
        slots, places, ids = zip(*step.rows, strict=True)
        return part, self._forward(list(slots), list(places), [[one] for one in ids])

    def _forward(self, slots: list[int], starts: list[int], ids: list[list[int]]) -> torch.Tensor:
        """Read ids [rows, n] that begin at `starts` of `slots`; return the last ones' logits, [rows, vocabulary]."""
        device = self._model.device
        first = torch.tensor(starts, device=device)[:, None]
        self._rows = torch.tensor(slots, device=device)
        self._places = first + torch.arange(len(ids[0]), device=device)
        self._reach = max(starts) + len(ids[0])
        out = self._model(
            input_ids=torch.tensor(ids, device=device),
            position_ids=self._places,
            attention_mask=self._masks(),
            past_key_values=self,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def _masks(self) -> Any:
        """Return what each token may look at, as the model wants it: one mask, or one for each kind of layer."""
        config, dtype = self._model.config, self._model.dtype
        kinds, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
        back = self._places[:, None, :, None] - torch.arange(self._reach, device=self._places.device)
        lowest = torch.finfo(dtype).min
        full = torch.zeros(back.shape, dtype=dtype, device=back.device).masked_fill(back < 0, lowest)
        if not window or (kinds and "sliding_attention" not in kinds):
            return full
        sliding = full.masked_fill(back >= window, lowest)
        return {"full_attention": full, "sliding_attention": sliding} if kinds else sliding

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values [rows, heads, n, width]; return all of these rows (transformers asks)."""
        if layer not in self._memory:
            shape = (self._count, self._length, keys.shape[1], keys.shape[3])
            self._memory[layer] = (keys.new_zeros(shape), values.new_zeros((*shape[:3], values.shape[3])))
        kept = self._memory[layer]
        for memory, new in zip(kept, (keys, values), strict=True):
            memory[self._rows[:, None], self._places] = new.transpose(1, 2)
        found = [memory[self._rows, : self._reach].transpose(1, 2) for memory in kept]
        return found[0], found[1]

    def get_seq_length(self, *_: Any) -> int:
        """Return how far the longest row reaches before this step (transformers asks)."""
        return int(self._places.min())
