"""Stacks by CloudFormation's raw API, past our own code."""

import json
import time
from typing import Any

import boto3

from clusters.aws import Site
from emulator.aws import REGION
from tests.sky import client


class Sky:
    """Stacks by the raw API."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.stacks = client("cloudformation", site.endpoint)

    def client(self, service: str) -> Any:
        return client(service, self.site.endpoint)

    def outputs(self, name: str) -> dict[str, str]:
        told = self.stacks.describe_stacks(StackName=name)["Stacks"][0].get("Outputs", [])
        return {one["OutputKey"]: one["OutputValue"] for one in told}

    def why(self, name: str) -> str:
        """Why the first resource that failed did."""
        events = self.stacks.describe_stack_events(StackName=name)["StackEvents"][::-1]
        return str(next(one["ResourceStatusReason"] for one in events if one["ResourceStatus"].endswith("_FAILED")))

    def propose(self, name: str, template: dict[str, Any], *, update: bool = False, **more: Any) -> dict[str, Any]:
        made = self.stacks.create_change_set(
            StackName=name,
            ChangeSetName=f"c{time.monotonic_ns()}",
            ChangeSetType="UPDATE" if update else "CREATE",
            TemplateBody=json.dumps(template),
            **more,
        )
        told: dict[str, Any] = self.stacks.describe_change_set(ChangeSetName=made["Id"])
        return told

    def bring(self, name: str, template: dict[str, Any], *, update: bool = False, **more: Any) -> dict[str, Any]:
        proposed = self.propose(name, template, update=update, **more)
        self.stacks.execute_change_set(ChangeSetName=proposed["ChangeSetId"])
        return self.settled(name)

    def settled(self, name: str) -> dict[str, Any]:
        while True:
            told: dict[str, Any] = self.stacks.describe_stacks(StackName=name)["Stacks"][0]
            if not told["StackStatus"].endswith("_IN_PROGRESS"):
                return told
            time.sleep(0.01)

    def delete(self, stack: dict[str, Any]) -> dict[str, Any]:
        self.stacks.delete_stack(StackName=stack["StackId"])
        return self.settled(stack["StackId"])

    def events(self, stack: dict[str, Any]) -> list[tuple[str, str]]:
        found = self.stacks.describe_stack_events(StackName=stack["StackId"])["StackEvents"]
        return [(event["LogicalResourceId"], event["ResourceStatus"]) for event in reversed(found)]


def resources(**parts: Any) -> dict[str, Any]:
    return {"Resources": parts}


def part(kind: str, **properties: Any) -> dict[str, Any]:
    return {"Type": f"AWS::{kind}", "Properties": properties}


def ref(name: str) -> dict[str, Any]:
    return {"Ref": name}


def att(name: str, attribute: str) -> dict[str, Any]:
    return {"Fn::GetAtt": [name, attribute]}


def eager(service: str, endpoint: str) -> Any:
    """A client that takes the first answer: it neither retries nor waits for long."""
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1}, read_timeout=10, connect_timeout=5)
    session = boto3.session.Session("castra", "castra", region_name=REGION)
    return session.client(service, endpoint_url=endpoint, config=config)  # type: ignore[call-overload]  # a name at run time
