"""SageMaker training: the role that its jobs take. The instances are SageMaker's own."""

from clusters.stacks.parts import Part, allow, assemble, att, image_rights, role, store_rights, sub
from recipes.spec import Recipe


def rights(store: str) -> list[Part]:
    """What a training job does: the store, its image, its log lines, its metrics, its interfaces in our network."""
    logs = "arn:${AWS::Partition}:logs:${AWS::Region}:${AWS::AccountId}:log-group:/aws/sagemaker/"
    interfaces = "arn:${AWS::Partition}:ec2:${AWS::Region}:${AWS::AccountId}:"
    return [
        *store_rights(store),
        *image_rights(),
        allow(
            ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"],
            [sub(f"{logs}*"), sub(f"{logs}*:log-stream:*")],
        ),
        allow(
            ["cloudwatch:PutMetricData"],
            "*",
            {"StringLike": {"cloudwatch:namespace": ["/aws/sagemaker/*", "aws/sagemaker/*"]}},
        ),
        allow(
            [
                "ec2:CreateNetworkInterface",
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ],
            [sub(f"{interfaces}{kind}/*") for kind in ("network-interface", "subnet", "security-group")],
        ),
        allow(
            [
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeSecurityGroups",
                "ec2:DescribeSubnets",
                "ec2:DescribeVpcs",
            ],
            "*",
        ),
    ]


def template(recipe: Recipe) -> Part:
    """The template. Output: Role (its ARN)."""
    made = role("What a training job may do: store, image, logs, network", "sagemaker", *rights(recipe.store))
    return assemble("Castra: the role of SageMaker training jobs.", {"Role": made}, {"Role": att("Role", "Arn")})
