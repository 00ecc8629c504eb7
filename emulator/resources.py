"""The resource types our CloudFormation knows, each made, changed and deleted through the services' own APIs.

A type lists its properties: `fixed` ones need a replacement to change, `mutable` ones are applied by `settle`. A type
or property that is not listed is refused. This module holds S3, IAM and CloudWatch Logs; `emulator.network` holds EC2.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from emulator.template import TemplateError

Properties = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Services:
    """Clients of this very emulator, in one region."""

    region: str
    account: str
    ec2: Any
    iam: Any
    logs: Any
    s3: Any


class Resource:
    """One resource of a stack; a subclass says how its type is made."""

    type: ClassVar[str]
    fixed: ClassVar[frozenset[str]]
    mutable: ClassVar[frozenset[str]]
    required: ClassVar[frozenset[str]]

    def __init_subclass__(cls, type: str = "", fixed: str = "", mutable: str = "", required: str = "") -> None:  # noqa: A002
        cls.type = type
        cls.fixed, cls.mutable, cls.required = (frozenset(names.split()) for names in (fixed, mutable, required))
        if type:
            TYPES[type] = cls

    def __init__(self, services: Services, stack: str, logical_id: str, p: Properties) -> None:
        self.aws = services
        self.stack, self.logical_id = stack, logical_id
        self.p, self.id = p, ""
        self._made: dict[str, str] | None = None

    def create(self) -> str:
        """Make it; returns its physical id."""
        raise NotImplementedError

    def settle(self, old: Properties) -> None:
        """Apply the mutable properties; `old` is empty after a creation."""

    def attributes(self) -> dict[str, str]:
        """What Fn::GetAtt may ask for."""
        return {}

    def delete(self) -> None:
        """Remove it."""
        raise NotImplementedError

    def attribute(self, name: str) -> str:
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
    """A resource's tags as a dict."""
    return {tag["Key"]: str(tag["Value"]) for tag in p.get("Tags", [])}


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


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule in the words of S3's API; whatever is new to it is passed on for the API to refuse."""
    told = dict(rule)
    out = {"ID": told.pop("Id", ""), "Filter": {"Prefix": told.pop("Prefix", "")}}
    if (days := told.pop("ExpirationInDays", None)) is not None:
        out["Expiration"] = {"Days": int(days)}
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


class Role(
    Resource,
    type="AWS::IAM::Role",
    fixed="RoleName Path",
    mutable="AssumeRolePolicyDocument Description ManagedPolicyArns Policies Tags",
    required="AssumeRolePolicyDocument",
):
    """A role with inline and managed policies."""

    def create(self) -> str:
        name = str(self.p.get("RoleName") or self.name(64))
        trust = json.dumps(self.p["AssumeRolePolicyDocument"])
        self.aws.iam.create_role(RoleName=name, Path=self.p.get("Path", "/"), AssumeRolePolicyDocument=trust)
        return name

    def settle(self, old: Properties) -> None:
        iam = self.aws.iam
        iam.update_assume_role_policy(RoleName=self.id, PolicyDocument=json.dumps(self.p["AssumeRolePolicyDocument"]))
        iam.update_role_description(RoleName=self.id, Description=self.p.get("Description", ""))
        if gone := set(tags(old)) - set(tags(self.p)):
            iam.untag_role(RoleName=self.id, TagKeys=sorted(gone))
        iam.tag_role(RoleName=self.id, Tags=tag_list(self.p))
        inline = {told["PolicyName"]: told["PolicyDocument"] for told in self.p.get("Policies", [])}
        for name in {told["PolicyName"] for told in old.get("Policies", [])} - set(inline):
            iam.delete_role_policy(RoleName=self.id, PolicyName=name)
        for name, document in inline.items():
            iam.put_role_policy(RoleName=self.id, PolicyName=name, PolicyDocument=json.dumps(document))
        managed, before = set(self.p.get("ManagedPolicyArns", [])), set(old.get("ManagedPolicyArns", []))
        for arn in before - managed:
            iam.detach_role_policy(RoleName=self.id, PolicyArn=arn)
        for arn in managed - before:
            iam.attach_role_policy(RoleName=self.id, PolicyArn=arn)

    def attributes(self) -> dict[str, str]:
        found = self.aws.iam.get_role(RoleName=self.id)["Role"]
        return {"Arn": found["Arn"], "RoleId": found["RoleId"]}

    def delete(self) -> None:
        for told in self.p.get("Policies", []):
            self.aws.iam.delete_role_policy(RoleName=self.id, PolicyName=told["PolicyName"])
        for arn in self.p.get("ManagedPolicyArns", []):
            self.aws.iam.detach_role_policy(RoleName=self.id, PolicyArn=arn)
        self.aws.iam.delete_role(RoleName=self.id)


class InstanceProfile(
    Resource, type="AWS::IAM::InstanceProfile", fixed="InstanceProfileName Path", mutable="Roles", required="Roles"
):
    """What hands a role to an instance."""

    def create(self) -> str:
        name = str(self.p.get("InstanceProfileName") or self.name(128))
        self.aws.iam.create_instance_profile(InstanceProfileName=name, Path=self.p.get("Path", "/"))
        return name

    def settle(self, old: Properties) -> None:
        for role in set(old.get("Roles", [])) - set(self.p["Roles"]):
            self.aws.iam.remove_role_from_instance_profile(InstanceProfileName=self.id, RoleName=role)
        for role in set(self.p["Roles"]) - set(old.get("Roles", [])):
            self.aws.iam.add_role_to_instance_profile(InstanceProfileName=self.id, RoleName=role)

    def attributes(self) -> dict[str, str]:
        return {"Arn": self.aws.iam.get_instance_profile(InstanceProfileName=self.id)["InstanceProfile"]["Arn"]}

    def delete(self) -> None:
        for role in self.p.get("Roles", []):
            self.aws.iam.remove_role_from_instance_profile(InstanceProfileName=self.id, RoleName=role)
        self.aws.iam.delete_instance_profile(InstanceProfileName=self.id)
