"""The camp: the ground every cluster stands on. Network, scratch bucket, log group, the nodes' role."""

import ipaddress
from typing import Any

from clusters.stacks.parts import (
    LOG_DAYS,
    Part,
    allow,
    assemble,
    att,
    document,
    log_rights,
    named,
    part,
    ref,
    role,
    sub,
)

NETWORK = "10.42.0.0/16"
LETTERS = "abcdef"
"""Of the zones: no region has more. Each gets 507 public and 8,187 private addresses: a p5 instance with all its EFA
interfaces takes one, under HyperPod 81."""
EXPIRY_DAYS = 30
"""The scratch bucket is for what is on its way; results live in the store."""
ENDPOINTS = ("ecr.api", "ecr.dkr", "logs", "sts")
"""Services that nodes reach without leaving the network: image pulls, log lines and credentials of a whole fleet at
once are what a NAT gateway is bad at."""
CHOSEN_ZONE = "W3010"
"""cfn-lint: a zone is written down only because that is where the capacity is."""


def name(run: str) -> str:
    """The name of a run's camp: `castra-<run>-camp`."""
    return f"castra-{run}-camp"


def template(
    zones: tuple[str, ...] = (), *, count: int = 1, tls_only: bool = True, nat: bool = False, fleet: bool = False
) -> Part:
    """The CloudFormation template of a camp in these zones, or in the region's first `count`.

    `fleet` adds what many nodes want: interface endpoints and flow logs of refused traffic. `tls_only=False` is for
    emulators that speak plain http. Outputs: Vpc, PublicSubnet and PrivateSubnet (of the first zone), PublicSubnetB,
    PrivateSubnetB … (of zone b: see `subnet`), PrivateSubnets (all, comma between them), SecurityGroup, Bucket,
    LogGroup, NodeRole, InstanceProfile.
    """
    places = _places(zones, count)
    resources = _network() | _security() | _bucket(tls_only) | _logs_and_role()
    for letter, (block, zone) in places.items():
        resources |= _subnets(letter, block, zone)
    first, stable = next(iter(places)), min(places)
    resources |= _nat(stable) if nat else {}
    resources |= _fleet(stable) if fleet else {}
    subnets = {
        f"{side}Subnet{letter}": ref(f"{side}Subnet{letter}") for letter in places for side in ("Public", "Private")
    }
    outputs = subnets | {
        "Vpc": ref("Vpc"),
        "PublicSubnet": ref(f"PublicSubnet{first}"),
        "PrivateSubnet": ref(f"PrivateSubnet{first}"),
        "PrivateSubnets": {"Fn::Join": [",", [ref(f"PrivateSubnet{letter}") for letter in sorted(places)]]},
        "SecurityGroup": att("SecurityGroup", "GroupId"),
        "Bucket": ref("Bucket"),
        "LogGroup": ref("LogGroup"),
        "NodeRole": att("NodeRole", "Arn"),
        "InstanceProfile": att("InstanceProfile", "Arn"),
    }
    what = "Castra: network, scratch bucket, logs and node role of one run."
    return assemble(what, resources, outputs, quiet=(CHOSEN_ZONE,) if zones else ())


def subnet(zone: str) -> str:
    """The output that is the private subnet of a zone; of the camp's first zone if none is named.

    A stack that is going to be moved to another zone imports the zone's own: what is imported cannot change.
    """
    return f"PrivateSubnet{zone[-1:].upper()}"


def first_subnets(count: int) -> tuple[str, ...]:
    """The outputs that are the private subnets of a camp whose zones are not named."""
    return tuple(f"PrivateSubnet{index + 1 if index else ''}" for index in range(count))


def _places(zones: tuple[str, ...], count: int) -> dict[str, tuple[int, Any]]:
    """Letter of the zone → which block of addresses it has, and the zone.

    A zone's addresses follow from its letter: one zone more or less, or another order, moves no other's.
    """
    if zones:
        return {zone[-1].upper(): (LETTERS.index(zone[-1]), zone) for zone in zones}
    found = [{"Fn::Select": [index, {"Fn::GetAZs": ref("AWS::Region")}]} for index in range(count)]
    return {str(index + 1) if index else "": (index, zone) for index, zone in enumerate(found)}


def _network() -> Part:
    return {
        "Vpc": part("EC2::VPC", CidrBlock=NETWORK, EnableDnsSupport=True, EnableDnsHostnames=True, Tags=named("vpc")),
        "Gateway": part("EC2::InternetGateway", Tags=named("gateway")),
        "Attachment": part("EC2::VPCGatewayAttachment", VpcId=ref("Vpc"), InternetGatewayId=ref("Gateway")),
        "PublicRoutes": part("EC2::RouteTable", VpcId=ref("Vpc"), Tags=named("public")),
        "PrivateRoutes": part("EC2::RouteTable", VpcId=ref("Vpc"), Tags=named("private")),
        "PublicRoute": part(
            "EC2::Route", RouteTableId=ref("PublicRoutes"), DestinationCidrBlock="0.0.0.0/0", GatewayId=ref("Gateway")
        )
        | {"DependsOn": "Attachment"},  # else the route may be made before the gateway is usable
        "BucketEndpoint": part(
            "EC2::VPCEndpoint",
            VpcId=ref("Vpc"),
            VpcEndpointType="Gateway",
            ServiceName=sub("com.amazonaws.${AWS::Region}.s3"),
            RouteTableIds=[ref("PublicRoutes"), ref("PrivateRoutes")],
        ),
    }


