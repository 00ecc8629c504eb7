"""The requests of CloudFormation's API that we answer, in moto's server, instead of moto's own CloudFormation.

Change sets, stacks, events, resources. Everything else of that API is refused, not pretended.
"""

import hashlib
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import boto3
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, BaseResponse, EmptyResult

from emulator import network  # noqa: F401  its types register themselves
from emulator.resources import Services, known
from emulator.stacks import Operation, Stack, changes
from emulator.template import Template, TemplateError

ACCOUNT = "123456789012"
LARGEST_BODY = 51_200
ACTIONS = {
    "CreateChangeSet",
    "DescribeChangeSet",
    "ListChangeSets",
    "DeleteChangeSet",
    "ExecuteChangeSet",
    "DeleteStack",
    "DescribeStacks",
    "DescribeStackEvents",
    "ListStackResources",
    "GetTemplate",
}
NO_CHANGES = "The submitted information didn't contain changes. Submit different information to create a change set."
IAM_TYPES = "AWS::IAM::"


class ApiError(ServiceException):  # type: ignore[misc]  # moto has no types
    """What the API answers instead: a code and a message."""


@dataclass(slots=True)
class ChangeSet:
    """A change set, described once when it is created."""

    name: str
    id: str
    stack: Stack
    template: Template
    body: str
    tags: dict[str, str]
    rows: list[dict[str, Any]]
    token: str
    failed: str = ""
    executed: bool = False
    created: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(slots=True)
class Region:
    """What CloudFormation knows in one region."""

    services: Services
    stacks: dict[str, Stack] = field(default_factory=dict)
    change_sets: dict[str, ChangeSet] = field(default_factory=dict)

    def stack(self, name: str) -> Stack | None:
        """The stack of that id, or the one that stands under that name."""
        named = (one for one in self.stacks.values() if one.name == name and not one.deleted)
        return self.stacks.get(name) or next(named, None)


class World:
    """All regions of this emulator, and how it behaves."""

    endpoint = ""
    pace_s = 0.0
    lock = threading.RLock()
    regions: dict[str, Region] = {}  # noqa: RUF012  one per server process, as everything in moto

    @classmethod
    def region(cls, name: str) -> Region:
        """The region of that name; its first use makes the clients."""
        with cls.lock:
            if name not in cls.regions:
                session = boto3.session.Session("castra", "castra", region_name=name)
                clients = {
                    service: session.client(service, endpoint_url=cls.endpoint)
                    for service in ("ec2", "iam", "logs", "s3")
                }
                cls.regions[name] = Region(Services(region=name, account=ACCOUNT, **clients))
            return cls.regions[name]


