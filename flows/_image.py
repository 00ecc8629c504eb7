"""`python -m flows.build_image` by hand: an image that exists is found in less than a second, without Prefect.

0 there    1 the build failed    2 the input is wrong    130 stopped by Ctrl-C
"""

import ipaddress
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ami import container as containers
from ami import packer
from ami.base import ImageError
from clusters.base import Refused
from clusters.machine_images import ANYWHERE, Place
from flows._input import MISTAKES, Real, launch, read, sentences
from store.objects import state_folder
from tasks import container_wanted, image_wanted
from tasks.image_wanted import Wanted
from tasks.phrases import CONSOLE

RecipeFile = Annotated[Path | None, Parameter(help="The recipe whose image it is, a YAML file; or name a --flavour.")]
FlavourName = Annotated[str | None, Parameter("--flavour", help="Bake this flavour, whatever the recipe.")]
ContainerName = Annotated[str | None, Parameter("--container", help="Build this container, and push it to ECR.")]
Regions = Annotated[
    list[str] | None, Parameter("--region", negative="", help="Where it shall be; can be given again. First is baked.")
]
StorePlace = Annotated[str | None, Parameter("--store", help="Where leases and the ledger are.")]
Latest = Annotated[bool, Parameter("--publish", negative="", help="Name it in /castra/images/<flavour>/latest.")]
Accounts = Annotated[list[str] | None, Parameter("--share", negative="", help="An account that may use it; again.")]
Key = Annotated[str, Parameter("--kms-key", help="What encrypts it; needed to share it.")]
Prune = Annotated[
    str | None,
    Parameter("--prune", help="keep=3 names all but the newest three and what is in use; removes with --yes."),
]
BootTest = Annotated[
    bool, Parameter("--boot-test", negative="", help="Launch an instance of it and prove all roles, before --publish.")
]
Subnet = Annotated[str, Parameter("--subnet", help="Where it is baked; else in the default VPC.")]
Profile = Annotated[str, Parameter("--instance-profile", help="Whose rights the instance has that it is baked on.")]
Source = Annotated[str, Parameter("--source", help="The addresses (CIDR) from which that instance is reached by SSH.")]
Yes = Annotated[bool, Parameter("--yes", negative="", help="Remove what --prune names.")]


def command(help_text: str | None) -> None:
    """Bake an image from the command line and exit with its code."""

    def run(  # noqa: PLR0913  a command's flags
        path: RecipeFile = None,
        /,
        *,
        flavour: FlavourName = None,
        container: ContainerName = None,
        region: Regions = None,
        store: StorePlace = None,
        publish: Latest = False,
        share: Accounts = None,
        kms_key: Key = "",
        boot_test: BootTest = False,
        subnet: Subnet = "",
        instance_profile: Profile = "",
        source: Source = "",
        prune: Prune = None,
        yes: Yes = False,
        real: Real = False,
    ) -> None:
        with sentences((*MISTAKES, ImageError)):
            if container:
                sys.exit(_contain(container, region or [], store, real=real))
            name, regions, place = _asked(path, flavour, region or [], store)
            _point_at_aws(real=real)
            if prune is not None:
                sys.exit(_prune(name, regions, prune, yes=yes))
            wanted = image_wanted.wanted(name, regions)
            if not (publish or share or boot_test) and _is_there(wanted):
                sys.exit(0)
            _check_tools(real=real)
            ground = _ground(subnet, instance_profile, source, real=real)
            from flows._command import EMULATED, REAL, execute  # Prefect's import takes longer than the look
            from flows.build_image import build_image
            from recipes import Recipe
            from tasks.image import Publication

            told = {"flavour": name, "regions": regions, "recipe": Recipe(store=place)}
            publication = Publication(publish, tuple(share or []), kms_key, ground, boot_test)
            sys.exit(execute(build_image, {**told, "publication": publication}, sky=REAL if real else EMULATED))

    launch(run, "build_image", help_text)


