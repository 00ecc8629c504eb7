"""Containers at ECR, with a registry behind it that is real: what is there, what is not, and who may push."""

import hashlib
import http.client
import os
from base64 import b64encode

import pytest

from clusters import container_images
from clusters.aws import Site
from clusters.base import ClusterError
from emulator import registry
from tests.sky import client

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not registry.possible() and not os.environ.get("CI"), reason="needs docker-registry"),
]
KIND = b"application/vnd.oci.image.manifest.v1+json"
MANIFEST = b'{"schemaVersion": 2, "mediaType": "' + KIND + b'", "config": %s, "layers": []}'


def ask(host: str, method: str, path: str, body: bytes = b"", password: str = "") -> http.client.HTTPResponse:
    login = b64encode(f"AWS:{password}".encode()).decode()
    headers = {"Authorization": f"Basic {login}"} if password else {}
    kind = {"Content-Type": KIND.decode()} if "manifests" in path else {}
    line = http.client.HTTPConnection(host, timeout=10)
    line.request(method, path, body, headers | kind)
    answer = line.getresponse()
    answer.read()
    line.close()
    return answer


def push(at: container_images.Registry, name: str, tag: str) -> None:
    """Put the smallest image there is into the registry."""
    digest = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
    place = ask(at.host, "POST", f"/v2/{name}/blobs/uploads/", password=at.password).headers["Location"]
    path = place.partition(at.host)[2] if at.host in place else place
    assert ask(at.host, "PUT", f"{path}&digest={digest}", b"{}", at.password).status == 201
    config = b'{"mediaType": "application/vnd.oci.image.config.v1+json", "size": 2, "digest": "%s"}' % digest.encode()
    assert ask(at.host, "PUT", f"/v2/{name}/manifests/{tag}", MANIFEST % config, at.password).status == 201


def test_a_container_is_found_once_it_was_pushed(site: Site) -> None:
    assert container_images.found(site, "mine", "d1") == "", "there is no repository yet"
    for _ in range(2):
        container_images.make_repository(site, "mine", {"castra:flavour": "mine"})
    (made,) = client("ecr", site.endpoint).describe_repositories(repositoryNames=["castra/mine"])["repositories"]
    assert (made["imageTagMutability"], made["imageScanningConfiguration"]) == ("IMMUTABLE", {"scanOnPush": True})
    assert container_images.found(site, "mine", "d1") == ""
    with pytest.raises(ClusterError, match="was pushed, and ECR in us-east-1"):
        container_images.require(site, "mine", "d1")
    at = container_images.registry(site)
    push(at, "castra/mine", "d1")
    assert container_images.require(site, "mine", "d1").startswith("sha256:")
    assert container_images.found(site, "mine", "d2") == ""


def test_the_registry_lets_in_only_who_has_the_password_and_listens_here_only(site: Site) -> None:
    at = container_images.registry(site)
    assert at.host.startswith("127.0.0.1:")
    assert not at.secure
    assert at.password not in repr(at)
    assert ask(at.host, "GET", "/v2/").status == 401
    assert ask(at.host, "GET", "/v2/", password="wrong").status == 401
    assert ask(at.host, "GET", "/v2/", password=at.password).status == 200
