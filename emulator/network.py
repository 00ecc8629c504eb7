"""The EC2 types our CloudFormation knows: a network from the VPC down to the rules of its security groups."""

import secrets
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from emulator.request import truth
from emulator.resources import Properties, Resource, tag_list, tags


class Tagged(Resource):
    """What carries EC2 tags."""

    def settle(self, old: Properties) -> None:
        if gone := set(tags(old)) - set(tags(self.p)):
            self.aws.ec2.delete_tags(Resources=[self.id], Tags=[{"Key": key} for key in sorted(gone)])
        if wanted := tag_list(self.p):
            self.aws.ec2.create_tags(Resources=[self.id], Tags=wanted)


class Vpc(
    Tagged,
    type="AWS::EC2::VPC",
    fixed="CidrBlock",
    mutable="EnableDnsHostnames EnableDnsSupport Tags",
    required="CidrBlock",
):
    """A network; deleting it fails while anything is in it."""

    def create(self) -> str:
        return str(self.aws.ec2.create_vpc(CidrBlock=self.p["CidrBlock"])["Vpc"]["VpcId"])

    def settle(self, old: Properties) -> None:
        super().settle(old)
        for name in ("EnableDnsSupport", "EnableDnsHostnames"):
            if name in self.p:
                self.aws.ec2.modify_vpc_attribute(VpcId=self.id, **{name: {"Value": truth(self.p[name])}})

    def attributes(self) -> dict[str, str]:
        here = [{"Name": "vpc-id", "Values": [self.id]}]
        groups = self.aws.ec2.describe_security_groups(Filters=here)["SecurityGroups"]
        default = next(group["GroupId"] for group in groups if group["GroupName"] == "default")
        return {"VpcId": self.id, "CidrBlock": self.p["CidrBlock"], "DefaultSecurityGroup": default}

    def delete(self) -> None:
        self.aws.ec2.delete_vpc(VpcId=self.id)


class Subnet(
    Tagged,
    type="AWS::EC2::Subnet",
    fixed="AvailabilityZone AvailabilityZoneId CidrBlock VpcId",
    mutable="MapPublicIpOnLaunch Tags",
    required="CidrBlock VpcId",
):
    """A part of a network in one availability zone."""

    def create(self) -> str:
        told = self.chosen("MapPublicIpOnLaunch", "Tags")
        return str(self.call("ec2", "create_subnet", told)["Subnet"]["SubnetId"])

    def settle(self, old: Properties) -> None:
        super().settle(old)
        public = {"Value": truth(self.p.get("MapPublicIpOnLaunch", False))}
        self.aws.ec2.modify_subnet_attribute(SubnetId=self.id, MapPublicIpOnLaunch=public)

    def attributes(self) -> dict[str, str]:
        found = self.aws.ec2.describe_subnets(SubnetIds=[self.id])["Subnets"][0]
        return {"SubnetId": self.id} | {key: found[key] for key in ("AvailabilityZone", "CidrBlock", "VpcId")}

    def delete(self) -> None:
        self.aws.ec2.delete_subnet(SubnetId=self.id)


