"""Fixtures of the emulator tests."""

from tests.sky import emulator, site

__all__ = ["emulator", "site"]
