"""The lines of a job from CloudWatch Logs: each once, the streams of its nodes merged by time.

The cursor is JSON: for every stream the time of the last line seen and how many lines of that millisecond were seen.
CloudWatch's own tokens would expire after a day.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clusters import aws
from clusters.aws import Site


@dataclass(frozen=True, slots=True)
class Stream:
    """A log stream and the words that its lines begin with, if they do not say themselves where they come from."""

    name: str
    prefix: str = ""


def read(site: Site, group: str, streams: Sequence[Stream], after: str) -> tuple[list[str], str]:
    """The lines after the cursor, by time, and the cursor to go on from."""
    seen: dict[str, list[int]] = json.loads(after or "{}")
    found: list[tuple[int, str]] = []
    with aws.sentences(site, f"logs of {group}"):
        for stream in streams:
            since, there = seen.get(stream.name, (0, 0))
            for when, line in _events(site, group, stream.name, since, there):
                there = there + 1 if when == since else 1
                since = when
                found.append((when, line if _named(line, stream.prefix) else stream.prefix + line))
            if since:
                seen[stream.name] = [since, there]
    lines = [line for _, line in sorted(found, key=lambda one: one[0])]
    return lines, json.dumps(seen, sort_keys=True) if lines else after


def _events(site: Site, group: str, stream: str, since: int, skip: int) -> Iterator[tuple[int, str]]:
    """The events from the time `since` on, but the first `skip` of them."""
    token: dict[str, Any] = {}
    logs = aws.client(site, "logs")
    asked = {"logGroupName": group, "logStreamName": stream, "startFromHead": True} | (
        {"startTime": since} if since else {}
    )
    while True:
        try:
            page = logs.get_log_events(**asked, **token)
        except logs.exceptions.ResourceNotFoundException:  # a stream is made when its first line comes
            return
        for event in page["events"]:
            if skip and event["timestamp"] == since:
                skip -= 1
            else:
                yield event["timestamp"], event["message"].rstrip("\r\n")
        if page["nextForwardToken"] == token.get("nextToken"):  # pages may be empty before the end
            return
        token = {"nextToken": page["nextForwardToken"]}


def _named(line: str, prefix: str) -> bool:
    return not prefix or line.startswith("[node")