class InternetGateway(Tagged, type="AWS::EC2::InternetGateway", mutable="Tags"):
    """The way to the internet."""

    def create(self) -> str:
        return str(self.aws.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"])

    def attributes(self) -> dict[str, str]:
        return {"InternetGatewayId": self.id}

    def delete(self) -> None:
        self.aws.ec2.delete_internet_gateway(InternetGatewayId=self.id)


class GatewayAttachment(
    Resource,
    type="AWS::EC2::VPCGatewayAttachment",
    fixed="InternetGatewayId VpcId",
    required="InternetGatewayId VpcId",
):
    """An internet gateway put into a network."""

    def create(self) -> str:
        self.aws.ec2.attach_internet_gateway(**self.p)
        return f"IGW|{self.p['VpcId']}"

    def delete(self) -> None:
        self.aws.ec2.detach_internet_gateway(**self.p)


class RouteTable(Tagged, type="AWS::EC2::RouteTable", fixed="VpcId", mutable="Tags", required="VpcId"):
    """Where packets go."""

    def create(self) -> str:
        return str(self.aws.ec2.create_route_table(VpcId=self.p["VpcId"])["RouteTable"]["RouteTableId"])

    def attributes(self) -> dict[str, str]:
        return {"RouteTableId": self.id}

    def delete(self) -> None:
        self.aws.ec2.delete_route_table(RouteTableId=self.id)


class Route(
    Resource,
    type="AWS::EC2::Route",
    fixed="DestinationCidrBlock RouteTableId GatewayId NatGatewayId",
    required="DestinationCidrBlock RouteTableId",
):
    """One line of a route table."""

    def create(self) -> str:
        self.aws.ec2.create_route(**self.p)
        return f"{self.p['RouteTableId']}|{self.p['DestinationCidrBlock']}"

    def delete(self) -> None:
        destination = self.p["DestinationCidrBlock"]
        self.aws.ec2.delete_route(RouteTableId=self.p["RouteTableId"], DestinationCidrBlock=destination)


class RouteTableAssociation(
    Resource,
    type="AWS::EC2::SubnetRouteTableAssociation",
    fixed="RouteTableId SubnetId",
    required="RouteTableId SubnetId",
):
    """Which route table a subnet follows."""

    def create(self) -> str:
        return str(self.aws.ec2.associate_route_table(**self.p)["AssociationId"])

    def delete(self) -> None:
        self.aws.ec2.disassociate_route_table(AssociationId=self.id)


class ElasticIp(Tagged, type="AWS::EC2::EIP", fixed="Domain", mutable="Tags"):
    """A public address."""

    def create(self) -> str:
        return str(self.aws.ec2.allocate_address(Domain="vpc")["AllocationId"])

    def attributes(self) -> dict[str, str]:
        found = self.aws.ec2.describe_addresses(AllocationIds=[self.id])["Addresses"][0]
        return {"AllocationId": self.id, "PublicIp": found["PublicIp"]}

    def delete(self) -> None:
        self.aws.ec2.release_address(AllocationId=self.id)


class NatGateway(
    Tagged,
    type="AWS::EC2::NatGateway",
    fixed="AllocationId ConnectivityType SubnetId",
    mutable="Tags",
    required="SubnetId",
):
    """The way out of a private subnet."""

    def create(self) -> str:
        wanted = {key: self.p[key] for key in ("AllocationId", "ConnectivityType", "SubnetId") if key in self.p}
        return str(self.aws.ec2.create_nat_gateway(**wanted)["NatGateway"]["NatGatewayId"])

    def attributes(self) -> dict[str, str]:
        return {"NatGatewayId": self.id}

    def delete(self) -> None:
        self.aws.ec2.delete_nat_gateway(NatGatewayId=self.id)


class CidrBlock(Resource, type="AWS::EC2::VPCCidrBlock", fixed="CidrBlock VpcId", required="CidrBlock VpcId"):
    """More addresses for a network."""

    def create(self) -> str:
        return str(self.call("ec2", "associate_vpc_cidr_block", self.p)["CidrBlockAssociation"]["AssociationId"])

    def attributes(self) -> dict[str, str]:
        return {"Id": self.id}

    def delete(self) -> None:
        self.aws.ec2.disassociate_vpc_cidr_block(AssociationId=self.id)


class Endpoint(
    Tagged,
    type="AWS::EC2::VPCEndpoint",
    fixed="ServiceName VpcEndpointType VpcId",
    mutable="PolicyDocument PrivateDnsEnabled RouteTableIds SecurityGroupIds SubnetIds Tags",
    required="ServiceName VpcId",
):
    """The short way from a network to a service: a gateway for S3 and DynamoDB, network interfaces for the others."""

    sets = ("RouteTableIds", "SecurityGroupIds", "SubnetIds")

    def create(self) -> str:
        kind = self.p.get("VpcEndpointType", "Gateway")
        strange = {"SecurityGroupIds", "SubnetIds"} if kind == "Gateway" else {"RouteTableIds"}
        if kind not in ("Gateway", "Interface") or strange & set(self.p):
            told = f"{', '.join(sorted(strange & set(self.p)))} cannot be given for an endpoint of type {kind}"
            raise ValueError(f"InvalidParameter: {told}")
        made = self.call("ec2", "create_vpc_endpoint", self.chosen("Tags"), VpcEndpointType=kind)
        return str(made["VpcEndpoint"]["VpcEndpointId"])

    def settle(self, old: Properties) -> None:
        super().settle(old)
        if not old:
            return
        told: dict[str, Any] = self.changed(old, "PolicyDocument", "PrivateDnsEnabled")
        for name in self.sets:
            after, before = set(self.p.get(name, [])), set(old.get(name, []))
            told |= {f"Add{name}": sorted(after - before)} if after - before else {}
            told |= {f"Remove{name}": sorted(before - after)} if before - after else {}
        if told:
            self.call("ec2", "modify_vpc_endpoint", told, VpcEndpointId=self.id)

    def attributes(self) -> dict[str, Any]:
        found = self.aws.ec2.describe_vpc_endpoints(VpcEndpointIds=[self.id])["VpcEndpoints"][0]
        entries = [f"{one.get('HostedZoneId', '')}:{one['DnsName']}" for one in found.get("DnsEntries", [])]
        return {"Id": self.id, "NetworkInterfaceIds": found.get("NetworkInterfaceIds", []), "DnsEntries": entries}

    def delete(self) -> None:
        self.aws.ec2.delete_vpc_endpoints(VpcEndpointIds=[self.id])


class SecurityGroup(
    Tagged,
    type="AWS::EC2::SecurityGroup",
    fixed="GroupDescription GroupName VpcId",
    mutable="SecurityGroupEgress SecurityGroupIngress Tags",
    required="GroupDescription",
):
    """A firewall around instances. Rules given inside it replace the default one that lets everything out."""

    def create(self) -> str:
        name = str(self.p.get("GroupName") or self.name(255))
        where = {"VpcId": self.p["VpcId"]} if "VpcId" in self.p else {}
        made = self.aws.ec2.create_security_group(GroupName=name, Description=self.p["GroupDescription"], **where)
        return str(made["GroupId"])

    def settle(self, old: Properties) -> None:
        super().settle(old)
        anywhere = [{"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}]
        for side, way in (("SecurityGroupIngress", "ingress"), ("SecurityGroupEgress", "egress")):
            before = old.get(side, []) if old else anywhere if way == "egress" and side in self.p else []
            after = self.p.get(side, [])
            for rule in (rule for rule in before if rule not in after):
                _call(self.aws.ec2, f"revoke_security_group_{way}", self.id, rule)
            for rule in (rule for rule in after if rule not in before):
                _call(self.aws.ec2, f"authorize_security_group_{way}", self.id, rule)

    def attributes(self) -> dict[str, str]:
        return {"GroupId": self.id, "Id": self.id} | ({"VpcId": self.p["VpcId"]} if "VpcId" in self.p else {})

    def delete(self) -> None:
        self.aws.ec2.delete_security_group(GroupId=self.id)


class Ingress(
    Resource,
    type="AWS::EC2::SecurityGroupIngress",
    fixed="CidrIp Description FromPort GroupId IpProtocol SourceSecurityGroupId ToPort",
    required="GroupId IpProtocol",
):
    """One rule of a security group, for what comes in."""

    way = "ingress"

    def create(self) -> str:
        made = _call(self.aws.ec2, f"authorize_security_group_{self.way}", self.p["GroupId"], self.p)
        return str(made["SecurityGroupRules"][0]["SecurityGroupRuleId"])

    def attributes(self) -> dict[str, str]:
        return {"Id": self.id}

    def delete(self) -> None:
        _call(self.aws.ec2, f"revoke_security_group_{self.way}", self.p["GroupId"], self.p)


class Egress(
    Ingress,
    type="AWS::EC2::SecurityGroupEgress",
    fixed="CidrIp Description DestinationSecurityGroupId FromPort GroupId IpProtocol ToPort",
    required="GroupId IpProtocol",
):
    """One rule of a security group, for what goes out; the one that lets everything out may be there already."""

    way = "egress"

    def create(self) -> str:
        try:
            return super().create()
        except ClientError as error:
            if error.response["Error"]["Code"] != "InvalidPermission.Duplicate":
                raise
            return f"sgr-{secrets.token_hex(9)[:17]}"


def _call(ec2: Any, action: str, group: str, rule: Mapping[str, Any]) -> Any:
    permission: dict[str, Any] = {"IpProtocol": str(rule["IpProtocol"])}
    for port in ("FromPort", "ToPort"):
        if port in rule:
            permission[port] = int(rule[port])
    about = {"Description": rule["Description"]} if "Description" in rule else {}
    if "CidrIp" in rule:
        permission["IpRanges"] = [{"CidrIp": rule["CidrIp"]} | about]
    if other := rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId"):
        permission["UserIdGroupPairs"] = [{"GroupId": other} | about]
    return getattr(ec2, action)(GroupId=group, IpPermissions=[permission])
