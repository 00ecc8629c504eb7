"""The parameters of a template: their types and limits, checked before anything is done, as CloudFormation does."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from emulator.errors import TemplateError

Value = str | list[str]
KEYS = {
    *("AllowedPattern", "AllowedValues", "ConstraintDescription", "Default", "Description"),
    *("MaxLength", "MaxValue", "MinLength", "MinValue", "NoEcho", "Type"),
}
OWN_TYPES = {
    *("AvailabilityZone::Name", "Image::Id", "Instance::Id", "KeyPair::KeyName", "SecurityGroup::GroupName"),
    *("SecurityGroup::Id", "Subnet::Id", "Volume::Id", "VPC::Id"),
}
AMI = re.compile(r"ami-[0-9a-f]{8,17}")


class Around(Protocol):
    """What a template may ask of the account and region it is deployed in."""

    def zones(self, region: str) -> list[str]:
        """The availability zones of a region."""

    def exists(self, kind: str, value: str) -> bool:
        """Whether there is such a thing of EC2, as in ("VPC::Id", "vpc-1")."""

    def parameter(self, name: str) -> str:
        """The value of a parameter of the systems manager; raises `TemplateError`."""

    def secret(self, told: str) -> str:
        """The value that a `{{resolve:secretsmanager:…}}` stands for; raises `TemplateError`."""

    def export(self, name: str) -> str:
        """What a stack exports under that name; raises `TemplateError`."""


def values(declared: Mapping[str, Any], given: Mapping[str, str], around: Around) -> dict[str, Value]:
    """The value of every declared parameter; raises `TemplateError` in CloudFormation's words."""
    if unknown := set(given) - set(declared):
        raise TemplateError(f"Parameters: [{', '.join(sorted(unknown))}] do not exist in the template")
    told = {name: given.get(name, about.get("Default")) for name, about in declared.items()}
    if missing := [name for name, value in told.items() if value is None]:
        raise TemplateError(f"Parameters: [{', '.join(missing)}] must have values")
    return {name: _value(name, _text(told[name]), about, around) for name, about in declared.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(name: str, text: str, about: Mapping[str, Any], around: Around) -> Value:
    if unknown := set(about) - KEYS:
        raise TemplateError(f"Invalid template parameter property '{', '.join(sorted(unknown))}'")
    kind = str(about.get("Type", ""))
    if found := re.fullmatch(r"AWS::SSM::Parameter::Value<(.+)>", kind):
        kind, text = found.group(1), around.parameter(text)
    elif kind == "AWS::SSM::Parameter::Name":
        kind = "String"
    inner = re.fullmatch(r"List<(.+)>", kind)
    many = inner is not None or kind == "CommaDelimitedList"
    single = inner.group(1) if inner else "String" if many else kind
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()] if many else [text]
    for piece in pieces:
        _check_type(name, piece, single, around)
        _check_limits(name, piece, single, about)
    return pieces if many else text


def _check_type(name: str, value: str, kind: str, around: Around) -> None:
    own = kind.removeprefix("AWS::EC2::")
    if kind == "String":
        return
    if kind == "Number":
        try:
            float(value)
        except ValueError:
            raise TemplateError(f"Parameter '{name}' must be a number.") from None
        return
    if kind == own or own not in OWN_TYPES:
        raise TemplateError(f"Template format error: Unrecognized parameter type: {kind}")
    fits = AMI.fullmatch(value) if own == "Image::Id" else around.exists(own, value)
    if not fits:
        told = f"parameter value {value} for parameter name {name} does not exist"
        raise TemplateError(f"Parameter validation failed: {told}")


def _check_limits(name: str, value: str, kind: str, about: Mapping[str, Any]) -> None:
    allowed = [_text(one) for one in about.get("AllowedValues", [value])]
    length, number = len(value), float(value) if kind == "Number" else 0.0
    pattern = about.get("AllowedPattern", ".*")
    failures = {
        f"must be one of AllowedValues [{', '.join(allowed)}]": value not in allowed,
        f"must match pattern {pattern}": not re.fullmatch(pattern, value, re.DOTALL),
        f"must contain at least {about.get('MinLength')} characters": length < int(about.get("MinLength", 0)),
        f"must contain at most {about.get('MaxLength')} characters": length > int(about.get("MaxLength", length)),
        f"must be a number not less than {about.get('MinValue')}": number < float(about.get("MinValue", number)),
        f"must be a number not greater than {about.get('MaxValue')}": number > float(about.get("MaxValue", number)),
    }
    for failure in (failure for failure, failed in failures.items() if failed):
        better = about.get("ConstraintDescription")
        raise TemplateError(f"Parameter '{name}' {f'failed to satisfy constraint: {better}' if better else failure}")
