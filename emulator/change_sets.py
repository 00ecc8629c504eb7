"""CloudFormation's requests about change sets, and what all its requests share."""

import hashlib
import secrets
from typing import Any

from moto.core.responses import ActionResult, BaseResponse, EmptyResult

from emulator.errors import TemplateError
from emulator.memory import ACCOUNT
from emulator.resources import known
from emulator.stacks import Operation, Stack, changes
from emulator.template import Template
from emulator.world import ApiError, ChangeSet, Region, World, invalid

LARGEST_BODY = 51_200
NO_CHANGES = "The submitted information didn't contain changes. Submit different information to create a change set."
POWERS = {
    "AWS::IAM::InstanceProfile": "InstanceProfileName",
    "AWS::IAM::ManagedPolicy": "ManagedPolicyName",
    "AWS::IAM::Policy": "",
    "AWS::IAM::Role": "RoleName",
}
"""The types that need a capability, and the property that makes it the one for names."""
STUCK = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED", "REVIEW_IN_PROGRESS", "UPDATE_ROLLBACK_FAILED")


class ChangeSetApi(BaseResponse):  # type: ignore[misc]  # moto has no types
    """A method per action, and how they read what they are asked."""

    def create_change_set(self) -> ActionResult:
        name, token = self.told("ChangeSetName"), self.told("ClientToken")
        stack = self._stack_to_change(name, self.told("ChangeSetType", "UPDATE"))
        for there in self.here.sets(stack):
            if there.name == name and token and there.token == token:
                return ActionResult({"Id": there.id, "StackId": stack.id})
            if there.name == name:
                raise ApiError("AlreadyExistsException", f"ChangeSet {name} cannot be created: it exists")
        body, template = self.template_for(stack)
        tags = self.tags_for(stack)
        rows, nothing = self.difference(stack, template, tags)
        made = ChangeSet(name, self.new_arn("changeSet", name), stack, template, body, tags, rows, token)
        made.failed = NO_CHANGES if nothing else ""
        self.here.stacks[stack.id] = stack
        self.here.change_sets[made.id] = made
        return ActionResult({"Id": made.id, "StackId": stack.id})

    def describe_change_set(self) -> ActionResult:
        found = self._change_set()
        usable = "UNAVAILABLE" if found.failed else "EXECUTE_COMPLETE" if found.executed else "AVAILABLE"
        return ActionResult(
            _summary(found)
            | {
                "Changes": found.rows,
                "Tags": [{"Key": key, "Value": value} for key, value in found.tags.items()],
                "Parameters": parameters_of(found.template),
                "Status": "FAILED" if found.failed else "CREATE_COMPLETE",
                "StatusReason": found.failed,
                "ExecutionStatus": usable,
            }
        )

    def list_change_sets(self) -> ActionResult:
        return ActionResult({"Summaries": [_summary(one) for one in self.here.sets(self.stack())]})

    def delete_change_set(self) -> ActionResult:
        del self.here.change_sets[self._change_set().id]
        return EmptyResult()

    def execute_change_set(self) -> ActionResult:
        found, token = self._change_set(), self.told("ClientRequestToken")
        stack = found.stack
        if token and token in stack.tokens:
            return EmptyResult()
        if found.failed or found.executed or stack.busy:
            told = f"ChangeSet [{found.id}] cannot be executed in its current status of [{stack.status}]"
            raise ApiError("InvalidChangeSetStatus", told)
        found.executed = True
        for other in self.here.sets(stack):
            if other is not found:
                del self.here.change_sets[other.id]
        self.deploy(stack, found.template, found.body, found.tags)
        return EmptyResult()

    @property
    def here(self) -> Region:
        """The region of the request."""
        return World.region(self.region)

    def told(self, name: str, otherwise: str = "") -> str:
        """A parameter of the request."""
        return str(self._get_param(name) or otherwise)

    def new_arn(self, kind: str, name: str) -> str:
        """An ARN that no other has."""
        unique = hashlib.sha256(secrets.token_bytes(16)).hexdigest()[:32]
        return f"arn:aws:cloudformation:{self.region}:{ACCOUNT}:{kind}/{name}/{unique}"

    def stack(self) -> Stack:
        """The stack that is asked for."""
        name = self.told("StackName")
        found = self.here.stack(name)
        if found is None:
            raise invalid(f"Stack with id {name} does not exist")
        return found

    def operation(self, stack: Stack) -> Operation:
        """A new operation on a stack, remembered by its token."""
        token = self.told("ClientRequestToken")
        stack.tokens.add(token)
        made = Operation(self.here.services, stack, token, self.here.standing)
        made.pace_s = World.pace_s
        return made

    def deploy(self, stack: Stack, template: Template, body: str, tags: dict[str, str]) -> None:
        """Bring a stack to a template, in the background."""
        operation = self.operation(stack)
        operation.start(operation.deploy(template, tags, body))

    def difference(self, stack: Stack, template: Template, tags: dict[str, str]) -> tuple[list[dict[str, Any]], bool]:
        """The rows of a change set, and whether there is nothing to do at all."""
        try:
            rows = changes(self.here.services, stack, template, tags)
        except TemplateError as error:
            raise invalid(str(error)) from error
        same_outputs = stack.template is not None and stack.template.body.get("Outputs") == template.body.get("Outputs")
        return rows, not rows and same_outputs

    def updatable(self, name: str) -> Stack:
        """The stack of that name if it can be updated."""
        found = self.here.stack(name)
        if found is None or found.deleted:
            raise invalid(f"Stack [{name}] does not exist")
        if found.busy or found.status in STUCK:
            raise invalid(f"Stack:{found.id} is in {found.status} state and can not be updated.")
        return found

    def tags_for(self, stack: Stack) -> dict[str, str]:
        """The request's tags; those the stack has if none are given."""
        given = self._get_param("Tags")
        return dict(stack.tags) if given is None else {tag["Key"]: tag["Value"] for tag in given}

    def template_for(self, stack: Stack) -> tuple[str, Template]:
        """The request's template, with its parameters, as it is meant for a stack."""
        body = stack.body if self._get_param("UsePreviousTemplate") else self.told("TemplateBody")
        template = self.parsed(body, stack)
        try:
            kinds = {name: known(name, one) for name, one in template.body["Resources"].items()}
        except TemplateError as error:
            raise invalid(str(error)) from error
        allowed = set(self._get_param("Capabilities", []))
        for name, kind in kinds.items():
            named = POWERS.get(kind.type, "") in template.body["Resources"][name].get("Properties", {})
            needed = {"CAPABILITY_NAMED_IAM"} if named else {"CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"}
            if kind.type in POWERS and not needed & allowed:
                told = f"Requires capabilities : [{min(needed)}]"
                raise ApiError("InsufficientCapabilitiesException", told)
        return body, template

    def parsed(self, body: str, stack: Stack) -> Template:
        """A template with the request's parameters."""
        if not body or len(body.encode()) > LARGEST_BODY:
            raise invalid(f"'templateBody' must be given, with a length less than or equal to {LARGEST_BODY}")
        pseudo = {
            "AWS::Region": self.region,
            "AWS::AccountId": ACCOUNT,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": stack.name,
            "AWS::StackId": stack.id,
            "AWS::NotificationARNs": [],
        }
        before = stack.template.given if stack.template else {}
        try:
            given = {
                name: before[name] if one.get("UsePreviousValue") else one["ParameterValue"]
                for one in self._get_param("Parameters", [])
                for name in [one["ParameterKey"]]
            }
            return Template.parse(body, given, pseudo, self.here)
        except KeyError as error:
            raise invalid(f"Parameters: [{error.args[0]}] must have values") from None
        except TemplateError as error:
            raise invalid(str(error)) from error

    def _stack_to_change(self, change_set: str, kind: str) -> Stack:
        name = self.told("StackName")
        if kind != "CREATE":
            return self.updatable(name)
        found = self.here.stack(name)
        if found and found.status != "REVIEW_IN_PROGRESS":
            told = f"already exists and cannot be created again with the changeSet [{change_set}]"
            raise invalid(f"Stack [{name}] {told}.")
        return found or Stack(name, self.new_arn("stack", name), "REVIEW_IN_PROGRESS")

    def _change_set(self) -> ChangeSet:
        name, stack = self.told("ChangeSetName"), self.told("StackName")
        found = self.here.change_sets.get(name)
        if found is None and stack:
            found = next((one for one in self.here.sets(self.stack()) if one.name == name), None)
        if found is None:
            raise ApiError("ChangeSetNotFound", f"ChangeSet [{name}] does not exist")
        return found


def parameters_of(template: Template) -> list[dict[str, str]]:
    """A template's parameters as they are told, without secrets."""
    declared = template.body.get("Parameters") or {}
    rows = []
    for name, value in template.parameters.items():
        hidden = str(declared[name].get("NoEcho", False)).lower() == "true"
        shown = "****" if hidden else ",".join(value) if isinstance(value, list) else value
        rows.append({"ParameterKey": name, "ParameterValue": shown})
    return rows


def _summary(one: ChangeSet) -> dict[str, Any]:
    return {
        "ChangeSetName": one.name,
        "ChangeSetId": one.id,
        "StackName": one.stack.name,
        "StackId": one.stack.id,
        "CreationTime": one.created,
        "Status": "FAILED" if one.failed else "CREATE_COMPLETE",
    }
