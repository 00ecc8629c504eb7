"""Our CloudFormation: strict about what it does not know, honest about what failed, thorough when it deletes."""

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.emulator.raw_stacks import Sky, resources
from tests.sky import client

GROUP = {"Type": "AWS::Logs::LogGroup", "Properties": {"RetentionInDays": 7}}
ROLE = {
    "Type": "AWS::IAM::Role",
    "Properties": {"AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": []}},
}


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (resources(X={"Type": "AWS::Nope::Thing"}), r"Unrecognized resource types: \[AWS::Nope::Thing\]"),
        (resources(X={**GROUP, "Properties": {"Colour": "red"}}), "not emulated properties: Colour"),
        (resources(X={**GROUP, "CreationPolicy": {}}), "CreationPolicy is not emulated"),
        (resources(X={**GROUP, "DeletionPolicy": "Snapshot"}), "DeletionPolicy Snapshot is not emulated"),
        (resources(X={"Type": "AWS::EC2::VPC"}), "missing properties: CidrBlock"),
        (resources(X={**GROUP, "DependsOn": "Y"}), r"Unresolved resource dependencies \[Y\]"),
        (resources(X={**GROUP, "Properties": {"LogGroupName": {"Ref": "Z"}}}), r"Unresolved .*\[Z\]"),
        (resources(X={**GROUP, "DependsOn": "Y"}, Y={**GROUP, "DependsOn": "X"}), "Circular dependency"),
        (resources(X={**GROUP, "Properties": {"LogGroupName": {"Fn::Magic": "m"}}}), "Fn::Magic is not emulated"),
        ({"Resources": {}}, "At least one Resources member"),
        ({**resources(X=GROUP), "Transform": "AWS::LanguageExtensions"}, r"Invalid template property.*\[Transform\]"),
        ({**resources(X=GROUP), "Parameters": {"P": {"Type": "String"}}}, r"Parameters: \[P\] must have values"),
    ],
)
def test_what_it_does_not_know_is_refused_before_anything_is_made(sky: Sky, template: Any, told: str) -> None:
    before = sky.stacks.describe_stacks()["Stacks"]
    with pytest.raises(ClientError, match=told):
        sky.propose("strict", template)
    assert sky.stacks.describe_stacks()["Stacks"] == before


def test_an_action_on_iam_needs_the_capability(sky: Sky) -> None:
    with pytest.raises(ClientError, match="InsufficientCapabilities"):
        sky.propose("powers", resources(R=ROLE))


def test_a_failed_creation_is_rolled_back_with_the_reason_in_the_events(sky: Sky) -> None:
    taken = client("s3", sky.site.endpoint)
    taken.create_bucket(Bucket="taken-by-somebody")
    bad = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/99"}, "DependsOn": "Group"}
    stack = sky.bring("rolled", resources(Group=GROUP, Bad=bad))
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    assert sky.events(stack) == [
        ("rolled", "CREATE_IN_PROGRESS"),
        ("Group", "CREATE_IN_PROGRESS"),
        ("Group", "CREATE_COMPLETE"),
        ("Bad", "CREATE_IN_PROGRESS"),
        ("Bad", "CREATE_FAILED"),
        ("rolled", "ROLLBACK_IN_PROGRESS"),
        ("Group", "DELETE_IN_PROGRESS"),
        ("Group", "DELETE_COMPLETE"),
        ("rolled", "ROLLBACK_COMPLETE"),
    ]
    told = sky.stacks.describe_stack_events(StackName="rolled")["StackEvents"]
    (reason,) = (event["ResourceStatusReason"] for event in told if event["ResourceStatus"] == "CREATE_FAILED")
    assert "InvalidVpc.Range" in reason or "InvalidParameterValue" in reason
    assert not [group for group in log_groups(sky) if group.startswith("rolled-")]
    with pytest.raises(ClientError, match="ROLLBACK_COMPLETE state and can not be updated"):
        sky.propose("rolled", resources(Group=GROUP), update=True)
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE"


def log_groups(sky: Sky) -> list[str]:
    found = client("logs", sky.site.endpoint).describe_log_groups()["logGroups"]
    return [group["logGroupName"] for group in found]


def test_an_update_changes_in_place_replaces_adds_and_removes(sky: Sky) -> None:
    old = {"A": GROUP, "B": {**GROUP, "Properties": {"LogGroupName": "upd-old"}}, "C": GROUP}
    sky.bring("upd", {"Resources": old})
    new = {
        "A": {**GROUP, "Properties": {"RetentionInDays": 30}},
        "B": {**GROUP, "Properties": {"LogGroupName": "upd-new"}},
        "D": GROUP,
    }
    proposed = sky.propose("upd", {"Resources": new}, update=True)
    rows = [change["ResourceChange"] for change in proposed["Changes"]]
    assert [(row["Action"], row["LogicalResourceId"], row.get("Replacement")) for row in rows] == [
        ("Modify", "A", "False"),
        ("Modify", "B", "True"),
        ("Add", "D", None),
        ("Remove", "C", None),
    ]
    sky.stacks.execute_change_set(ChangeSetName=proposed["ChangeSetId"])
    assert sky.settled("upd")["StackStatus"] == "UPDATE_COMPLETE"
    there = {name for name in log_groups(sky) if name.startswith("upd")}
    assert {"upd-new"} < there
    assert "upd-old" not in there
    assert len(there) == 3


