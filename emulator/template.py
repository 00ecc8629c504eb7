"""Read a CloudFormation template and work out its values: conditions, references, functions, dependencies.

Stricter than moto: whatever is not known here is an error that names it, never silently passed over.
"""

import base64
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from emulator import parameters, short_forms
from emulator.errors import TemplateError
from emulator.parameters import Around, Value

SECTIONS = {
    *("AWSTemplateFormatVersion", "Description", "Metadata", "Parameters", "Rules", "Mappings", "Conditions"),
    *("Resources", "Outputs"),
}
RESOURCE_KEYS = {"Type", "Properties", "DependsOn", "Condition", "Metadata", "DeletionPolicy", "UpdateReplacePolicy"}
OUTPUT_KEYS = {"Value", "Description", "Condition", "Export"}
POLICIES = ("Delete", "Retain", "RetainExceptOnCreate")
NO_VALUE = object()
PLACEHOLDER = re.compile(r"\$\{(!?)([\w:.]+)\}")
UNKNOWN = re.compile(r"<[\w:.]+>")
RESOLVED = re.compile(r"\{\{resolve:(ssm|ssm-secure|secretsmanager):([^}]+)\}\}")


@dataclass(slots=True)
class Template:
    """A parsed template with the values of its parameters."""

    body: dict[str, Any]
    given: dict[str, str]
    parameters: dict[str, Value]
    pseudo: Mapping[str, Value]
    around: Around
    conditions: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, given: Mapping[str, str], pseudo: Mapping[str, Value], around: Around) -> "Template":
        """Read a template, JSON or YAML; raises `TemplateError`."""
        try:
            body = short_forms.read(text)
        except ValueError as error:
            raise TemplateError(f"Template format error: {error}") from None
        if not isinstance(body, dict) or not body.get("Resources"):
            raise TemplateError("Template format error: At least one Resources member must be defined.")
        if unknown := set(body) - SECTIONS:
            raise TemplateError(f"Invalid template property or properties [{', '.join(sorted(unknown))}]")
        declared = body.get("Parameters") or {}
        template = cls(body, dict(given), parameters.values(declared, given, around), pseudo, around)
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
            for key in {"DeletionPolicy", "UpdateReplacePolicy"} & set(told):
                if told[key] not in POLICIES:
                    raise TemplateError(f"Resource {name}: {key} {told[key]} is not emulated here")
            after = told.get("DependsOn", [])
            named |= {after} if isinstance(after, str) else set(after)
        named |= set(_references([self.body["Resources"], self.body.get("Outputs", {})]))
        if missing := named - known:
            _unresolved(sorted(missing))
        for name, told in self.body.get("Outputs", {}).items():
            if unknown := set(told) - OUTPUT_KEYS:
                raise TemplateError(f"Output {name}: {', '.join(sorted(unknown))} is not known")
        self.order()


@dataclass(slots=True)
class Values:
    """Works out values; `ref` and `attribute` answer for resources."""

    template: Template
    ref: Callable[[str], Any]
    attribute: Callable[[str, str], Any]
    foreseen: bool = False
    """Whether nothing is made yet: what `<…>` stands for is not known, nor what is computed from it."""
    imported: set[str] = field(default_factory=set)
    """The exports of other stacks that were asked for."""

    def of(self, told: Any) -> Any:
        """The value of any part of the template; raises `TemplateError`."""
        if isinstance(told, list):
            return [value for one in told if (value := self.of(one)) is not NO_VALUE]
        if isinstance(told, str):
            return RESOLVED.sub(self._resolved, told)
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
        own = {"Ref": self._named, "Fn::GetAtt": self._attribute, "Fn::Sub": self._sub, "Fn::ImportValue": self._import}
        if name in own:
            return own[name](argument)
        if name not in FUNCTIONS:
            raise TemplateError(f"Template error: {name} is not emulated here")
        value = self.of(argument)
        if self.foreseen and UNKNOWN.search(str(value)):
            return f"<{name}>"
        try:
            return FUNCTIONS[name](value, self.template)
        except (ValueError, TypeError, IndexError, LookupError) as error:
            raise TemplateError(f"Template error: every {name} object requires proper arguments ({error})") from None

    def _named(self, name: str) -> Any:
        if name == "AWS::NoValue":
            return NO_VALUE
        for known in (self.template.parameters, self.template.pseudo):
            if name in known:
                return known[name]
        return self.ref(name)

    def _import(self, told: Any) -> Any:
        name = str(self.of(told))
        self.imported.add(name)
        return self.template.around.export(name)

    def _resolved(self, found: re.Match[str]) -> str:
        service, told = found.groups()
        around = self.template.around
        if self.foreseen and UNKNOWN.search(told):
            return f"<{service}>"
        if service == "secretsmanager":
            return around.secret(told)
        try:
            return around.parameter(told.partition(":")[0])
        except TemplateError:
            if not self.foreseen:  # it may come with the stack
                raise
            return f"<{service}>"

    def _attribute(self, told: Any) -> Any:
        name, attribute = told.split(".", 1) if isinstance(told, str) else (told[0], self.of(told[1]))
        return self.attribute(name, attribute)

    def _sub(self, told: Any) -> Any:
        text, own = told if isinstance(told, list) else (told, {})

        def put(found: re.Match[str]) -> str:
            literal, name = found.groups()
            if literal:
                return f"${{{name}}}"
            if name in own:
                return str(self.of(own[name]))
            return str(self._attribute(name) if "." in name else self._named(name))

        return self.of(PLACEHOLDER.sub(put, text))  # it may name a secret


def _cidr(arguments: list[Any], _: Template) -> list[str]:
    block, count, *bits = arguments
    pieces = ipaddress.ip_network(block).subnets(new_prefix=32 - int(bits[0] if bits else 8))
    return [str(next(pieces)) for _ in range(int(count))]


def _find_in_map(arguments: list[Any], template: Template) -> Any:
    name, top, second = arguments
    found = template.body.get("Mappings", {}).get(name, {}).get(top, {})
    if second not in found:
        raise ValueError(f"there is no mapping {name}, {top}, {second}")
    return found[second]


FUNCTIONS: dict[str, Callable[[Any, Template], Any]] = {
    "Fn::Join": lambda told, _: told[0].join(map(str, told[1])),
    "Fn::Split": lambda told, _: told[1].split(told[0]),
    "Fn::Select": lambda told, _: told[1][int(told[0])],
    "Fn::Base64": lambda told, _: base64.b64encode(told.encode()).decode(),
    "Fn::Cidr": _cidr,
    "Fn::FindInMap": _find_in_map,
    "Fn::GetAZs": lambda told, template: template.around.zones(str(told or template.pseudo["AWS::Region"])),
    "Fn::Equals": lambda told, _: told[0] == told[1],
    "Fn::Not": lambda told, _: not told[0],
    "Fn::And": lambda told, _: all(told),
    "Fn::Or": lambda told, _: any(told),
}


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
