"""The camp: the ground every cluster stands on. Network, scratch bucket, log group, the nodes' role."""

from typing import Any

from clusters.aws import Site
from clusters.ledger import Entry
from clusters.stacks.deploy import Stack

Part = dict[str, Any]

NETWORK, PUBLIC, PRIVATE = "10.42.0.0/16", "10.42.0.0/20", "10.42.128.0/17"
"""Addresses: 4,091 public, 32,763 private; a p5 instance with all its EFA interfaces takes a single IP address."""
EXPIRY_DAYS = 30
"""The scratch bucket is for what is on its way; results live in the store."""
LOG_DAYS = 30
CHOSEN_ZONE = {"cfn-lint": {"config": {"ignore_checks": ["W3010"]}}}
"""A zone is written down only because that is where the capacity is."""


def name(run: str) -> str:
    """The name of a run's camp: `castra-<run>-camp`."""
    return f"castra-{run}-camp"


def stack(entry: Entry, *, nat: bool = False, zone: str | None = None) -> Stack:
    """The camp that `ledger.intend(store, claim, "stack", camp.name(run), asdict(site))` announced.

    `nat` gives the private subnet a way out (about 33 US dollars a month and 0.045 a GB); `zone` is the availability
    zone, the region's first by default. Outputs: Vpc, PublicSubnet, PrivateSubnet, SecurityGroup, Bucket, LogGroup,
    NodeRole and InstanceProfile (ARNs).
    """
    site = Site(**entry.where)
    return Stack(entry.name, template(tls_only=not site.endpoint, nat=nat, zone=zone), entry.tags, site)


def template(*, tls_only: bool = True, nat: bool = False, zone: str | None = None) -> Part:
    """The CloudFormation template, long-form JSON; `tls_only=False` is for emulators that speak plain http."""
    where: Any = zone or {"Fn::Select": [0, {"Fn::GetAZs": {"Ref": "AWS::Region"}}]}
    resources = _network(where) | _security() | _bucket(tls_only) | _logs_and_role()
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Castra: network, scratch bucket, logs and node role of one run.",
        **({"Metadata": CHOSEN_ZONE} if zone else {}),
        "Resources": resources | (_nat() if nat else {}),
        "Outputs": {
            "Vpc": {"Value": _ref("Vpc")},
            "PublicSubnet": {"Value": _ref("PublicSubnet")},
            "PrivateSubnet": {"Value": _ref("PrivateSubnet")},
            "SecurityGroup": {"Value": _att("SecurityGroup", "GroupId")},
            "Bucket": {"Value": _ref("Bucket")},
            "LogGroup": {"Value": _ref("LogGroup")},
            "NodeRole": {"Value": _att("NodeRole", "Arn")},
            "InstanceProfile": {"Value": _att("InstanceProfile", "Arn")},
        },
    }


