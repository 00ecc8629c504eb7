"""Fixtures that every test may ask for."""

from pathlib import Path

import pytest

from tests.camp import Camp


@pytest.fixture
def user_camp(tmp_path: Path) -> Camp:
    """A fresh user's folder."""
    return Camp(tmp_path)
