"""A flavour: which base image, which roles in which mode, on what kind of instance it is baked."""

from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator

from ami.base import ImageError
from recipes.part import Part
from recipes.sentences import did_you_mean

FLAVOURS = Path(__file__).with_name("flavours")
ROLES = (
    *("base", "packages", "kernel", "nvidia_driver", "cuda", "efa", "gdrcopy", "nccl", "training", "container_engine"),
    *("nvidia_container_toolkit", "enroot_pyxis", "lustre_client", "observability", "cloudwatch_agent", "neuron"),
    *("slurm", "ecs_gpu", "image_facts", "verify", "clean"),
)
"""In the order in which they run."""
Mode = Literal["install", "assert"]
OS = Literal["debian-12", "ubuntu-24.04", "amazon-linux-2023"]


class Base(Part):
    """Where the base image is found: the public parameter first, then the newest of that owner and name."""

    parameter: str = Field("", description="Of the systems manager; empty where its owner publishes none.")
    owner: str = Field(description="Account that owns it.", pattern=r"^\d{12}$")
    name: str = Field(description="Its name, with * for what changes.")


class Ssh(Part):
    """How the builder is reached."""

    user: str = Field(description="Whom the base image lets in.")
    port: PositiveInt = Field(22, description="Of the SSH server.")
    interface: Literal["", "private_ip", "public_ip", "session_manager"] = Field(
        "", description="Which address of the instance; empty lets Packer choose."
    )


class Made(Part):
    """What roles make: a machine image or a container."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,38}[a-z0-9]$")
    description: str
    os: OS
    kernel: str = Field("", description="Kernel of the base image, as far as it is promised: 6.8.")
    deadline_minutes: PositiveInt = Field(120, description="The build is ended after this long.")
    roles: dict[str, Mode] = Field(description="What is not named is skipped.")
    variables: dict[str, str | int | bool | list[str]] = Field({}, description="Of the roles, beside their defaults.")
    tags: dict[str, str] = Field({}, description="Of the image, beside ours.")

    @field_validator("roles")
    @classmethod
    def _known_in_order(cls, roles: dict[str, Mode]) -> dict[str, Mode]:
        if unknown := [name for name in roles if name not in ROLES]:
            raise ValueError(f"there is no role {unknown[0]!r}{did_you_mean(unknown[0], ROLES)}")
        return {name: roles[name] for name in ROLES if name in roles}


class Flavour(Made):
    """What one kind of node is made of."""

    kernel: str = Field(description="Kernel of the base image, as far as it is promised: 6.8.")
    base: Base
    ssh: Ssh
    instance_type: str = Field(description="On which it is baked.")
    root_gib: PositiveInt = Field(description="Size of the root volume. Unit: GiB.")

    @property
    def emulated(self) -> bool:
        """Whether it can be baked on the emulator, which has Debian alone."""
        return self.os == "debian-12"


OneMade = TypeVar("OneMade", bound=Made)


@cache
def names() -> tuple[str, ...]:
    """The flavours there are."""
    return tuple(sorted(path.stem for path in FLAVOURS.glob("*.yaml")))


def load(name: str) -> Flavour:
    """A flavour by its name, or by the path of a YAML file; raises `ImageError` if it is unknown or badly written."""
    return read(Flavour, name, FLAVOURS, "flavour")


def read(kind: type[OneMade], name: str, folder: Path, word: str) -> OneMade:
    """What a YAML file describes, one of `folder`'s by its name or any by its path; raises `ImageError`."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(one.stem for one in folder.glob("*.yaml"))
        among = f"among {', '.join(known)}, and no such file"
        raise ImageError(f"there is no {word} {name!r} {among}{did_you_mean(name, known)}")
    try:
        return kind(name=path.stem, **yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ImageError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
    except (TypeError, yaml.YAMLError) as error:
        raise ImageError(f"{path} is not a {word}: {str(error).splitlines()[0]}") from None
