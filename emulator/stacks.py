"""CloudFormation's engine: stacks brought up, changed, rolled back and deleted in the order of their dependencies.

As on AWS, an operation goes on in the background after the request was answered, every resource has its events, what
fails is rolled back with the reason in the events, and a deletion that fails leaves a stack in DELETE_FAILED.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from emulator import faults
from emulator.errors import TemplateError
from emulator.resources import Properties, Resource, Services, known, tag_list
from emulator.resources import tags as tag_dict
from emulator.template import Template, Values

STACK = "AWS::CloudFormation::Stack"
NOT_THERE = ("NotFound", "NoSuch")
FAILURES = (ClientError, BotoCoreError, ResponseParserError, LookupError, TypeError, ValueError)


@dataclass(slots=True)
class Stack:
    """A stack and everything that happened to it."""

    name: str
    id: str
    status: str
    reason: str = ""
    body: str = "{}"
    template: Template | None = None
    tags: dict[str, str] = field(default_factory=dict)
    live: dict[str, Resource] = field(default_factory=dict)
    states: dict[str, tuple[str, datetime]] = field(default_factory=dict)
    outputs: list[dict[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    """The exports of other stacks that this one uses."""
    tokens: set[str] = field(default_factory=set)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    deleted: datetime | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def exports(self) -> dict[str, str]:
        """What other stacks may import."""
        return _exports(self.outputs)

    def say(self, status: str, reason: str = "", resource: Resource | None = None, token: str = "") -> None:
        """Write an event, of the stack itself if no resource is given."""
        now = datetime.now(UTC)
        if resource is None:
            self.status, self.reason = status, reason
        else:
            self.states[resource.logical_id] = status, now
        self.events.append(
            {
                "StackId": self.id,
                "StackName": self.name,
                "EventId": secrets.token_hex(16),
                "LogicalResourceId": resource.logical_id if resource else self.name,
                "PhysicalResourceId": resource.id if resource else self.id,
                "ResourceType": resource.type if resource else STACK,
                "Timestamp": now,
                "ResourceStatus": status,
                "ResourceStatusReason": reason,
                "ClientRequestToken": token,
            }
        )


def changes(services: Services, stack: Stack, template: Template, tags: Mapping[str, str]) -> list[dict[str, Any]]:
    """What leads from a stack as it stands to a template, as DescribeChangeSet tells it."""
    moved: set[str] = set()  # those whose id is not known before they are made
    touched: set[str] = set()

    def ref(name: str) -> str:
        return f"<{name}>" if name in moved else _live(stack, name).id

    def attribute(name: str, of: str) -> Any:
        found = stack.live.get(name)
        unknown = name in moved or (found and name in touched and of in found.moving)
        return f"<{name}.{of}>" if unknown else _live(stack, name).attribute(of)

    values, rows = Values(template, ref, attribute, foreseen=True), []
    for name in template.order():
        new = _wanted(services, stack, template, values, tags, name)
        old = stack.live.get(name)
        if old is None or old.type != new.type:
            moved.add(name)
            rows.append(_row("Add", new))
        elif old.p != new.p:
            replacement = _replacement(old, new)
            touched.add(name)
            if replacement != "False":
                moved.add(name)
            rows.append(_row("Modify", new, old.id, replacement))
    return rows + [_row("Remove", old, old.id) for name, old in stack.live.items() if name not in template.resources]


class Operation:
    """One operation on a stack: `deploy` or `delete`, run on a thread of its own."""

    def __init__(self, services: Services, stack: Stack, token: str, others: Callable[[], list[Stack]]) -> None:
        self.services, self.stack, self.token, self.others = services, stack, token, others
        self.pace_s = 0.0
        self.number = 0
        self.undo: list[Callable[[], None]] = []
        self.made: list[Resource] = []
        self.outdated: list[Resource] = []

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in the background; the stack's status has been set by then."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                verb = self.stack.status.removesuffix("_IN_PROGRESS")
                self._say(f"{verb}_FAILED", f"Internal Failure ({error!r}): a mistake of the emulator, see its log")
                raise

        threading.Thread(target=run, daemon=True).start()

    def deploy(self, template: Template, tags: Mapping[str, str], body: str) -> Callable[[], None]:
        """Bring the stack to the template; returns the work that is left for the background."""
        verb = "UPDATE" if self.stack.template else "CREATE"
        if verb == "CREATE":
            self.stack.tags = dict(tags)  # at once, so that one that is rolled back has them
        self._say(f"{verb}_IN_PROGRESS", "User Initiated")

        def work() -> None:
            try:
                self._bring_all(template, tags)
            except _Failed as failed:
                self._roll_back(verb, failed)
                return
            before = self.stack.template
            self.stack.template, self.stack.body, self.stack.tags = template, body, dict(tags)
            if verb == "UPDATE":
                self._say("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
            gone = [old for name, old in self.stack.live.items() if name not in template.resources]
            for old in self.outdated:
                self._drop(old, "UpdateReplacePolicy", before)
            for old in reversed(gone):
                self._drop(old, "DeletionPolicy", before)
            self._say(f"{verb}_COMPLETE")

        return work

    def delete(self) -> Callable[[], None]:
        """Delete every resource, the last made first; returns the work that is left for the background."""
        self._say("DELETE_IN_PROGRESS", "User Initiated")

        def work() -> None:
            order = self.stack.template.order() if self.stack.template else []
            names = [name for name in reversed(order) if name in self.stack.live]
            template = self.stack.template
            failed = [name for name in names if not self._drop(self.stack.live[name], "DeletionPolicy", template)]
            if failed:
                told = f"The following resource(s) failed to delete: [{', '.join(failed)}]."
                self._say("DELETE_FAILED", told)
            else:
                self.stack.deleted = datetime.now(UTC)
                self._say("DELETE_COMPLETE")

        return work

    def _bring_all(self, template: Template, tags: Mapping[str, str]) -> None:
        stack = self.stack
        values = Values(template, lambda name: _live(stack, name).id, lambda name, of: _live(stack, name).attribute(of))
        for name in template.order():
            try:
                self._bring(_wanted(self.services, self.stack, template, values, tags, name))
            except TemplateError as error:
                self._say("CREATE_FAILED", str(error), _Unnamed(self.services, self.stack.name, name, {}))
                raise _Failed(name) from error
        try:
            outputs = _outputs(template, values)
        except TemplateError as error:
            raise _Failed("Outputs", str(error)) from error
        if conflict := self._conflict(_exports(outputs)):
            raise _Failed("Outputs", conflict)
        stack.outputs, stack.imports = outputs, values.imported

    def _conflict(self, exports: Mapping[str, str]) -> str:
        """Why these cannot be the stack's exports, "" if they can."""
        for name, value in self.stack.exports.items():
            users = importers(name, self.others())
            if users and exports.get(name) != value:
                verb = "updated" if name in exports else "deleted"
                return f"Export {name} cannot be {verb} as it is in use by {' and '.join(users)}"
        for other in self.others():
            for name in set(exports) & set(other.exports):
                if other is not self.stack and not other.deleted:
                    return f"Export with name {name} is already exported by stack {other.name}"
        return ""

    def _bring(self, new: Resource) -> None:
        """Make or change one resource, unless it is as wanted already."""
        old = self.stack.live.get(new.logical_id)
        if old and old.type == new.type and old.p == new.p:
            return
        in_place = old is not None and old.type == new.type and _replacement(old, new) == "False"
        verb = "UPDATE" if old else "CREATE"
        self._say(f"{verb}_IN_PROGRESS", "", new)
        time.sleep(self.pace_s)
        self.number += 1
        try:
            if why := faults.of_resource(self.stack.name, new.logical_id, self.number):
                raise ValueError(why)
            if old and in_place:
                if stiff := sorted(key for key in new.unmoved if old.p.get(key) != new.p.get(key)):
                    raise ValueError(f"a change of {', '.join(stiff)} in place is not emulated here")
                new.id = old.id
                self.undo.append(lambda: self._settle_back(old, new))
                new.settle(old.p)
            else:
                new.id = new.create()
                self.made.append(new)
                self.undo.append(lambda: self._unmake(new, old))
                new.settle({})
                self.outdated += [old] if old else []
        except FAILURES as error:
            self._say(f"{verb}_FAILED", _why(error), new)
            if new.id and not in_place and not any(new is one for one in self.made):
                self.undo.append(lambda: self._unmake(new, old))
            raise _Failed(new.logical_id) from error
        self.stack.live[new.logical_id] = new
        self._say(f"{verb}_COMPLETE", "", new)

    def _settle_back(self, old: Resource, new: Resource) -> None:
        old.settle(new.p)
        self.stack.live[old.logical_id] = old
        self._say("UPDATE_COMPLETE", "", old)

    def _unmake(self, new: Resource, old: Resource | None) -> None:
        self._remove(new)
        if old:
            self.stack.live[old.logical_id] = old

    def _roll_back(self, verb: str, failed: "_Failed") -> None:
        before = "" if verb == "CREATE" else "UPDATE_"
        done = "create" if verb == "CREATE" else "update"
        told = failed.reason or f"The following resource(s) failed to {done}: [{failed.name}]. "
        self._say(f"{before}ROLLBACK_IN_PROGRESS", told)
        for step in reversed(self.undo):
            step()
        left = list(self.stack.live) if verb == "CREATE" else []
        told = f"The following resource(s) failed to delete: [{', '.join(left)}]."
        self._say(f"{before}ROLLBACK_FAILED" if left else f"{before}ROLLBACK_COMPLETE", told if left else "")

    def _drop(self, resource: Resource, policy: str, template: Template | None) -> bool:
        """Remove a resource unless the template that made it says that it stays."""
        told = template.body["Resources"].get(resource.logical_id, {}) if template else {}
        if not str(told.get(policy, "Delete")).startswith("Retain"):
            return self._remove(resource)
        if self.stack.live.get(resource.logical_id) is resource:
            del self.stack.live[resource.logical_id]
        self._say("DELETE_SKIPPED", "", resource)
        return True

    def _remove(self, resource: Resource) -> bool:
        self._say("DELETE_IN_PROGRESS", "", resource)
        time.sleep(self.pace_s)
        try:
            resource.delete()
        except FAILURES as error:
            if not any(word in _why(error) for word in NOT_THERE):
                self._say("DELETE_FAILED", _why(error), resource)
                return False
        if self.stack.live.get(resource.logical_id) is resource:
            del self.stack.live[resource.logical_id]
        self._say("DELETE_COMPLETE", "", resource)
        return True

    def _say(self, status: str, reason: str = "", resource: Resource | None = None) -> None:
        self.stack.say(status, reason, resource, self.token)


