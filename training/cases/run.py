"""Runs another framework's program as this recipe's training: its exact command, its log as progress, its figures.

    torchrun … -m training.cases.run job.json

Started once per rank, or once per node for what starts its ranks itself. The program is a child of this one, so that
its last words are heard however it ends, and it ends when this one does.
"""

import importlib.machinery
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from training import cases
from training.cases import mpi
from training.cases.base import CaseError, Command, Launcher, Paths, Upstream
from training.cases.meeting import Meeting
from training.job import NodeJob, progress, say
from training.process import REFUSED, STOPPED, JobError, end_on_crash, follow_parent, leave, read_job
from training.ranks import use_efa

CODE: Final = str(Path(__file__).parents[2])
"""Where Castra's own code is, which a framework's program must not take for its own."""


@dataclass
class Figures:
    """What a program's log said so far."""

    steps: int
    tokens: int
    """Of an optimizer step, over all ranks."""
    ranks: int = 1
    length: int = 0
    """Tokens of a sequence."""
    rows: list[dict[str, float]] = field(default_factory=list)

    def take(self, found: dict[str, float]) -> None:
        """Note what a line says, and tell of it."""
        done = int(found.pop("step", len(self.rows) + 1))
        if (each := found.pop("tokens_per_second_per_gpu", None)) is not None:
            found["tokens_per_second"] = each * self.ranks
        if (sequences := found.pop("sequences_per_second", None)) is not None:
            found["tokens_per_second"] = sequences * self.length
        if "seconds" in found and "loss" in found:
            found.setdefault("tokens_per_second", self.tokens / found["seconds"])
        self.rows.append({"step": done, **found})
        progress(done, max(self.steps, done), "step", **found)

    def summary(self) -> dict[str, Any]:
        """What all of it comes to: the losses and mean speeds of a training, the rows of a measurement."""
        losses = [row["loss"] for row in self.rows if "loss" in row]
        if not losses:
            return {"rows": [{name: row[name] for name in row if name != "step"} for row in self.rows]}
        told: dict[str, Any] = {"loss_first": losses[0], "loss_last": losses[-1], "steps": int(self.rows[-1]["step"])}
        # the first line has the start in it
        for name in ("tokens_per_second", "tflops"):
            if values := [row[name] for row in self.rows[len(self.rows) > 1 :] if name in row]:
                told[name] = sum(values) / len(values)
        return told | {"tokens": int(self.rows[-1]["step"]) * self.tokens}


class Child:
    """The framework's program, whose lines are relayed and measured."""

    def __init__(self, argv: list[str], env: Mapping[str, str], folder: Path) -> None:
        """Start it. Raises JobError where there is no such program."""
        self._asked = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=follow_parent,  # noqa: PLW1509  no thread has begun yet
            )
        except OSError as problem:
            raise JobError(f"{argv[0]} cannot be started: {problem.strerror}") from problem

    def lines(self) -> Iterator[str]:
        """Its lines as they come, each written to standard output first."""
        assert self._process is not None
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            print(line, flush=True)
            yield line

    def end(self) -> int:
        """Wait for its end and return its exit code: 143 if it ended as it was asked to."""
        assert self._process is not None
        code = self._process.wait()
        if self._asked and code in (0, -signal.SIGTERM, STOPPED):
            return STOPPED
        return code if code >= 0 else 128 - code

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._asked = True
        if self._process is not None:
            self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class Case:
    """A framework's program, resolved for this machine."""

    launcher: Launcher
    told: Command
    argv: list[str]
    folder: Path
    """Where it runs."""
    ranks_per_node: int

    def follow(self, figures: Figures, meeting: Meeting) -> int:
        """Run it to its end, measuring its lines; returns its exit code. Raises JobError if it does not start."""
        if self.told.per != "mpi":
            return self._measure(self.argv, _environment(self.told), figures)
        with mpi.gang(self.argv, self.told, self.ranks_per_node, meeting) as (words, env):
            return self._measure(words, env, figures) if words else 0  # its launch agent needs our own code

    def _measure(self, words: list[str], env: Mapping[str, str], figures: Figures) -> int:
        child = Child(words, env, self.folder)
        for line in child.lines():
            if figure := self.launcher.measure(line):
                figures.take(figure)
        return child.end()


