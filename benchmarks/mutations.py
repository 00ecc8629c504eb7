"""Count every request of this process that changes something, and die before or after a chosen one.

Works below all client libraries, on http.client, and on the commands that change a cluster (sbatch, scancel, pcluster).
"""

import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READS = re.compile(r"(Describe|List|Get|Head|Validate|Lookup)|/v1/(describe|list)")
CHANGING = ("sbatch", "scancel", "create-cluster", "update-cluster", "delete-cluster")


@dataclass
class Counter:
    """The requests so far, and where to die: at the `at`-th, `before` it is sent or after its answer has come."""

    trace: Path
    at: int = 0
    before: bool = True
    count: int = 0
    names: list[str] = field(default_factory=list)

    def begins(self, name: str) -> None:
        """A request that changes something is about to be sent."""
        self.count += 1
        with self.trace.open("a") as out:
            out.write(json.dumps([self.count, name]) + "\n")
        if self.count == self.at and self.before:
            os.kill(os.getpid(), signal.SIGKILL)

    def answered(self) -> None:
        """Its answer is here, and nobody has read it."""
        if self.count == self.at and not self.before:
            os.kill(os.getpid(), signal.SIGKILL)


def install(counter: Counter) -> None:
    """Watch this process from here on."""
    _watch_http(counter)
    _watch_commands(counter)


def _watch_http(counter: Counter) -> None:  # noqa: C901  five hooks, one after another
    connection: Any = http.client.HTTPConnection
    put_request, put_header = connection.putrequest, connection.putheader
    end_headers, send_body, get_response = connection.endheaders, connection.send, connection.getresponse

    def putrequest(self: Any, method: str, url: str, *told: Any, **more: Any) -> Any:
        self.castra = {"method": method, "url": url, "target": "", "form": "", "name": "", "state": "headers"}
        return put_request(self, method, url, *told, **more)

    def putheader(self: Any, header: Any, *values: Any) -> Any:
        name, value = _text(header).lower(), _text(values[0])
        if name == "x-amz-target":
            self.castra["target"] = value
        elif name == "content-type" and "form-urlencoded" in value:
            self.castra["form"] = "yes"
        return put_header(self, header, *values)

    def endheaders(self: Any, message_body: Any = None, **more: Any) -> Any:
        if message_body is not None or not self.castra["form"]:
            _decide(self.castra, message_body, counter)
        done = end_headers(self, message_body, **more)
        if self.castra["state"] == "headers":
            self.castra["state"] = "body"
        return done

    def send(self: Any, data: Any) -> Any:
        told = getattr(self, "castra", {})
        if told.get("state") == "body" and told["form"]:
            _decide(told, data, counter)
        return send_body(self, data)

    def getresponse(self: Any, *told: Any, **more: Any) -> Any:
        response = get_response(self, *told, **more)
        if getattr(self, "castra", {}).get("name"):
            counter.answered()
        return response

    connection.putrequest, connection.putheader = putrequest, putheader
    connection.endheaders, connection.send, connection.getresponse = endheaders, send, getresponse


def _decide(request: dict[str, str], body: Any, counter: Counter) -> None:
    """A query's action is in its body, which comes after the headers."""
    request["state"] = "decided"
    request["name"] = _name(request, body)
    if request["name"]:
        counter.begins(request["name"])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _name(request: dict[str, str], body: Any) -> str:
    """What a request changes, in words; empty if it only reads."""
    method, path = request["method"], request["url"].partition("?")[0]
    if method in ("GET", "HEAD"):
        return ""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    action = re.match(r"Action=(\w+)|.*&Action=(\w+)", text[:4000])
    said = request["target"].rpartition(".")[2] or (action and (action[1] or action[2])) or f"{method} {path}"
    return "" if READS.match(said) or READS.search(path) else said


def _watch_commands(counter: Counter) -> None:
    run: Callable[..., Any] = subprocess.run

    def counted(argv: Any, *told: Any, **more: Any) -> Any:
        words = " ".join(map(str, argv)) if isinstance(argv, list | tuple) else str(argv)
        changing = next((word for word in CHANGING if word in words), "")
        if changing:
            counter.begins(changing)
        done = run(argv, *told, **more)
        if changing:
            counter.answered()
        return done

    subprocess.run = counted  # type: ignore[assignment]  # overloads are for readers
