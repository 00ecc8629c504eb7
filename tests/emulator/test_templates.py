"""Templates of other people: YAML, parameters, mappings, exports and imports, as CloudFormation takes them."""

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.emulator.raw_stacks import Sky, part, resources

GROUP = part("Logs::LogGroup", RetentionInDays=7)
VALLEY = """
AWSTemplateFormatVersion: 2010-09-09
Description: A network as others write it.
Metadata:
  AWS::CloudFormation::Interface: {ParameterGroups: []}
Parameters:
  Zones: {Type: "List<AWS::EC2::AvailabilityZone::Name>"}
  Count: {Type: Number, Default: 2, MinValue: 1, MaxValue: 3}
  Short:
    Type: AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>
    Default: /aws/service/eks/optimized-ami/1.33/amazon-linux-2023/x86_64/nvidia/recommended/image_id
Rules:
  Any: {Assertions: []}
Mappings:
  Blocks: {Vpc: {First: 10.7.0.0/16, Second: 10.8.0.0/16}}
Conditions:
  Two: !Not [!Equals [!Ref Count, '1']]
  Three: !And [!Condition Two, !Equals [!Ref Count, '3']]
Resources:
  Vpc:
    Type: AWS::EC2::VPC
    Properties: {CidrBlock: !FindInMap [Blocks, Vpc, First], EnableDnsHostnames: 'true'}
  More:
    Type: AWS::EC2::VPCCidrBlock
    Properties: {VpcId: !Ref Vpc, CidrBlock: !FindInMap [Blocks, Vpc, Second]}
  Near:
    Type: AWS::EC2::Subnet
    Properties:
      VpcId: !Ref Vpc
      CidrBlock: !Select [1, !Cidr [!GetAtt Vpc.CidrBlock, 2, 8]]
      AvailabilityZone: !Select [0, !Ref Zones]
      Tags: [{Key: Name, Value: !Sub '${AWS::StackName} near'}]
  Far:
    Type: AWS::EC2::Subnet
    Condition: Two
    DependsOn: More
    Properties:
      VpcId: !Ref Vpc
      CidrBlock: !Select [0, !Cidr [!FindInMap [Blocks, Vpc, Second], 2, 15]]
      AvailabilityZone: !Select [1, !Ref Zones]
  Logs: {Type: AWS::Logs::LogGroup}
  Flow:
    Type: AWS::EC2::FlowLog
    Properties:
      ResourceId: !Ref Vpc
      ResourceType: VPC
      TrafficType: ALL
      LogGroupName: !Ref Logs
      DeliverLogsPermissionArn: !GetAtt Role.Arn
  Role:
    Type: AWS::IAM::Role
    Properties:
      AssumeRolePolicyDocument:
        Version: 2012-10-17
        Statement: [{Effect: Allow, Principal: {Service: vpc-flow-logs.amazonaws.com}, Action: 'sts:AssumeRole'}]
  Group:
    Type: AWS::EC2::SecurityGroup
    Properties: {GroupDescription: everybody, VpcId: !Ref Vpc}
  Out:
    Type: AWS::EC2::SecurityGroupEgress
    Properties: {GroupId: !Ref Group, IpProtocol: -1, CidrIp: 0.0.0.0/0}
  Itself:
    Type: AWS::EC2::SecurityGroupIngress
    Properties: {GroupId: !Ref Group, IpProtocol: -1, FromPort: -1, ToPort: -1, SourceSecurityGroupId: !Ref Group}
  Table: {Type: AWS::EC2::RouteTable, Properties: {VpcId: !Ref Vpc}}
  Bucket:
    Type: AWS::EC2::VPCEndpoint
    Properties:
      VpcId: !Ref Vpc
      ServiceName: !Join ['', [com.amazonaws., !Ref AWS::Region, .s3]]
      RouteTableIds: [!Ref Table]
      PolicyDocument: {Version: 2012-10-17, Statement: [{Effect: Allow, Principal: '*', Action: '*', Resource: '*'}]}
  Images:
    Type: AWS::EC2::VPCEndpoint
    Properties:
      VpcId: !Ref Vpc
      VpcEndpointType: Interface
      ServiceName: !Sub com.amazonaws.${AWS::Region}.ecr.api
      PrivateDnsEnabled: true
      SubnetIds: [!Ref Near]
      SecurityGroupIds: [!GetAtt Group.GroupId]
Outputs:
  Vpc: {Value: !Ref Vpc, Export: {Name: !Sub '${AWS::StackName}-Vpc'}}
  Subnets: {Value: !Join [',', [!Ref Near, !If [Two, !Ref Far, !Ref AWS::NoValue]]]}
  Zones: {Value: !Join ['+', !Ref Zones]}
  Image: {Value: !Ref Short}
  Last: {Value: !Ref Near, Condition: Three}
"""
ZONES = [{"ParameterKey": "Zones", "ParameterValue": "us-east-1b, us-east-1f"}]
IAM = ["CAPABILITY_IAM"]


