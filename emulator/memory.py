"""The tables in which the emulator keeps what moto does not know: rows by id, per kind and region."""

import secrets
import threading
from collections import defaultdict
from typing import Any

Row = dict[str, Any]
ACCOUNT = "123456789012"
lock = threading.RLock()
"""Held while a table is changed: every request has a thread of its own."""
_tables: defaultdict[tuple[str, str], dict[str, Row]] = defaultdict(dict)


def table(kind: str, region: str) -> dict[str, Row]:
    """The rows of a kind, as in "pcs cluster", in one region."""
    return _tables[kind, region]


def everywhere(kind: str) -> dict[str, Row]:
    """The rows of a kind in all regions."""
    return {key: row for (known, _), rows in list(_tables.items()) if known == kind for key, row in rows.items()}


def new_id(prefix: str) -> str:
    """An id as EC2 makes them: the prefix and 17 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(9)[:17]}"


def arn(service: str, region: str, rest: str) -> str:
    """The ARN of something in this account."""
    return f"arn:aws:{service}:{region}:{ACCOUNT}:{rest}"
