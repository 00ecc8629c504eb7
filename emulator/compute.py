"""The EC2 types that say what instances are like and where they come from."""

from typing import Any

from emulator import topology
from emulator.network import Tagged
from emulator.resources import Properties, Resource, tag_list


class PlacementGroup(Resource, type="AWS::EC2::PlacementGroup", fixed="PartitionCount SpreadLevel Strategy Tags"):
    """Instances close to each other."""

    def create(self) -> str:
        told = {"Strategy": "cluster"} | self.chosen("Tags")
        labels = [{"ResourceType": "placement-group", "Tags": tag_list(self.p)}] if self.p.get("Tags") else []
        name = self.name(255)
        self.call("ec2", "create_placement_group", told, GroupName=name, TagSpecifications=labels)
        return name

    def attributes(self) -> dict[str, Any]:
        (found,) = self.aws.ec2.describe_placement_groups(GroupNames=[self.id])["PlacementGroups"]
        return {"GroupName": self.id, "GroupId": found["GroupId"]}

    def delete(self) -> None:
        self.aws.ec2.delete_placement_group(GroupName=self.id)


class CapacityReservation(
    Resource,
    type="AWS::EC2::CapacityReservation",
    fixed="AvailabilityZone EbsOptimized InstancePlatform InstanceType Tenancy",
    mutable="EndDate EndDateType InstanceCount InstanceMatchCriteria TagSpecifications",
    required="InstanceCount InstancePlatform InstanceType",
):
    """Instances that are paid for, used or not."""

    unmoved = frozenset({"InstanceMatchCriteria", "TagSpecifications"})

    def create(self) -> str:
        made = self.call("ec2", "create_capacity_reservation", self.p)
        return str(made["CapacityReservation"]["CapacityReservationId"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "InstanceCount", "EndDate", "EndDateType")):
            self.call("ec2", "modify_capacity_reservation", told, CapacityReservationId=self.id)

    def attributes(self) -> dict[str, Any]:
        told = {"Id": self.id, "TotalInstanceCount": self.p["InstanceCount"], "InstanceType": self.p["InstanceType"]}
        return told | ({"AvailabilityZone": self.p["AvailabilityZone"]} if "AvailabilityZone" in self.p else {})

    def delete(self) -> None:
        self.aws.ec2.cancel_capacity_reservation(CapacityReservationId=self.id)


class LaunchTemplate(
    Resource,
    type="AWS::EC2::LaunchTemplate",
    fixed="LaunchTemplateName",
    mutable="LaunchTemplateData TagSpecifications VersionDescription",
    required="LaunchTemplateData",
):
    """What an instance looks like; a change makes a new version of it."""

    unmoved = frozenset({"TagSpecifications"})
    moving = frozenset({"LatestVersionNumber"})

    def create(self) -> str:
        topology.check(self.p["LaunchTemplateData"])
        name = str(self.p.get("LaunchTemplateName") or self.name(128))
        own = {tag["Key"]: tag["Value"] for one in self.p.get("TagSpecifications", []) for tag in one["Tags"]}
        labels = [{"Key": key, "Value": value} for key, value in {**self.stack_tags, **own}.items()]
        named = [{"ResourceType": "launch-template", "Tags": labels}] if labels else []
        told = self.chosen("TagSpecifications")
        made = self.call("ec2", "create_launch_template", told, LaunchTemplateName=name, TagSpecifications=named)
        return str(made["LaunchTemplate"]["LaunchTemplateId"])

    def settle(self, old: Properties) -> None:
        if old and self.changed(old, "LaunchTemplateData"):
            topology.check(self.p["LaunchTemplateData"])
            told = self.chosen("TagSpecifications", "LaunchTemplateName")
            self.call("ec2", "create_launch_template_version", told, LaunchTemplateId=self.id)

    def attributes(self) -> dict[str, Any]:
        (found,) = self.aws.ec2.describe_launch_templates(LaunchTemplateIds=[self.id])["LaunchTemplates"]
        numbers = {key: str(found[key]) for key in ("LatestVersionNumber", "DefaultVersionNumber")}
        return {"LaunchTemplateId": self.id} | numbers

    def delete(self) -> None:
        self.aws.ec2.delete_launch_template(LaunchTemplateId=self.id)


