"""The types that say who may do what, and keep secrets: IAM, KMS, Secrets Manager and SSM parameters."""

import json
import secrets
import string
from typing import Any

from emulator.request import truth
from emulator.resources import Properties, Resource, tag_list, tags


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


class Policy(
    Resource,
    type="AWS::IAM::Policy",
    fixed="PolicyName",
    mutable="PolicyDocument Roles",
    required="PolicyDocument PolicyName",
):
    """A policy put into roles."""

    def create(self) -> str:
        if not self.p.get("Roles"):
            raise ValueError("At least one of [Groups,Roles,Users] must be non-empty.")
        return self.name(64)

    def settle(self, old: Properties) -> None:
        text, name = json.dumps(self.p["PolicyDocument"]), self.p["PolicyName"]
        for role in set(old.get("Roles", [])) - set(self.p["Roles"]):
            self.aws.iam.delete_role_policy(RoleName=role, PolicyName=name)
        for role in self.p["Roles"]:
            self.aws.iam.put_role_policy(RoleName=role, PolicyName=name, PolicyDocument=text)

    def attributes(self) -> dict[str, Any]:
        return {"Id": self.id}

    def delete(self) -> None:
        for role in self.p["Roles"]:
            self.aws.iam.delete_role_policy(RoleName=role, PolicyName=self.p["PolicyName"])


class ManagedPolicy(
    Resource,
    type="AWS::IAM::ManagedPolicy",
    fixed="Description ManagedPolicyName Path",
    mutable="PolicyDocument Roles",
    required="PolicyDocument",
):
    """A policy that stands for itself."""

    def create(self) -> str:
        name = str(self.p.get("ManagedPolicyName") or self.name(128))
        about = {key: self.p[key] for key in ("Description", "Path") if key in self.p}
        made = self.call("iam", "create_policy", about, PolicyName=name, PolicyDocument=self.p["PolicyDocument"])
        return str(made["Policy"]["Arn"])

    def settle(self, old: Properties) -> None:
        iam, text = self.aws.iam, json.dumps(self.p["PolicyDocument"])
        if old and old["PolicyDocument"] != self.p["PolicyDocument"]:
            self._forget_versions()  # IAM keeps five
            iam.create_policy_version(PolicyArn=self.id, PolicyDocument=text, SetAsDefault=True)
        for role in set(old.get("Roles", [])) - set(self.p.get("Roles", [])):
            iam.detach_role_policy(RoleName=role, PolicyArn=self.id)
        for role in set(self.p.get("Roles", [])) - set(old.get("Roles", [])):
            iam.attach_role_policy(RoleName=role, PolicyArn=self.id)

    def attributes(self) -> dict[str, Any]:
        return {"PolicyArn": self.id}

    def delete(self) -> None:
        for role in self.p.get("Roles", []):
            self.aws.iam.detach_role_policy(RoleName=role, PolicyArn=self.id)
        self._forget_versions()
        self.aws.iam.delete_policy(PolicyArn=self.id)

    def _forget_versions(self) -> None:
        for version in self.aws.iam.list_policy_versions(PolicyArn=self.id)["Versions"]:
            if not version["IsDefaultVersion"]:
                self.aws.iam.delete_policy_version(PolicyArn=self.id, VersionId=version["VersionId"])


class OidcProvider(Resource, type="AWS::IAM::OIDCProvider", fixed="Url", mutable="ClientIdList Tags ThumbprintList"):
    """Who vouches for the service accounts of a Kubernetes cluster."""

    def create(self) -> str:
        told = {"Url": self.p["Url"], "ThumbprintList": self.p.get("ThumbprintList", []), "Tags": tag_list(self.p)}
        clients = {"ClientIDList": self.p.get("ClientIdList", [])}
        return str(self.call("iam", "create_open_id_connect_provider", told | clients)["OpenIDConnectProviderArn"])

    def settle(self, old: Properties) -> None:
        iam, where = self.aws.iam, {"OpenIDConnectProviderArn": self.id}
        if not old:
            return
        if thumbprints := self.changed(old, "ThumbprintList"):
            iam.update_open_id_connect_provider_thumbprint(**where, **thumbprints)
        before, after = set(old.get("ClientIdList", [])), set(self.p.get("ClientIdList", []))
        for one in after - before:
            iam.add_client_id_to_open_id_connect_provider(**where, ClientID=one)
        for one in before - after:
            iam.remove_client_id_from_open_id_connect_provider(**where, ClientID=one)

    def attributes(self) -> dict[str, Any]:
        return {"Arn": self.id}

    def delete(self) -> None:
        self.aws.iam.delete_open_id_connect_provider(OpenIDConnectProviderArn=self.id)


