"""Deploy and delete CloudFormation stacks by change sets, so that a killed run converges when it is run again.

propose(stack) → Proposal → apply(proposal, token) → events … → outputs(name, site)
delete(name, site, owner, token) → events …

Nothing is remembered between calls: what stands is looked up, the change set's name is the hash of what it leads to,
and the client token makes a repeated request the same request.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusters import aws
from clusters.aws import Site
from clusters.base import ClusterError, Refused
from clusters.stacks.watch import Event, Watch, busy, look, pauses

if TYPE_CHECKING:
    from mypy_boto3_cloudformation.type_defs import DescribeChangeSetOutputTypeDef
    from mypy_boto3_s3.type_defs import ObjectIdentifierTypeDef

__all__ = ["Change", "Event", "Proposal", "Stack", "apply", "delete", "outputs", "propose"]

LARGEST_TEMPLATE = 51_200
"""Bytes that CloudFormation accepts inline."""
NO_CHANGES = ("didn't contain changes", "No updates are to be performed")
TRIES = 2
"""A creation that was rolled back is tried once more: some failures are races within AWS."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What should stand: a template under a name, with tags, at a site."""

    name: str
    template: Mapping[str, Any]
    tags: Mapping[str, str]
    site: Site

    @property
    def body(self) -> str:
        """The template as it is sent."""
        return json.dumps(self.template, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a change set."""

    action: str
    """Add, Modify, Remove."""
    logical_id: str
    type: str
    replacement: str
    """True, Conditional, False; empty for what is not modified."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change set that waits to be applied; `change_set` is empty if there is nothing to do."""

    stack: Stack
    change_set: str
    changes: tuple[Change, ...]


def propose(stack: Stack) -> Proposal:
    """Create the change set that leads from what stands to `stack`, or find the one that was created before.

    Waits for an operation that is under way, and removes a stack whose creation was rolled back. Where the stack stands
    as wanted nothing is created. Raises `ClusterError`.
    """
    if len(stack.body.encode()) > LARGEST_TEMPLATE:
        raise Refused(
            f"stack {stack.name}: its template has more than {LARGEST_TEMPLATE} bytes; split it in two stacks"
        )
    with aws.sentences(stack.site, f"stack {stack.name}"):
        exists = _settle(stack.name, stack.site)
        if exists and _stands(stack):
            return Proposal(stack, "", ())
        described = _change_set(stack, exists=exists)
    if described["Status"] == "FAILED":
        reason = described.get("StatusReason", "")
        with aws.sentences(stack.site, f"stack {stack.name}"):
            aws.cloudformation(stack.site).delete_change_set(ChangeSetName=described["ChangeSetId"])
        if any(words in reason for words in NO_CHANGES):
            return Proposal(stack, "", ())
        raise ClusterError(f"stack {stack.name} in {stack.site}: no change set ({reason}); fix the template")
    return Proposal(stack, described["ChangeSetId"], tuple(_changes(described)))


def apply(proposal: Proposal, token: str) -> Iterator[Event]:
    """Execute a proposal and tell its events until the stack stands; a creation rolled back is tried once more.

    `token` identifies the operation: the same one sent twice is carried out once. Raises `ClusterError` with the reason
    of the first resource that failed.
    """
    stack = proposal.stack
    for attempt in range(1, TRIES + 1):
        if not proposal.change_set:
            return
        with aws.sentences(stack.site, f"stack {stack.name}"):
            watch = Watch(stack.name, stack.site)
            _execute(proposal, _token(token, proposal.change_set))
            yield from watch.events()
        if watch.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
            return
        if watch.status != "ROLLBACK_COMPLETE" or attempt == TRIES:
            raise ClusterError(f"stack {stack.name} in {stack.site} is in {watch.status}: {watch.failure}")
        proposal = propose(stack)


def outputs(name: str, site: Site) -> dict[str, str]:
    """The outputs of the stack of that name; raises `ClusterError` if it does not stand."""
    with aws.sentences(site, f"stack {name}"):
        there = look(name, site)
    if there is None:
        raise ClusterError(f"stack {name} does not stand in {site}; provision it first")
    return {told["OutputKey"]: told["OutputValue"] for told in there.get("Outputs", [])}


def delete(name: str, site: Site, owner: str, token: str) -> Iterator[Event]:
    """Empty the stack's buckets, delete it and tell its events until it is gone; fine where there is none.

    Raises `Refused` if its tag castra:owner is not `owner`, `ClusterError` with the reason if something does not go.
    """
    with aws.sentences(site, f"stack {name}"):
        there = look(name, site)
        if there is None:
            return
        theirs = next((tag["Value"] for tag in there.get("Tags", []) if tag["Key"] == "castra:owner"), None)
        if theirs != owner and there["StackStatus"] != "REVIEW_IN_PROGRESS":  # that one has no tags, and nothing in it
            raise Refused(f"stack {name} in {site} belongs to {theirs or 'somebody else'}, not to {owner}: left alone")
        if busy(there["StackStatus"]):
            watch = Watch(there["StackId"], site)
            yield from watch.events(patience_s=0)
            if watch.status == "DELETE_COMPLETE":
                return
        yield from _delete(there["StackId"], site, token)


def _token(token: str, of: str) -> str:
    """A client token for one request of an operation: at most 128 letters, digits and dashes."""
    return f"{token}-{hashlib.sha256(of.encode()).hexdigest()[:16]}"[-128:]


def _settle(name: str, site: Site) -> bool:
    """Wait for what is under way, remove what was rolled back; returns whether the stack exists."""
    there = look(name, site)
    if there and busy(there["StackStatus"]):
        list(Watch(there["StackId"], site).events(patience_s=0))
        there = look(name, site)
    if there is None or there["StackStatus"] == "REVIEW_IN_PROGRESS":
        return False
    if there["StackStatus"] in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED"):
        list(_delete(there["StackId"], site, "castra"))
        return False
    if there["StackStatus"].endswith("_FAILED"):
        raise ClusterError(
            f"stack {name} in {site} is stuck in {there['StackStatus']}: continue its rollback, or tear it down"
        )
    return True


def _stands(stack: Stack) -> bool:
    """Whether the stack that exists was made from this very template with these tags."""
    there = look(stack.name, stack.site)
    tags = {tag["Key"]: tag["Value"] for tag in there.get("Tags", [])} if there else {}
    body = aws.cloudformation(stack.site).get_template(StackName=stack.name, TemplateStage="Original")["TemplateBody"]
    return tags == stack.tags and body == json.loads(stack.body)


def _change_set(stack: Stack, *, exists: bool) -> "DescribeChangeSetOutputTypeDef":
    """Create the change set unless a usable one of that name is there, and wait until it is worked out."""
    client = aws.cloudformation(stack.site)
    told = json.dumps([stack.body, sorted(stack.tags.items())])
    name = f"castra-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    there = _described(stack, name) if look(stack.name, stack.site) else None
    if there and (there["Status"] == "FAILED" or there["ExecutionStatus"] not in ("AVAILABLE", "UNAVAILABLE")):
        client.delete_change_set(ChangeSetName=there["ChangeSetId"])
        there = None
    if there is None:
        with contextlib.suppress(client.exceptions.AlreadyExistsException):  # two at this moment: both mean the same
            client.create_change_set(
                StackName=stack.name,
                ChangeSetName=name,
                ChangeSetType="UPDATE" if exists else "CREATE",
                TemplateBody=stack.body,
                Tags=[{"Key": key, "Value": value} for key, value in stack.tags.items()],
                Capabilities=["CAPABILITY_IAM"],
            )
    for pause in pauses(f"change set {name} of stack {stack.name}"):
        there = _described(stack, name)
        if there and there["Status"] in ("CREATE_COMPLETE", "FAILED"):
            break
        time.sleep(pause)
    assert there is not None
    return there


def _described(stack: Stack, name: str) -> "DescribeChangeSetOutputTypeDef | None":
    client = aws.cloudformation(stack.site)
    try:
        there = client.describe_change_set(StackName=stack.name, ChangeSetName=name)
        page = there
        while token := page.get("NextToken"):
            page = client.describe_change_set(StackName=stack.name, ChangeSetName=name, NextToken=token)
            there["Changes"] += page["Changes"]
    except client.exceptions.ChangeSetNotFoundException:
        return None
    return there


def _changes(described: "DescribeChangeSetOutputTypeDef") -> Iterator[Change]:
    for row in described["Changes"]:
        told = row["ResourceChange"]
        yield Change(told["Action"], told["LogicalResourceId"], told["ResourceType"], told.get("Replacement", ""))


def _execute(proposal: Proposal, token: str) -> None:
    client = aws.cloudformation(proposal.stack.site)
    executed = (client.exceptions.InvalidChangeSetStatusException, client.exceptions.ChangeSetNotFoundException)
    with contextlib.suppress(*executed):  # by somebody else, since: what follows is watched all the same
        client.execute_change_set(ChangeSetName=proposal.change_set, ClientRequestToken=token)


def _delete(stack_id: str, site: Site, token: str) -> Iterator[Event]:
    """Empty the buckets, delete, watch; once more if something was left, for a bucket may have been written to."""
    for attempt in range(1, TRIES + 1):
        _empty_buckets(stack_id, site)
        watch = Watch(stack_id, site)
        aws.cloudformation(site).delete_stack(StackName=stack_id, ClientRequestToken=_token(token, watch.latest))
        yield from watch.events()
        if watch.status == "DELETE_COMPLETE":
            return
        if attempt == TRIES:
            raise ClusterError(f"stack {stack_id} in {site} is in {watch.status}: {watch.failure}; remove that by hand")


def _empty_buckets(stack_id: str, site: Site) -> None:
    client = aws.cloudformation(site)
    kept = _retained(stack_id, site)
    for page in client.get_paginator("list_stack_resources").paginate(StackName=stack_id):
        for row in page["StackResourceSummaries"]:
            bucket = row["ResourceType"] == "AWS::S3::Bucket" and row["LogicalResourceId"] not in kept
            if bucket and row["ResourceStatus"] != "DELETE_COMPLETE":
                _empty(row.get("PhysicalResourceId", ""), site)


def _retained(stack_id: str, site: Site) -> set[str]:
    """The logical ids of what outlives its stack: its contents are not ours to delete."""
    client = aws.cloudformation(site)
    body: Any = client.get_template(StackName=stack_id, TemplateStage="Original")["TemplateBody"]
    told = json.loads(body) if isinstance(body, str) else body
    resources = told.get("Resources", {}).items()
    return {name for name, made in resources if made.get("DeletionPolicy", "Delete") != "Delete"}


def _empty(bucket: str, site: Site) -> None:
    """Delete every version of every object, and every upload that was begun; fine if there is no such bucket."""
    client = aws.s3(site)
    try:
        for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket):
            found = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
            keys: list[ObjectIdentifierTypeDef] = [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in found]
            if keys:
                client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
        for uploads in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket):
            for one in uploads.get("Uploads", []):
                client.abort_multipart_upload(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
    except client.exceptions.NoSuchBucket:
        return