class _Unnamed(Resource):
    """Stands in an event for a resource whose template could not be read."""

    def create(self) -> str:
        """Is never made."""
        return ""

    def delete(self) -> None:
        """Was never made."""


class _Failed(Exception):
    """A resource could not be made; the events say why."""

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(name)
        self.name, self.reason = name, reason


def importers(export: str, stacks: list[Stack]) -> list[str]:
    """The names of the stacks that use an export."""
    return sorted(one.name for one in stacks if export in one.imports and not one.deleted)


def _live(stack: Stack, name: str) -> Resource:
    if name not in stack.live:
        told = f"Unresolved resource dependencies [{name}] in the Resources block of the template"
        raise TemplateError(f"Template format error: {told}")
    return stack.live[name]


def _wanted(
    services: Services, stack: Stack, template: Template, values: Values, tags: Mapping[str, str], name: str
) -> Resource:
    told = template.resources[name]
    kind = known(name, told)
    p: Properties = values.of(told.get("Properties", {}))
    if "Tags" in kind.mutable | kind.fixed:
        p = {**p, "Tags": tag_list({"Tags": {**tags, **tag_dict(p)}})}
    made = kind(services, stack.name, name, p)
    made.stack_tags = tags
    return made


def _replacement(old: Resource, new: Resource) -> str:
    return "True" if new.replaces(old.p) else "False"


