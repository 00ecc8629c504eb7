"""Which image is wanted, and whether it exists: all that is to be known before anything is baked, without Prefect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ami import compatibility, flavour, stage, versions
from ami.flavour import Flavour
from clusters import aws, machine_images
from clusters.aws import Site
from clusters.base import Refused
from clusters.machine_images import BaseImage, Image
from recipes.spec import Recipe


@dataclass(frozen=True)
class Wanted:
    """One image, down to its content hash."""

    flavour: Flavour
    base: BaseImage
    site: Site
    """Where it is baked."""
    regions: tuple[str, ...]
    """Where it shall be, that one first."""

    @cached_property
    def told(self) -> Mapping[str, Any]:
        """What the playbook is told."""
        return {
            **self.flavour.variables,
            "image_kind": "machine",
            "image_flavour": self.flavour.name,
            "image_roles": self.flavour.roles,
            "image_os": self.flavour.os,
            "image_kernel": self.flavour.kernel,
            "versions": versions.told(self.flavour),
        }

    @cached_property
    def digest(self) -> str:
        """The content hash."""
        return stage.digest(self.flavour, self.told, self.base.id)

    @property
    def tags(self) -> dict[str, str]:
        """Of the image, and of all that is made on the way to it."""
        return {
            **self.flavour.tags,
            "Name": f"castra-{self.flavour.name}",
            machine_images.FLAVOUR: self.flavour.name,
            machine_images.DIGEST: self.digest,
            "castra:base-image": self.base.id,
        }

    @property
    def sites(self) -> dict[str, Site]:
        """Of every region."""
        return {region: replace(self.site, region=region) for region in self.regions}

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.flavour.name}@{self.digest}"


def wanted(name: str, regions: Sequence[str] = ()) -> Wanted:
    """The image of a flavour, in these regions or where the environment points; looks, and creates nothing.

    Raises `ImageError` for a flavour that is unknown or whose versions do not go together, `Refused` for a base image
    or an instance type that is not there.
    """
    site = aws.here(regions[0] if regions else None)
    kind = flavour.load(name)
    if site.endpoint and not kind.emulated:
        raise Refused(
            f"flavour {name} is baked from an image that AWS alone has: add --aws, and bake it there for money"
        )
    versions.check(kind)
    compatibility.check(kind)
    base = machine_images.base_image(site, kind.base.parameter, kind.base.owner, kind.base.name)
    return Wanted(kind, base, site, (site.region, *(one for one in regions[1:] if one != site.region)))


def found(image: Wanted) -> dict[str, Image]:
    """The finished images of that content hash, by region."""
    rows = {
        region: machine_images.images(site, image.flavour.name, image.digest) for region, site in image.sites.items()
    }
    return {region: row[0] for region, row in rows.items() if row}


def settled(recipe: Recipe) -> Recipe:
    """The recipe with the image that its flavour has in its region; raises `Refused` if that is still to be baked.

    A flavour that the emulator does not have is left to AWS's own image, as is an AMI that is named.
    """
    image, region = recipe.image, getattr(recipe.cluster, "region", None)
    if (
        image.flavour == "local"
        or image.ami
        or (aws.here(region).endpoint and not flavour.load(image.flavour).emulated)
    ):
        return recipe
    asked = wanted(image.flavour, (region,) if region else ())
    there = found(asked)
    if not there:
        raise Refused(f"image {asked.name} is not baked yet: run `python -m flows.build_image` first")
    return recipe.model_copy(update={"image": image.model_copy(update={"ami": next(iter(there.values())).id})})


def superseded(name: str, regions: Sequence[str], keep: int) -> list[tuple[str, Image]]:
    """The images of a flavour that newer ones have replaced, with their regions; the newest `keep` stay."""
    site, kind = aws.here(regions[0] if regions else None), flavour.load(name)
    sites = [replace(site, region=region) for region in regions or (site.region,)]
    return [(one.region, image) for one in sites for image in machine_images.superseded(one, kind.name, keep)]


def remove(images: Sequence[tuple[str, Image]]) -> None:
    """Deregister images and delete their snapshots."""
    for region, image in images:
        machine_images.remove(aws.here(region), image)