def run(job: NodeJob, meeting: Meeting) -> int:
    """Run the program of a job and return its exit code; rank 0 writes the result. Raises JobError."""
    spec, case = job.spec, _case(job)
    length, ranks = spec["data"]["sequence_length"], spec["cluster"]["nodes"] * spec[cases.RANKS]
    figures = Figures(spec["train"]["steps"], spec["train"]["global_batch_size"] * length, ranks, length)
    begun = time.monotonic()
    if code := case.follow(figures, meeting):
        return code
    everybody = meeting.gather(figures.rows)
    if meeting.rank == 0:
        ranks = meeting.size * (1 if case.told.per == "rank" else case.ranks_per_node)
        figures.rows = max(everybody, key=len)  # those of the rank that logs, which is the last one or the first
        name, version = spec["case"]["framework"], case.launcher.UPSTREAM.version
        facts = {"framework": name, "version": version, "program": case.argv, "world_size": ranks}
        job.finish(facts | {"seconds": time.monotonic() - begun} | figures.summary())
    return 0


def _case(job: NodeJob) -> Case:
    """The program of a job, its files written; raises JobError."""
    spec = job.spec
    try:
        found, told = cases.launcher(spec["case"]["framework"]), _command(job)
    except CaseError as problem:
        raise JobError(str(problem)) from None
    folder = Path(cases.folder(spec) or job.output)
    argv = _argv(told, folder, found.UPSTREAM)
    _write(told, job.output)
    return Case(found, told, argv, folder if folder.is_dir() else job.output, spec[cases.RANKS])


def _command(job: NodeJob) -> Command:
    spec, inputs = job.spec, {name: str(path) for name, path in job.inputs.items()}
    folder = cases.folder(spec)
    paths = Paths(str(job.output), folder, inputs.get("dataset", ""), inputs.get("initial", ""))
    return cases.command(spec, spec["cluster"]["nodes"], spec[cases.RANKS], paths)


def _write(told: Command, output: Path) -> None:
    """Write the program's files; all ranks write the same, none sees half of one."""
    for name, content in told.files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        fresh.write_text(content)
        fresh.replace(path)


def _argv(told: Command, folder: Path, upstream: Upstream) -> list[str]:
    """The program's words for this machine; raises JobError where it is not installed."""
    first, rest = told.argv[0], told.argv[1:]
    if first == "-m":
        places = [str(folder), *sys.path]
        there = importlib.machinery.PathFinder.find_spec(rest[0].partition(".")[0], places) is not None
        words = [sys.executable, *told.argv]
    elif first.endswith(".py"):
        there = (folder / first).is_file()
        words = [sys.executable, str(folder / first), *rest]
    else:  # a path is below the framework's folder, a name is looked for as a shell does
        found = shutil.which(str(folder / first) if "/" in first else first)
        there, words = found is not None, [found or first, *rest]
    if there:
        return words
    missing = rest[0] if first == "-m" else first
    brings = [f"run the job in {upstream.container}"] if upstream.container else []
    brings += [f"install {upstream.package}"] if upstream.package else []
    brings += [f"put {upstream.repository} at {upstream.version} there, or name its folder in case.folder"]
    raise JobError(f"{missing} is not in {folder} on {socket.gethostname()}: {', or '.join(brings)}")


def _environment(told: Command) -> dict[str, str]:
    """What the program sees: the launcher's variables, and none of our own code among its modules."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in ("", CODE)]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # its folder has its modules
    return {**own, "PYTHONPATH": os.pathsep.join(places), **told.env}


def main() -> None:
    """Be one process of the job; exit codes as `training.ranks.run`."""
    follow_parent()
    end_on_crash()
    use_efa()
    local_rank = 0
    try:
        meeting = Meeting.read(os.environ)
        local_rank, job = meeting.local_rank, read_job()
        code = 0 if (job.output / "result.json").exists() else run(job, meeting)
    except JobError as problem:
        if local_rank == 0:
            say("error", message=str(problem))
        code = REFUSED
    leave(code)


if __name__ == "__main__":
    main()