class FlowLog(
    Resource,
    type="AWS::EC2::FlowLog",
    fixed="DeliverLogsPermissionArn LogDestination LogDestinationType LogFormat LogGroupName MaxAggregationInterval "
    "ResourceId ResourceType TrafficType",
    mutable="Tags",
    required="ResourceId ResourceType",
):
    """A record of a network's traffic."""

    def create(self) -> str:
        told = self.chosen("ResourceId", "Tags")
        labels = [{"ResourceType": "vpc-flow-log", "Tags": tag_list(self.p)}] if self.p.get("Tags") else []
        where = [self.p["ResourceId"]]
        made = self.call("ec2", "create_flow_logs", told, ResourceIds=where, TagSpecifications=labels)
        if refused := made.get("Unsuccessful"):
            raise ValueError(refused[0]["Error"]["Message"])
        return str(made["FlowLogIds"][0])

    def attributes(self) -> dict[str, Any]:
        return {"Id": self.id}

    def delete(self) -> None:
        self.aws.ec2.delete_flow_logs(FlowLogIds=[self.id])


class NetworkAcl(Tagged, type="AWS::EC2::NetworkAcl", fixed="VpcId", mutable="Tags", required="VpcId"):
    """A list of rules around subnets."""

    def create(self) -> str:
        return str(self.aws.ec2.create_network_acl(VpcId=self.p["VpcId"])["NetworkAcl"]["NetworkAclId"])

    def attributes(self) -> dict[str, Any]:
        return {"Id": self.id}

    def delete(self) -> None:
        self.aws.ec2.delete_network_acl(NetworkAclId=self.id)


class NetworkAclEntry(
    Resource,
    type="AWS::EC2::NetworkAclEntry",
    fixed="CidrBlock Egress NetworkAclId PortRange Protocol RuleAction RuleNumber",
    required="NetworkAclId Protocol RuleAction RuleNumber",
):
    """One rule of such a list."""

    def create(self) -> str:
        self.call("ec2", "create_network_acl_entry", {"Egress": False} | dict(self.p))
        return f"{self.p['NetworkAclId']}|{self.p['RuleNumber']}"

    def attributes(self) -> dict[str, Any]:
        return {"Id": self.id}

    def delete(self) -> None:
        told = {key: self.p.get(key, False) for key in ("Egress", "NetworkAclId", "RuleNumber")}
        self.call("ec2", "delete_network_acl_entry", told)


class NetworkAclAssociation(
    Resource,
    type="AWS::EC2::SubnetNetworkAclAssociation",
    fixed="NetworkAclId SubnetId",
    required="NetworkAclId SubnetId",
):
    """Which list of rules a subnet follows; the network's own one again when it is deleted."""

    def create(self) -> str:
        return self._follow(str(self.p["NetworkAclId"]))

    def attributes(self) -> dict[str, Any]:
        return {"AssociationId": self.id}

    def delete(self) -> None:
        acl = self.aws.ec2.describe_network_acls(NetworkAclIds=[self.p["NetworkAclId"]])["NetworkAcls"][0]
        rows = [{"Name": "vpc-id", "Values": [acl["VpcId"]]}, {"Name": "default", "Values": ["true"]}]
        self._follow(self.aws.ec2.describe_network_acls(Filters=rows)["NetworkAcls"][0]["NetworkAclId"])

    def _follow(self, acl: str) -> str:
        rows = [{"Name": "association.subnet-id", "Values": [self.p["SubnetId"]]}]
        lists = self.aws.ec2.describe_network_acls(Filters=rows)["NetworkAcls"]
        now = [one for found in lists for one in found["Associations"] if one["SubnetId"] == self.p["SubnetId"]]
        told = {"AssociationId": now[0]["NetworkAclAssociationId"], "NetworkAclId": acl}
        return str(self.aws.ec2.replace_network_acl_association(**told)["NewAssociationId"])