def _subnets(letter: str, block: int, zone: Any) -> Part:
    """The subnets of one zone: a gang stays in one, for EFA does not cross zones and a placement group lives in one."""
    blocks = list(ipaddress.IPv4Network(NETWORK).subnets(new_prefix=19))
    public, private = list(blocks[0].subnets(new_prefix=23))[block], blocks[block + 1]
    return {
        f"PublicSubnet{letter}": part(
            "EC2::Subnet",
            VpcId=ref("Vpc"),
            CidrBlock=str(public),
            AvailabilityZone=zone,
            MapPublicIpOnLaunch=True,
            Tags=named(f"public{letter.lower()}"),
        ),
        f"PrivateSubnet{letter}": part(
            "EC2::Subnet",
            VpcId=ref("Vpc"),
            CidrBlock=str(private),
            AvailabilityZone=zone,
            Tags=named(f"private{letter.lower()}"),
        ),
        f"PublicAssociation{letter}": _association(f"PublicSubnet{letter}", "PublicRoutes"),
        f"PrivateAssociation{letter}": _association(f"PrivateSubnet{letter}", "PrivateRoutes"),
    }


def _association(subnet: str, routes: str) -> Part:
    return part("EC2::SubnetRouteTableAssociation", SubnetId=ref(subnet), RouteTableId=ref(routes))


def _nat(letter: str) -> Part:
    """One gateway for all zones: what the other zones pull through it is packages, for data has the S3 endpoint."""
    return {
        "NatAddress": part("EC2::EIP", Domain="vpc", Tags=named("nat")) | {"DependsOn": "Attachment"},
        "Nat": part(
            "EC2::NatGateway",
            AllocationId=att("NatAddress", "AllocationId"),
            SubnetId=ref(f"PublicSubnet{letter}"),
            Tags=named("nat"),
        ),
        "PrivateRoute": part(
            "EC2::Route", RouteTableId=ref("PrivateRoutes"), DestinationCidrBlock="0.0.0.0/0", NatGatewayId=ref("Nat")
        ),
    }


def _security() -> Part:
    """EFA wants all traffic to and from the group itself, and the way out as a rule of its own."""
    itself = att("SecurityGroup", "GroupId")
    return {
        "SecurityGroup": part(
            "EC2::SecurityGroup",
            GroupDescription="Nodes of one Castra run: everything among themselves, nothing from outside",
            VpcId=ref("Vpc"),
            SecurityGroupEgress=[{"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": "Out"}],
            Tags=named("nodes"),
        ),
        "SelfIngress": part(
            "EC2::SecurityGroupIngress",
            GroupId=itself,
            IpProtocol="-1",
            SourceSecurityGroupId=itself,
            Description="Node to node (EFA)",
        ),
        "SelfEgress": part(
            "EC2::SecurityGroupEgress",
            GroupId=itself,
            IpProtocol="-1",
            DestinationSecurityGroupId=itself,
            Description="Node to node (EFA)",
        ),
    }


def _fleet(letter: str) -> Part:
    ends = {
        f"{service.title().replace('.', '')}Endpoint": part(
            "EC2::VPCEndpoint",
            VpcId=ref("Vpc"),
            VpcEndpointType="Interface",
            ServiceName=sub(f"com.amazonaws.${{AWS::Region}}.{service}"),
            SubnetIds=[ref(f"PrivateSubnet{letter}")],
            SecurityGroupIds=[att("SecurityGroup", "GroupId")],
            PrivateDnsEnabled=True,
        )
        for service in ENDPOINTS
    }
    writes = allow(["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"], att("FlowLogGroup", "Arn"))
    return ends | {
        "FlowLogGroup": part("Logs::LogGroup", RetentionInDays=LOG_DAYS),
        "FlowLogRole": role("Writes down what traffic was refused", "vpc-flow-logs", writes),
        "FlowLog": part(
            "EC2::FlowLog",
            ResourceType="VPC",
            ResourceId=ref("Vpc"),
            TrafficType="REJECT",
            LogDestinationType="cloud-watch-logs",
            LogGroupName=ref("FlowLogGroup"),
            DeliverLogsPermissionArn=att("FlowLogRole", "Arn"),
            Tags=named("refused"),
        ),
    }


def _bucket(tls_only: bool) -> Part:
    expire = {
        "Id": "expire",
        "Status": "Enabled",
        "ExpirationInDays": EXPIRY_DAYS,
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    made = {"Bucket": part("S3::Bucket", **CLOSED, LifecycleConfiguration={"Rules": [expire]})}
    return made | (tls_policy() if tls_only else {})


CLOSED: Part = {
    "BucketEncryption": {
        "ServerSideEncryptionConfiguration": [{"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
    },
    "PublicAccessBlockConfiguration": {
        "BlockPublicAcls": True,
        "BlockPublicPolicy": True,
        "IgnorePublicAcls": True,
        "RestrictPublicBuckets": True,
    },
    "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
}
"""A bucket that is encrypted, its owner's, and nobody else's."""


def tls_policy() -> Part:
    """Refuse whatever comes to the template's `Bucket` without TLS."""
    refuse_http = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [att("Bucket", "Arn"), sub("${Bucket.Arn}/*")],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    return {"BucketPolicy": part("S3::BucketPolicy", Bucket=ref("Bucket"), PolicyDocument=document(refuse_http))}


def _logs_and_role() -> Part:
    rights = [
        allow(["s3:ListBucket", "s3:ListBucketMultipartUploads"], att("Bucket", "Arn")),
        allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"], sub("${Bucket.Arn}/*")),
        log_rights(att("LogGroup", "Arn")),
    ]
    return {
        "LogGroup": part("Logs::LogGroup", RetentionInDays=LOG_DAYS),
        "NodeRole": role("What a node of one Castra run may do: its bucket, its log group", "ec2", *rights),
        "InstanceProfile": part("IAM::InstanceProfile", Roles=[ref("NodeRole")]),
    }
