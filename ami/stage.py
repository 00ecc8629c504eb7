"""Lay out a build for Packer: the template in the dialect of the Packer at hand, its variables, the way to Ansible."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ami.base import ImageError
from ami.flavour import Made

ROOT = Path(__file__).parents[1]
TEMPLATE = Path(__file__).with_name("node.pkr.hcl")
ANSIBLE = ROOT / "ansible"
SHARED = ("signed_file", "signed_repository")
"""Roles that other roles use."""
PLAYBOOK = ANSIBLE / "playbooks" / "node.yml"
FENCED = re.compile(r"^[ \t]*# >>> packer >= (\d+)\.(\d+)\n(.*?)^[ \t]*# <<< packer\n", re.DOTALL | re.MULTILINE)
LAUNCHER = """#!{python}
import sys

sys.path[:0] = [{root!r}]
from ami.playbook import main

sys.exit(main(sys.argv[1:]))
"""


def packer_version(program: str) -> tuple[int, int]:
    """Major and minor version of a Packer; raises `ImageError` if it does not say."""
    quiet = {**os.environ, "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run([program, "version"], capture_output=True, text=True, env=quiet, timeout=30, check=False)
    if not (found := re.search(r"v(\d+)\.(\d+)\.\d+", done.stdout)):
        raise ImageError(f"{program} does not say which version it is: install HashiCorp's Packer")
    return int(found[1]), int(found[2])


def template(version: tuple[int, int]) -> str:
    """The template for a Packer of that version."""
    return FENCED.sub(lambda part: part[3] if version >= (int(part[1]), int(part[2])) else "", TEMPLATE.read_text())


def lay(folder: Path, told: Mapping[str, Any]) -> list[str]:
    """Write the playbook and what it is told into a folder; returns the words that run it, but for the inventory."""
    launcher = folder / "playbook"
    launcher.write_text(LAUNCHER.format(python=sys.executable, root=str(ROOT)))
    launcher.chmod(0o755)
    (folder / "playbook.json").write_text(json.dumps(told, indent=1))  # roles run in the order in which they are told
    shutil.copytree(ANSIBLE, folder / "ansible")  # who edits a role meanwhile edits the next image
    return [str(launcher), "-e", f"@{folder / 'playbook.json'}", str(_playbook(folder))]


def _playbook(folder: Path) -> Path:
    return folder / "ansible" / PLAYBOOK.relative_to(ANSIBLE)


def stage(folder: Path, version: tuple[int, int], variables: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Write a build's folder. `variables` are the template's, `told` is for the playbook."""
    launcher = lay(folder, told)[0]
    packer = folder / "packer"
    packer.mkdir()
    (packer / TEMPLATE.name).write_text(template(version))
    ways = {
        "playbook": str(_playbook(folder)),
        "playbook_command": launcher,
        "playbook_variables": str(folder / "playbook.json"),
        "manifest": str(folder / "manifest.json"),
    }
    (packer / "build.auto.pkrvars.json").write_text(json.dumps({**variables, **ways}, indent=1, sort_keys=True))


def digest(flavour: Made, told: Mapping[str, Any], base_image: str, templates: Sequence[Path] = (TEMPLATE,)) -> str:
    """The content hash of an image: 16 hexadecimal digits over all that goes into it, and nothing else.

    That is the templates, the playbook, the roles that it uses, what they are told, the instance type and the base.
    """
    found = hashlib.sha256()
    for path in (*templates, PLAYBOOK, *_files(flavour)):
        data = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {os.access(path, os.X_OK)} {len(data)}\n".encode() + data)
    made_of = flavour.model_dump(mode="json", exclude={"description", "ssh"})
    rest = {"told": told, "flavour": made_of, "order": list(flavour.roles), "base": base_image}
    found.update(json.dumps(rest, sort_keys=True).encode())
    return found.hexdigest()[:16]


def _files(flavour: Made) -> Iterator[Path]:
    for role in (*flavour.roles, *SHARED):
        place = ANSIBLE / "roles" / role
        if not place.is_dir():
            raise ImageError(f"flavour {flavour.name} uses the role {role}, which is not in {place.parent}")
        yield from sorted(path for path in place.rglob("*") if path.is_file())
