"""One rank's watch over itself and the others: a thread that sees a hang, says who is behind, and ends the attempt.

It works while the main thread is in a collective or in C code. Should C code hold Python's lock too, so that no thread
of Python runs, a watchdog of the interpreter's own (faulthandler) writes the stacks and ends the process.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from training.job import NodeJob, say
from training.process import FAILED, JobError, leave
from training.ranks import World
from training.supervise.attempts import Attempts
from training.supervise.beat import Beat, Pulse
from training.supervise.blame import Verdict, blame
from training.supervise.judge import Judge
from training.supervise.mark import leave_mark
from training.supervise.straggler import Pace

PERIOD_S: Final = 1.0
"""Between two heartbeats."""
CROWD: Final = 256
"""Ranks from which on heartbeats are rarer, so that rank 0 hears no more than so many in a second."""
MISSED: Final = 4
"""Heartbeats in a row that may be lost before a rank counts as silent."""
LAST_WORDS_S: Final = 5.0
"""What a process may take to say why it ends."""
MARGIN_S: Final = 60.0
"""How much longer than train.hang_after_s a collective waits."""
REPORT_STEPS: Final = 50
"""Steps between two looks at who is slow."""
FOLDER: Final = "stacks"


class Supervisor:
    """Watches this rank from its first `at`; all ranks make it together, with the run's job.

    Stacks go to <output>/stacks/rank-N.txt. Raises JobError where the output folder cannot be written.
    """

    def __init__(self, job: NodeJob, world: World, *, report_steps: int = REPORT_STEPS) -> None:
        self._world, self._limit = world, float(job.spec["train"]["hang_after_s"])
        self._judge = Judge(job.spec["train"], talking=world.rank == 0)
        self._pace = Pace(report_steps)
        self._stacks_path = job.output / FOLDER / f"rank-{world.rank}.txt"
        with world.agreed():
            self._attempts = self._begin_attempt(job)
        _outlast(self._limit)
        self._pulse = Pulse(world, os.environ.get("MASTER_ADDR", ""))
        self._period = min(PERIOD_S * max(1.0, world.size / CROWD), self._limit / 4)
        self.restarts: int = world.gather(self._attempts.count)[0]
        """How many attempts of this run there were before."""
        if self.restarts and world.rank == 0:
            say("restarted", restarts=self.restarts, **({"hung": hang} if (hang := self._attempts.hang) else {}))
        if world.rank == 0:
            self._attempts.add(ranks=world.size, hosts=list(dict.fromkeys(seat.host for seat in self._pulse.seats)))
        self._at: tuple[int, str, int, float] | None = None
        self._done = 0
        self._work: tuple[int, float] = (0, 0.0)
        self._end = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def at(self, step: int, phase: str) -> None:
        """This rank begins a phase of a step; the same ones on every rank. train.hang_after_s begins anew."""
        before = self._at
        order = before[2] + 1 if before is not None and before[0] == step else 0
        self._at = (step, phase, order, time.monotonic())

    def judge(self, step: int, loss: float, norm: float) -> bool:
        """Return whether to do the update of a step, by its global loss and gradient norm. Raises JobError."""
        return self._judge.judge(step, loss, norm)

    def stepped(self, step: int, seconds_own: float) -> None:
        """A step is done, for which this rank worked so long itself, without waiting for others."""
        self._done = step
        done, total = self._work
        self._work = (done + 1, total + seconds_own)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge alike, as JSON."""
        return self._judge.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint has of another's `state`."""
        self._judge.restore(state)

    def close(self) -> None:
        """End the watch; call it before the ranks part."""
        self._end.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._pulse.close()
        self._stacks.close()
        if not self._stacks_path.stat().st_size:
            self._stacks_path.unlink()

    def _begin_attempt(self, job: NodeJob) -> Attempts:
        try:
            self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = self._stacks_path.open("a")
            return Attempts(job.output)
        except OSError as problem:
            raise JobError(f"{problem.filename} cannot be written: {problem.strerror}; make it writable") from problem

    def _watch(self) -> None:
        while not self._end.is_set():
            began = time.monotonic()
            # the next beat puts it off; there is none when no thread of Python can run
            faulthandler.dump_traceback_later(self._limit + MISSED * self._period, exit=True, file=self._stacks)
            beat = self._beat()
            self._pulse.send(beat)
            leave_mark(beat, self._done, self._world.device)
            self._pulse.listen(began + self._period, alert=True)
            at = self._at
            late = at is not None and time.monotonic() - at[3] > self._limit
            if not self._end.is_set() and (late or any(beat.hang for beat, _ in self._pulse.table.values())):
                self._give_up()
            if self._world.rank == 0:
                self._report()

    def _beat(self, *, hang: bool = False) -> Beat:
        step, phase, order, since = self._at or (0, "start", 0, time.monotonic())
        done, seconds = self._work
        age = time.monotonic() - since
        place, waits = self._place() if age > self._period else ("", False)
        return Beat(self._world.rank, step, phase, order, age, done, seconds, place, waits, hang)

    def _place(self) -> tuple[str, bool]:
        """Return where the main thread is, by the innermost frame that is not torch's, and if it is in a collective."""
        frame = sys._current_frames().get(self._main or 0)
        waits = frame is not None and f"torch{os.sep}distributed" in frame.f_code.co_filename
        while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return "", waits
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"[:200], waits

    def _give_up(self) -> None:
        """Write the stacks, hear the others a last time, say who is behind, and end the process."""
        faulthandler.dump_traceback_later(2 * self._period + 2 * LAST_WORDS_S, exit=True, file=self._stacks)
        until = time.monotonic() + 2 * self._period
        self._write_stacks()
        while time.monotonic() < until:
            self._pulse.send(self._beat(hang=True))
            self._pulse.listen(time.monotonic() + self._period / 2)
        beats, silence = self._pulse.now(), MISSED * self._period
        # rank 0 hears all and speaks for all; if it is the silent one, others can tell no more than that
        if self._world.rank == 0 or (beats[0][1] > silence and (self._world.rank == 1 or self._world.local_rank == 0)):
            self._speak(blame(beats, self._pulse.seats, silence))
        else:
            time.sleep(self._period)  # the launcher ends all ranks with the first, and rank 0 has something to say
        leave(FAILED)

    def _write_stacks(self) -> None:
        beat, seat = self._beat(), self._pulse.seats[self._world.rank]
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._stacks.write(
            f"{moment}, attempt {self.restarts + 1}: rank {beat.rank} (node {seat.node}, {seat.host}) is in phase "
            f"{beat.phase} of step {beat.step} since {beat.age_s:.1f} s\n"
        )
        self._stacks.flush()
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        with contextlib.suppress(OSError):  # full: what there is room for is there
            os.fsync(self._stacks.fileno())

    def _speak(self, verdict: Verdict) -> None:
        seats = [self._pulse.seats[rank] for rank in verdict.ranks]
        step, *_ = self._at or (0,)
        blamed = {"ranks": list(verdict.ranks), "nodes": sorted({seat.node for seat in seats})}
        say("hang", step=step, message=verdict.sentence, **blamed, hosts=sorted({seat.host for seat in seats}))
        if self._world.rank == 0 or (self._world.rank == 1 and not self._world.private):
            with contextlib.suppress(OSError):  # the log has it
                self._attempts.add(hang=verdict.sentence, **blamed)

    def _report(self) -> None:
        beats = {rank: beat for rank, (beat, _) in self._pulse.table.items()}
        slow = self._pace.look(beats, self._pulse.seats)
        if slow is not None:
            step = self._at[0] if self._at else 0
            say("straggler", step=step, **{name: _short(value) for name, value in asdict(slow).items()})


def _outlast(limit_s: float) -> None:
    """Have collectives give up only when the watch has had the time to say who is behind; not if the user set that."""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    if "CASTRA_COMM_TIMEOUT_S" not in os.environ:
        for group in list(_world.pg_map):
            _set_pg_timeout(timedelta(seconds=limit_s + MARGIN_S), group)


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
