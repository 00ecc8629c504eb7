"""The resource types our CloudFormation knows, each made, changed and deleted through the services' own APIs.

A type lists its properties: `fixed` ones need a replacement to change, `mutable` ones are applied by `settle`. A type
or property that is not listed is refused. This module holds what all types have in common, and S3 and CloudWatch Logs.
"""

import json
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from emulator.errors import TemplateError
from emulator.request import fitted

Properties = Mapping[str, Any]
LABELS = ("tags", "tagspecifications")
"""Members that are left out when they are empty: most services refuse an empty one."""
PATIENCE_S = 120.0
"""The longest that anything here takes to become usable."""


class Services:
    """Clients of this very emulator in one region, made when they are first needed: `services.ec2`."""

    def __init__(self, region: str, account: str, make: Callable[[str], Any]) -> None:
        self.region, self.account, self._make = region, account, make
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()

    def __getattr__(self, service: str) -> Any:
        with self._making:
            if service not in self._clients:
                self._clients[service] = self._make(service)
            return self._clients[service]

    def arn(self, service: str, rest: str) -> str:
        """The ARN of something of this account and region."""
        return f"arn:aws:{service}:{self.region}:{self.account}:{rest}"


class Resource(ABC):
    """One resource of a stack; a subclass says how its type is made."""

    type: ClassVar[str]
    fixed: ClassVar[frozenset[str]]
    mutable: ClassVar[frozenset[str]]
    required: ClassVar[frozenset[str]]
    unmoved: ClassVar[frozenset[str]] = frozenset()
    """Mutable properties whose change in place is not emulated: it fails instead of being passed over."""
    moving: ClassVar[frozenset[str]] = frozenset()
    """Attributes that an update in place may change."""

    def __init_subclass__(cls, type: str = "", fixed: str = "", mutable: str = "", required: str = "") -> None:  # noqa: A002
        cls.type = type
        cls.fixed, cls.mutable, cls.required = (frozenset(names.split()) for names in (fixed, mutable, required))
        if type:
            TYPES[type] = cls

    def __init__(self, services: Services, stack: str, logical_id: str, p: Properties) -> None:
        self.aws = services
        self.stack, self.logical_id = stack, logical_id
        self.p, self.id = p, ""
        self.stack_tags: Mapping[str, str] = {}
        self._made: dict[str, Any] | None = None

    @abstractmethod
    def create(self) -> str:
        """Make it; returns its physical id."""

    def settle(self, old: Properties) -> None:  # noqa: B027  # most types have nothing to settle
        """Apply the mutable properties; `old` is empty after a creation."""

    def attributes(self) -> dict[str, Any]:
        """What Fn::GetAtt may ask for."""
        return {}

    def replaces(self, old: Properties) -> bool:
        """Whether what differs from `old` asks for another one in its place."""
        return any(old.get(key) != self.p.get(key) for key in self.fixed)

    @abstractmethod
    def delete(self) -> None:
        """Remove it."""

    def attribute(self, name: str) -> Any:
        """What Fn::GetAtt gives; raises `TemplateError` for what it does not know."""
        if self._made is None:
            self._made = self.attributes()
        if name not in self._made:
            told = f"resource {self.logical_id} does not support attribute type {name} in Fn::GetAtt"
            raise TemplateError(f"Template error: {told}")
        return self._made[name]

    def name(self, longest: int) -> str:
        """A name made up of the stack's, the logical id and chance."""
        tail = f"-{secrets.token_hex(6)}"
        return f"{self.stack}-{self.logical_id}"[: longest - len(tail)] + tail

    def call(self, service: str, operation: str, told: Properties | None = None, **more: Any) -> Any:
        """Make a request out of properties; raises `ValueError` if they do not fit it."""
        client = getattr(self.aws, service)
        asked = {key: one for key, one in {**(told or {}), **more}.items() if one or key.lower() not in LABELS}
        return getattr(client, operation)(**fitted(client, operation, asked))

    def chosen(self, *but: str) -> dict[str, Any]:
        """The properties but these."""
        return {key: value for key, value in self.p.items() if key not in but}

    def changed(self, old: Properties, *names: str) -> dict[str, Any]:
        """Those of the named properties that are not as they were, and are not gone."""
        return {key: self.p[key] for key in names if key in self.p and self.p[key] != old.get(key)}


def until(done: Callable[[], bool], what: str) -> None:
    """Wait for a service to finish; raises `ValueError` as CloudFormation says it."""
    last = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > last:
            raise ValueError(f"{what} did not stabilize.")
        time.sleep(0.02)


TYPES: dict[str, type[Resource]] = {}


def known(logical_id: str, told: Mapping[str, Any]) -> type[Resource]:
    """The type of a resource of a template; raises `TemplateError` if it, or one of its properties, is unknown."""
    name, properties = told.get("Type", ""), set(told.get("Properties", {}))
    if name not in TYPES:
        raise TemplateError(f"Template format error: Unrecognized resource types: [{name}] (not emulated here)")
    found = TYPES[name]
    if unknown := properties - found.fixed - found.mutable:
        listed = ", ".join(sorted(unknown))
        raise TemplateError(f"Resource {logical_id} ({name}): unknown or not emulated properties: {listed}")
    if missing := found.required - properties:
        raise TemplateError(f"Resource {logical_id} ({name}): missing properties: {', '.join(sorted(missing))}")
    return found


