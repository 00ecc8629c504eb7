"""Answer a file of requests, one JSON body a line as /invocations takes them, into a file of answers in their order.

    python -m training.serve.batch job.json
    torchrun --nproc-per-node 2 -m training.serve.batch job.json

inputs: "export" and "prompts", the JSONL file. Writes answers.jsonl, {"line", "answer"} or {"line", "error"} per line,
and result.json last. Killed and started again, it goes on after the last whole line it wrote.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from training.job import NodeJob, progress
from training.process import JobError, Stopped, StopSignal
from training.ranks import World, run
from training.serve.__main__ import lost
from training.serve.answer import Answer
from training.serve.body import Asked, BadRequest, Reader
from training.serve.engine import Engine, Full, follow
from training.serve.model import open_model
from training.serve.settings import Settings

AHEAD: Final = 4
"""Requests asked ahead of the one whose answer is written next, per slot."""
SAID_EVERY: Final = 1.0
"""Seconds between two lines of progress."""


@dataclass(slots=True)
class Work:
    """The requests that are left, and what became of those before."""

    prompts: Path
    partial: Path
    reader: Reader
    total: int
    written: int = 0
    whole: bool = False
    problem: OSError | None = None

    def feed(self, engine: Engine, ahead: int) -> None:
        """Ask everything that has no answer yet, and write the answers in order. Runs in a thread of its own."""
        try:
            with self.partial.open("r+b") as out, self.prompts.open("rb") as source:
                done = _whole_lines(out)
                asked: deque[tuple[int, Asked | str, list[Answer]]] = deque()
                for number, line in enumerate(source, 1):
                    if number > done:
                        asked.append(self._ask(engine, number, line))
                    while len(asked) >= ahead:
                        self._write(out, *asked.popleft())
                while asked:
                    self._write(out, *asked.popleft())
                out.flush()
                os.fsync(out.fileno())
            self.whole = True
        except Full:
            return  # the engine closes because it was asked to stop
        except OSError as problem:
            self.problem = problem

    def _ask(self, engine: Engine, number: int, line: bytes) -> tuple[int, Asked | str, list[Answer]]:
        try:
            asked = self.reader.read(json.loads(line))
        except (BadRequest, ValueError, RecursionError) as problem:
            return number, str(problem) if isinstance(problem, BadRequest) else "the line is no JSON", []
        return number, asked, engine.submit(asked.wishes)

    def _write(self, out: IO[bytes], number: int, asked: Asked | str, answers: list[Answer]) -> None:
        """Wait for a request's answers and write its line. Raises Full when the engine ended before they did."""
        texts = ["".join(iter(answer.pieces.get, None)) for answer in answers]
        if any(answer.reason == "failed" for answer in answers):
            raise Full
        told = {"error": asked} if isinstance(asked, str) else {"answer": asked.whole(answers, texts)}
        out.write(json.dumps({"line": number} | told, ensure_ascii=False).encode() + b"\n")
        out.flush()
        self.written = number


def answer_file(job: NodeJob, world: World) -> None:
    """Write answers.jsonl and result.json. Raises JobError, and Stopped after a stop signal."""
    stop, began = StopSignal(), time.monotonic()
    with world.agreed():
        settings = replace(Settings.of(os.environ), seconds=math.inf, queue=10**9)
        served = open_model(job, settings, world)
        engine = Engine(served, settings, world)
        work = _work(job, served.reader) if world.rank == 0 else None
    try:
        if work is None:
            follow(served.slots, world)
        else:
            _through(work, engine, settings.slots * AHEAD, stop)
    except RuntimeError as problem:
        lost(problem, world)
    with world.agreed():
        if work is not None and work.whole:
            _finish(job, work, time.monotonic() - began)
        elif work is not None and work.problem is not None:
            raise JobError(
                f"{work.problem.filename or job.output}: {work.problem.strerror}; make it right, start again"
            )
    if not world.gather(work is None or work.whole)[0]:
        raise Stopped


def _through(work: Work, engine: Engine, ahead: int, stop: StopSignal) -> None:
    """Run the engine while the file is read and answers are written."""
    thread = threading.Thread(target=work.feed, args=(engine, ahead), daemon=True)
    thread.start()
    said = time.monotonic()

    def over() -> bool:
        nonlocal said
        if time.monotonic() - said > SAID_EVERY:
            progress(work.written, work.total, "answer")
            said = time.monotonic()
        return stop.asked or not thread.is_alive()

    engine.run(over)
    thread.join()


def _work(job: NodeJob, reader: Reader) -> Work:
    """Find the requests, and what an earlier try wrote of their answers. Raises JobError."""
    try:
        prompts = job.inputs["prompts"]
        digest, total = hashlib.sha256(), 0
        with prompts.open("rb") as source:
            for total, line in enumerate(source, 1):  # noqa: B007  # how many there are in the end
                digest.update(line)
    except (KeyError, OSError) as problem:
        raise JobError('inputs["prompts"] is no file that can be read; name a JSONL file of requests') from problem
    if not total:
        raise JobError(f"{prompts} is empty; write one request a line")
    job.output.mkdir(parents=True, exist_ok=True)
    partial = job.output / f".answers.{digest.hexdigest()[:12]}.partial"
    partial.touch()
    return Work(prompts, partial, reader, total)


def _whole_lines(out: IO[bytes]) -> int:
    """Cut off a line that was not finished, and return how many were; the file is left at its end."""
    count = place = 0
    for line in out:
        if not line.endswith(b"\n"):
            break
        count, place = count + 1, place + len(line)
    out.seek(place)
    out.truncate()
    return count


def _finish(job: NodeJob, work: Work, seconds: float) -> None:
    answers = job.output / "answers.jsonl"
    work.partial.replace(answers)
    with answers.open("rb") as lines:
        errors = sum("error" in json.loads(line) for line in lines)
    progress(work.total, work.total, "answer")
    job.finish({"answers": work.total - errors, "errors": errors, "seconds": round(seconds, 3)})


if __name__ == "__main__":
    run(answer_file)
