"""Fixtures of the cluster tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.yard import Yard, wait_until
from tests.sky import emulator, site

__all__ = ["emulator", "site"]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """A yard that must be empty after the test."""
    yard = Yard(tmp_path)
    yield yard
    wait_until(lambda: not yard.processes(), 5)
