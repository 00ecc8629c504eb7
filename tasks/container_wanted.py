"""Which container is wanted, and whether it exists: all that is to be known before it is built, without Prefect."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ami import compatibility, container, versions
from ami.container import ROOTFS, Container
from clusters import aws, container_images
from clusters.aws import Site
from clusters.base import Refused


@dataclass(frozen=True)
class Wanted:
    """One container, down to its content hash."""

    kind: Container
    rootfs: str
    """The folder of the file system that it starts from; "" where it starts from an image."""
    site: Site
    regions: tuple[str, ...]
    """Where it shall be."""

    @property
    def base(self) -> str:
        """The image that it starts from."""
        return f"localhost/castra-{self.kind.os}:{Path(self.rootfs).name}" if self.rootfs else self.kind.base

    @cached_property
    def digest(self) -> str:
        """The content hash, which is its tag."""
        return container.digest(self.kind, self.base)

    @property
    def sites(self) -> dict[str, Site]:
        """Of every region."""
        return {region: replace(self.site, region=region) for region in self.regions}

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind.name}@{self.digest}"


def wanted(name: str, regions: Sequence[str] = (), rootfs: str = "") -> Wanted:
    """The container of a flavour, for these regions or where the environment points; looks, and creates nothing.

    Raises `ImageError` for a flavour that is unknown or whose versions do not go together, `Refused` if it starts from
    a file system and none is brought.
    """
    kind, site = container.load(name), aws.here(regions[0] if regions else None)
    if kind.base == ROOTFS and not rootfs:
        raise Refused(f"container {name} starts from the emulator's Debian: build it from the command line")
    versions.check(kind)
    compatibility.check(kind)
    return Wanted(kind, rootfs if kind.base == ROOTFS else "", site, tuple(regions) or (site.region,))


def found(asked: Wanted) -> dict[str, str]:
    """The digests of the container, by region, where it exists."""
    rows = {region: container_images.found(site, asked.kind.name, asked.digest) for region, site in asked.sites.items()}
    return {region: digest for region, digest in rows.items() if digest}


def references(asked: Wanted, there: dict[str, str]) -> list[str]:
    """What to write as a recipe's image.container, for every region."""
    place = container_images.repository(asked.kind.name)
    hosts = {region: container_images.registry(asked.sites[region]).host for region in there}
    return [f"{hosts[region]}/{place}:{asked.digest}" for region in there]
