"""What a request asks for, by the names in botocore's models, and how that service says no."""

import io
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

BY_ANOTHER_NAME = {"servicequotas": "service-quotas", "monitoring": "cloudwatch", "api.pricing": "pricing"}
"""Services that sign with another name than botocore's."""
THROTTLED = {"ec2": ("RequestLimitExceeded", 503), "s3": ("SlowDown", 503), "query": ("Throttling", 400)}
THROTTLED |= {"rest-json": ("TooManyRequestsException", 429), "json": ("ThrottlingException", 400)}
BROKEN = {"s3": ("InternalError", 500), "json": ("InternalServerError", 500), "rest-json": ("InternalServerError", 500)}


def operation(environ: dict[str, Any], service: str) -> str:
    """The name of the operation, "" if it cannot be told; the body can still be read."""
    if target := environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]:
        return str(target)
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        return str(dict(parse_qsl(body.decode(), keep_blank_values=True)).get("Action", ""))
    path = environ.get("RAW_URI", environ.get("PATH_INFO", "")).partition("?")[0]
    query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    told = set(query) | set(environ)
    fitting = [
        (len(needed), len(pattern.pattern), name)
        for method, pattern, needed, name in _routes(service)
        if method == environ["REQUEST_METHOD"] and pattern.fullmatch(unquote(path) or "/") and needed <= told
    ]
    return str(max(fitting)[2]) if fitting else ""


def refusal(service: str, kind: str) -> tuple[int, str, str]:
    """How a service says that it throttles ("throttle") or is broken ("500"): status, content type, body."""
    protocol = service if service in ("ec2", "s3") else _protocol(service)
    table = THROTTLED if kind == "throttle" else BROKEN
    code, status = table.get(protocol, ("InternalFailure", 500))
    message = "Rate exceeded" if kind == "throttle" else "An internal error occurred"
    request_id = secrets.token_hex(16)
    if protocol in ("json", "rest-json"):
        return status, "application/json", json.dumps({"__type": code, "message": message})
    told = f"<Code>{code}</Code><Message>{escape(message)}</Message>"
    if protocol == "s3":
        return status, "application/xml", f"<Error>{told}<RequestId>{request_id}</RequestId></Error>"
    if protocol == "ec2":
        body = f"<Response><Errors><Error>{told}</Error></Errors><RequestID>{request_id}</RequestID></Response>"
        return status, "text/xml", body
    error = f"<Error><Type>Sender</Type>{told}</Error><RequestId>{request_id}</RequestId>"
    return status, "text/xml", f"<ErrorResponse>{error}</ErrorResponse>"


@cache
def _model(service: str) -> Mapping[str, Any]:
    from botocore.exceptions import UnknownServiceError
    from botocore.loaders import Loader

    try:
        return dict(Loader().load_service_model(BY_ANOTHER_NAME.get(service, service), "service-2"))
    except UnknownServiceError:
        return {"metadata": {"protocol": "json"}, "operations": {}, "shapes": {}}


def _protocol(service: str) -> str:
    return str(_model(service)["metadata"]["protocol"])


@cache
def _routes(service: str) -> list[tuple[str, re.Pattern[str], set[str], str]]:
    return list(_each_route(service))


def _each_route(service: str) -> Iterator[tuple[str, re.Pattern[str], set[str], str]]:
    """Method, path, the query's fields and headers that have to be there, and name of every operation."""
    model = _model(service)
    for name, told in model["operations"].items():
        path, _, query = told["http"].get("requestUri", "/").partition("?")
        needed = {field.partition("=")[0] for field in query.split("&") if field}
        shape = model["shapes"].get(told.get("input", {}).get("shape", ""), {})
        for about in (shape["members"][member] for member in shape.get("required", [])):
            if about.get("location") == "querystring":
                needed.add(about["locationName"])
            elif about.get("location") == "header":
                needed.add(_header(about["locationName"]))
        pattern = re.sub(r"\\\{[^}]+?(\\\+)?\\\}", lambda found: ".+" if found.group(1) else "[^/]+", re.escape(path))
        yield told["http"]["method"], re.compile(pattern), needed, name


def _header(name: str) -> str:
    return f"HTTP_{name.upper().replace('-', '_')}"
