"""Read the text of a template: JSON, or YAML with CloudFormation's short forms (`!Ref`, `!GetAtt A.B`, `!Sub` …)."""

import json
from typing import Any

import yaml

PLAIN = {"Ref", "Condition"}
KNOWN = PLAIN | {
    *("And", "Base64", "Cidr", "Equals", "FindInMap", "GetAtt", "GetAZs", "If", "ImportValue"),
    *("Join", "Not", "Or", "Select", "Split", "Sub"),
    *("Contains", "EachMemberEquals", "EachMemberIn", "RefAll", "ValueOf", "ValueOfAll"),
}
"""The last ones are those of rules, which are not evaluated."""


class _Loader(yaml.SafeLoader):
    """YAML as CloudFormation reads it: dates are text."""


def read(text: str) -> Any:
    """The template as long-form data; raises `ValueError` with the place of the mistake."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"JSON not well-formed ({error})") from None
    try:
        return yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"YAML not well-formed ({' '.join(str(error).split())})") from None


def _short(loader: _Loader, name: str, node: yaml.Node) -> dict[str, Any]:
    if name not in KNOWN:
        raise yaml.constructor.ConstructorError(None, None, f"unknown function !{name}", node.start_mark)
    value: Any
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
        if name == "GetAtt":
            value = str(value).split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        assert isinstance(node, yaml.MappingNode)
        value = _mapping(loader, node)
    return {name if name in PLAIN else f"Fn::{name}": value}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """A mapping whose keys are text and come once."""
    found: dict[Any, Any] = {}
    loader.flatten_mapping(node)
    for key, value in node.value:
        name = str(loader.construct_object(key, deep=True))
        if name in found:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {name}", key.start_mark)
        found[name] = loader.construct_object(value, deep=True)
    return found


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_multi_constructor("!", _short)
