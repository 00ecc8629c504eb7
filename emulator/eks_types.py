"""The types of EKS: clusters, node groups and what belongs to a cluster, made through its API."""

from collections.abc import Mapping
from typing import Any

from emulator import topology
from emulator.batch_types import template_data
from emulator.resources import Properties, Resource, tags


class EksCluster(
    Resource,
    type="AWS::EKS::Cluster",
    fixed="BootstrapSelfManagedAddons EncryptionConfig Name RoleArn",
    mutable="AccessConfig DeletionProtection KubernetesNetworkConfig Logging ResourcesVpcConfig Tags UpgradePolicy "
    "Version ZonalShiftConfig",
    required="ResourcesVpcConfig RoleArn",
):
    """A Kubernetes control plane, with the security group that EKS gives every cluster."""

    unmoved = frozenset(
        (
            "AccessConfig",
            "DeletionProtection",
            "KubernetesNetworkConfig",
            "Logging",
            "UpgradePolicy",
            "ZonalShiftConfig",
        )
    )

    def create(self) -> str:
        name = str(self.p.get("Name") or self.name(100))
        told = self.chosen("Logging", "Tags") | self._logging()
        self.call("eks", "create_cluster", told, name=name, tags=tags(self.p))
        return name

    def settle(self, old: Properties) -> None:
        if not old:
            vpc = self._found()["resourcesVpcConfig"].get("vpcId") or self._vpc()
            about = {"GroupName": self._group(), "Description": "EKS created security group", "VpcId": vpc}
            self.aws.ec2.create_security_group(**about)
            return
        if version := self.changed(old, "Version"):
            self.call("eks", "update_cluster_version", version, name=self.id)
        if vpc := self.changed(old, "ResourcesVpcConfig"):
            self.call("eks", "update_cluster_config", vpc, name=self.id)

    def attributes(self) -> dict[str, Any]:
        found = self._found()
        issuer = found["identity"]["oidc"]["issuer"]
        return {
            "Arn": found["arn"],
            "Endpoint": found["endpoint"],
            "CertificateAuthorityData": found["certificateAuthority"]["data"],
            "ClusterSecurityGroupId": self._group_id(),
            "OpenIdConnectIssuerUrl": issuer if issuer.startswith("https://") else f"https://{issuer}",
        }

    def delete(self) -> None:
        self.aws.eks.delete_cluster(name=self.id)
        self.aws.ec2.delete_security_group(GroupId=self._group_id())

    def _found(self) -> dict[str, Any]:
        return dict(self.aws.eks.describe_cluster(name=self.id)["cluster"])

    def _vpc(self) -> str:
        subnet = self.p["ResourcesVpcConfig"]["SubnetIds"][0]
        return str(self.aws.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"])

    def _group(self) -> str:
        return f"eks-cluster-sg-{self.id}"

    def _group_id(self) -> str:
        named = [{"Name": "group-name", "Values": [self._group()]}]
        return str(self.aws.ec2.describe_security_groups(Filters=named)["SecurityGroups"][0]["GroupId"])

    def _logging(self) -> dict[str, Any]:
        kinds = self.p.get("Logging", {}).get("ClusterLogging", {}).get("EnabledTypes", [])
        if not kinds:
            return {}
        return {"Logging": {"ClusterLogging": [{"Types": [kind["Type"] for kind in kinds], "Enabled": True}]}}


class Nodegroup(
    Resource,
    type="AWS::EKS::Nodegroup",
    fixed="AmiType CapacityType ClusterName DiskSize InstanceTypes NodeRole NodegroupName RemoteAccess Subnets",
    mutable="ForceUpdateEnabled Labels LaunchTemplate NodeRepairConfig ReleaseVersion ScalingConfig Tags Taints "
    "UpdateConfig Version",
    required="ClusterName NodeRole Subnets",
):
    """Nodes of a Kubernetes cluster. `Ref` is cluster/name."""

    unmoved = frozenset({"Taints"})

    def create(self) -> str:
        self._check()
        name = str(self.p.get("NodegroupName") or self.name(63))
        told = self.chosen("ForceUpdateEnabled", "Tags")
        self.call("eks", "create_nodegroup", told, nodegroupName=name, tags=tags(self.p))
        return f"{self.p['ClusterName']}/{name}"

    def settle(self, old: Properties) -> None:
        if not old:
            return
        self._check()
        if told := self.changed(old, "LaunchTemplate", "ReleaseVersion", "Version"):
            self.call("eks", "update_nodegroup_version", told, **self._where())
        if told := self.changed(old, "NodeRepairConfig", "ScalingConfig", "UpdateConfig"):
            self.call("eks", "update_nodegroup_config", told, **self._where())
        if labels := self.changed(old, "Labels"):
            gone = sorted(set(old.get("Labels", {})) - set(labels["Labels"]))
            change = {"addOrUpdateLabels": labels["Labels"]} | ({"removeLabels": gone} if gone else {})
            self.call("eks", "update_nodegroup_config", labels=change, **self._where())

    def attributes(self) -> dict[str, Any]:
        arn = self.aws.eks.describe_nodegroup(**self._where())["nodegroup"]["nodegroupArn"]
        return {"Id": self.id, "Arn": arn, **{key[0].upper() + key[1:]: one for key, one in self._where().items()}}

    def delete(self) -> None:
        self.aws.eks.delete_nodegroup(**self._where())

    def _where(self) -> dict[str, Any]:
        cluster, _, name = self.id.partition("/")
        return {"clusterName": cluster, "nodegroupName": name}

    def _check(self) -> None:
        """What EKS refuses of a node group together with its launch template."""
        data, kinds = template_data(self.aws, self.p.get("LaunchTemplate", {})), self.p.get("InstanceTypes", [])
        if data.get("InstanceType") and kinds:
            raise ValueError("Instance types cannot be given in the node group and in its launch template")
        if any("SubnetId" in card for card in data.get("NetworkInterfaces", [])):
            raise ValueError("Launch template should not specify a subnet in its network interfaces")
        block, bought = self.p.get("CapacityType") == "CAPACITY_BLOCK", topology.market(data)
        if block != (bought == "capacity-block"):
            raise ValueError(
                "CapacityType CAPACITY_BLOCK and a launch template's MarketType capacity-block go together"
            )
        if "LaunchTemplate" in self.p and ("DiskSize" in self.p or "RemoteAccess" in self.p):
            raise ValueError("DiskSize and RemoteAccess cannot be given together with a launch template")
        for kind in kinds or [""]:
            topology.check(data, str(kind))


class _OfCluster(Resource):
    """What belongs to a Kubernetes cluster."""

    def of_cluster(self, operation: str, told: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Call EKS about the cluster of this resource."""
        return self.call("eks", operation, told, clusterName=self.p["ClusterName"], **more)


class Addon(
    _OfCluster,
    type="AWS::EKS::Addon",
    fixed="AddonName ClusterName",
    mutable="AddonVersion ConfigurationValues PodIdentityAssociations PreserveOnDelete ResolveConflicts "
    "ServiceAccountRoleArn Tags",
    required="AddonName ClusterName",
):
    """An add-on of a cluster. `Ref` is cluster|name."""

    def create(self) -> str:
        told = self.chosen("ClusterName", "PreserveOnDelete", "Tags")
        self.of_cluster("create_addon", told, tags=tags(self.p))
        return f"{self.p['ClusterName']}|{self.p['AddonName']}"

    def settle(self, old: Properties) -> None:
        names = ("AddonVersion", "ConfigurationValues", "PodIdentityAssociations", "ServiceAccountRoleArn")
        if old and (told := self.changed(old, *names)):
            self.of_cluster("update_addon", told, addonName=self.p["AddonName"])

    def attributes(self) -> dict[str, Any]:
        return {"Arn": self.of_cluster("describe_addon", addonName=self.p["AddonName"])["addon"]["addonArn"]}

    def delete(self) -> None:
        self.of_cluster("delete_addon", addonName=self.p["AddonName"])


class AccessEntry(
    _OfCluster,
    type="AWS::EKS::AccessEntry",
    fixed="ClusterName PrincipalArn Type",
    mutable="AccessPolicies KubernetesGroups Tags Username",
    required="ClusterName PrincipalArn",
):
    """A role's rights in a cluster. `Ref` is principal|cluster."""

    def create(self) -> str:
        self.of_cluster("create_access_entry", self.chosen("AccessPolicies", "ClusterName", "Tags"), tags=tags(self.p))
        return f"{self.p['PrincipalArn']}|{self.p['ClusterName']}"

    def settle(self, old: Properties) -> None:
        who = {"principalArn": self.p["PrincipalArn"]}
        if old and (told := self.changed(old, "KubernetesGroups", "Username")):
            self.of_cluster("update_access_entry", told, **who)
        before, after = old.get("AccessPolicies", []), self.p.get("AccessPolicies", [])
        for policy in {one["PolicyArn"] for one in before} - {one["PolicyArn"] for one in after}:
            self.of_cluster("disassociate_access_policy", policyArn=policy, **who)
        for policy in (one for one in after if one not in before):
            self.of_cluster("associate_access_policy", policy, **who)

    def attributes(self) -> dict[str, Any]:
        found = self.of_cluster("describe_access_entry", principalArn=self.p["PrincipalArn"])
        return {"AccessEntryArn": found["accessEntry"]["accessEntryArn"]}

    def delete(self) -> None:
        self.of_cluster("delete_access_entry", principalArn=self.p["PrincipalArn"])


class PodIdentity(
    _OfCluster,
    type="AWS::EKS::PodIdentityAssociation",
    fixed="ClusterName Namespace ServiceAccount",
    mutable="DisableSessionTags RoleArn Tags TargetRoleArn",
    required="ClusterName Namespace RoleArn ServiceAccount",
):
    """A service account's role. `Ref` is the association's ARN."""

    def create(self) -> str:
        told = self.chosen("ClusterName", "Tags")
        made = self.of_cluster("create_pod_identity_association", told, tags=tags(self.p))
        return str(made["association"]["associationArn"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "DisableSessionTags", "RoleArn", "TargetRoleArn")):
            self.of_cluster("update_pod_identity_association", told, associationId=self._name())

    def attributes(self) -> dict[str, Any]:
        return {"AssociationArn": self.id, "AssociationId": self._name()}

    def delete(self) -> None:
        self.of_cluster("delete_pod_identity_association", associationId=self._name())

    def _name(self) -> str:
        return self.id.rpartition("/")[2]
