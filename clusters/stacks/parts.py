"""What every template is put together from: resources, references, outputs that are exported, policy statements."""

from typing import Any

from store.objects import in_s3

Part = dict[str, Any]

LOG_DAYS = 30
"""How long the log groups keep their lines."""


def assemble(description: str, resources: Part, outputs: Part, *, quiet: tuple[str, ...] = ()) -> Part:
    """A CloudFormation template in long form; each output is exported as `<stack>-<output>`.

    `quiet` names checks of cfn-lint that are answered here on purpose.
    """
    exported = {
        name: {"Value": value, "Export": {"Name": {"Fn::Sub": f"${{AWS::StackName}}-{name}"}}}
        for name, value in outputs.items()
    }
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": description,
        **({"Metadata": {"cfn-lint": {"config": {"ignore_checks": list(quiet)}}}} if quiet else {}),
        "Resources": resources,
        "Outputs": exported,
    }


def part(kind: str, **properties: Any) -> Part:
    """A resource: `part("EC2::Subnet", VpcId=…)`."""
    return {"Type": f"AWS::{kind}", "Properties": properties}


def ref(name: str) -> Part:
    """The physical id of a resource of the same template."""
    return {"Ref": name}


def att(name: str, attribute: str) -> Part:
    """An attribute of a resource of the same template."""
    return {"Fn::GetAtt": [name, attribute]}


def sub(text: str) -> Part:
    """A text in which CloudFormation fills the placeholders."""
    return {"Fn::Sub": text}


def imported(stack: str, output: str) -> Part:
    """An output of another stack, which cannot be deleted as long as this one stands."""
    return {"Fn::ImportValue": f"{stack}-{output}"}


def named(what: str) -> list[Part]:
    """The tag that people see in the console."""
    return [{"Key": "Name", "Value": sub(f"${{AWS::StackName}}-{what}")}]


def document(*statements: Part) -> Part:
    """A policy document."""
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(actions: list[str], resource: Any, condition: Part | None = None) -> Part:
    """A statement that allows actions on a resource, or on a list of them."""
    told: Part = {"Effect": "Allow", "Action": actions, "Resource": resource}
    return told | ({"Condition": condition} if condition else {})


def trust(service: str, actions: tuple[str, ...] = ("sts:AssumeRole",)) -> Part:
    """The document that lets an AWS service take a role, for things of this account only."""
    told: Part = {"Effect": "Allow", "Principal": {"Service": f"{service}.amazonaws.com"}, "Action": list(actions)}
    if service not in ("ec2", "pods.eks"):  # these two do not say on whose behalf they ask
        told["Condition"] = {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
    return document(told)


def role(description: str, service: str, *rights: Part, managed: tuple[str, ...] = (), **more: Any) -> Part:
    """A role for a service with rights of its own and, by name, AWS's own policies."""
    arns = [sub(f"arn:${{AWS::Partition}}:iam::aws:policy/{name}") for name in managed]
    return part(
        "IAM::Role",
        Description=description,
        AssumeRolePolicyDocument=trust(service),
        **({"ManagedPolicyArns": arns} if arns else {}),
        **({"Policies": [{"PolicyName": "castra", "PolicyDocument": document(*rights)}]} if rights else {}),
        **more,
    )


def store_rights(url: str) -> list[Part]:
    """What a job may do with the recipe's store: read, write and delete below its prefix; nothing for a folder."""
    if (place := in_s3(url)) is None:
        return []
    bucket, prefix = place
    arn, below = f"arn:${{AWS::Partition}}:s3:::{bucket}", f"{prefix}/*" if prefix else "*"
    return [
        allow(["s3:ListBucket"], sub(arn), {"StringLike": {"s3:prefix": [below]}}),
        allow(["s3:GetBucketLocation", "s3:ListBucketMultipartUploads"], sub(arn)),
        allow(
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            sub(f"{arn}/{below}"),
        ),
    ]


def image_rights() -> list[Part]:
    """What it takes to pull a container image from any repository of this account."""
    return [
        allow(["ecr:GetAuthorizationToken"], "*"),
        allow(
            ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
            sub("arn:${AWS::Partition}:ecr:*:${AWS::AccountId}:repository/*"),
        ),
    ]


def log_rights(group: Any) -> Part:
    """Write lines into a log group, given by its ARN (which ends in `:*`)."""
    return allow(["logs:CreateLogStream", "logs:PutLogEvents"], group)
