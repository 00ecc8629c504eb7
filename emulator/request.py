"""From a resource's properties to a service's request, guided by botocore's model of that request.

CloudFormation and the APIs agree but for case (`SubnetIds`, `subnetIds`), for tags (a list, a map) and for policies
(a document, its text). What the model does not know, or a value that it does not allow, is refused with its path, as
the service itself would.
"""

import json
import re
from collections.abc import Mapping
from typing import Any


def fitted(client: Any, operation: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters for `client.<operation>`; raises `ValueError` that says what does not fit, and where."""
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
    found: dict[str, Any] = _structure(model.input_shape, told, "")
    return found


def truth(value: Any) -> bool:
    """What a template means by `true` or `"true"`."""
    return str(value).lower() == "true"


def _fit(shape: Any, value: Any, path: str) -> Any:
    kinds = {"structure": _structure, "list": _list, "map": _map, "string": _string}
    if shape.type_name in kinds:
        return kinds[shape.type_name](shape, value, path)
    try:
        return _plain(shape.type_name, value)
    except (ValueError, TypeError):
        raise ValueError(f"expected type: {shape.type_name}, found: {value!r} at {path or '#'}") from None


def _structure(shape: Any, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected type: Object, found: {value!r} at {path or '#'}")
    members = {name.lower(): name for name in shape.members}
    if strange := [name for name in value if name.lower() not in members]:
        raise ValueError(f"extraneous key [{', '.join(strange)}] is not permitted at {path or '#'}")
    names = {members[name.lower()]: (name, one) for name, one in value.items()}
    if missing := [name for name in shape.required_members if name not in names]:
        raise ValueError(f"required key [{', '.join(missing)}] not found at {path or '#'}")
    return {to: _fit(shape.members[to], one, f"{path}/{name}") for to, (name, one) in names.items()}


def _list(shape: Any, value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected type: JSONArray, found: {value!r} at {path or '#'}")
    return [_fit(shape.member, one, f"{path}/{number}") for number, one in enumerate(value)]


def _map(shape: Any, value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, list):  # tags
        value = {one["Key"]: one["Value"] for one in value}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected type: Object, found: {value!r} at {path or '#'}")
    return {str(name): _fit(shape.value, one, f"{path}/{name}") for name, one in value.items()}


def _string(shape: Any, value: Any, path: str) -> str:
    if isinstance(value, Mapping | list):
        value = json.dumps(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if shape.enum and text not in shape.enum:
        allowed = ", ".join(shape.enum)
        told = f"Member must satisfy enum value set: [{allowed}]"
        raise ValueError(f"Value '{text}' at '{path}' failed to satisfy constraint: {told}")
    longest, pattern = shape.metadata.get("max"), shape.metadata.get("pattern")
    if longest is not None and len(text) > longest:
        told = f"Member must have length less than or equal to {longest}"
        raise ValueError(f"Value '{text}' at '{path}' failed to satisfy constraint: {told}")
    if pattern and not _matches(pattern, text):
        told = f"Member must satisfy regular expression pattern: {pattern}"
        raise ValueError(f"Value '{text}' at '{path}' failed to satisfy constraint: {told}")
    return text


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.fullmatch(pattern, text, re.DOTALL) is not None
    except re.error:  # Java's
        return True


def _plain(kind: str, value: Any) -> Any:
    if kind in ("integer", "long"):
        return int(str(value))
    if kind in ("float", "double"):
        return float(value)
    if kind == "boolean":
        if str(value).lower() not in ("true", "false"):
            raise ValueError
        return truth(value)
    return value.encode() if kind == "blob" and isinstance(value, str) else value
