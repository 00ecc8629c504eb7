"""The program that runs on every node of every kind of cluster: `python -m training.node job.json`.

It finds its place in the job, brings the inputs here, waits for the other nodes, runs the job's module (by torchrun if
it has ranks), relays its output in whole lines, keeps the output safe, keeps the time limit, and ends when, and as, the
whole gang ends:

    0 done   1 a program crashed, or a node was lost   2 refused   124 the time limit   143 stopped as asked, and saved

The time limit counts from this program's start, so every attempt has all of it. SIGTERM means: save and stop; whoever
has not ended `grace_s` seconds later is killed.
"""

import contextlib
import json
import math
import os
import queue
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from training import contract
from training.contract import Node
from training.follower import Follower
from training.gang import FAREWELL_S, Abort, AllDone, End, Go, Patience, Stop, Uploaded
from training.job import write_json
from training.leader import Leader
from training.process import FAILED, REFUSED, STOPPED, JobError, end_on_crash, leave
from training.program import Log, Program, adopt_orphans
from training.remote import Trouble
from training.staging import Stage

TIMED_OUT: Final = 124
"""Exit code of timeout(1)."""
ABORT_S: Final = 3.0
"""What a program gets to end by itself once the gang has failed: its ranks would only wait for each other."""
TICK_S: Final = 0.2
FOLDER: Final = "CASTRA_NODE_FOLDER"
"""Names a folder of this node's that goes with it."""
FOREIGN: Final = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a platform may have set for a torchrun of its own; so are all PET_*."""


@dataclass(frozen=True, slots=True)
class Task:
    """The job.json that came with the code, see `clusters.payload`."""

    name: str
    module: str
    spec: dict[str, Any]
    inputs: dict[str, str]
    output: str
    processes_per_node: int
    timeout_s: float
    grace_s: float

    @classmethod
    def read(cls, path: Path) -> "Task":
        """Raises JobError."""
        try:
            told = json.loads(path.read_text())
            return cls(**{name: told[name] for name in cls.__slots__})
        except OSError as problem:
            raise JobError(f"{path} cannot be read: {problem.strerror}") from problem
        except (ValueError, KeyError, TypeError) as problem:
            raise JobError(f"{path} is not a job for a node: {problem!r}") from problem


@dataclass(frozen=True, slots=True)
class _Staged:
    """The inputs are on this node; where the program's own job.json is."""

    job: Path


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the program wrote on this node is where it belongs, or why it is not."""

    problem: str


@dataclass(frozen=True, slots=True)
class _Published:
    """The whole gang's output is complete, or why it is not; and the code to end with."""

    problem: str
    code: int


@dataclass(frozen=True, slots=True)
class _Failed:
    """This node cannot begin."""

    code: int
    message: str


