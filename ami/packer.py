"""Drive the packer program and understand what it says: its arguments, its lines for machines, its manifest."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ami.base import ImageError
from ami.playbook import EVENTS

TOOLS = {
    "packer": "apt-get install packer, or HashiCorp's own",
    "ansible-playbook": "uv sync --extra image",
    "ssh": "apt-get install openssh-client",
}
PASSING = re.compile(
    r"Timeout waiting for SSH|connection reset|Connection refused|UNREACHABLE|Could not get lock|is held by process"
    r"|Unable to acquire the dpkg frontend lock|Failed to lock apt|Waiting for process with pid|RequestLimitExceeded"
    r"|Throttling|InsufficientInstanceCapacity|ServiceUnavailable|InternalError|Temporary failure (in name )?resolv",
    re.IGNORECASE,
)
"""What passes by itself: SSH that does not answer, a locked package database, an API or a zone that is overloaded."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of `packer -machine-readable`."""

    target: str
    kind: str
    data: tuple[str, ...]

    @property
    def text(self) -> str:
        """What it says to people; "" if nothing."""
        return self.data[-1].strip() if self.kind == "ui" and self.data else ""

    @property
    def error(self) -> str:
        """What went wrong; "" if nothing did."""
        return self.data[-1].strip() if self.kind == "error" or (self.kind == "ui" and self.data[0] == "error") else ""


def line(text: str) -> Line | None:
    """Understand one line; None for what is not Packer's own."""
    stamp, *rest = text.rstrip("\n").split(",")
    if len(rest) < 2 or not stamp.isdigit():
        return None
    return Line(rest[0], rest[1], tuple(_unescaped(one) for one in rest[2:]))


def _unescaped(text: str) -> str:
    return text.replace("%!(PACKER_COMMA)", ",").replace("\\n", "\n").replace("\\r", "\r")


def looked_for() -> dict[str, str | None]:
    """Where the programs of a build are, by name; None where one is missing."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {name: shutil.which(name, path=path) for name in TOOLS}


def programs() -> dict[str, str]:
    """Where the programs of a build are, by name; raises `ImageError` if one is missing."""
    found = looked_for()
    for name in (name for name, place in found.items() if place is None):
        raise ImageError(f"{name} is not on PATH, and an image is baked with it: {TOOLS[name]}")
    return {name: place for name, place in found.items() if place}


def command(program: str, folder: Path) -> list[str]:
    """The words that build what is staged in `folder`."""
    return [program, "build", "-machine-readable", "-color=false", str(folder / "packer")]


def environment(folder: Path) -> dict[str, str]:
    """What Packer and Ansible need beside the environment that they inherit; nothing in it is secret.

    `folder/tmp` leads to a folder with a short name: both put sockets there, whose paths have 107 letters at most.
    """
    short = (folder / "tmp").resolve()
    return {
        "CHECKPOINT_DISABLE": "1",
        "TMPDIR": str(short),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "ANSIBLE_CONFIG": str(folder / "ansible" / "ansible.cfg"),
        "ANSIBLE_HOME": str(short / "ansible"),
        EVENTS: str(folder / "events.jsonl"),
    }


def images(folder: Path) -> dict[str, str]:
    """The images that a build made, by region; raises `ImageError` if its manifest names none."""
    try:
        told: Mapping[str, Any] = json.loads((folder / "manifest.json").read_text())
        last = [one for one in told["builds"] if one["packer_run_uuid"] == told["last_run_uuid"]][-1]
        pairs = [(pair.partition(":")[0], pair.partition(":")[2]) for pair in last["artifact_id"].split(",")]
    except (FileNotFoundError, LookupError, ValueError):
        raise ImageError(f"Packer ended well and named no image: look at {folder / 'log'}") from None
    return dict(pairs)