class Key(
    Resource,
    type="AWS::KMS::Key",
    fixed="KeySpec KeyUsage MultiRegion Origin",
    mutable="Description EnableKeyRotation KeyPolicy PendingWindowInDays Tags",
):
    """An encryption key; deleting it schedules its deletion, as on AWS."""

    def create(self) -> str:
        told = self.chosen("EnableKeyRotation", "KeyPolicy", "PendingWindowInDays", "Tags")
        policy = {"Policy": self.p["KeyPolicy"]} if "KeyPolicy" in self.p else {}
        names = [{"TagKey": key, "TagValue": value} for key, value in tags(self.p).items()]
        return str(self.call("kms", "create_key", told, **policy, Tags=names)["KeyMetadata"]["KeyId"])

    def settle(self, old: Properties) -> None:
        if truth(self.p.get("EnableKeyRotation", False)):
            self.aws.kms.enable_key_rotation(KeyId=self.id)
        if old and "KeyPolicy" in self.p:
            self.call("kms", "put_key_policy", KeyId=self.id, PolicyName="default", Policy=self.p["KeyPolicy"])
        if old and "Description" in self.p:
            self.aws.kms.update_key_description(KeyId=self.id, Description=self.p["Description"])

    def attributes(self) -> dict[str, Any]:
        return {"KeyId": self.id, "Arn": self.aws.arn("kms", f"key/{self.id}")}

    def delete(self) -> None:
        days = int(self.p.get("PendingWindowInDays", 30))
        self.aws.kms.schedule_key_deletion(KeyId=self.id, PendingWindowInDays=days)


class Alias(
    Resource,
    type="AWS::KMS::Alias",
    fixed="AliasName",
    mutable="TargetKeyId",
    required="AliasName TargetKeyId",
):
    """A key's name."""

    def create(self) -> str:
        self.call("kms", "create_alias", self.p)
        return str(self.p["AliasName"])

    def settle(self, old: Properties) -> None:
        if old:
            self.call("kms", "update_alias", self.p)

    def delete(self) -> None:
        self.aws.kms.delete_alias(AliasName=self.id)


class Secret(
    Resource,
    type="AWS::SecretsManager::Secret",
    fixed="Name",
    mutable="Description GenerateSecretString KmsKeyId SecretString Tags",
):
    """A secret, told or made up by chance."""

    unmoved = frozenset({"GenerateSecretString"})

    def create(self) -> str:
        if {"GenerateSecretString", "SecretString"} <= set(self.p):
            raise ValueError("You can't specify both a secret value and secret generation")
        told = self.chosen("GenerateSecretString", "Name", "SecretString", "Tags")
        name = str(self.p.get("Name") or self.name(256))
        value = {"SecretString": self._value()} if {"GenerateSecretString", "SecretString"} & set(self.p) else {}
        made = self.call("secretsmanager", "create_secret", told, **value, Name=name, Tags=tag_list(self.p))
        return str(made["ARN"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "Description", "KmsKeyId", "SecretString")):
            self.call("secretsmanager", "update_secret", told, SecretId=self.id)

    def attributes(self) -> dict[str, Any]:
        return {"Id": self.id}

    def delete(self) -> None:
        self.aws.secretsmanager.delete_secret(SecretId=self.id, ForceDeleteWithoutRecovery=True)

    def _value(self) -> str:
        if "SecretString" in self.p:
            return str(self.p["SecretString"])
        told = self.p["GenerateSecretString"]
        out = set(told.get("ExcludeCharacters", ""))
        if truth(told.get("ExcludePunctuation", False)):
            out |= set(string.punctuation)
        letters = [letter for letter in string.ascii_letters + string.digits + string.punctuation if letter not in out]
        word = "".join(secrets.choice(letters) for _ in range(int(told.get("PasswordLength", 32))))
        if "GenerateStringKey" not in told:
            return word
        return json.dumps(json.loads(told["SecretStringTemplate"]) | {told["GenerateStringKey"]: word})


class Parameter(
    Resource,
    type="AWS::SSM::Parameter",
    fixed="Name Type",
    mutable="AllowedPattern DataType Description Tags Tier Value",
    required="Type Value",
):
    """A named value of the systems manager."""

    def create(self) -> str:
        return str(self.p.get("Name") or self.name(512))

    def settle(self, old: Properties) -> None:
        told = self.chosen("Name", "Tags")
        self.call("ssm", "put_parameter", told, Name=self.id, Overwrite=bool(old))
        names = tag_list(self.p)
        self.aws.ssm.add_tags_to_resource(ResourceType="Parameter", ResourceId=self.id, Tags=names)

    def attributes(self) -> dict[str, Any]:
        return {"Type": self.p["Type"], "Value": self.p["Value"]}

    def delete(self) -> None:
        self.aws.ssm.delete_parameter(Name=self.id)
