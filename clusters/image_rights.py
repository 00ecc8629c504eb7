"""The IAM statements of whoever bakes images and containers: Packer's calls, ours, podman's, and on what.

All that a build makes carries the tag `castra:flavour`, so whatever is changed or removed must carry it. Source:
service authorization reference of AWS (EC2, ECR, KMS; which action has which resources and conditions), and the calls
that a build makes at the emulator; read and measured 2026-11.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from clusters.container_images import PREFIX
from clusters.machine_images import FLAVOUR

Statement = dict[str, Any]
OURS = {"Null": {f"aws:ResourceTag/{FLAVOUR}": "false"}}
BECOMES_OURS = {"Null": {f"aws:RequestTag/{FLAVOUR}": "false"}}
LOOKS = (
    "DescribeImageAttribute DescribeImages DescribeInstanceStatus DescribeInstanceTypeOfferings DescribeInstances "
    "DescribeKeyPairs DescribeRegions DescribeSecurityGroups DescribeSnapshots DescribeSubnets DescribeTags "
    "DescribeVolumes DescribeVpcs"
)
KEY = "CreateGrant Decrypt DescribeKey GenerateDataKeyWithoutPlaintext ReEncryptFrom ReEncryptTo"
"""What EC2 does with a key of one's own in the name of who asks for an encrypted volume."""
PUSH = (
    "BatchCheckLayerAvailability BatchGetImage CompleteLayerUpload CreateRepository DescribeImages "
    "GetDownloadUrlForLayer InitiateLayerUpload PutImage TagResource UploadLayerPart"
)


def statements(words: Mapping[str, str]) -> Iterator[Statement]:
    """The statements, for `words` as in `clusters.rights`: region, account, partition."""

    def arns(service: str, *names: str, region: str = words["region"], account: str = words["account"]) -> list[str]:
        return [f"arn:{words['partition']}:{service}:{region}:{account}:{name}" for name in names]

    published = arns("ssm", "parameter/castra/images/*")
    theirs = arns("ec2", "image/*", "snapshot/*", account="")
    made = arns("ec2", "instance/*", "volume/*")
    kept = [*theirs, *arns("ec2", "security-group/*"), *made]
    around = arns("ec2", "key-pair/castra-build-*", "network-interface/*", "security-group/*", "subnet/*")
    yield _allow("ec2", LOOKS, ["*"])
    yield _allow("ec2", "RunInstances", [*theirs, *around])
    yield _allow("ec2", "CreateSecurityGroup", arns("ec2", "vpc/*"))
    yield _allow("ec2", "RunInstances", made, BECOMES_OURS)
    yield _allow("ec2", "CreateSecurityGroup", arns("ec2", "security-group/*"), BECOMES_OURS)
    yield _allow("ec2", "CreateKeyPair DeleteKeyPair", arns("ec2", "key-pair/castra-build-*"))
    yield _allow("ec2", "CreateTags", [*kept, *arns("ec2", "key-pair/castra-build-*")], BECOMES_OURS)
    yield _allow("ec2", "CreateTags", theirs, OURS)
    yield _allow("ec2", "CopyImage CreateImage", theirs)
    yield _allow("ec2", "CreateImage", arns("ec2", "instance/*"), OURS)
    changed = "DeregisterImage EnableImageDeprecation ModifyImageAttribute DeleteSnapshot ModifySnapshotAttribute"
    machine = "ModifyInstanceAttribute ModifyInstanceMetadataOptions StopInstances TerminateInstances DeleteVolume"
    door = "AuthorizeSecurityGroupIngress DeleteSecurityGroup"
    yield _allow("ec2", f"{changed} {machine} {door}", kept, OURS)
    yield _allow("ssm", "GetParameters", [*arns("ssm", "parameter/aws/service/*", account=""), *published])
    yield _allow("ssm", "PutParameter", published)
    yield _allow("iam", "GetInstanceProfile", arns("iam", "instance-profile/castra-*", region=""))
    to_ec2 = {"StringEquals": {"iam:PassedToService": ["ec2.amazonaws.com"]}}
    yield _allow("iam", "PassRole", arns("iam", "role/castra-*", region=""), to_ec2)
    through_ec2 = {"StringLike": {"kms:ViaService": f"ec2.{words['region']}.amazonaws.com"}}
    yield _allow("kms", KEY, arns("kms", "key/*"), through_ec2)
    yield _allow("ecr", "GetAuthorizationToken", ["*"])
    yield _allow("ecr", PUSH, arns("ecr", f"repository/{PREFIX}/*"))


def _allow(service: str, actions: str, resources: list[str], condition: Statement | None = None) -> Statement:
    told = {"Effect": "Allow", "Action": sorted(f"{service}:{one}" for one in actions.split()), "Resource": resources}
    return told | ({"Condition": condition} if condition else {})
