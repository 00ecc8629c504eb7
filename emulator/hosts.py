"""The EC2 instances that other services start: they are not in moto's memory, and TerminateInstances ends them, too."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from emulator.extension import Call, answers
from emulator.memory import ACCOUNT

HOSTS: dict[str, Callable[[], None]] = {}
"""By instance id: what switches it off."""
CLUSTER = "castra-batch"
"""The ECS cluster of all instances of AWS Batch here."""


def container_instance(region: str, instance: str) -> str:
    """The ARN by which ECS knows an instance of AWS Batch."""
    return f"arn:aws:ecs:{region}:{ACCOUNT}:container-instance/{CLUSTER}/{instance.removeprefix('i-')}"


@answers("ecs", "DescribeContainerInstances")
def describe_container_instances(call: Call) -> dict[str, Any]:
    """Which EC2 instances those are, as far as they are still there."""
    asked = {f"i-{arn.rpartition('/')[2]}": arn for arn in call.told["containerInstances"]}
    there = [
        {"containerInstanceArn": arn, "ec2InstanceId": one, "status": "ACTIVE"}
        for one, arn in asked.items()
        if one in HOSTS
    ]
    return {"containerInstances": there, "failures": []}


@cache
def take_over() -> None:
    """Let moto's EC2 end these instances, too."""
    from moto.ec2.models import EC2Backend

    theirs: Any = EC2Backend.terminate_instances

    @wraps(theirs)
    def terminate(backend: Any, instance_ids: list[str]) -> Any:
        rest = [one for one in instance_ids if one not in HOSTS]
        for end in [HOSTS.pop(one) for one in instance_ids if one in HOSTS]:
            end()
        return theirs(backend, rest) if rest else []

    EC2Backend.terminate_instances = terminate
