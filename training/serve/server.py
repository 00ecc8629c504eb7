"""The HTTP side: GET /ping and POST /invocations as SageMaker calls them, one thread per request, never a traceback."""

import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from queue import Empty
from typing import Any, Final

from training.process import JobError
from training.serve.answer import Answer
from training.serve.body import Asked, BadRequest, Reader
from training.serve.engine import Engine, Full
from training.serve.settings import Settings

PATHS: Final = ("/invocations", "/v1/completions", "/v1/chat/completions")
LINES: Final = ("application/jsonlines", "application/x-ndjson", "application/jsonl")
LOOK_EVERY: Final = 0.25
"""Seconds between two looks whether the one who asked is still there."""
SLOW: Final = 30.0
"""Seconds a client may take to send its request, or to take in a piece of the answer."""
SETTLE: Final = 3.0
"""Seconds that the last answers may take to be sent when the server ends."""
ENDS: Final = {
    "timeout": (HTTPStatus.GATEWAY_TIMEOUT, "the answer took longer than a request may; ask for fewer tokens"),
    "failed": (HTTPStatus.SERVICE_UNAVAILABLE, "the server ended before the answer did; ask again"),
    "cancelled": (HTTPStatus.SERVICE_UNAVAILABLE, "the request was taken back"),
}


class Refused(Exception):
    """An HTTP status and one sentence."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Server(ThreadingHTTPServer):
    """Listens, and hands what is asked to the engine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine, reader: Reader, settings: Settings) -> None:
        """Bind the address. Raises JobError when it is taken or not this machine's."""
        self.engine, self.reader, self.settings = engine, reader, settings
        self.under_way = 0
        """Requests whose answer is not sent yet."""
        self.changed = threading.Condition()
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            super().__init__((settings.host, settings.port), Handler)
        except OSError as problem:
            raise JobError(
                f"{settings.host}:{settings.port} cannot be listened at ({problem.strerror}); free it, or name another "
                "address in CASTRA_LISTEN"
            ) from problem

    def settle(self) -> None:
        """Take no more connections, and wait a little until what was answered is sent."""
        self.shutdown()
        with self.changed:
            self.changed.wait_for(lambda: not self.under_way, SETTLE)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client is gone, and its answer cancelled."""
        del request, client_address


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "castra", ""
    timeout = SLOW

    def do_GET(self) -> None:  # its name is the base class's
        if self.path != "/ping":
            self._tell(HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}; GET /ping or POST /invocations"})
        elif self.server.engine.open:
            self._tell(HTTPStatus.OK, {"status": "ok"})
        else:
            self._tell(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the server is about to end"})

    def do_POST(self) -> None:
        with self._under_way():
            self._post()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        with self.server.changed:
            self.server.under_way += 1
        try:
            yield
        finally:
            with self.server.changed:
                self.server.under_way -= 1
                self.server.changed.notify_all()

    def _post(self) -> None:
        try:
            self._answer(self._body())
        except Refused as refused:
            self._tell(refused.status, {"error": str(refused)})
        except BadRequest as problem:
            self._tell(HTTPStatus.BAD_REQUEST, {"error": str(problem)})
        except Full as problem:
            self._tell(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(problem)})

    def _body(self) -> bytes:
        """Read the body. Raises Refused; the connection ends with it where the body was not read."""
        self.close_connection, keep = True, self.close_connection
        length = self.headers.get("Content-Length", "")
        if self.path not in PATHS:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no {self.path}; POST /invocations")
        if not length.isdecimal():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the request does not say how long its body is (Content-Length)")
        if int(length) > self.server.settings.body:
            most = self.server.settings.body
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {length} bytes, and at most {most} may be"
            )
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {SLOW:g} s") from None
        self.close_connection = keep
        return body

    def _answer(self, body: bytes) -> None:
        kind = (self.headers.get("Content-Type") or "application/json").partition(";")[0].strip().lower()
        if kind in LINES:
            asked = [self.server.reader.read(_json(line, f"line {i}")) for i, line in _lines(body)]
            if not asked or any(one.stream for one in asked):
                raise BadRequest("the lines are none, or one of them asks for a stream; send such a request alone")
            self._send(HTTPStatus.OK, "application/jsonlines", _dump(self._waited(asked)))
        elif kind != "application/json":
            sentence = f"{kind} cannot be read; send application/json or application/jsonlines"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence)
        else:
            one = self.server.reader.read(_json(body, "the body"))
            if one.stream:
                self._stream(one)
            else:
                self._tell(HTTPStatus.OK, self._waited([one])[0])

    def _waited(self, asked: list[Asked]) -> list[Any]:
        """Return whole answers. Raises Refused where one did not come to its end."""
        answers = self.server.engine.submit([wish for one in asked for wish in one.wishes])
        try:
            texts = ["".join(self._pieces(answer)) for answer in answers]
        except ConnectionError:
            for answer in answers:
                answer.cancelled = True
            raise
        for answer in answers:
            if answer.reason in ENDS:
                raise Refused(*ENDS[answer.reason])
        whole, place = [], 0
        for one in asked:
            mine = slice(place, place + len(one.wishes))
            whole.append(one.whole(answers[mine], texts[mine]))
            place = mine.stop
        return whole

    def _stream(self, asked: Asked) -> None:
        """Send an answer piece by piece as server-sent events, chunked; its errors too, once it has begun."""
        answer = self.server.engine.submit(asked.wishes)[0]
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for text in chain(filter(None, asked.echo), self._pieces(answer)):
                self._event(json.dumps(asked.piece(text, None)))
            if answer.reason in ENDS:
                self._event(json.dumps({"error": ENDS[answer.reason][1]}))
            else:
                self._event(json.dumps(asked.piece("", answer.reason)))
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            answer.cancelled = True
            self.close_connection = True

    def _pieces(self, answer: Answer) -> Iterator[str]:
        """Yield an answer's text as it comes. Raises ConnectionError when nobody is there to take it."""
        while True:
            try:
                piece = answer.pieces.get(timeout=LOOK_EVERY)
            except Empty:
                if self._gone():
                    raise ConnectionAbortedError from None
                continue
            if piece is None:
                return
            yield piece

    def _gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _tell(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, "application/json", _dump([value]))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name is the base class's
        """Keep requests out of the job's log."""
        del format, args


def _lines(body: bytes) -> list[tuple[int, bytes]]:
    return [(i, line) for i, line in enumerate(body.splitlines(), 1) if line.strip()]


def _json(body: bytes, what: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as problem:
        where = f" at character {problem.pos}" if isinstance(problem, json.JSONDecodeError) else ""
        raise BadRequest(f"{what} is no JSON: it cannot be read{where}") from None


def _dump(values: list[Any]) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)