def test_a_failed_update_puts_back_what_was(sky: Sky) -> None:
    stack = sky.bring("back", resources(A=GROUP))
    bad = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/99"}, "DependsOn": "A"}
    changed = {**GROUP, "Properties": {"RetentionInDays": 30}}
    assert sky.bring("back", resources(A=changed, Bad=bad), update=True)["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    groups = client("logs", sky.site.endpoint).describe_log_groups(logGroupNamePrefix="back-")["logGroups"]
    assert [group["retentionInDays"] for group in groups] == [7]
    assert json.loads(json.dumps(sky.stacks.get_template(StackName="back")["TemplateBody"])) == resources(A=GROUP)
    sky.delete(stack)


def test_the_same_template_is_no_change_in_the_real_words(sky: Sky) -> None:
    sky.bring("same", resources(A=GROUP))
    told = sky.propose("same", resources(A=GROUP), update=True)
    assert told["Status"] == "FAILED"
    assert "didn't contain changes" in told["StatusReason"]


def test_tags_of_the_stack_are_on_its_resources(sky: Sky) -> None:
    tags = [{"Key": "castra:owner", "Value": "me"}]
    own = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16", "Tags": [{"Key": "Name", "Value": "n"}]}}
    stack = sky.bring("tagged", resources(V=own), Tags=tags)
    (vpc,) = sky.stacks.list_stack_resources(StackName="tagged")["StackResourceSummaries"]
    ec2 = client("ec2", sky.site.endpoint)
    (found,) = ec2.describe_vpcs(VpcIds=[vpc["PhysicalResourceId"]])["Vpcs"]
    assert sorted(tag["Key"] for tag in found["Tags"]) == ["Name", "castra:owner"]
    sky.delete(stack)


def test_a_deletion_that_fails_says_why_and_goes_on_when_asked_again(sky: Sky) -> None:
    s3 = client("s3", sky.site.endpoint)
    bucket = {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": "not-empty"}}
    stack = sky.bring("stuck", resources(B=bucket, G=GROUP))
    s3.put_object(Bucket="not-empty", Key="k", Body=b"")
    failed = sky.delete(stack)
    assert failed["StackStatus"] == "DELETE_FAILED"
    assert "[B]" in failed["StackStatusReason"]
    s3.delete_object(Bucket="not-empty", Key="k")
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE"
    with pytest.raises(ClientError, match="does not exist"):
        sky.stacks.describe_stacks(StackName="stuck")


def test_a_request_sent_twice_is_one_request(sky: Sky) -> None:
    proposed = sky.propose("twice", resources(A=GROUP))
    for _ in range(2):
        sky.stacks.execute_change_set(ChangeSetName=proposed["ChangeSetId"], ClientRequestToken="t1")
    stack = sky.settled("twice")
    with pytest.raises(ClientError, match="InvalidChangeSetStatus"):
        sky.stacks.execute_change_set(ChangeSetName=proposed["ChangeSetId"], ClientRequestToken="t2")
    for _ in range(2):
        sky.stacks.delete_stack(StackName=stack["StackId"], ClientRequestToken="t3")
    assert sky.settled(stack["StackId"])["StackStatus"] == "DELETE_COMPLETE"
    assert [status for name, status in sky.events(stack) if name == "twice"] == [
        "CREATE_IN_PROGRESS",
        "CREATE_COMPLETE",
        "DELETE_IN_PROGRESS",
        "DELETE_COMPLETE",
    ]


def test_functions_conditions_and_parameters(sky: Sky) -> None:
    template = {
        "Parameters": {
            "Stage": {"Type": "String", "AllowedValues": ["test", "prod"]},
            "Days": {"Type": "Number", "Default": "3"},
        },
        "Conditions": {"Prod": {"Fn::Equals": [{"Ref": "Stage"}, "prod"]}, "Dev": {"Fn::Not": [{"Condition": "Prod"}]}},
        "Resources": {
            "A": {
                "Type": "AWS::Logs::LogGroup",
                "Properties": {
                    "LogGroupName": {
                        "Fn::Sub": ["fun/${Stage}/${what}/${!literal}", {"what": {"Fn::Join": ["-", ["a", "b"]]}}]
                    },
                    "RetentionInDays": {"Fn::If": ["Prod", 30, {"Ref": "Days"}]},
                },
            },
            "OnlyProd": {**GROUP, "Condition": "Prod"},
        },
        "Outputs": {
            "Name": {"Value": {"Ref": "A"}},
            "Arn": {"Value": {"Fn::GetAtt": "A.Arn"}},
            "Zone": {"Value": {"Fn::Select": [1, {"Fn::GetAZs": ""}]}},
            "Cidr": {"Value": {"Fn::Select": [2, {"Fn::Cidr": ["10.0.0.0/16", 3, 8]}]}},
            "Last": {"Value": {"Fn::Select": [1, {"Fn::Split": ["/", "x/y"]}]}},
            "Never": {"Value": "n", "Condition": "Prod"},
        },
    }
    stack = sky.bring("fun", template, Parameters=[{"ParameterKey": "Stage", "ParameterValue": "test"}])
    assert {told["OutputKey"]: told["OutputValue"] for told in stack["Outputs"]} == {
        "Name": "fun/test/a-b/${literal}",
        "Arn": "arn:aws:logs:us-east-1:123456789012:log-group:fun/test/a-b/${literal}:*",
        "Zone": "us-east-1b",
        "Cidr": "10.0.2.0/24",
        "Last": "y",
    }
    with pytest.raises(ClientError, match="AllowedValues"):
        sky.propose("fun", template, update=True, Parameters=[{"ParameterKey": "Stage", "ParameterValue": "dev"}])


def test_what_the_api_does_not_offer_is_an_error(sky: Sky) -> None:
    with pytest.raises(ClientError, match="DetectStackDrift is not emulated here"):
        sky.stacks.detect_stack_drift(StackName="any")
    with pytest.raises(ClientError, match="OnFailure DELETE is not emulated here"):
        sky.stacks.create_stack(StackName="direct", TemplateBody=json.dumps(resources(A=GROUP)), OnFailure="DELETE")
