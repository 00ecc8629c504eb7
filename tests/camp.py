"""A user for tests of the whole: a tiny recipe, the command line as it is typed, and who is left in /proc."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TINY = """
name: tiny
data: {max_documents: 200, sequence_length: 64}
model: {hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, ffn_size: 128, vocab_size: 512}
train: {steps: 40, global_batch_size: 8, warmup_steps: 5, checkpoint_every: 10}
score: {max_tokens: 4000, must_beat: []}
serve: {max_new_tokens: 4}
"""


LISTENING = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def heed_ctrl_c() -> None:
    """Have a started command hear Ctrl-C, also where the tests themselves run in the background and do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Camp:
    """One user's folder: a recipe, a store, and the processes that belong to it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def recipe(self, text: str = TINY, name: str = "tiny.yaml") -> Path:
        """Write a recipe."""
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, verb: str, *words: str | Path) -> subprocess.Popen[str]:
        """Type `python -m flows.<verb> …` and do not wait."""
        argv = [sys.executable, "-m", f"flows.{verb}", *map(str, words)]
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=heed_ctrl_c,
        )

    def run(self, verb: str, *words: str | Path) -> tuple[int, str]:
        """Type `python -m flows.<verb> …`; returns the exit code and all that was printed."""
        done = self.start(verb, *words)
        told, _ = done.communicate(timeout=200)
        return done.returncode, told

    def environment(self) -> dict[str, str]:
        """A user's environment whose state is in the folder."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
        return clean | {"CASTRA_STATE": str(self.folder / ".castra"), "COLUMNS": "200"} | self.env

    @property
    def mark(self) -> bytes:
        """What is in the environment of our processes and of no others."""
        return f"CASTRA_STATE={self.folder / '.castra'}".encode()

    def processes(self, patience_s: float = 0.0) -> list[str]:
        """The command lines of what runs in our name, after waiting up to `patience_s` seconds for it to end."""
        until = time.monotonic() + patience_s
        while (found := alive(self.mark)) and time.monotonic() < until:
            time.sleep(0.1)
        return [_command_line(pid) for pid in found]

    def listeners(self) -> list[str]:
        """The addresses on which our processes listen for TCP, as /proc writes them (hexadecimal)."""
        sockets = {}
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING:
                    sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
        return [sockets[name] for pid in alive(self.mark) for name in _descriptors(pid) if name in sockets]

    def wait_for(self, pattern: str, patience_s: float = 90.0) -> Path:
        """The first file under the folder that matches `pattern`, waiting for it to appear."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            for path in self.folder.glob(pattern):
                return path
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} within {patience_s} s")


def alive(mark: bytes) -> list[Path]:
    """The processes, as folders of /proc, whose environment has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(entry)
    return found


def _command_line(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return process.name


def _descriptors(process: Path) -> list[str]:
    names = []
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                names.append(str(descriptor.readlink()))
    return names