class StackApi(BaseResponse):  # type: ignore[misc]  # moto has no types
    """One request; a method per action."""

    def __init__(self) -> None:
        super().__init__(service_name="cloudformation")
        self.automated_parameter_parsing = True

    def call_action(self) -> Any:
        """Answer one request, alone."""
        action = self._get_action()
        if action not in ACTIONS:
            return self.serialized(ActionResult(_invalid(f"{action} is not emulated here")))
        with World.lock:
            return super().call_action()

    def create_change_set(self) -> ActionResult:
        name, token = self._told("ChangeSetName"), self._told("ClientToken")
        stack = self._stack_to_change(name, self._told("ChangeSetType", "UPDATE"))
        for there in self._sets(stack):
            if there.name == name and token and there.token == token:
                return ActionResult({"Id": there.id, "StackId": stack.id})
            if there.name == name:
                raise ApiError("AlreadyExistsException", f"ChangeSet {name} cannot be created: it exists")
        body, template = self._template(stack)
        tags = {tag["Key"]: tag["Value"] for tag in self._get_param("Tags", [])}
        try:
            rows = changes(self._here.services, stack, template, tags)
        except TemplateError as error:
            raise _invalid(str(error)) from error
        same_outputs = stack.template is not None and stack.template.body.get("Outputs") == template.body.get("Outputs")
        made = ChangeSet(name, self._arn("changeSet", name), stack, template, body, tags, rows, token)
        made.failed = NO_CHANGES if not rows and same_outputs else ""
        self._here.stacks[stack.id] = stack
        self._here.change_sets[made.id] = made
        return ActionResult({"Id": made.id, "StackId": stack.id})

    def describe_change_set(self) -> ActionResult:
        found = self._change_set()
        usable = "UNAVAILABLE" if found.failed else "EXECUTE_COMPLETE" if found.executed else "AVAILABLE"
        return ActionResult(
            self._summary(found)
            | {
                "Changes": found.rows,
                "Tags": [{"Key": key, "Value": value} for key, value in found.tags.items()],
                "Status": "FAILED" if found.failed else "CREATE_COMPLETE",
                "StatusReason": found.failed,
                "ExecutionStatus": usable,
            }
        )

    def list_change_sets(self) -> ActionResult:
        return ActionResult({"Summaries": [self._summary(one) for one in self._sets(self._stack())]})

    def delete_change_set(self) -> ActionResult:
        del self._here.change_sets[self._change_set().id]
        return EmptyResult()

    def execute_change_set(self) -> ActionResult:
        found, token = self._change_set(), self._told("ClientRequestToken")
        stack = found.stack
        if token and token in stack.tokens:
            return EmptyResult()
        if found.failed or found.executed or stack.busy:
            told = f"ChangeSet [{found.id}] cannot be executed in its current status of [{stack.status}]"
            raise ApiError("InvalidChangeSetStatus", told)
        stack.tokens.add(token)
        found.executed = True
        for other in self._sets(stack):
            if other is not found:
                del self._here.change_sets[other.id]
        operation = Operation(self._here.services, stack, token, World.pace_s)
        operation.start(operation.deploy(found.template, found.tags, found.body))
        return EmptyResult()

    def delete_stack(self) -> ActionResult:
        stack, token = self._here.stack(self._told("StackName")), self._told("ClientRequestToken")
        if stack is None or stack.deleted or stack.status == "DELETE_IN_PROGRESS" or (token and token in stack.tokens):
            return EmptyResult()
        if stack.busy:
            raise _invalid(f"Stack [{stack.name}] cannot be deleted while in status {stack.status}")
        stack.tokens.add(token)
        operation = Operation(self._here.services, stack, token, World.pace_s)
        operation.start(operation.delete())
        return EmptyResult()

    def describe_stacks(self) -> ActionResult:
        named = self._told("StackName")
        standing = [one for one in self._here.stacks.values() if not one.deleted]
        return ActionResult({"Stacks": [_stack(one) for one in ([self._stack()] if named else standing)]})

    def describe_stack_events(self) -> ActionResult:
        return ActionResult({"StackEvents": self._stack().events[::-1]})

    def list_stack_resources(self) -> ActionResult:
        stack = self._stack()
        rows = [
            {
                "LogicalResourceId": name,
                "PhysicalResourceId": resource.id,
                "ResourceType": resource.type,
                "ResourceStatus": stack.states[name][0],
                "LastUpdatedTimestamp": stack.states[name][1],
            }
            for name, resource in stack.live.items()
        ]
        return ActionResult({"StackResourceSummaries": rows})

    def get_template(self) -> ActionResult:
        return ActionResult({"TemplateBody": self._stack().body})

    @property
    def _here(self) -> Region:
        return World.region(self.region)

    def _told(self, name: str, otherwise: str = "") -> str:
        return str(self._get_param(name) or otherwise)

    def _arn(self, kind: str, name: str) -> str:
        unique = hashlib.sha256(secrets.token_bytes(16)).hexdigest()[:32]
        return f"arn:aws:cloudformation:{self.region}:{ACCOUNT}:{kind}/{name}/{unique}"

    def _stack(self) -> Stack:
        name = self._told("StackName")
        found = self._here.stack(name)
        if found is None:
            raise _invalid(f"Stack with id {name} does not exist")
        return found

    def _stack_to_change(self, change_set: str, kind: str) -> Stack:
        name = self._told("StackName")
        found = self._here.stack(name)
        if kind == "CREATE":
            if found and found.status != "REVIEW_IN_PROGRESS":
                raise _invalid(
                    f"Stack [{name}] already exists and cannot be created again with the changeSet [{change_set}]."
                )
            return found or Stack(name, self._arn("stack", name), "REVIEW_IN_PROGRESS")
        if found is None:
            raise _invalid(f"Stack [{name}] does not exist")
        if found.busy or found.status in (
            "ROLLBACK_COMPLETE",
            "ROLLBACK_FAILED",
            "DELETE_FAILED",
            "REVIEW_IN_PROGRESS",
        ):
            raise _invalid(f"Stack:{found.id} is in {found.status} state and can not be updated.")
        return found

    def _template(self, stack: Stack) -> tuple[str, Template]:
        body = self._told("TemplateBody")
        if not body or len(body.encode()) > LARGEST_BODY:
            raise _invalid(f"'templateBody' must be given, with a length less than or equal to {LARGEST_BODY}")
        pseudo = {
            "AWS::Region": self.region,
            "AWS::AccountId": ACCOUNT,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": stack.name,
            "AWS::StackId": stack.id,
        }
        given = {one["ParameterKey"]: one["ParameterValue"] for one in self._get_param("Parameters", [])}
        try:
            template = Template.parse(body, given, pseudo)
            kinds = [known(name, told) for name, told in template.body["Resources"].items()]
        except TemplateError as error:
            raise _invalid(str(error)) from error
        allowed = set(self._get_param("Capabilities", [])) & {"CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"}
        if not allowed and any(kind.type.startswith(IAM_TYPES) for kind in kinds):
            raise ApiError("InsufficientCapabilitiesException", "Requires capabilities : [CAPABILITY_IAM]")
        return body, template

    def _sets(self, stack: Stack) -> list[ChangeSet]:
        return [one for one in self._here.change_sets.values() if one.stack is stack]

    def _change_set(self) -> ChangeSet:
        name, stack = self._told("ChangeSetName"), self._told("StackName")
        found = self._here.change_sets.get(name)
        if found is None and stack:
            found = next((one for one in self._sets(self._stack()) if one.name == name), None)
        if found is None:
            raise ApiError("ChangeSetNotFound", f"ChangeSet [{name}] does not exist")
        return found

    def _summary(self, one: ChangeSet) -> dict[str, Any]:
        return {
            "ChangeSetName": one.name,
            "ChangeSetId": one.id,
            "StackName": one.stack.name,
            "StackId": one.stack.id,
            "CreationTime": one.created,
            "Status": "FAILED" if one.failed else "CREATE_COMPLETE",
        }


def _stack(one: Stack) -> Mapping[str, Any]:
    told = {
        "StackName": one.name,
        "StackId": one.id,
        "StackStatus": one.status,
        "StackStatusReason": one.reason,
        "CreationTime": one.created,
        "Outputs": one.outputs,
        "Tags": [{"Key": key, "Value": value} for key, value in one.tags.items()],
    }
    return told | ({"DeletionTime": one.deleted} if one.deleted else {})


def _invalid(message: str) -> ApiError:
    return ApiError("ValidationError", message)