def test_a_network_in_yaml_deploys_by_create_stack_and_goes(sky: Sky) -> None:
    made = sky.stacks.create_stack(StackName="valley", TemplateBody=VALLEY, Parameters=ZONES, Capabilities=IAM)
    stack = sky.settled("valley")
    assert stack["StackStatus"] == "CREATE_COMPLETE", sky.why("valley")
    out = sky.outputs("valley")
    ec2 = sky.client("ec2")
    subnets = {row["CidrBlock"]: row for row in ec2.describe_subnets(SubnetIds=out["Subnets"].split(","))["Subnets"]}
    assert {block: row["AvailabilityZone"] for block, row in subnets.items()} == {
        "10.7.1.0/24": "us-east-1b",
        "10.8.0.0/17": "us-east-1f",
    }
    assert out["Zones"] == "us-east-1b+us-east-1f"
    assert out["Image"].startswith("ami-")
    assert "Last" not in out
    rows = {row["ParameterKey"]: row["ParameterValue"] for row in stack["Parameters"]}
    assert rows["Zones"] == "us-east-1b,us-east-1f"
    again = {"StackName": "valley", "UsePreviousTemplate": True, "Capabilities": IAM}
    kept = [{"ParameterKey": "Zones", "UsePreviousValue": True}]
    with pytest.raises(ClientError, match="No updates are to be performed"):
        sky.stacks.update_stack(Parameters=kept, **again)
    sky.stacks.update_stack(Parameters=[*kept, {"ParameterKey": "Count", "ParameterValue": "1"}], **again)
    assert sky.settled("valley")["StackStatus"] == "UPDATE_COMPLETE"
    assert "," not in sky.outputs("valley")["Subnets"]
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE"
    assert ec2.describe_vpcs(Filters=[{"Name": "vpc-id", "Values": [out["Vpc"]]}])["Vpcs"] == []
    assert ec2.describe_flow_logs()["FlowLogs"] == []
    assert made["StackId"] == stack["StackId"]


