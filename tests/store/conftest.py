"""Fixtures of the store tests: one store of each kind."""

from pathlib import Path

import pytest

from clusters.aws import Site
from store import Store, open_store
from tests.sky import client, emulator, site

__all__ = ["emulator", "site"]


@pytest.fixture(params=["files", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty store."""
    monkeypatch.setenv("CASTRA_STATE", str(tmp_path / "state"))
    if request.param == "files":
        return str(tmp_path / "store")
    where: Site = request.getfixturevalue("site")
    bucket = f"store-{abs(hash(request.node.nodeid)):x}"
    client("s3", where.endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture
def store(url: str) -> Store:
    """An empty store."""
    return open_store(url)
