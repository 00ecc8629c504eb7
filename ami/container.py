"""A container for training: which roles make it, the definition it is built from, and what its build says.

The roles are those of machines. They run in the container itself while it is built, for there is no SSH to it, and
leave out what is its host's: kernel, services, clock.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import unquote

from pydantic import Field

from ami import flavour, requirements, stage, versions
from ami.base import ImageError
from ami.flavour import Made

FLAVOURS = Path(__file__).with_name("containers")
DEFINITION = Path(__file__).with_name("Containerfile")
SCRIPT = Path(__file__).with_name("bake.sh")
ROOTFS = "rootfs"
TRAINING = ("castra[train]", "boto3", "setuptools")
"""What a job imports, and what DeepSpeed's source is built with."""
TOOLS = {"podman": "apt-get install podman", "unshare": "apt-get install util-linux"}
CERTIFICATES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
"""Where it is said which certificates are trusted, where that is not the system's own business."""
TASK = re.compile(r"TASK \[(?:(?P<role>\w+) : )?(?P<task>.+)\] \**$")
RESULT = re.compile(r"(?P<how>ok|changed|fatal|failed): \[localhost\](?P<rest>.*)")


class Container(Made):
    """What one kind of container is made of."""

    base: str = Field(
        description="The image it starts from, by its digest; 'rootfs' is a file system that the builder brings.",
        pattern=r"^(rootfs|\S+@sha256:[0-9a-f]{64})$",
    )
    environment: dict[str, str] = Field({}, description="Of every program that runs in it.")


@cache
def names() -> tuple[str, ...]:
    """The flavours of containers there are."""
    return tuple(sorted(path.stem for path in FLAVOURS.glob("*.yaml")))


def load(name: str) -> Container:
    """A flavour of container by its name, or by the path of a YAML file; raises `ImageError`."""
    return flavour.read(Container, name, FLAVOURS, "container")


def told(kind: Container) -> dict[str, Any]:
    """What the playbook is told."""
    return {
        **kind.variables,
        "image_kind": "container",
        "image_flavour": kind.name,
        "image_roles": kind.roles,
        "image_os": kind.os,
        "versions": versions.told(kind),
    }


def locks(kind: Container) -> dict[str, str]:
    """The requirements files, by name."""
    wheels, built = requirements.locked(kind.os, TRAINING, cpu=bool(kind.variables.get("training_cpu")))
    ansible, _ = requirements.locked(kind.os, ["ansible-core"])
    return {"ansible.txt": ansible, "training.txt": wheels, "training-built.txt": built}


def digest(kind: Container, base: str) -> str:
    """The content hash of a container that starts from that base: 16 hexadecimal digits."""
    return stage.digest(kind, told(kind) | {"locks": locks(kind)}, base, (DEFINITION, SCRIPT))


def write(folder: Path, kind: Container, base: str, labels: Mapping[str, str]) -> None:
    """Write all that a container is built from, its Containerfile first of all, into an empty folder."""
    environment = "\n".join(f"ENV {name}={json.dumps(value)}" for name, value in kind.environment.items())
    said = "\n".join(f"LABEL {name}={json.dumps(value)}" for name, value in labels.items())
    definition = Template(DEFINITION.read_text())
    words = {"base": base, "environment": environment, "labels": said}
    (folder / DEFINITION.name).write_text(definition.substitute(words))
    shutil.copy(SCRIPT, folder)
    shutil.copytree(stage.ANSIBLE, folder / "ansible")
    (folder / "playbook.json").write_text(json.dumps(told(kind), indent=1))
    for name, text in locks(kind).items():
        (folder / name).write_text(text)
    (folder / "files").mkdir()
    for file in _at_hand(kind):
        shutil.copy(file, folder / "files")


def command(context: Path, tag: str) -> list[str]:
    """The words after `podman` that build what is written in `context`."""
    words = ["build", "--isolation=chroot", "--pull=missing", "--format=oci", "--tag", tag]
    found = [os.environ[name] for name in CERTIFICATES if os.environ.get(name)]
    return [*words, *(["--secret", f"id=certificates,src={found[0]}"] if found else []), str(context)]


def podman(folder: Path) -> list[str]:
    """The words that begin every command: all that podman keeps lies in `folder`, and its mounts go with the process.

    `folder/tmp` leads to a folder with a short name, for podman takes no long one. Raises `ImageError` if a program is
    missing.
    """
    for name, remedy in TOOLS.items():
        if shutil.which(name) is None:
            raise ImageError(f"{name} is not on PATH, and a container is built with it: {remedy}")
    apart = ["unshare", "--mount"] if os.geteuid() == 0 else ["podman", "unshare"]
    short = (folder / "tmp").resolve()
    places = [f"--root={folder / 'root'}", f"--runroot={short / 'run'}", f"--tmpdir={short / 'libpod'}"]
    return [*apart, "podman", *places, "--cgroup-manager=cgroupfs", "--log-level=error"]


def event(line: str) -> dict[str, Any] | None:
    """What a line of Ansible's says, as `ami.playbook` tells it; None for what says nothing new."""
    if task := TASK.match(line):
        return {"event": "playbook_on_task_start", "role": task["role"] or "", "task": task["task"], "host": ""}
    if not (result := RESULT.match(line)):
        return None
    if result["how"] in ("ok", "changed"):
        return {"event": "runner_on_ok", "changed": result["how"] == "changed"}
    said = _failure(result["rest"])
    return {"event": "runner_on_failed", "changed": False, "why": said, "ignored": False} if said else None


def _failure(rest: str) -> str:
    """What a failed task said; "" of a loop's last line, which only says that an item failed."""
    try:
        told: dict[str, Any] = json.loads(rest.partition("=> ")[2])
    except ValueError:
        return rest.strip(": ")
    if "results" in told:
        return ""
    said = [str(told[name]).strip() for name in ("msg", "stderr", "module_stderr") if told.get(name)]
    return "; ".join(dict.fromkeys(said))


def _at_hand(kind: Container) -> Iterator[Path]:
    """The files of our pins that lie where pip is told to look first; their checksums are compared all the same."""
    folders = [Path(place) for place in os.environ.get("PIP_FIND_LINKS", "").split()]
    for pins in versions.used(kind).values():
        for pin in pins.values():
            name = Path(unquote(pin.url)).name
            yield from [folder / name for folder in folders if pin.sha256 and (folder / name).is_file()][:1]
