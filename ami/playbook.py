"""Packer's way to Ansible: ansible-playbook through ansible-runner, each task's result as a line of JSON.

    playbook -i inventory -e @playbook.json node.yml      (as Packer calls it, see ami.stage)

Writes `CASTRA_EVENTS`. Runs on the control plane, beside Packer, in a process of its own.
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVENTS = "CASTRA_EVENTS"
SECRETS = ("AWS_", "PREFECT_", "CASTRA_", "PKR_", "PACKER_")
"""What begins with this is none of Ansible's business."""
FOUND = "_found"
"""How the facts end in which a role notes the versions that it found."""
LONGEST = 4000
"""Of what a failed task said, the last so many letters are kept."""


def event_line(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is told of an event of ansible-runner's; None for what says nothing new."""
    kind, told = event["event"], event.get("event_data") or {}
    line = {"event": kind} | {name: told.get(name) or "" for name in ("role", "task", "host")}
    if kind in ("playbook_on_task_start", "runner_on_skipped"):
        return line
    if kind not in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
        return None
    result: Mapping[str, Any] = told.get("res") or {}
    line |= {"seconds": told.get("duration", 0.0), "changed": bool(result.get("changed"))}
    if kind != "runner_on_ok":
        return line | {"why": _why(result), "ignored": bool(told.get("ignore_errors"))}
    found = [value for name, value in result.get("ansible_facts", {}).items() if name.endswith(FOUND)]
    return line | ({"bill": found[0]} if found else {})


def _why(result: Mapping[str, Any]) -> str:
    """What a failed task said: of a loop, the first item that failed."""
    for item in result.get("results", ()):
        if item.get("failed"):
            return _why(item)
    said = [str(result[name]).strip() for name in ("msg", "stderr", "module_stderr") if result.get(name)]
    return "; ".join(dict.fromkeys(said))[-LONGEST:]


def main(argv: list[str]) -> int:
    """Run ansible-playbook; returns its exit code."""
    import ansible_runner

    if "--version" in argv:  # Packer asks first
        os.execvp("ansible-playbook", ["ansible-playbook", "--version"])  # noqa: S606
    events = Path(os.environ[EVENTS])
    for name in [name for name in os.environ if name.startswith(SECRETS)]:
        del os.environ[name]
    cancelled = threading.Event()  # a callback keeps ansible-runner from taking over the signals
    with events.open("a", buffering=1) as out, tempfile.TemporaryDirectory() as private:

        def take(event: Mapping[str, Any]) -> bool:
            if line := event_line(event):
                out.write(json.dumps(line, default=str) + "\n")
            if event.get("stdout"):
                print(event["stdout"], flush=True)
            return False  # keep no copy on disk

        _, _, code = ansible_runner.run_command(
            executable_cmd="ansible-playbook",
            cmdline_args=argv,
            private_data_dir=private,
            event_handler=take,
            cancel_callback=cancelled.is_set,
            suppress_env_files=True,
            quiet=True,
            host_cwd=str(Path.cwd()),
        )
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
