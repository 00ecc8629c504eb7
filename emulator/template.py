"""Read a CloudFormation template and work out its values: conditions, references, functions, dependencies.

Stricter than moto: whatever is not known here is an error that names it, never silently passed over.
"""

import base64
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

SECTIONS = {"AWSTemplateFormatVersion", "Description", "Metadata", "Parameters", "Conditions", "Resources", "Outputs"}
RESOURCE_KEYS = {"Type", "Properties", "DependsOn", "Condition", "Metadata"}
NO_VALUE = object()
PLACEHOLDER = re.compile(r"\$\{(!?)([\w:.]+)\}")


class TemplateError(Exception):
    """The template is wrong, or uses what is not emulated; the text is CloudFormation's ValidationError."""


@dataclass(slots=True)
class Template:
    """A parsed template with the values of its parameters."""

    body: dict[str, Any]
    parameters: dict[str, str]
    pseudo: Mapping[str, str]
    conditions: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, given: Mapping[str, str], pseudo: Mapping[str, str]) -> "Template":
        """Read long-form JSON; raises `TemplateError`."""
        try:
            body = json.loads(text)
        except ValueError as error:
            raise TemplateError(f"Template format error: JSON not well-formed ({error})") from None
        if not isinstance(body, dict) or not body.get("Resources"):
            raise TemplateError("Template format error: At least one Resources member must be defined.")
        if unknown := set(body) - SECTIONS:
            raise TemplateError(f"Invalid template property or properties [{', '.join(sorted(unknown))}]")
        template = cls(body, _parameters(body.get("Parameters", {}), given), pseudo)
        template._check()
        return template

    def holds(self, condition: str) -> bool:
        """Whether a condition of the template holds; "" always does."""
        if not condition:
            return True
        if condition not in self.conditions:
            if condition not in self.body.get("Conditions", {}):
                raise TemplateError(f"Template format error: Unresolved condition dependency {condition}")
            values = Values(self, lambda name: _unresolved([name]), lambda name, _: _unresolved([name]))
            self.conditions[condition] = bool(values.of(self.body["Conditions"][condition]))
        return self.conditions[condition]

    @property
    def resources(self) -> dict[str, dict[str, Any]]:
        """The resources whose condition holds."""
        found = self.body["Resources"].items()
        return {name: told for name, told in found if self.holds(told.get("Condition", ""))}

    def order(self) -> list[str]:
        """The resources' names, each after what it depends on."""
        graph = {name: self.depends(name) for name in self.resources}
        try:
            return list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise TemplateError(f"Circular dependency between resources: [{', '.join(error.args[1])}]") from None

    def depends(self, name: str) -> set[str]:
        """The resources that this one names."""
        told = self.resources[name]
        after = told.get("DependsOn", [])
        names = {after} if isinstance(after, str) else set(after)
        return (names | set(_references(told.get("Properties", {})))) & set(self.resources)

    def _check(self) -> None:
        known = set(self.body["Resources"]) | set(self.parameters) | set(self.pseudo) | {"AWS::NoValue"}
        named: set[str] = set()
        for name, told in self.body["Resources"].items():
            if unknown := set(told) - RESOURCE_KEYS:
                raise TemplateError(f"Resource {name}: {', '.join(sorted(unknown))} is not emulated here")
            after = told.get("DependsOn", [])
            named |= {after} if isinstance(after, str) else set(after)
        named |= set(_references([self.body["Resources"], self.body.get("Outputs", {})]))
        if missing := named - known:
            _unresolved(sorted(missing))
        self.order()


