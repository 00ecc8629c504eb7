"""Containers at ECR: where they are pushed, with what password, and which of ours exist."""

import base64
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusters import aws
from clusters.aws import Site
from clusters.base import ClusterError

PREFIX = "castra"
ABSENT = ("ImageNotFoundException", "RepositoryNotFoundException")


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry and how to log in to it, which is possible for twelve hours."""

    host: str
    secure: bool
    """Whether it speaks TLS; an emulator on this machine does not."""
    user: str
    password: str = field(repr=False)


def repository(flavour: str) -> str:
    """The repository of a flavour."""
    return f"{PREFIX}/{flavour}"


def registry(site: Site) -> Registry:
    """The registry of the account in a region; raises `ClusterError`."""
    with aws.sentences(site, "log in to ECR"):
        (row,) = aws.client(site, "ecr").get_authorization_token()["authorizationData"]
    user, _, password = base64.b64decode(row["authorizationToken"]).decode().partition(":")
    scheme, _, host = str(row["proxyEndpoint"]).partition("://")
    return Registry(host, scheme == "https", user, password)


def found(site: Site, flavour: str, tag: str) -> str:
    """The digest of a flavour's container with that tag; "" if there is none."""
    wanted: dict[str, Any] = {"repositoryName": repository(flavour), "imageIds": [{"imageTag": tag}]}
    with aws.sentences(site, f"look for {repository(flavour)}:{tag}"), _absent():
        rows = aws.client(site, "ecr").describe_images(**wanted)["imageDetails"]
        return str(rows[0]["imageDigest"]) if rows else ""
    return ""


def make_repository(site: Site, flavour: str, tags: Mapping[str, str]) -> None:
    """Make a flavour's repository unless it is there: what is pushed to it is scanned, and no tag is ever moved."""
    from botocore.exceptions import ClientError

    labels = [{"Key": key, "Value": value} for key, value in tags.items()]
    how = {"imageTagMutability": "IMMUTABLE", "imageScanningConfiguration": {"scanOnPush": True}}
    with aws.sentences(site, f"make the repository {repository(flavour)}"):
        try:
            aws.client(site, "ecr").create_repository(repositoryName=repository(flavour), tags=labels, **how)
        except ClientError as error:
            if error.response["Error"]["Code"] != "RepositoryAlreadyExistsException":
                raise


def require(site: Site, flavour: str, tag: str) -> str:
    """The digest of a container that has just been pushed; raises `ClusterError` if ECR does not have it."""
    if not (digest := found(site, flavour, tag)):
        raise ClusterError(f"{repository(flavour)}:{tag} was pushed, and ECR in {site} does not have it: run again")
    return digest


@contextlib.contextmanager
def _absent() -> Iterator[None]:
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] not in ABSENT:
            raise