class NodeProgram:
    """One node's part in a job: what happens comes as events, one at a time."""

    def __init__(self, task: Task, node: Node, log: Log, folder: Path) -> None:
        self._task, self._node, self._log, self._folder = task, node, log, folder
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._deadline, self._kill_at = time.monotonic() + task.timeout_s, math.inf
        self._give_up_at = math.inf
        self._program: Program | None = None
        self._job: Path | None = None
        self._code: int | None = None
        self._stopping = 0
        self._aborted: int | None = None
        self._outcome: int | None = None
        self._why, self._reported = "", False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._events.put(Stop(STOPPED)))
        gang = Follower if node.rank else Leader
        self._gang = gang(node, task.name, Patience.read(os.environ), self._events.put)
        self._stage = Stage(task.name, node, self._gang.uploaded, self._upload_trouble)
        self._beats = self._serve_metrics()

    def run(self) -> int:
        """Do this node's part and return the exit code."""
        self._background(self._bring)
        while self._outcome is None:
            with contextlib.suppress(queue.Empty):
                self._react(self._events.get(timeout=TICK_S))
            self._look()
        self._part()
        return self._outcome

    def _react(self, event: Any) -> None:
        match event:
            case Go(hosts):
                self._start(hosts)
            case Stop(code):
                self._stop(code)
            case Uploaded(rank, name):
                self._stage.heard(rank, name)
            case AllDone(code):
                self._background(lambda: _Published(self._stage.publish(whole=code == 0), code))
            case End(code):
                self._outcome = code
            case Abort():
                self._abort(event)
            case _:
                self._go_on(event)

    def _go_on(self, done: Any) -> None:
        """React to what this node did in the background."""
        match done:
            case _Staged(job):
                self._job = job
                self._gang.ready()
            case _Failed(code, message):
                self._log.say("error", message=message)
                self._ended(code, message)
            case _Saved(problem):
                self._saved(problem)
            case _Published(problem, code):
                self._published(problem, code)
            case Exception():
                raise done

    def _look(self) -> None:
        """See what no event tells: the program's end, and what is due."""
        now = time.monotonic()
        if now > self._deadline and not self._stopping and self._code is None:
            sentence = f"the job reached its time limit of {self._task.timeout_s:g} s"
            self._log.say("error", message=sentence)
            self._stop(TIMED_OUT)
        if self._program is not None:
            if now > self._kill_at:
                self._program.kill()
            if (code := self._program.ended()) is not None:
                self._program = None
                self._ended(TIMED_OUT if code and self._stopping == TIMED_OUT else code)
        if now > self._give_up_at:
            self._outcome = self._code or self._aborted

    def _bring(self) -> _Staged | _Failed:
        """Bring the inputs here and write the program's own job.json."""
        try:
            inputs, output = self._stage.bring(self._task.inputs, self._task.output)
            job = self._folder / "job.json"
            write_json(job, {"spec": self._task.spec, "inputs": inputs, "output": output})
        except JobError as problem:
            return _Failed(REFUSED, str(problem))
        except (OSError, Trouble) as problem:
            return _Failed(FAILED, f"the inputs cannot be brought to {socket.gethostname()}: {problem}")
        return _Staged(job)

    def _start(self, hosts: list[str]) -> None:
        if self._node.nodes > 1 and self._node.rank == 0:
            self._log.say("gang-ready", hosts=hosts)
        if self._code is not None:
            return
        self._stage.begin()
        try:
            self._program = Program(self._argv(), self._env(), self._log)
        except OSError as problem:
            self._ended(FAILED, f"{sys.executable} cannot be started: {problem.strerror}")

    def _stop(self, code: int) -> None:
        """Stop the program politely, and with it those of the other nodes."""
        if self._stopping:
            return
        self._stopping = code
        self._gang.stop(code)
        if self._program is not None:
            self._program.ask_to_stop(launcher=self._task.processes_per_node > 0)
            self._kill_at = time.monotonic() + self._task.grace_s
        else:
            self._ended(code)

    def _abort(self, why: Abort) -> None:
        """End at once: the gang has failed, here or elsewhere."""
        if why.event and (why.event != "node-failed" or self._node.nodes > 1):
            self._log.say(why.event, **why.facts)
        if self._aborted is not None:
            return
        self._aborted = why.code
        self._give_up_at = time.monotonic() + ABORT_S + FAREWELL_S
        if self._program is not None:
            self._program.ask_to_stop(launcher=self._task.processes_per_node > 0)
            self._kill_at = min(self._kill_at, time.monotonic() + ABORT_S)
        elif self._code is None:
            self._ended(why.code)
        elif self._reported:
            self._outcome = self._code or why.code

    def _ended(self, code: int, message: str = "") -> None:
        """Note the end of the program, or that there will be none, and save what it wrote."""
        if self._code is None:
            self._code = code if self._aborted is None else self._aborted
            self._why = message or f"the program on {socket.gethostname()} ended with exit code {code}"
            hurry = self._aborted is not None
            self._background(lambda: _Saved(self._stage.finish(hurry=hurry)))

    def _saved(self, problem: str) -> None:
        assert self._code is not None
        if problem:
            self._log.say("error", message=problem)
            self._code, self._why = _worse(self._code), problem
        self._reported = True
        self._gang.done(self._code, self._why)
        if self._aborted is not None:
            self._outcome = self._code or self._aborted

    def _published(self, problem: str, code: int) -> None:
        if problem:
            self._log.say("error", message=problem)
            code = _worse(code)
        assert isinstance(self._gang, Leader)
        self._gang.end(code)

    def _part(self) -> None:
        """Leave the gang; after a failure the leader first hears what the others could still save."""
        if self._aborted is not None and self._node.rank == 0:
            until = time.monotonic() + FAREWELL_S
            while not self._gang.left(TICK_S) and time.monotonic() < until:
                pass
            with contextlib.suppress(queue.Empty):
                while True:
                    self._react(self._events.get_nowait())
            if self._reported:
                self._stage.publish(whole=False)
        self._gang.leave(FAREWELL_S)
        if self._outcome == 0:
            self._stage.clear()

    def _upload_trouble(self, sentence: str, hopeless: bool) -> None:
        """Tell, from the mirror's thread, that S3 fails; if there is no hope, the work must not go on."""
        self._log.say("upload-failing", message=sentence)
        if hopeless:
            self._events.put(Stop(STOPPED))

    def _argv(self) -> list[str]:
        program = ["-m", self._task.module, str(self._job)]
        if not self._task.processes_per_node:
            return [sys.executable, *program]
        node = self._node
        launcher = {
            "nnodes": node.nodes,
            "node-rank": node.rank,
            "nproc-per-node": self._task.processes_per_node,
            "max-restarts": 0,  # a failed job starts again as a whole, from its checkpoint
            "master-addr": node.master,
            "master-port": node.port if node.nodes > 1 else _free_port(),
            "rdzv-id": f"{node.job_id}-{node.attempt}",
        }
        return [
            sys.executable,
            "-m",
            "training.launch",
            *(f"--{name}={told}" for name, told in launcher.items()),
            *program,
        ]

    def _env(self) -> dict[str, str]:
        kept = {name: told for name, told in os.environ.items() if name not in FOREIGN and not name.startswith("PET_")}
        ranks, node = self._task.processes_per_node, self._node
        told = self._stage.env() | self._beats
        if ranks:
            if not Path("/dev/nvidiactl").exists():
                told["OMP_NUM_THREADS"] = str(max(1, _cores() // ranks))
            network = "lo" if node.nodes == 1 else contract.interface_of(contract.own_address(node.master))
            if network and sys.platform == "linux":
                told |= {"GLOO_SOCKET_IFNAME": network, "NCCL_SOCKET_IFNAME": network}
        return told | kept

    def _serve_metrics(self) -> dict[str, str]:
        """Serve this node's metrics where that is asked for; returns what the ranks have to know for it."""
        where = os.environ.get("CASTRA_METRICS", "").strip()
        if not where:
            return {}
        from training import metrics

        beats = self._folder / "beats"
        with contextlib.suppress(OSError):  # a full disk: there will be no heartbeats to tell of
            beats.mkdir(exist_ok=True)
        task = self._task
        found = metrics.of_node(task.spec, task.name, self._node, task.processes_per_node, beats)
        self._log.listener = found.hear
        metrics.serve(found, where, self._log)
        return {"CASTRA_BEATS": str(beats)}

    def _background(self, work: Callable[[], Any]) -> None:
        """Do something slow beside the events, and put what it returns among them."""

        def do() -> None:
            try:
                self._events.put(work())
            except Exception as error:  # noqa: BLE001  raised again where it ends the node, not only this thread
                self._events.put(error)

        threading.Thread(target=do, daemon=True).start()


def main() -> NoReturn:
    """Be the program of a node."""
    end_on_crash()
    adopt_orphans()
    log = Log()
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="castra-"))
    try:
        _leave_the_zip(folder)
        if len(sys.argv) != 2:
            raise JobError(f"this program takes one argument, the path of a job.json, and got {len(sys.argv) - 1}")
        task, node = Task.read(Path(sys.argv[1])), contract.read(os.environ)
        log = Log(f"[node{node.rank}] " if node.nodes > 1 else "")
        code = NodeProgram(task, node, log, folder).run()
    except JobError as problem:
        log.say("error", message=str(problem))
        code = REFUSED
    shutil.rmtree(folder, ignore_errors=True)
    leave(code)


def _leave_the_zip(folder: Path) -> None:
    """Unpack the code and start again from there, if it runs from a zip: torch's compiler reads sources as files."""
    archive = Path(__file__).parents[1]
    if archive.is_dir():
        return
    with zipfile.ZipFile(archive) as code:
        code.extractall(folder)
    others = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in ("", str(archive))]
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(folder), *others]), FOLDER: str(folder)}
    os.execv(sys.executable, [sys.executable, "-m", "training.node", *sys.argv[1:]])  # noqa: S606  itself again


def _worse(code: int) -> int:
    """Return the exit code of an end that would have been good, had its work been saved."""
    return FAILED if code in (0, STOPPED) else code


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _free_port() -> int:
    """Return a free TCP port of 127.0.0.1, below the range from which the system serves outgoing connections."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise JobError("no port of 127.0.0.1 between 20000 and 32000 is free")


if __name__ == "__main__":
    main()
