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

from emulator.resources import Properties, Resource, Services, known, tag_list
from emulator.template import Template, TemplateError, Values

STACK = "AWS::CloudFormation::Stack"
NOT_THERE = ("NotFound", "NoSuch")


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
    tokens: set[str] = field(default_factory=set)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    deleted: datetime | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

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

    def ref(name: str) -> str:
        return f"<{name}>" if name in moved else stack.live[name].id

    def attribute(name: str, of: str) -> str:
        return f"<{name}.{of}>" if name in moved else stack.live[name].attribute(of)

    values, rows = Values(template, ref, attribute), []
    for name in template.order():
        new = _wanted(services, stack, template, values, tags, name)
        old = stack.live.get(name)
        if old is None or old.type != new.type:
            moved.add(name)
            rows.append(_row("Add", new))
        elif old.p != new.p:
            replacement = _replacement(old, new)
            if replacement != "False":
                moved.add(name)
            rows.append(_row("Modify", new, old.id, replacement))
    return rows + [_row("Remove", old, old.id) for name, old in stack.live.items() if name not in template.resources]


class Operation:
    """One operation on a stack: `deploy` or `delete`, run on a thread of its own."""

    def __init__(self, services: Services, stack: Stack, token: str, pace_s: float) -> None:
        self.services, self.stack, self.token, self.pace_s = services, stack, token, pace_s
        self.undo: list[Callable[[], None]] = []
        self.outdated: list[Resource] = []

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in the background; the stack's status has been set by then."""
        threading.Thread(target=work, daemon=True).start()

    def deploy(self, template: Template, tags: Mapping[str, str], body: str) -> Callable[[], None]:
        """Bring the stack to the template; returns the work that is left for the background."""
        verb = "UPDATE" if self.stack.template else "CREATE"
        self._say(f"{verb}_IN_PROGRESS", "User Initiated")

        def work() -> None:
            try:
                self._bring_all(template, tags)
            except _Failed as failed:
                self._roll_back(verb, failed.name)
                return
            self.stack.template, self.stack.body, self.stack.tags = template, body, dict(tags)
            if verb == "UPDATE":
                self._say("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
            gone = [old for name, old in self.stack.live.items() if name not in template.resources]
            for old in (*self.outdated, *reversed(gone)):
                self._remove(old)
            self._say(f"{verb}_COMPLETE")

        return work

    def delete(self) -> Callable[[], None]:
        """Delete every resource, the last made first; returns the work that is left for the background."""
        self._say("DELETE_IN_PROGRESS", "User Initiated")

        def work() -> None:
            order = self.stack.template.order() if self.stack.template else []
            names = [name for name in reversed(order) if name in self.stack.live]
            failed = [name for name in names if not self._remove(self.stack.live[name])]
            if failed:
                told = f"The following resource(s) failed to delete: [{', '.join(failed)}]."
                self._say("DELETE_FAILED", told)
            else:
                self.stack.deleted = datetime.now(UTC)
                self._say("DELETE_COMPLETE")

        return work

    def _bring_all(self, template: Template, tags: Mapping[str, str]) -> None:
        live = self.stack.live
        values = Values(template, lambda name: live[name].id, lambda name, of: live[name].attribute(of))
        for name in template.order():
            try:
                self._bring(_wanted(self.services, self.stack, template, values, tags, name))
            except TemplateError as error:
                self._say("CREATE_FAILED", str(error), Resource(self.services, self.stack.name, name, {}))
                raise _Failed(name) from error
        try:
            self.stack.outputs = _outputs(template, values)
        except TemplateError as error:
            self._say(self.stack.status, str(error))
            raise _Failed("Outputs") from error

    def _bring(self, new: Resource) -> None:
        """Make or change one resource, unless it is as wanted already."""
        old = self.stack.live.get(new.logical_id)
        if old and old.type == new.type and old.p == new.p:
            return
        in_place = old is not None and old.type == new.type and _replacement(old, new) == "False"
        verb = "UPDATE" if old else "CREATE"
        self._say(f"{verb}_IN_PROGRESS", "", new)
        time.sleep(self.pace_s)
        try:
            if old and in_place:
                new.id = old.id
                self.undo.append(lambda: self._settle_back(old, new))
                new.settle(old.p)
            else:
                new.id = new.create()
                self.undo.append(lambda: self._unmake(new, old))
                new.settle({})
                self.outdated += [old] if old else []
        except (ClientError, BotoCoreError, LookupError, TypeError, ValueError) as error:
            self._say(f"{verb}_FAILED", _why(error), new)
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

    def _roll_back(self, verb: str, failed: str) -> None:
        before = "" if verb == "CREATE" else "UPDATE_"
        done = "create" if verb == "CREATE" else "update"
        self._say(f"{before}ROLLBACK_IN_PROGRESS", f"The following resource(s) failed to {done}: [{failed}]. ")
        for step in reversed(self.undo):
            step()
        left = list(self.stack.live) if verb == "CREATE" else []
        told = f"The following resource(s) failed to delete: [{', '.join(left)}]."
        self._say(f"{before}ROLLBACK_FAILED" if left else f"{before}ROLLBACK_COMPLETE", told if left else "")

    def _remove(self, resource: Resource) -> bool:
        self._say("DELETE_IN_PROGRESS", "", resource)
        time.sleep(self.pace_s)
        try:
            resource.delete()
        except (ClientError, BotoCoreError) as error:
            if not any(word in _why(error) for word in NOT_THERE):
                self._say("DELETE_FAILED", _why(error), resource)
                return False
        if self.stack.live.get(resource.logical_id) is resource:
            del self.stack.live[resource.logical_id]
        self._say("DELETE_COMPLETE", "", resource)
        return True

    def _say(self, status: str, reason: str = "", resource: Resource | None = None) -> None:
        self.stack.say(status, reason, resource, self.token)


class _Failed(Exception):
    """A resource could not be made; the events say why."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _wanted(
    services: Services, stack: Stack, template: Template, values: Values, tags: Mapping[str, str], name: str
) -> Resource:
    told = template.resources[name]
    kind = known(name, told)
    p: Properties = values.of(told.get("Properties", {}))
    if "Tags" in kind.mutable:
        merged = {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()] + list(p.get("Tags", []))}
        p = {**p, "Tags": tag_list(merged)}
    return kind(services, stack.name, name, p)


def _replacement(old: Resource, new: Resource) -> str:
    changed = {key for key in {*old.p, *new.p} if old.p.get(key) != new.p.get(key)}
    return "True" if changed & old.fixed else "False"


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
        }
        for name, one in wanted.items()
    ]


def _why(error: Exception) -> str:
    if isinstance(error, ClientError):
        told = error.response["Error"]
        return f"{told.get('Message')} (Service: {error.operation_name}; Error Code: {told.get('Code')})"
    return f"{type(error).__name__}: {error}"
