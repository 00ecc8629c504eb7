"""Tools that are not on this machine, playing what they said elsewhere (see recorded/README.md), and plain ranks."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.clusters.yard import ROOT
from tests.training.nursery import free_port

RECORDED = Path(__file__).with_name("recorded")


def recorded(name: str) -> str:
    """What a tool said."""
    return (RECORDED / name).read_text()


def play(folder: Path, tool: str, answers: Mapping[str, str], code: int = 0) -> None:
    """Put a tool into a folder of the PATH: it answers by the beginning of its arguments, with the first that fits."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for number, (words, answer) in enumerate(answers.items()):
        text = folder / f".{tool}-{number}"
        text.write_text(answer)
        cases.append(f"{shlex.quote(words)}*) cat {shlex.quote(str(text))}; exit {code};;")
    script = folder / tool
    script.write_text('#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + '\nesac\necho "what is $*?" >&2\nexit 2\n')
    script.chmod(0o755)


def hang(folder: Path, tool: str) -> None:
    """Put a tool into a folder of the PATH that does not answer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / tool).write_text("#!/bin/sh\nexec sleep 60\n")
    (folder / tool).chmod(0o755)


def ranks(number: int, *argv: str) -> list[str]:
    """Run Python as the ranks of a job on this machine, a node each, and return what each printed."""
    place = {"WORLD_SIZE": str(number), "GROUP_WORLD_SIZE": str(number), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    shared = os.environ | place | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *argv],
            env=shared | {"RANK": str(rank), "GROUP_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(number)
    ]
    try:
        said = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * number, said
    return said