def tags(p: Properties) -> dict[str, str]:
    """A resource's tags as a dict; in a template they are a list or a map."""
    if isinstance(told := p.get("Tags", []), Mapping):
        return {key: str(value) for key, value in told.items()}
    return {tag["Key"]: str(tag["Value"]) for tag in told}


def tag_list(p: Properties) -> list[dict[str, str]]:
    """A resource's tags as AWS writes them."""
    return [{"Key": key, "Value": value} for key, value in tags(p).items()]


class Bucket(
    Resource,
    type="AWS::S3::Bucket",
    fixed="BucketName",
    mutable="BucketEncryption LifecycleConfiguration OwnershipControls PublicAccessBlockConfiguration Tags "
    "VersioningConfiguration",
):
    """A bucket; deleting it fails while it holds objects, as it does on AWS."""

    def create(self) -> str:
        name = str(self.p.get("BucketName") or self.name(63).lower())
        where = {} if self.aws.region == "us-east-1" else {"LocationConstraint": self.aws.region}
        self.aws.s3.create_bucket(Bucket=name, **({"CreateBucketConfiguration": where} if where else {}))
        return name

    def settle(self, old: Properties) -> None:
        s3 = self.aws.s3
        s3.put_bucket_tagging(Bucket=self.id, Tagging={"TagSet": tag_list(self.p)})
        if told := self.p.get("BucketEncryption"):
            rules = [
                {"ApplyServerSideEncryptionByDefault": rule["ServerSideEncryptionByDefault"]}
                for rule in told["ServerSideEncryptionConfiguration"]
            ]
            s3.put_bucket_encryption(Bucket=self.id, ServerSideEncryptionConfiguration={"Rules": rules})
        if told := self.p.get("PublicAccessBlockConfiguration"):
            s3.put_public_access_block(Bucket=self.id, PublicAccessBlockConfiguration=told)
        if told := self.p.get("OwnershipControls"):
            s3.put_bucket_ownership_controls(Bucket=self.id, OwnershipControls=told)
        if told := self.p.get("VersioningConfiguration"):
            s3.put_bucket_versioning(Bucket=self.id, VersioningConfiguration=told)
        if told := self.p.get("LifecycleConfiguration"):
            rules = [_lifecycle_rule(rule) for rule in told["Rules"]]
            s3.put_bucket_lifecycle_configuration(Bucket=self.id, LifecycleConfiguration={"Rules": rules})
        elif "LifecycleConfiguration" in old:
            s3.delete_bucket_lifecycle(Bucket=self.id)

    def attributes(self) -> dict[str, str]:
        host = f"{self.id}.s3.{self.aws.region}.amazonaws.com"
        return {
            "Arn": f"arn:aws:s3:::{self.id}",
            "DomainName": f"{self.id}.s3.amazonaws.com",
            "RegionalDomainName": host,
        }

    def delete(self) -> None:
        self.aws.s3.delete_bucket(Bucket=self.id)


def _renamed(told: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in told.items()}


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule in the words of S3's API; whatever is new to it is passed on for the API to refuse."""
    told = dict(rule)
    out = {"ID": told.pop("Id", ""), "Filter": {"Prefix": told.pop("Prefix", "")}}
    if (days := told.pop("ExpirationInDays", None)) is not None:
        out["Expiration"] = {"Days": int(days)}
    if (marker := told.pop("ExpiredObjectDeleteMarker", None)) is not None:
        out["Expiration"] = {"ExpiredObjectDeleteMarker": str(marker).lower() == "true"}
    if moves := told.pop("Transitions", []):
        out["Transitions"] = [_renamed(one, TransitionInDays="Days") for one in moves]
    if (days := told.pop("NoncurrentVersionExpirationInDays", None)) is not None:
        out["NoncurrentVersionExpiration"] = {"NoncurrentDays": int(days)}
    return out | told


class BucketPolicy(Resource, type="AWS::S3::BucketPolicy", fixed="Bucket", mutable="PolicyDocument", required="Bucket"):
    """A bucket's policy. It is enforced, also over http: a TLS-only policy shuts everybody out here."""

    def create(self) -> str:
        return str(self.p["Bucket"])

    def settle(self, old: Properties) -> None:
        if self.p != old:
            self.aws.s3.put_bucket_policy(Bucket=self.id, Policy=json.dumps(self.p["PolicyDocument"]))

    def delete(self) -> None:
        self.aws.s3.delete_bucket_policy(Bucket=self.id)


class LogGroup(Resource, type="AWS::Logs::LogGroup", fixed="LogGroupName", mutable="RetentionInDays Tags"):
    """A log group with its retention."""

    def create(self) -> str:
        name = str(self.p.get("LogGroupName") or self.name(512))
        self.aws.logs.create_log_group(logGroupName=name)
        return name

    def settle(self, old: Properties) -> None:
        if gone := set(tags(old)) - set(tags(self.p)):
            self.aws.logs.untag_log_group(logGroupName=self.id, tags=sorted(gone))
        self.aws.logs.tag_log_group(logGroupName=self.id, tags=tags(self.p))
        if days := self.p.get("RetentionInDays"):
            self.aws.logs.put_retention_policy(logGroupName=self.id, retentionInDays=int(days))

    def attributes(self) -> dict[str, str]:
        return {"Arn": f"arn:aws:logs:{self.aws.region}:{self.aws.account}:log-group:{self.id}:*"}

    def delete(self) -> None:
        self.aws.logs.delete_log_group(logGroupName=self.id)