def _row(action: str, resource: Resource, physical: str = "", replacement: str = "") -> dict[str, Any]:
    row = {"Action": action, "LogicalResourceId": resource.logical_id, "ResourceType": resource.type}
    if physical:
        row["PhysicalResourceId"] = physical
    if replacement:
        row["Replacement"] = replacement
    return {"Type": "Resource", "ResourceChange": row}


def _outputs(template: Template, values: Values) -> list[dict[str, str]]:
    told = template.body.get("Outputs", {})
    wanted = {name: one for name, one in told.items() if template.holds(one.get("Condition", ""))}
    return [
        {
            "OutputKey": name,
            "OutputValue": str(values.of(one["Value"])),
            **({"Description": one["Description"]} if "Description" in one else {}),
            **({"ExportName": str(values.of(one["Export"]["Name"]))} if "Export" in one else {}),
        }
        for name, one in wanted.items()
    ]


def _exports(outputs: list[dict[str, str]]) -> dict[str, str]:
    return {one["ExportName"]: one["OutputValue"] for one in outputs if "ExportName" in one}


def _why(error: Exception) -> str:
    if type(error) is ValueError:  # our own, in AWS's words
        return str(error)
    if isinstance(error, ClientError):
        told = error.response["Error"]
        return f"{told.get('Message')} (Service: {error.operation_name}; Error Code: {told.get('Code')})"
    return f"{type(error).__name__}: {error}"
