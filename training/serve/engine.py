"""Many answers at once: a bounded queue, first come first served, and one step of the model after another.

The first rank decides and tells the others each step before it runs it; they follow. A rank that ends takes all down:
the next step, or the next idle second, fails on every other rank.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from training.ranks import World
from training.serve.answer import Answer, Wish
from training.serve.model import Served
from training.serve.settings import Settings
from training.serve.slots import CHUNK, Slots, Step

IDLE: Final = 1.0
"""Seconds between two signs of life to the other ranks while nobody asks."""
IDLE_STEP: Final = Step()


class Full(Exception):
    """The queue is full, or the server is about to end; the text says which."""


@dataclass(slots=True)
class _Sequence:
    """An answer in its slot: how many ids of its prompt are read, and the token chosen last."""

    answer: Answer
    slot: int
    read: int = 0
    last: int = 0

    @property
    def place(self) -> int:
        return len(self.answer.wish.ids) + len(self.answer.tokens) - 1

    @property
    def reading(self) -> bool:
        return self.read < len(self.answer.wish.ids)


class Engine:
    """The first rank's side: who asked, in order, and who is being answered."""

    def __init__(self, served: Served, settings: Settings, world: World) -> None:
        self._slots, self._tokenizer, self._ends = served.slots, served.reader.tokenizer, served.ends
        self._settings, self._world = settings, world
        self.answered = 0
        """Answers that have ended."""
        self._waiting: deque[Answer] = deque()
        self._active: list[_Sequence] = []
        self._free = list(range(settings.slots))
        self._changed = threading.Condition()
        self._closing = False

    @property
    def open(self) -> bool:
        """Whether new requests are taken."""
        return not self._closing

    @property
    def load(self) -> tuple[int, int]:
        """How many are being answered, and how many wait."""
        return len(self._active), len(self._waiting)

    def submit(self, wishes: Sequence[Wish]) -> list[Answer]:
        """Queue requests that belong together: all or none. Raises Full."""
        with self._changed:
            if self._closing:
                raise Full("the server is about to end and takes no more requests; ask another one")
            if len(self._waiting) + len(wishes) > self._settings.queue:
                raise Full(
                    f"{len(self._waiting)} requests wait already, and at most {self._settings.queue} may; ask later"
                )
            answers = [Answer(wish, self._tokenizer, self._settings.seconds) for wish in wishes]
            self._waiting.extend(answers)
            self._changed.notify()
        return answers

    def run(self, stopped: Callable[[], bool]) -> None:
        """Answer until `stopped`, then what was asked before, for the time settings give; tells the other ranks to end.

        Raises RuntimeError when another rank is gone; every answer under way has then failed.
        """
        until = float("inf")
        try:
            while True:
                if stopped() and not self._closing:
                    self._closing, until = True, time.monotonic() + self._settings.drain
                if self._closing and (not any(self.load) or time.monotonic() > until):
                    break
                self._step()
            tell(None, self._world)
        finally:
            self._closing = True
            for answer in [one.answer for one in self._active] + list(self._waiting):
                answer.end("failed")

    def _step(self) -> None:
        """Read one part of a prompt and one token of each answer; wait a little where there is nothing to do."""
        with self._changed:
            if not self._active and not self._waiting:
                self._changed.wait(IDLE)
            self._arrange()
        step, reading, writing = self._next()
        tell(step, self._world)
        if step == IDLE_STEP:
            return
        part, logits = self._slots.run(step)
        if reading is not None and part is not None:
            reading.read += len(step.ids)
            if not reading.reading:
                reading.last = reading.answer.take(part, self._ends)
        for i, one in enumerate(writing):
            if logits is not None:
                one.last = one.answer.take(logits[i], self._ends)

    def _arrange(self) -> None:
        """Let go of what has ended, is too late or no longer wanted, and give free slots to who waits longest."""
        now = time.monotonic()
        for answer in [one.answer for one in self._active] + list(self._waiting):
            if answer.cancelled:
                answer.end("cancelled")
            elif now > answer.deadline:
                answer.end("timeout")
        for one in [one for one in self._active if one.answer.reason]:
            self._active.remove(one)
            self._free.append(one.slot)
            self.answered += 1
        self._waiting = deque(answer for answer in self._waiting if not answer.reason)
        while self._waiting and self._free:
            self._active.append(_Sequence(self._waiting.popleft(), self._free.pop()))

    def _next(self) -> tuple[Step, _Sequence | None, list[_Sequence]]:
        reading = next((one for one in self._active if one.reading), None)
        writing = [one for one in self._active if not one.reading]
        rows = [(one.slot, one.place, one.last) for one in writing]
        if reading is None:
            return Step(rows=rows), None, writing
        ids = reading.answer.wish.ids[reading.read : reading.read + CHUNK]
        return Step(reading.slot, reading.read, ids, rows), reading, writing


def follow(slots: Slots, world: World) -> None:
    """Run what the first rank tells, until it tells the end. Raises RuntimeError when it is gone."""
    while (step := tell(None, world)) is not None:
        if step != IDLE_STEP:
            slots.run(step)


def tell(step: Step | None, world: World) -> Step | None:
    """Give every rank the first rank's step; None is the end. Every rank must call it; returns the step."""
    if world.size == 1:
        return step
    from torch import device, distributed

    told = [step]
    distributed.broadcast_object_list(told, src=0, device=device("cpu"))
    return told[0]
