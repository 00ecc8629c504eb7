"""What the emulator answers itself, in place of moto: one function per operation, whatever the protocol.

    @answers("batch", "POST /v1/submitjob")            REST: method and path, {name} catches a segment
    @answers("sagemaker", "CreateTrainingJob")         JSON: the X-Amz-Target's last word
    @answers("ec2", "DescribePlacementGroups")         query: the Action; lists and nesting as Name.1.Part
    def submit_job(call: Call) -> dict[str, Any]: ...

A function returns the answer's members under their names in the API, or raises `Fault`. Whatever no function answers
goes on to moto.
"""

import io
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class Fault(Exception):
    """The error an operation answers instead."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


@dataclass(frozen=True, slots=True)
class Call:
    """One request, understood."""

    service: str
    """As it is signed for: batch, sagemaker, ec2, servicequotas …"""
    operation: str
    region: str
    told: Mapping[str, Any]
    """The parameters: the JSON body, or a query's fields as they are sent (`Filter.1.Value.1`)."""
    path: Mapping[str, str]
    """What {name} caught."""


Answer = Callable[[Call], Mapping[str, Any] | None]
ANSWERS: dict[tuple[str, str], Answer] = {}
PAGES: dict[str, Callable[[Any], Any]] = {}
"""Pages of our own, by path: each takes the JSON that is posted to it, answers with JSON, and raises `ValueError`."""


def answers(service: str, operation: str) -> Callable[[Answer], Answer]:
    """Register a function for an operation."""

    def register(answer: Answer) -> Answer:
        ANSWERS[service, operation] = answer
        return answer

    return register


def signed_for(environ: Mapping[str, Any]) -> tuple[str, str]:
    """The service and the region that a request is signed for; empty where it is not signed."""
    scope = environ.get("HTTP_AUTHORIZATION", "").partition(",")[0].split("/")
    return (scope[3], scope[2]) if len(scope) >= 5 else ("", "")


def understood(environ: dict[str, Any]) -> Call | None:
    """The request as a call that is answered here, None if it is moto's; its body can still be read."""
    service, region = signed_for(environ)
    if not any(known == service for known, _ in ANSWERS):
        return None
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    if target := environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]:
        return _call(service, target, region, json.loads(body or b"{}"))
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True))
        return _call(service, fields.get("Action", ""), region, fields)
    return _rest(service, environ, region, body)


def respond(call: Call, start_response: StartResponse) -> Iterable[bytes]:
    """Answer a call in its service's protocol."""
    request_id = secrets.token_hex(16)
    query = "Action" in call.told and call.service == "ec2"
    try:
        told, status = ANSWERS[call.service, call.operation](call) or {}, 200
        body = _xml(call.operation, told, request_id) if query else json.dumps(told, default=str)
    except Fault as fault:
        told, status = {"__type": fault.code, "message": fault.message, "Message": fault.message}, fault.status
        body = _xml_fault(fault, request_id) if query else json.dumps(told)
        headers = [("x-amzn-ErrorType", fault.code)]
    else:
        headers = []
    kind = "text/xml" if query else "application/json"
    start_response(f"{status} -", [("Content-Type", kind), ("x-amzn-RequestId", request_id), *headers])
    return [body.encode()]


def page(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes] | None:
    """Answer for a page of our own, None if there is none at this path."""
    if (answer := PAGES.get(environ.get("PATH_INFO", ""))) is None:
        return None
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    try:
        told, status = answer(json.loads(body or b"null")), "200 OK"
    except ValueError as error:
        told, status = {"message": str(error)}, "400 Bad Request"
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps(told).encode()]


def listed(fields: Mapping[str, Any], name: str) -> list[str]:
    """A query's list: the values of `name.1`, `name.2` and so on."""
    return list(_numbered(fields, name))


def _numbered(fields: Mapping[str, Any], name: str) -> Iterator[str]:
    number = 1
    while f"{name}.{number}" in fields:
        yield fields[f"{name}.{number}"]
        number += 1


def _call(service: str, operation: str, region: str, told: Mapping[str, Any]) -> Call | None:
    return Call(service, operation, region, told, {}) if (service, operation) in ANSWERS else None


def _rest(service: str, environ: Mapping[str, Any], region: str, body: bytes) -> Call | None:
    path = environ.get("RAW_URI", environ.get("PATH_INFO", "")).partition("?")[0]  # an ARN in it has its own slashes
    asked = f"{environ['REQUEST_METHOD']} {path}"
    query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
    for known, operation in ANSWERS:
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(operation))
        if known == service and (found := re.fullmatch(pattern, asked)):
            caught = {name: unquote(value) for name, value in found.groupdict().items()}
            return Call(service, operation, region, json.loads(body or b"{}") | query, caught)
    return None


def _xml(operation: str, told: Mapping[str, Any], request_id: str) -> str:
    inner = "".join(_element(name, value) for name, value in told.items())
    space = "http://ec2.amazonaws.com/doc/2016-11-15/"
    return f'<{operation}Response xmlns="{space}"><requestId>{request_id}</requestId>{inner}</{operation}Response>'


def _element(name: str, value: Any) -> str:
    """EC2's XML: lists are `item`s, names begin in lower case."""
    name = name[:1].lower() + name[1:]
    if isinstance(value, list):
        return f"<{name}>{''.join(_element('item', one) for one in value)}</{name}>"
    if isinstance(value, Mapping):
        return f"<{name}>{''.join(_element(key, one) for key, one in value.items())}</{name}>"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"<{name}>{escape(text)}</{name}>"


def _xml_fault(fault: Fault, request_id: str) -> str:
    told = f"<Code>{escape(fault.code)}</Code><Message>{escape(fault.message)}</Message>"
    return f"<Response><Errors><Error>{told}</Error></Errors><RequestID>{request_id}</RequestID></Response>"
