"""The pinned versions, `versions.yaml`: for each role what it installs or expects, where that is from, how it is proven.

Nothing is installed on trust: a repository is signed by a key that is pinned, a file has a checksum or a signature.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from ami.base import ImageError
from ami.flavour import Flavour
from recipes.part import Part

VERSIONS = Path(__file__).with_name("versions.yaml")


class Pin(Part):
    """One piece of software. `{version}` stands for the version in `url`."""

    version: str = Field(min_length=1)
    source: Literal["distribution", "base", "repository", "file"] = Field(
        description="The system's own packages; the base image, which has it; a signed repository; a file."
    )
    url: str = Field("", description="Of the file, or of the repository; {os} stands for the repository's word for it.")
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="Of the file.")
    key: str = Field("", description="URL of the key that signs it.")
    fingerprint: str = Field("", pattern=r"^([0-9A-F]{40})?$", description="Of that key.")

    @property
    def proven(self) -> bool:
        """Whether a wrong file would be noticed."""
        if self.source in ("distribution", "base"):
            return True
        return bool(self.sha256 or (self.key and self.fingerprint))


@cache
def load(path: Path = VERSIONS) -> Mapping[str, Mapping[str, Pin]]:
    """All pins by role and name; raises `ImageError` for what is badly written."""
    try:
        told = yaml.safe_load(path.read_text())
        return {role: {name: Pin(**pin) for name, pin in pins.items()} for role, pins in told.items()}
    except (ValidationError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ImageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def pins(flavour: Flavour) -> dict[str, dict[str, dict[str, Any]]]:
    """The pins of the roles that a flavour uses, as the playbook is told them."""
    known = load()
    return {
        role: {name: _told(pin) for name, pin in known[role].items()} for role in flavour.roles if role in known
    }


def check(flavour: Flavour) -> None:
    """Raise `ImageError` if something would be installed that nothing proves."""
    for role, mode in flavour.roles.items():
        for name, pin in load().get(role, {}).items():
            if mode == "install" and not pin.proven:
                raise ImageError(
                    f"{VERSIONS}: {role}.{name} {pin.version} has no checksum, and {flavour.name} would install it: "
                    "add sha256, or key and fingerprint"
                )


def _told(pin: Pin) -> dict[str, Any]:
    return pin.model_dump() | {"url": pin.url.replace("{version}", pin.version)}