def _network(zone: Any) -> Part:
    """One zone: EFA traffic does not cross zones, and a placement group lives in one."""
    return {
        "Vpc": _part("EC2::VPC", CidrBlock=NETWORK, EnableDnsSupport=True, EnableDnsHostnames=True, Tags=_named("vpc")),
        "Gateway": _part("EC2::InternetGateway", Tags=_named("gateway")),
        "Attachment": _part("EC2::VPCGatewayAttachment", VpcId=_ref("Vpc"), InternetGatewayId=_ref("Gateway")),
        "PublicSubnet": _part(
            "EC2::Subnet",
            VpcId=_ref("Vpc"),
            CidrBlock=PUBLIC,
            AvailabilityZone=zone,
            MapPublicIpOnLaunch=True,
            Tags=_named("public"),
        ),
        "PrivateSubnet": _part(
            "EC2::Subnet", VpcId=_ref("Vpc"), CidrBlock=PRIVATE, AvailabilityZone=zone, Tags=_named("private")
        ),
        "PublicRoutes": _part("EC2::RouteTable", VpcId=_ref("Vpc"), Tags=_named("public")),
        "PrivateRoutes": _part("EC2::RouteTable", VpcId=_ref("Vpc"), Tags=_named("private")),
        "PublicRoute": _part(
            "EC2::Route",
            RouteTableId=_ref("PublicRoutes"),
            DestinationCidrBlock="0.0.0.0/0",
            GatewayId=_ref("Gateway"),
        )
        | {"DependsOn": "Attachment"},  # else the route may be made before the gateway is usable
        "PublicAssociation": _part(
            "EC2::SubnetRouteTableAssociation", SubnetId=_ref("PublicSubnet"), RouteTableId=_ref("PublicRoutes")
        ),
        "PrivateAssociation": _part(
            "EC2::SubnetRouteTableAssociation", SubnetId=_ref("PrivateSubnet"), RouteTableId=_ref("PrivateRoutes")
        ),
        "BucketEndpoint": _part(
            "EC2::VPCEndpoint",
            VpcId=_ref("Vpc"),
            VpcEndpointType="Gateway",
            ServiceName={"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
            RouteTableIds=[_ref("PublicRoutes"), _ref("PrivateRoutes")],
        ),
    }


def _nat() -> Part:
    return {
        "NatAddress": _part("EC2::EIP", Domain="vpc", Tags=_named("nat")) | {"DependsOn": "Attachment"},
        "Nat": _part(
            "EC2::NatGateway",
            AllocationId=_att("NatAddress", "AllocationId"),
            SubnetId=_ref("PublicSubnet"),
            Tags=_named("nat"),
        ),
        "PrivateRoute": _part(
            "EC2::Route",
            RouteTableId=_ref("PrivateRoutes"),
            DestinationCidrBlock="0.0.0.0/0",
            NatGatewayId=_ref("Nat"),
        ),
    }


def _security() -> Part:
    """EFA wants all traffic to and from the group itself, and the way out as a rule of its own."""
    itself = _att("SecurityGroup", "GroupId")
    return {
        "SecurityGroup": _part(
            "EC2::SecurityGroup",
            GroupDescription="Nodes of one Castra run: everything among themselves, nothing from outside",
            VpcId=_ref("Vpc"),
            SecurityGroupEgress=[{"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": "Out"}],
            Tags=_named("nodes"),
        ),
        "SelfIngress": _part(
            "EC2::SecurityGroupIngress",
            GroupId=itself,
            IpProtocol="-1",
            SourceSecurityGroupId=itself,
            Description="Node to node (EFA)",
        ),
        "SelfEgress": _part(
            "EC2::SecurityGroupEgress",
            GroupId=itself,
            IpProtocol="-1",
            DestinationSecurityGroupId=itself,
            Description="Node to node (EFA)",
        ),
    }


def _bucket(tls_only: bool) -> Part:
    bucket = _part(
        "S3::Bucket",
        BucketEncryption={
            "ServerSideEncryptionConfiguration": [{"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
        },
        PublicAccessBlockConfiguration={
            "BlockPublicAcls": True,
            "BlockPublicPolicy": True,
            "IgnorePublicAcls": True,
            "RestrictPublicBuckets": True,
        },
        OwnershipControls={"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        LifecycleConfiguration={
            "Rules": [
                {
                    "Id": "expire",
                    "Status": "Enabled",
                    "ExpirationInDays": EXPIRY_DAYS,
                    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                }
            ]
        },
    )
    everything = [_att("Bucket", "Arn"), {"Fn::Sub": "${Bucket.Arn}/*"}]
    refuse_http = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": everything,
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    policy = _part("S3::BucketPolicy", Bucket=_ref("Bucket"), PolicyDocument=_document(refuse_http))
    return {"Bucket": bucket} | ({"BucketPolicy": policy} if tls_only else {})


def _logs_and_role() -> Part:
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    rights = [
        _allow(["s3:ListBucket", "s3:ListBucketMultipartUploads"], _att("Bucket", "Arn")),
        _allow(
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            {"Fn::Sub": "${Bucket.Arn}/*"},
        ),
        _allow(["logs:CreateLogStream", "logs:PutLogEvents"], _att("LogGroup", "Arn")),
    ]
    return {
        "LogGroup": _part("Logs::LogGroup", RetentionInDays=LOG_DAYS),
        "NodeRole": _part(
            "IAM::Role",
            Description="What a node of one Castra run may do: its bucket, its log group",
            AssumeRolePolicyDocument=_document(trust),
            Policies=[{"PolicyName": "node", "PolicyDocument": _document(*rights)}],
        ),
        "InstanceProfile": _part("IAM::InstanceProfile", Roles=[_ref("NodeRole")]),
    }


def _part(kind: str, **properties: Any) -> Part:
    return {"Type": f"AWS::{kind}", "Properties": properties}


def _ref(name: str) -> Part:
    return {"Ref": name}


def _att(name: str, attribute: str) -> Part:
    return {"Fn::GetAtt": [name, attribute]}


def _named(what: str) -> list[Part]:
    return [{"Key": "Name", "Value": {"Fn::Sub": f"${{AWS::StackName}}-{what}"}}]


def _document(*statements: Part) -> Part:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(actions: list[str], resource: Any) -> Part:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}
