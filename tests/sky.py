"""AWS for the tests: one emulator for all tests of a process, and a site in it."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from clusters import aws
from clusters.aws import Site
from emulator import aws as emulated
from emulator.aws import Emulator
from emulator.guests import SHARE


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A running emulator; its guests share the folders of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARE, str(tmp_path_factory.getbasetemp()))
        with emulated.running(tmp_path_factory.mktemp("emulator")) as running:
            yield running


@pytest.fixture
def site(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The emulator, as the environment points at it."""
    for name, value in emulated.environment(emulator.endpoint).items():
        monkeypatch.setenv(name, value)
    return aws.here()


def tell(endpoint: str, page: str, told: Any = None, method: str = "POST") -> Any:
    """Ask for one of the emulator's own pages, `faults` or `lose`, say; returns what it answers."""
    request = urllib.request.Request(f"{endpoint}/castra/{page}", json.dumps(told).encode(), method=method)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


_clients: dict[tuple[str, str], Any] = {}


def client(service: str, endpoint: str) -> Any:
    """A client to look at the emulator with, past our own code."""
    if (service, endpoint) not in _clients:
        session = boto3.session.Session("castra", "castra", region_name=emulated.REGION)
        made = session.client(service, endpoint_url=endpoint)  # type: ignore[call-overload]  # a name at run time
        _clients[service, endpoint] = made
    return _clients[service, endpoint]
