"""What CloudFormation knows: the stacks and change sets of every region, and what templates may ask about the rest."""

import json
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.core.exceptions import ServiceException

from emulator.errors import TemplateError
from emulator.memory import ACCOUNT
from emulator.resources import Services
from emulator.stacks import Stack
from emulator.template import Template

WITHIN = "castra-within"
"""The access key of the emulator's own requests."""
SEEN = {
    "VPC::Id": ("describe_vpcs", "VpcIds"),
    "Subnet::Id": ("describe_subnets", "SubnetIds"),
    "SecurityGroup::Id": ("describe_security_groups", "GroupIds"),
    "SecurityGroup::GroupName": ("describe_security_groups", "GroupNames"),
    "KeyPair::KeyName": ("describe_key_pairs", "KeyNames"),
    "Instance::Id": ("describe_instances", "InstanceIds"),
    "Volume::Id": ("describe_volumes", "VolumeIds"),
}
"""Parameter types → how EC2 is asked for such a thing."""


class ApiError(ServiceException):  # type: ignore[misc]  # moto has no types
    """What the API answers instead: a code and a message."""


def invalid(message: str) -> ApiError:
    """CloudFormation's usual refusal."""
    return ApiError("ValidationError", message)


@dataclass(slots=True)
class ChangeSet:
    """A change set, described once when it is created."""

    name: str
    id: str
    stack: Stack
    template: Template
    body: str
    tags: dict[str, str]
    rows: list[dict[str, Any]]
    token: str
    failed: str = ""
    executed: bool = False
    created: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(slots=True)
class Region:
    """What CloudFormation knows in one region; answers what templates ask (`emulator.parameters.Around`)."""

    services: Services
    stacks: dict[str, Stack] = field(default_factory=dict)
    change_sets: dict[str, ChangeSet] = field(default_factory=dict)

    def stack(self, name: str) -> Stack | None:
        """The stack of that id, or the one that stands under that name."""
        named = (one for one in self.stacks.values() if one.name == name and not one.deleted)
        return self.stacks.get(name) or next(named, None)

    def sets(self, stack: Stack) -> list[ChangeSet]:
        """The change sets of a stack."""
        return [one for one in self.change_sets.values() if one.stack is stack]

    def standing(self) -> list[Stack]:
        """The stacks that were not deleted."""
        return [one for one in self.stacks.values() if not one.deleted]

    def zones(self, region: str) -> list[str]:
        """The availability zones of a region."""
        return _zones(region)

    def exists(self, kind: str, value: str) -> bool:
        """Whether there is such a thing of EC2."""
        if kind == "AvailabilityZone::Name":
            return value in self.zones(self.services.region)
        operation, names = SEEN[kind]
        try:
            getattr(self.services.ec2, operation)(**{names: [value]})
        except ClientError:
            return False
        return True

    def parameter(self, name: str) -> str:
        """The value of a parameter of the systems manager."""
        try:
            return str(self.services.ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])
        except ClientError:
            raise TemplateError(f"Unable to fetch parameters [{name}] from parameter store for this account.") from None

    def secret(self, told: str) -> str:
        """The value of a secret: its id, `:SecretString`, and a key of its JSON if it has one."""
        name, _, rest = told.partition(":SecretString")
        try:
            text = str(self.services.secretsmanager.get_secret_value(SecretId=name)["SecretString"])
            key = rest.lstrip(":").partition(":")[0]
            return str(json.loads(text)[key]) if key else text
        except (ClientError, ValueError, LookupError) as error:
            raise TemplateError(f"Could not resolve the secret {told} ({error})") from None

    def export(self, name: str) -> str:
        """What a stack exports under that name."""
        for stack in self.standing():
            if name in stack.exports:
                return stack.exports[name]
        raise TemplateError(f"No export named {name} found.")


class World:
    """All regions of this emulator, and how it behaves."""

    endpoint = ""
    pace_s = 0.0
    lock = threading.RLock()
    regions: dict[str, Region] = {}  # noqa: RUF012  one per server process, as everything in moto

    @classmethod
    def region(cls, name: str) -> Region:
        """The region of that name."""
        with cls.lock:
            if name not in cls.regions:
                session = boto3.session.Session(WITHIN, WITHIN, region_name=name)
                config = Config(retries={"total_max_attempts": 1})

                def make(service: str) -> Any:
                    return session.client(service, endpoint_url=cls.endpoint, config=config)  # type: ignore[call-overload]  # a name at run time

                cls.regions[name] = Region(Services(name, ACCOUNT, make))
            return cls.regions[name]


@cache
def _zones(region: str) -> list[str]:
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    return [zone.name for zone in RegionsAndZonesBackend.zones[region]]
