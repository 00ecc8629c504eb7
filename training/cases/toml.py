"""Writes a nested mapping as TOML: what tomllib reads back equal, for frameworks that are configured with it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from training.cases.base import CaseError


def toml(config: Mapping[str, Any]) -> str:
    """Tables of booleans, numbers, texts and lists of them; None is left out, for TOML has no word for it.

    Raises CaseError for a value that TOML has no form for, such as a list of mappings.
    """
    return "\n".join(_table(config, ())) + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {name: value for name, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if path and values:
        yield f"[{'.'.join(map(_key, path))}]"
    for name, value in values.items():
        yield f"{_key(name)} = {_value(value, (*path, name))}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*path, name))


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else _text(name)


def _text(text: str) -> str:
    # TOML's basic strings are JSON's but for DEL, which TOML wants escaped
    return json.dumps(text).replace("\x7f", "\\u007f")


def _value(value: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one, path) for one in value)}]"
    raise CaseError(f"{'.'.join(path)}: TOML has no form for a {type(value).__name__}.")
