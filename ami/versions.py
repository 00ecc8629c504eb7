"""The pinned versions, `versions.yaml`: for each role what it installs or expects, from where, proven how.

Nothing is installed on trust: a repository is signed by a key that is pinned, a file has a checksum or a signature.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from ami.base import ImageError
from ami.flavour import OS, Made
from recipes.part import Part

VERSIONS = Path(__file__).with_name("versions.yaml")


class Pin(Part):
    """One piece of software."""

    version: str = Field(
        min_length=1, description="Of what a distribution or a base image has, the oldest that will do; else exactly."
    )
    source: Literal["distribution", "base", "repository", "file", "git"] = Field(
        description="The system's own packages; the base image, which has it; a signed repository; a file; a commit."
    )
    systems: tuple[OS, ...] = Field((), description="Only on these; empty is everywhere.")
    url: str = Field("", description="{version} stands for the version, {os} for NVIDIA's word for the system.")
    commit: str = Field("", pattern=r"^([0-9a-f]{40})?$", description="Of the repository in git: a hash of all of it.")
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="Of the file.")
    key: str = Field("", description="URL of the key that signs it.")
    fingerprint: str = Field("", pattern=r"^([0-9A-F]{40})?$", description="Of that key.")

    @property
    def proven(self) -> bool:
        """Whether a wrong file would be noticed."""
        if self.source in ("distribution", "base"):
            return True
        return bool(self.commit or self.sha256 or (self.key and self.fingerprint))


@cache
def load(path: Path = VERSIONS) -> Mapping[str, Mapping[str, Pin]]:
    """All pins by role and name; raises `ImageError` for what is badly written."""
    try:
        told = yaml.safe_load(path.read_text())
        return {role: {name: Pin(**pin) for name, pin in pins.items()} for role, pins in told.items()}
    except (ValidationError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ImageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def used(flavour: Made) -> dict[str, dict[str, Pin]]:
    """The pins of the roles that a flavour uses, on its system."""
    known = {role: load().get(role, {}) for role in flavour.roles}
    return {
        role: {name: pin for name, pin in pins.items() if not pin.systems or flavour.os in pin.systems}
        for role, pins in known.items()
        if pins
    }


def told(flavour: Made) -> dict[str, dict[str, dict[str, Any]]]:
    """What the playbook is told of them."""
    return {role: {name: _told(pin) for name, pin in pins.items()} for role, pins in used(flavour).items()}


def check(flavour: Made) -> None:
    """Raise `ImageError` if something would be installed that nothing proves."""
    for role, pins in used(flavour).items():
        for name, pin in pins.items():
            if flavour.roles[role] == "install" and not pin.proven:
                raise ImageError(
                    f"{VERSIONS}: {role}.{name} {pin.version} has no checksum, and {flavour.name} would install it: "
                    "add sha256, commit, or key and fingerprint"
                )


def _told(pin: Pin) -> dict[str, Any]:
    return pin.model_dump(exclude={"systems"}) | {"url": pin.url.replace("{version}", pin.version)}
