"""Requests of JSON APIs held against botocore's model of them, as strictly as the services hold theirs.

Unknown members, wrong types, missing members, values outside an enumeration, a range or a pattern are all refused.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from emulator.extension import Call, Fault

PLAIN: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "float": (int, float),
    "double": (int, float),
    "timestamp": (int, float, str),
    "blob": str,
}


def checked(call: Call, operation: str, code: str) -> dict[str, Any]:
    """The call's parameters, found to be what `operation` takes; raises a `Fault` of this `code` otherwise."""
    told = dict(call.told) | dict(call.path)
    if wrong := list(_wrong(_model(call.service).operation_model(operation).input_shape, told, "")):
        raise Fault(code, f"{len(wrong)} validation error{'s' * (len(wrong) > 1)} detected: {'; '.join(wrong)}")
    return told


@cache
def _model(service: str) -> Any:
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


def _wrong(shape: Any, value: Any, path: str) -> list[str]:
    kinds = {"structure": _structure, "list": _list, "map": _map}
    if shape.type_name in kinds:
        return kinds[shape.type_name](shape, value, path)
    expected = PLAIN[shape.type_name]
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        return [f"Value {value!r} at '{path}' is not of type {shape.type_name}"]
    return _limits(shape, value, path) + (_text(shape, value, path) if isinstance(value, str) else [])


def _structure(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"Value {value!r} at '{path}' is not an object"]
    wrong = [f"Unknown parameter '{_at(path, name)}'" for name in value if name not in shape.members]
    missing = (name for name in shape.required_members if value.get(name) is None)
    wrong += [
        f"Value null at '{_at(path, name)}' failed to satisfy constraint: Member must not be null" for name in missing
    ]
    for name, one in value.items():
        if name in shape.members and one is not None:
            wrong += _wrong(shape.members[name], one, _at(path, name))
    return wrong


def _list(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, list):
        return [f"Value {value!r} at '{path}' is not a list"]
    wrong = _limits(shape, value, path)
    for number, one in enumerate(value, 1):
        wrong += _wrong(shape.member, one, f"{path}.{number}")
    return wrong


def _map(shape: Any, value: Any, path: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"Value {value!r} at '{path}' is not a map"]
    wrong = _limits(shape, value, path)
    for name, one in value.items():
        wrong += _wrong(shape.key, name, _at(path, name)) + _wrong(shape.value, one, _at(path, name))
    return wrong


def _limits(shape: Any, value: Any, path: str) -> list[str]:
    counted = isinstance(value, str | list | Mapping)
    size, what = (len(value), "have length") if counted else (value, "have value")
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    told = f"Value at '{path}' failed to satisfy constraint: Member must {what}"
    if least is not None and isinstance(size, int | float) and size < least:
        return [f"{told} greater than or equal to {least}"]
    if most is not None and isinstance(size, int | float) and size > most:
        return [f"{told} less than or equal to {most}"]
    return []


def _text(shape: Any, value: str, path: str) -> list[str]:
    told = f"Value '{value}' at '{path}' failed to satisfy constraint: Member must satisfy"
    enum, pattern = getattr(shape, "enum", None), shape.metadata.get("pattern")
    if enum and value not in enum:
        return [f"{told} enum value set: [{', '.join(enum)}]"]
    if pattern and not _matches(pattern, value):
        return [f"{told} regular expression pattern: {pattern}"]
    return []


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.fullmatch(pattern, text, re.DOTALL) is not None
    except re.error:  # written for Java
        return True


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
