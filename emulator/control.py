"""The emulator's own pages, and what goes wrong on purpose before or after a request is answered.

GET /castra/emulator                        names this memory
GET, POST, DELETE /castra/faults            see `emulator.faults`
GET, POST, DELETE /castra/reservations      see `emulator.reservations`
GET, POST, DELETE /castra/quotas            see `emulator.quotas`
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from emulator import asked, extension, faults, quotas, reservations
from emulator.world import WITHIN

PREFIX = "/castra/"
PAGES = {"faults": faults, "reservations": reservations, "quotas": quotas}
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def page(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer one of the pages: GET lists, POST adds, DELETE forgets all; 400 with the reason for what does not fit."""
    about = PAGES.get(environ["PATH_INFO"].removeprefix(PREFIX))
    if about is None:
        return _json(start_response, "404 Not Found", {"error": f"the pages are {', '.join(PAGES)}"})
    try:
        if environ["REQUEST_METHOD"] == "POST":
            about.add(json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))))
        elif environ["REQUEST_METHOD"] == "DELETE":
            about.clear()
    except (ValueError, TypeError, LookupError) as error:
        return _json(start_response, "400 Bad Request", {"error": str(error)})
    return _json(start_response, "200 OK", about.listed())


def attended(application: Application, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Let a request have its answer, unless something befalls it."""
    if f"Credential={WITHIN}/" in environ.get("HTTP_AUTHORIZATION", ""):
        return application(environ, start_response)
    if faults.down():
        _hang_up(environ)
    service = extension.signed_for(environ)[0]
    if not faults.may_befall(service):
        return application(environ, start_response)
    fault = faults.of_request(service, asked.operation(environ, service))
    kind = fault.kind if fault else ""
    if fault and kind == "slow":
        time.sleep(fault.seconds)
    if kind == "drop":
        _hang_up(environ)
    if kind == "lost":
        for _ in application(environ, lambda *_: None):
            pass
        _hang_up(environ)
    if kind in ("throttle", "500"):
        status, content, body = asked.refusal(service, kind)
        start_response(f"{status} -", [("Content-Type", content), ("x-amzn-RequestId", "fault")])
        return [body.encode()]
    return application(environ, start_response)


def _hang_up(environ: dict[str, Any]) -> None:
    """Close the connection without an answer."""
    with contextlib.suppress(OSError, LookupError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("a fault that was asked for")


def _json(start_response: Callable[..., Any], status: str, told: Any) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps(told, default=str).encode()]
