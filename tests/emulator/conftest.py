"""Fixtures of the emulator tests."""

import pytest

from clusters.aws import Site
from tests.emulator.raw_stacks import Sky
from tests.sky import emulator, site

__all__ = ["emulator", "site", "sky"]


@pytest.fixture
def sky(site: Site) -> Sky:
    return Sky(site)
