"""The requests of CloudFormation's API that we answer, in moto's server, instead of moto's own CloudFormation.

Stacks, change sets, events, resources, exports. Everything else of that API is refused, not pretended.
"""

from collections.abc import Mapping
from typing import Any

from moto.core.responses import ActionResult, EmptyResult

from emulator import (
    batch_types,
    compute,
    eks_types,
    identity,
    network,
    pcs_types,
    sagemaker_types,
    short_forms,
    storage,
)
from emulator.change_sets import ChangeSetApi, parameters_of
from emulator.stacks import Stack, importers
from emulator.world import ApiError, World, invalid

__all__ = ["StackApi", "World"]

TYPES = (batch_types, compute, eks_types, identity, network, pcs_types, sagemaker_types, storage)
"""The modules whose resource types register themselves."""
ACTIONS = {
    *("CreateChangeSet", "DescribeChangeSet", "ListChangeSets", "DeleteChangeSet", "ExecuteChangeSet"),
    *("CreateStack", "UpdateStack", "DeleteStack", "DescribeStacks", "ListStacks"),
    *("DescribeStackEvents", "ListStackResources", "DescribeStackResources"),
    *("GetTemplate", "ValidateTemplate", "ListExports", "ListImports"),
}
ORDINARY = {"OnFailure": ("", "ROLLBACK"), "DisableRollback": ("", "False"), "TemplateURL": ("",), "RoleARN": ("",)}
"""Parameters that are only taken with these values."""


class StackApi(ChangeSetApi):
    """One request; a method per action."""

    def __init__(self) -> None:
        super().__init__(service_name="cloudformation")
        self.automated_parameter_parsing = True

    def call_action(self) -> Any:
        """Answer one request, alone."""
        action = self._get_action()
        if action not in ACTIONS:
            return self.serialized(ActionResult(invalid(f"{action} is not emulated here")))
        with World.lock:
            for name, allowed in ORDINARY.items():
                if self.told(name) not in allowed:
                    told = f"{name} {self.told(name)} is not emulated here"
                    return self.serialized(ActionResult(invalid(told)))
            return super().call_action()

    def create_stack(self) -> ActionResult:
        name, token = self.told("StackName"), self.told("ClientRequestToken")
        found = self.here.stack(name)
        if found and token and token in found.tokens:
            return ActionResult({"StackId": found.id})
        if found:
            raise ApiError("AlreadyExistsException", f"Stack [{name}] already exists")
        stack = Stack(name, self.new_arn("stack", name), "CREATE_IN_PROGRESS")
        body, template = self.template_for(stack)
        tags = self.tags_for(stack)
        self.difference(stack, template, tags)
        self.here.stacks[stack.id] = stack
        self.deploy(stack, template, body, tags)
        return ActionResult({"StackId": stack.id})

    def update_stack(self) -> ActionResult:
        found, token = self.here.stack(self.told("StackName")), self.told("ClientRequestToken")
        if found and token and token in found.tokens:
            return ActionResult({"StackId": found.id})
        stack = self.updatable(self.told("StackName"))
        body, template = self.template_for(stack)
        tags = self.tags_for(stack)
        if self.difference(stack, template, tags)[1]:
            raise invalid("No updates are to be performed.")
        self.deploy(stack, template, body, tags)
        return ActionResult({"StackId": stack.id})

    def delete_stack(self) -> ActionResult:
        stack, token = self.here.stack(self.told("StackName")), self.told("ClientRequestToken")
        if stack is None or stack.deleted or stack.status == "DELETE_IN_PROGRESS" or (token and token in stack.tokens):
            return EmptyResult()
        if stack.busy:
            raise invalid(f"Stack [{stack.name}] cannot be deleted while in status {stack.status}")
        for name in stack.exports:
            if users := importers(name, self.here.standing()):
                told = f"Delete canceled. Cannot delete export {name} as it is in use by {' and '.join(users)}."
                stack.say(stack.status, told, token=token)
                return EmptyResult()
        operation = self.operation(stack)
        operation.start(operation.delete())
        return EmptyResult()

    def describe_stacks(self) -> ActionResult:
        found = [self.stack()] if self.told("StackName") else self.here.standing()
        return ActionResult({"Stacks": [_stack(one) for one in found]})

    def list_stacks(self) -> ActionResult:
        wanted = self._get_param("StackStatusFilter", [])
        found = [one for one in self.here.stacks.values() if not wanted or one.status in wanted]
        return ActionResult({"StackSummaries": [_stack(one) for one in found]})

    def describe_stack_events(self) -> ActionResult:
        return ActionResult({"StackEvents": self.stack().events[::-1]})

    def list_stack_resources(self) -> ActionResult:
        return ActionResult({"StackResourceSummaries": _resources(self.stack(), "LastUpdatedTimestamp")})

    def describe_stack_resources(self) -> ActionResult:
        stack, wanted = self.stack(), self.told("LogicalResourceId")
        rows = [row for row in _resources(stack, "Timestamp") if wanted in ("", row["LogicalResourceId"])]
        return ActionResult({"StackResources": [row | {"StackName": stack.name, "StackId": stack.id} for row in rows]})

    def get_template(self) -> ActionResult:
        return ActionResult({"TemplateBody": self.stack().body})

    def validate_template(self) -> ActionResult:
        try:
            body = short_forms.read(self.told("TemplateBody"))
        except ValueError as error:
            raise invalid(f"Template format error: {error}") from None
        rows = [
            {"ParameterKey": name, "DefaultValue": one.get("Default"), "Description": one.get("Description")}
            for name, one in (body.get("Parameters") or {}).items()
        ]
        return ActionResult({"Parameters": rows, "Description": body.get("Description")})

    def list_exports(self) -> ActionResult:
        rows = [
            {"ExportingStackId": stack.id, "Name": name, "Value": value}
            for stack in self.here.standing()
            for name, value in stack.exports.items()
        ]
        return ActionResult({"Exports": rows})

    def list_imports(self) -> ActionResult:
        name = self.told("ExportName")
        users = importers(name, self.here.standing())
        if not users:
            raise invalid(f"Export '{name}' is not imported by any stack.")
        return ActionResult({"Imports": users})


def _stack(one: Stack) -> Mapping[str, Any]:
    told = {
        "StackName": one.name,
        "StackId": one.id,
        "StackStatus": one.status,
        "StackStatusReason": one.reason,
        "CreationTime": one.created,
        "Outputs": one.outputs,
        "Parameters": parameters_of(one.template) if one.template else [],
        "Tags": [{"Key": key, "Value": value} for key, value in one.tags.items()],
    }
    return told | ({"DeletionTime": one.deleted} if one.deleted else {})


def _resources(stack: Stack, changed: str) -> list[dict[str, Any]]:
    return [
        {
            "LogicalResourceId": name,
            "PhysicalResourceId": resource.id,
            "ResourceType": resource.type,
            "ResourceStatus": stack.states[name][0],
            changed: stack.states[name][1],
        }
        for name, resource in stack.live.items()
    ]