@dataclass(slots=True)
class Values:
    """Works out values; `ref` and `attribute` answer for resources."""

    template: Template
    ref: Callable[[str], Any]
    attribute: Callable[[str, str], Any]

    def of(self, told: Any) -> Any:
        """The value of any part of the template; raises `TemplateError`."""
        if isinstance(told, list):
            return [value for one in told if (value := self.of(one)) is not NO_VALUE]
        if not isinstance(told, dict):
            return told
        if len(told) == 1:
            ((name, argument),) = told.items()
            if name in ("Ref", "Condition") or name.startswith("Fn::"):
                return self._call(name, argument)
        return {key: value for key, one in told.items() if (value := self.of(one)) is not NO_VALUE}

    def _call(self, name: str, argument: Any) -> Any:
        if name == "Fn::If":
            condition, then, otherwise = argument
            return self.of(then if self.template.holds(condition) else otherwise)
        if name == "Condition":
            return self.template.holds(argument)
        if name == "Ref":
            return self._named(argument)
        if name == "Fn::GetAtt":
            return self._attribute(argument)
        if name == "Fn::Sub":
            return self._sub(argument)
        if name not in FUNCTIONS:
            raise TemplateError(f"Template error: {name} is not emulated here")
        try:
            return FUNCTIONS[name](self.of(argument), self.template.pseudo)
        except (ValueError, TypeError, IndexError, LookupError) as error:
            raise TemplateError(f"Template error: every {name} object requires proper arguments ({error})") from None

    def _named(self, name: str) -> Any:
        if name == "AWS::NoValue":
            return NO_VALUE
        for known in (self.template.parameters, self.template.pseudo):
            if name in known:
                return known[name]
        return self.ref(name)

    def _attribute(self, told: Any) -> Any:
        name, attribute = told.split(".", 1) if isinstance(told, str) else told
        return self.attribute(name, attribute)

    def _sub(self, told: Any) -> str:
        text, own = told if isinstance(told, list) else (told, {})

        def put(found: re.Match[str]) -> str:
            literal, name = found.groups()
            if literal:
                return f"${{{name}}}"
            if name in own:
                return str(self.of(own[name]))
            return str(self._attribute(name) if "." in name else self._named(name))

        return PLACEHOLDER.sub(put, text)


def _cidr(arguments: list[Any], _: Mapping[str, str]) -> list[str]:
    block, count, *bits = arguments
    pieces = ipaddress.ip_network(block).subnets(new_prefix=32 - int(bits[0] if bits else 8))
    return [str(next(pieces)) for _ in range(int(count))]


FUNCTIONS: dict[str, Callable[[Any, Mapping[str, str]], Any]] = {
    "Fn::Join": lambda told, _: told[0].join(map(str, told[1])),
    "Fn::Split": lambda told, _: told[1].split(told[0]),
    "Fn::Select": lambda told, _: told[1][int(told[0])],
    "Fn::Base64": lambda told, _: base64.b64encode(told.encode()).decode(),
    "Fn::Cidr": _cidr,
    "Fn::GetAZs": lambda told, pseudo: [f"{told or pseudo['AWS::Region']}{letter}" for letter in "abc"],
    "Fn::Equals": lambda told, _: told[0] == told[1],
    "Fn::Not": lambda told, _: not told[0],
    "Fn::And": lambda told, _: all(told),
    "Fn::Or": lambda told, _: any(told),
}


def _parameters(declared: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    if unknown := set(given) - set(declared):
        raise TemplateError(f"Parameters: [{', '.join(sorted(unknown))}] do not exist in the template")
    values = {name: given.get(name, told.get("Default")) for name, told in declared.items()}
    if missing := [name for name, value in values.items() if value is None]:
        raise TemplateError(f"Parameters: [{', '.join(missing)}] must have values")
    for name, value in values.items():
        if value not in declared[name].get("AllowedValues", [value]):
            raise TemplateError(f"Parameter '{name}' must be one of AllowedValues")
    return {name: str(value) for name, value in values.items()}


def _references(told: Any) -> Iterator[str]:
    """What is named by Ref, Fn::GetAtt and Fn::Sub anywhere below."""
    if isinstance(told, list):
        for one in told:
            yield from _references(one)
    elif isinstance(told, dict):
        for name, argument in told.items():
            if name == "Ref" and isinstance(argument, str):
                yield argument
            elif name == "Fn::GetAtt":
                yield argument.split(".")[0] if isinstance(argument, str) else argument[0]
            elif name == "Fn::Sub":
                text, own = argument if isinstance(argument, list) else (argument, {})
                found = PLACEHOLDER.findall(text)
                yield from (name.split(".")[0] for literal, name in found if not literal and name not in own)
                yield from _references(own)
            else:
                yield from _references(argument)


def _unresolved(names: list[str]) -> Any:
    raise TemplateError(
        f"Template format error: Unresolved resource dependencies [{', '.join(names)}] in the Resources block"
    )
