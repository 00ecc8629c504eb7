"""One answer under way: what was asked for, the text it has so far, and why it ended."""

import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import torch

COLD: Final = 1e-5
"""Temperatures below this are 0: logits divided by them would not be finite."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A prompt and how to go on: at most `limit` new tokens; temperature 0 takes the likeliest token each time."""

    ids: list[int]
    limit: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Answer:
    """An answer that the engine writes and the one who asked reads, each in a thread of its own."""

    def __init__(self, wish: Wish, tokenizer: Any, seconds: float) -> None:
        self.wish, self._tokenizer = wish, tokenizer
        self.deadline = time.monotonic() + seconds
        self.pieces: SimpleQueue[str | None] = SimpleQueue()
        """Text as it comes; None ends it."""
        self.tokens: list[int] = []
        self.reason = ""
        """Why it ended: stop, length, timeout, cancelled or failed."""
        self.cancelled = False
        self._shown = self._read = 0
        self._held = ""
        self._generator = torch.Generator()
        if wish.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(wish.seed)

    def take(self, logits: torch.Tensor, ends: frozenset[int]) -> int:
        """Choose the next token from logits [vocabulary], and tell its text; returns its id."""
        chosen = self._choose(logits)
        if chosen in ends:
            self.end("stop")
            return chosen
        self.tokens.append(chosen)
        self._tell(self._decoded(whole=False))
        if not self.reason and len(self.tokens) >= self.wish.limit:
            self.end("length")
        return chosen

    def end(self, reason: str) -> None:
        """End the answer, once; text that was held back is told where the answer is as asked."""
        if self.reason:
            return
        if reason in ("stop", "length", "timeout"):
            self._tell(self._decoded(whole=True))
        if not self.reason:
            self._close(reason)

    def _close(self, reason: str) -> None:
        self.reason = reason
        if self._held:
            self.pieces.put(self._held)
        self.pieces.put(None)

    def _tell(self, piece: str) -> None:
        """Put text out, but for what may be the beginning of a text that stops the answer."""
        self._held += piece
        places = [place for one in self.wish.stop if (place := self._held.find(one)) >= 0]
        if places:
            self._held = self._held[: min(places)]
            self._close("stop")
            return
        back = max((len(one) - 1 for one in self.wish.stop), default=0)
        free = max(0, len(self._held) - back)
        if free:
            self.pieces.put(self._held[:free])
            self._held = self._held[free:]

    def _decoded(self, *, whole: bool) -> str:
        """Return the text of tokens that were not told yet; a character cut between tokens waits for its rest."""
        before = self._tokenizer.decode(self.tokens[self._shown : self._read])
        now = self._tokenizer.decode(self.tokens[self._shown :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not whole):
            return ""
        self._shown, self._read = self._read, len(self.tokens)
        return str(now[len(before) :])

    def _choose(self, logits: torch.Tensor) -> int:
        wish = self.wish
        if wish.temperature < COLD:
            return int(logits.argmax())
        chances = torch.softmax(logits.cpu() / wish.temperature, 0)
        likeliest, ids = chances.sort(descending=True)
        before = likeliest.cumsum(0) - likeliest
        count = int((before < wish.top_p).sum())
        if wish.top_k:
            count = min(count, wish.top_k)
        drawn = torch.multinomial(likeliest[: max(1, count)], 1, generator=self._generator)
        return int(ids[drawn])
