"""Deploy other people's CloudFormation templates on the emulator, as they are, and delete them again.

    git clone https://github.com/awslabs/awsome-distributed-ai
    python -m benchmarks.upstream_templates awsome-distributed-ai/1.architectures/1.vpc_network

Every `*.yaml` of the folder (or the file) that is a template is deployed with values for the parameters that have no
default, by CreateStack, and deleted. What is left of EC2 afterwards is counted against what was there before.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3

from emulator import short_forms
from emulator.aws import REGION, running

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d", "us-east-1e", "us-east-1f")
COUNTED = {
    "describe_vpcs": "Vpcs",
    "describe_subnets": "Subnets",
    "describe_internet_gateways": "InternetGateways",
    "describe_addresses": "Addresses",
    "describe_vpc_endpoints": "VpcEndpoints",
    "describe_security_groups": "SecurityGroups",
    "describe_route_tables": "RouteTables",
    "describe_flow_logs": "FlowLogs",
    "describe_nat_gateways": "NatGateways",
}
GONE = ("deleted", "deleting")
"""States in which EC2 still shows what is deleted."""


def guesses(declared: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """Values for the parameters that have none: zones for those that are zones."""
    told = dict(given)
    for name, about in declared.items():
        if name not in told and "Default" not in about:
            if about["Type"] == "AWS::EC2::AvailabilityZone::Name":
                told[name] = ZONES[0]
            elif about["Type"] == "List<AWS::EC2::AvailabilityZone::Name>":
                told[name] = ",".join(ZONES)
    return told


def templates(place: Path) -> dict[Path, str]:
    """The templates at a place, by their paths."""
    files = [place] if place.is_file() else sorted(place.glob("*.yaml"))
    return {path: text for path in files if "Resources:" in (text := path.read_text())}


def counts(ec2: Any) -> dict[str, int]:
    """How many there are of each kind."""
    found = {member: getattr(ec2, name)()[member] for name, member in COUNTED.items()}
    return {member: sum(row.get("State") not in GONE for row in rows) for member, rows in found.items()}


def settled(stacks: Any, stack: str) -> dict[str, Any]:
    """The stack once nothing is under way in it."""
    while True:
        told: dict[str, Any] = stacks.describe_stacks(StackName=stack)["Stacks"][0]
        if not told["StackStatus"].endswith("_IN_PROGRESS"):
            return told
        time.sleep(0.02)


def try_one(endpoint: str, name: str, text: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Deploy and delete one template."""
    session = boto3.session.Session("castra", "castra", region_name=REGION)
    stacks, ec2 = (session.client(kind, endpoint_url=endpoint) for kind in ("cloudformation", "ec2"))
    try:
        declared, before = short_forms.read(text).get("Parameters") or {}, counts(ec2)
    except ValueError as error:
        return {"deployed": f"refused: {error}"}
    rows: list[Any] = [
        {"ParameterKey": key, "ParameterValue": value}
        for key, value in guesses(declared, given).items()
        if key in declared
    ]
    began = time.monotonic()
    try:
        made = stacks.create_stack(
            StackName=name, TemplateBody=text, Parameters=rows, Capabilities=["CAPABILITY_NAMED_IAM"]
        )
    except stacks.exceptions.ClientError as error:
        return {"deployed": f"refused: {error.response['Error']['Message']}"}
    deployed = settled(stacks, made["StackId"])
    took, resources = time.monotonic() - began, stacks.describe_stack_resources(StackName=name)["StackResources"]
    failed = [
        f"{event['LogicalResourceId']}: {event['ResourceStatusReason']}"
        for event in stacks.describe_stack_events(StackName=name)["StackEvents"]
        if event["ResourceStatus"].endswith("_FAILED")
    ]
    stacks.delete_stack(StackName=name)
    deleted = settled(stacks, made["StackId"])
    left = {key: number - before[key] for key, number in counts(ec2).items() if number != before[key]}
    return {
        "deployed": deployed["StackStatus"],
        "resources": len(resources),
        "exports": sum("ExportName" in one for one in deployed.get("Outputs", [])),
        "seconds": round(took, 2),
        "failed": failed,
        "deleted": deleted["StackStatus"],
        "left": left,
    }


def main(argv: list[str] | None = None) -> int:
    """Try every template and print what came of it; 1 unless all deploy and leave nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upstream_templates", description=__doc__)
    parser.add_argument("place", type=Path, help="a folder with templates, or one template")
    parser.add_argument("--parameter", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args(argv)
    given = dict(one.split("=", 1) for one in asked.parameter)
    fine = True
    with running() as emulator:
        for number, (path, text) in enumerate(templates(asked.place).items()):
            told = try_one(emulator.endpoint, f"upstream-{number}", text, given)
            print(f"{path.name}: {json.dumps(told)}", flush=True)
            whole: tuple[str, str, dict[str, int]] = ("CREATE_COMPLETE", "DELETE_COMPLETE", {})
            fine &= (told["deployed"], told.get("deleted"), told.get("left")) == whole
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