@pytest.mark.parametrize(
    ("about", "value", "told"),
    [
        ({"Type": "String", "AllowedPattern": "[a-z]+"}, "UP", r"must match pattern \[a-z\]\+"),
        ({"Type": "String", "AllowedPattern": "[a-z]+", "ConstraintDescription": "be small"}, "UP", "be small"),
        ({"Type": "String", "MinLength": 3}, "ab", "at least 3 characters"),
        ({"Type": "String", "MaxLength": 3}, "abcd", "at most 3 characters"),
        ({"Type": "Number", "MaxValue": 3}, "4", "not greater than 3"),
        ({"Type": "Number"}, "four", "must be a number"),
        ({"Type": "List<Number>"}, "4,four", "must be a number"),
        ({"Type": "CommaDelimitedList", "AllowedValues": ["a", "b"]}, "a,c", "AllowedValues"),
        ({"Type": "AWS::EC2::AvailabilityZone::Name"}, "us-east-1x", "us-east-1x for parameter name P does not exist"),
        ({"Type": "AWS::EC2::VPC::Id"}, "vpc-0", "does not exist"),
        ({"Type": "AWS::EC2::Image::Id"}, "ubuntu", "does not exist"),
        ({"Type": "AWS::SSM::Parameter::Value<String>"}, "/nowhere", r"Unable to fetch parameters \[/nowhere\]"),
        ({"Type": "Colour"}, "red", "Unrecognized parameter type: Colour"),
        ({"Type": "String", "Shape": "round"}, "x", "Invalid template parameter property 'Shape'"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused(sky: Sky, about: Any, value: str, told: str) -> None:
    template = {**resources(A=GROUP), "Parameters": {"P": about}}
    with pytest.raises(ClientError, match=told):
        sky.propose("fits", template, Parameters=[{"ParameterKey": "P", "ParameterValue": value}])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Resources: {A: {Type: !Magic x}}", "unknown function !Magic"),
        ("Resources:\n  A: 1\n  A: 2\n", "duplicate key A"),
        ("Resources: [", "YAML not well-formed"),
        ('{"Resources": ', "JSON not well-formed"),
        ("just words", "At least one Resources member"),
    ],
)
def test_a_text_that_is_no_template_is_refused(sky: Sky, text: str, told: str) -> None:
    with pytest.raises(ClientError, match=told):
        sky.stacks.create_stack(StackName="text", TemplateBody=text)


def exporter(value: str) -> dict[str, Any]:
    return {
        **resources(A=GROUP),
        "Outputs": {"Name": {"Value": value, "Export": {"Name": {"Fn::Sub": "${AWS::StackName}-Name"}}}},
    }


def test_an_export_in_use_stays_as_it_is(sky: Sky) -> None:
    exporting = sky.bring("giver", exporter("one"))
    wanted = {"Fn::ImportValue": {"Fn::Sub": "giver-Name"}}
    importing = sky.bring("taker", resources(G=part("Logs::LogGroup", LogGroupName={"Fn::Join": ["-", ["g", wanted]]})))
    assert importing["StackStatus"] == "CREATE_COMPLETE"
    (row,) = (row for row in sky.stacks.list_exports()["Exports"] if row["Name"] == "giver-Name")
    assert (row["Value"], row["ExportingStackId"]) == ("one", exporting["StackId"])
    assert sky.stacks.list_imports(ExportName="giver-Name")["Imports"] == ["taker"]
    for other, verb in ((exporter("two"), "updated"), (resources(A=GROUP), "deleted")):
        changed = sky.bring("giver", other, update=True)
        assert changed["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
        events = sky.stacks.describe_stack_events(StackName="giver")["StackEvents"]
        told = f"Export giver-Name cannot be {verb} as it is in use by taker"
        assert told in {event.get("ResourceStatusReason") for event in events}
    sky.stacks.delete_stack(StackName="giver")
    kept = sky.settled("giver")
    assert kept["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    assert "Cannot delete export giver-Name as it is in use by taker" in kept["StackStatusReason"]
    assert sky.delete(importing)["StackStatus"] == "DELETE_COMPLETE"
    with pytest.raises(ClientError, match="is not imported by any stack"):
        sky.stacks.list_imports(ExportName="giver-Name")
    assert sky.delete(exporting)["StackStatus"] == "DELETE_COMPLETE"
    with pytest.raises(ClientError, match="No export named giver-Name found"):
        sky.propose("taker", resources(G=part("Logs::LogGroup", LogGroupName=wanted)))


def test_a_name_is_exported_once(sky: Sky) -> None:
    outputs = {"Outputs": {"O": {"Value": "v", "Export": {"Name": "the-only-one"}}}}
    first = sky.bring("first", resources(A=GROUP) | outputs)
    second = sky.bring("second", resources(A=GROUP) | outputs)
    assert second["StackStatus"] == "ROLLBACK_COMPLETE"
    events = sky.stacks.describe_stack_events(StackName="second")["StackEvents"]
    told = "Export with name the-only-one is already exported by stack first"
    assert told in {event.get("ResourceStatusReason") for event in events}
    sky.delete(first)
    sky.delete(second)


def test_what_is_retained_stays(sky: Sky) -> None:
    stack = sky.bring("keeps", resources(A=GROUP | {"DeletionPolicy": "Retain"}, B=GROUP))
    names = {row["LogicalResourceId"]: row["PhysicalResourceId"] for row in _resources(sky, "keeps")}
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE"
    assert ("A", "DELETE_SKIPPED") in sky.events(stack)
    logs = sky.client("logs")
    left = [row["logGroupName"] for row in logs.describe_log_groups(logGroupNamePrefix="keeps-")["logGroups"]]
    assert left == [names["A"]]
    logs.delete_log_group(logGroupName=names["A"])


def _resources(sky: Sky, stack: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = sky.stacks.describe_stack_resources(StackName=stack)["StackResources"]
    return found


def test_names_given_by_hand_need_their_own_capability(sky: Sky) -> None:
    role = part("IAM::Role", RoleName="mine", AssumeRolePolicyDocument={"Version": "2012-10-17", "Statement": []})
    with pytest.raises(ClientError, match="CAPABILITY_NAMED_IAM"):
        sky.propose("named", resources(R=role), Capabilities=["CAPABILITY_IAM"])
    assert sky.propose("named", resources(R=role), Capabilities=["CAPABILITY_NAMED_IAM"])["Status"] == "CREATE_COMPLETE"


def test_secrets_and_parameters_are_resolved_when_they_are_used(sky: Sky) -> None:
    template = resources(
        S=part(
            "SecretsManager::Secret", GenerateSecretString={"SecretStringTemplate": "{}", "GenerateStringKey": "word"}
        ),
        P=part("SSM::Parameter", Name="/days", Type="String", Value="14"),
        G=part(
            "Logs::LogGroup",
            LogGroupName={"Fn::Sub": "said-{{resolve:secretsmanager:${S}:SecretString:word}}"},
            RetentionInDays="{{resolve:ssm:/days}}",
        )
        | {"DependsOn": "P"},
    )
    template["Resources"]["S"]["Properties"]["GenerateSecretString"] |= {
        "PasswordLength": 12,
        "ExcludePunctuation": True,
    }
    stack = sky.bring("spoken", template)
    assert stack["StackStatus"] == "CREATE_COMPLETE", sky.why("spoken")
    (secret,) = sky.client("secretsmanager").list_secrets()["SecretList"]
    value = json.loads(sky.client("secretsmanager").get_secret_value(SecretId=secret["ARN"])["SecretString"])["word"]
    (group,) = sky.client("logs").describe_log_groups(logGroupNamePrefix="said-")["logGroups"]
    assert (group["logGroupName"], group["retentionInDays"]) == (f"said-{value}", 14)
    assert len(value) == 12
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE"
