"""Follow a build by what Packer and Ansible write: its progress, its tasks with their durations, why it failed."""

import json
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ami import packer
from ami.base import BuildFailed
from clusters import keeper
from tasks import report
from tasks.report import Bar

LOOK_S = 0.1
INSTANCE = re.compile(r"Instance ID: (i-[0-9a-f]+)")


@dataclass
class Story:
    """What is known of a build so far."""

    roles: tuple[str, ...]
    instance: str = ""
    task: str = "starting an instance"
    done: int = 0
    """Roles that are over."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """Of every task that ran: role, task, seconds, changed; and what failed."""
    bill: dict[str, str] = field(default_factory=dict)
    """Versions as they were found on the image."""
    errors: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    """The newest lines that are nobody's."""
    ended: str = ""
    """What its keeper says of its end."""
    program: str = "Packer"
    """What bakes."""

    def take_event(self, event: dict[str, Any]) -> None:
        """Learn from a line of ami.playbook's."""
        kind = event.pop("event")
        if kind == "playbook_on_task_start":
            self.task = f"{event['role']}: {event['task']}" if event["role"] else event["task"]
            if event["role"] in self.roles:
                self.done = self.roles.index(event["role"])
        elif kind != "runner_on_skipped":
            self.bill.update(event.pop("bill", {}))
            self.results.append(event)

    def take_line(self, text: str) -> None:
        """Learn from a line of Packer's."""
        told = packer.line(text)
        if told is None:
            self.last.append(text)
            return
        if told.kind not in ("ui", "error"):
            return
        if found := INSTANCE.search(told.text):
            self.instance = found[1]
        if told.error and told.error not in self.errors:
            self.errors.append(told.error)
        if told.text:
            report.relay([told.text])

    def failure(self, name: str) -> BuildFailed:
        """Why the build failed, in one sentence."""
        for event in self.results:
            if event.get("why") and not event.get("ignored"):
                where = f"task {event['task']!r} of role {event['role']} failed on {event['host']}"
                said = f"{name}: {where}: {event['why']}; fix ansible/roles/{event['role']}, then run again"
                return BuildFailed(said, passing=bool(packer.PASSING.search(event["why"])))
        told = "; ".join(self.errors[-2:] or [f"{self.program} {self.ended}", *self.last])
        return BuildFailed(f"{name}: {told}", passing=bool(packer.PASSING.search(told)))


class Reader:
    """The whole lines that a growing file gained since it was last read."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0

    def lines(self) -> list[str]:
        """Each line once."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.at += len(whole + newline)
        return whole.decode(errors="replace").splitlines()


def follow(folder: Path, story: Story, bar: Bar, launched: Any) -> bool:
    """Follow the build in `folder` to its end; returns whether it went well.

    `launched` is called once, when the instance is there.
    """
    log, events, known = Reader(folder / "log"), Reader(folder / "events.jsonl"), ""
    while True:
        ended = keeper.ended(folder)  # first, so that its last words are read
        for text in log.lines():
            story.take_line(text)
        for text in events.lines():
            story.take_event(json.loads(text))
        if story.instance and not known:
            known = story.instance
            launched()
        bar.update(story.done, len(story.roles), f"role {story.done + 1} of {len(story.roles)}, {story.task}")
        if ended:
            story.ended = str(ended["reason"])
            return bool(ended["state"] == "succeeded")
        time.sleep(LOOK_S)
