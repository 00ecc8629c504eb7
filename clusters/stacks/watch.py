"""Look at a stack and watch an operation on it: its events as they come, how it ended, what failed first."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from clusters import aws
from clusters.aws import Site
from clusters.base import ClusterError

if TYPE_CHECKING:
    from mypy_boto3_cloudformation.type_defs import StackEventTypeDef, StackTypeDef

STACK = "AWS::CloudFormation::Stack"
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
PATIENCE_S = 30.0
"""CloudFormation shows a new operation a moment after it took the request: so long an old status is not believed."""
LONGEST_S = 2 * 3600.0
UNTOLD = ("Resource creation cancelled", "Resource update cancelled")
"""The reasons of those that were stopped because another one failed."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a resource of a stack, or to the stack."""

    time: datetime
    logical_id: str
    type: str
    status: str
    reason: str


def busy(status: str) -> bool:
    """Whether an operation is under way in a stack of this status."""
    return status.endswith("_IN_PROGRESS") and status != "REVIEW_IN_PROGRESS"


def look(name: str, site: Site) -> "StackTypeDef | None":
    """The stack of that name (or id) as it stands now, None where there is none."""
    there = _describe(name, site)
    return None if there is None or there["StackStatus"] == "DELETE_COMPLETE" else there


def pauses(what: str) -> Iterator[float]:
    """Ever longer pauses between two looks, seconds; raises `ClusterError` when it takes unreasonably long."""
    pause, until = SHORTEST_PAUSE_S, time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        yield pause
        pause = min(pause * 1.5, LONGEST_PAUSE_S)
    raise ClusterError(f"{what} takes longer than {LONGEST_S / 3600:g} hours; look at it in the AWS console")


class Watch:
    """An operation on a stack. Make it before the request that starts the operation: what it sees later is new."""

    def __init__(self, name: str, site: Site) -> None:
        self.name, self.site = name, site
        self.status, self.failure = "", ""
        self._seen: set[str] = set()
        self.latest = ""
        """The id of the newest event, "" if there is none: names the state the stack is in."""
        self._new()

    def events(self, patience_s: float = PATIENCE_S) -> Iterator[Event]:
        """The new events as they come, until the operation has ended; then `status` and `failure` are set.

        A status that is final from the start is believed after `patience_s` seconds without a new event.
        """
        began, told = time.monotonic(), False
        for pause in pauses(f"stack {self.name} in {self.site}"):
            there = _describe(self.name, self.site)
            for event in self._new():
                told = told or event["ResourceType"] == STACK
                yield self._event(event)
            self.status = there["StackStatus"] if there else "DELETE_COMPLETE"
            still = busy(self.status) or self.status == "REVIEW_IN_PROGRESS"
            if not still and (told or time.monotonic() - began >= patience_s):
                reason = there.get("StackStatusReason", "") if there else ""
                self.failure = self.failure or reason or "no reason was given"
                return
            time.sleep(pause)

    def _event(self, told: "StackEventTypeDef") -> Event:
        reason, status = told.get("ResourceStatusReason", ""), told.get("ResourceStatus", "")
        logical_id = told.get("LogicalResourceId", "")
        if not self.failure and status.endswith("_FAILED") and not reason.startswith(UNTOLD):
            self.failure = f"{logical_id}: {reason}"
        return Event(told["Timestamp"], logical_id, told.get("ResourceType", ""), status, reason)

    def _new(self) -> "list[StackEventTypeDef]":
        """The events not seen before, oldest first."""
        client = aws.cloudformation(self.site)
        found: list[StackEventTypeDef] = []
        try:
            for page in client.get_paginator("describe_stack_events").paginate(StackName=self.name):
                fresh = [event for event in page["StackEvents"] if event["EventId"] not in self._seen]
                found += fresh
                if len(fresh) < len(page["StackEvents"]):
                    break
        except client.exceptions.ClientError as error:
            if not _absent(error.response["Error"].get("Message", "")):
                raise
        self._seen |= {event["EventId"] for event in found}
        self.latest = found[0]["EventId"] if found else self.latest
        return found[::-1]


def _describe(name: str, site: Site) -> "StackTypeDef | None":
    client = aws.cloudformation(site)
    try:
        return client.describe_stacks(StackName=name)["Stacks"][0]
    except client.exceptions.ClientError as error:
        if _absent(error.response["Error"].get("Message", "")):
            return None
        raise


def _absent(message: str) -> bool:
    return "does not exist" in message