def _ground(subnet: str, profile: str, source: str, *, real: bool) -> Place:
    """Where the builder stands; raises `Refused` for what is no network."""
    if source:
        try:
            ipaddress.ip_network(source)
        except ValueError as error:
            raise Refused(f"--source {source!r} is no network: {error}; write --source 203.0.113.7/32") from None
    elif real:
        CONSOLE.print("[dim]·[/] SSH of the builder is open to all addresses, for its key alone: --source narrows it")
    return Place(subnet, profile, source or ANYWHERE.source)


def _contain(name: str, regions: list[str], store: str | None, *, real: bool) -> int:
    """Make sure of a container; returns the exit code."""
    kind = containers.load(name)
    containers.podman(Path())
    _point_at_aws(real=real)
    rootfs = _rootfs() if kind.base == containers.ROOTFS else ""
    wanted = container_wanted.wanted(name, regions, rootfs)
    if len(there := container_wanted.found(wanted)) == len(wanted.regions):
        print(", ".join(container_wanted.references(wanted, there)))
        return 0
    from flows._command import EMULATED, REAL, execute  # Prefect's import takes longer than the look
    from flows.build_image import build_image
    from recipes import Recipe

    told = {"container_flavour": name, "regions": wanted.regions, "rootfs": rootfs}
    place = store or str(state_folder() / "store")
    return execute(build_image, {**told, "recipe": Recipe(store=place)}, sky=REAL if real else EMULATED)


def _rootfs() -> str:
    """Debian's file system, which the emulator has; raises `Refused` if it cannot be had here."""
    from emulator import debian, machines  # see flows._command

    if not machines.possible():
        raise Refused("this container starts from the emulator's Debian, which needs root on Linux and mmdebstrap")
    return str(debian.root())


def _asked(path: Path | None, flavour: str | None, regions: list[str], store: str | None) -> tuple[str, list[str], str]:
    """The flavour, the regions and the store that are meant; raises `Refused` if no flavour is."""
    default = str(state_folder() / "store")
    if flavour:
        return flavour, regions, store or default
    if path is None:
        raise Refused("which image? give a recipe, or --flavour with one of its names")
    recipe = read(path, [], kind=None, shrink=False)
    home = getattr(recipe.cluster, "region", None)
    return recipe.image.flavour, regions or ([home] if home else []), store or recipe.store


def _point_at_aws(*, real: bool) -> None:
    """Unless AWS itself is meant, make sure of an emulator that stands: an image should outlive this command."""
    if real or os.environ.get("AWS_ENDPOINT_URL"):
        return
    from emulator import aws as emulated  # see flows._command
    from emulator import standing

    os.environ.update(emulated.environment(standing.up(None, ()).endpoint))


def _check_tools(*, real: bool) -> None:
    """Raise `ImageError` or `Refused` if this machine cannot bake."""
    packer.programs()
    if real:
        return
    from emulator import machines  # see flows._command

    if not machines.possible():
        needed = "root on Linux, iproute2, slirp4netns, systemd-container and mmdebstrap"
        raise Refused(f"without --aws an image is baked on a machine of the emulator, which needs {needed}")


def _is_there(wanted: Wanted) -> bool:
    found = image_wanted.found(wanted)
    for region, image in found.items():
        CONSOLE.print(
            f"[dim]·[/] {wanted.name}: {image.id} in {region}, baked {image.created}", highlight=False, soft_wrap=True
        )
    if len(found) < len(wanted.regions):
        return False
    print(", ".join(image.id for image in found.values()))
    return True


def _prune(name: str, regions: list[str], told: str, *, yes: bool) -> int:
    word, _, number = told.partition("=")
    if word != "keep" or not number.isdigit() or not int(number):
        raise Refused(f"--prune {told!r} is not understood: write --prune keep=3")
    doomed = image_wanted.superseded(name, regions, int(number))
    for region, image in doomed:
        CONSOLE.print(
            f"[dim]·[/] {image.id} in {region}, baked {image.created}, {image.name}", highlight=False, soft_wrap=True
        )
    if yes:
        image_wanted.remove(doomed)
    print(f"{len(doomed)} images {'removed' if yes else 'would be removed; --yes does it'}")
    return 0
