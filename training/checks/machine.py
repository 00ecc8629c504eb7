"""The machine under the checks: its files, and what its tools say, none of which may hang or be missing loudly."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")
PLACES: Final = ("/opt/amazon/efa/bin", "/usr/local/cuda/bin", "/opt/slurm/bin", "/usr/sbin", "/sbin")
"""Where images put tools that a job's PATH may lack."""
PATIENCE_S: Final = 20.0
"""More than nvidia-smi takes for eight GPUs without persistence mode, of which each is woken up."""
HIDDEN: Final = "CUDA_VISIBLE_DEVICES"
"""Would hide GPUs from the tools too."""


class Hung(Exception):
    """Something did not answer in time; the message says what."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool answered."""

    code: int
    out: str
    errors: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine by its root folder and its tools; another root is a recorded one."""

    root: Path = Path("/")
    path: str = field(default_factory=lambda: os.pathsep.join([os.environ.get("PATH", os.defpath), *PLACES]))

    def at(self, path: str) -> Path:
        """Where an absolute path is."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """A file's text without blanks around it, "" if it is not there or not readable."""
        try:
            return self.at(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def facts(self, path: str) -> dict[str, Any]:
        """A JSON object in a file, {} if there is none."""
        try:
            told = json.loads(self.read(path))
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    def number(self, path: str) -> int | None:
        """A whole number in a file, None if there is none."""
        try:
            return int(self.read(path), 0)
        except ValueError:
            return None

    def names(self, path: str, pattern: str = "*") -> list[str]:
        """The names in a folder, sorted; none if it is not there."""
        return sorted(place.name for place in self.at(path).glob(pattern))

    def run(self, *argv: str, patience_s: float = PATIENCE_S) -> Said | None:
        """What a tool answers, None if it is not installed. Raises `Hung`."""
        program = shutil.which(argv[0], path=self.path)
        if program is None:
            return None
        env = {name: told for name, told in os.environ.items() if name != HIDDEN} | {"LC_ALL": "C", "PATH": self.path}
        tool = subprocess.Popen(
            [program, *argv[1:]], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            out, errors = tool.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired as late:
            tool.kill()
            # not for long: behind a GPU that hangs, a process may stay in the kernel for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                tool.communicate(timeout=1.0)
            raise Hung(f"{' '.join(argv)} did not answer within {patience_s:g} s") from late
        return Said(tool.returncode, out, errors)

    def text(self, *argv: str) -> str:
        """What a tool prints, "" if it is not installed, fails or hangs: for versions, which may be absent."""
        try:
            said = self.run(*argv)
        except Hung:
            return ""
        return said.out if said and said.code == 0 else ""

    def line(self, *argv: str) -> str:
        """The first line a tool prints, even if it fails; "" if it is not installed or hangs."""
        try:
            said = self.run(*argv)
        except Hung:
            return ""
        return next(iter(said.out.splitlines()), "") if said else ""


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """Do something that may hang, as a network's file system does, in a thread. Raises `Hung`, and what it raises."""
    answer: list[T] = []
    problem: list[BaseException] = []

    def attempt() -> None:
        try:
            answer.append(work())
        except BaseException as error:  # noqa: BLE001  # it is raised below, in the thread that asked
            problem.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if problem:
        raise problem[0]
    if not answer:
        raise Hung(f"{what} did not answer within {seconds:g} s")
    return answer[0]
