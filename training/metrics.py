"""What a node does, for Prometheus: http://<CASTRA_METRICS>/metrics, served beside the program and never in its way.

CASTRA_METRICS is host:port, as in 127.0.0.1:9464; without it nothing is served, port 0 takes any. The figures are
those of the log (`training.job.progress` and `say`), so of a training's loss and speed only node 0 has them; every
node has the heartbeats of its own ranks, which these leave in a folder (`training.supervise.mark`). A port that is
busy, or a fault in here, is one line of the log.

Format: Prometheus' text exposition format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats, read 2026-11).
"""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from training.contract import Node
from training.job import MARK
from training.program import Log

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

VARIABLE: Final = "CASTRA_METRICS"
HOST: Final = "127.0.0.1"
PATH: Final = "/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
ANSWER_S: Final = 5.0
"""How long a client may take to ask and to read."""
Samples = list[tuple[dict[str, str], float]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name, its type, and what it says."""

    name: str
    kind: str
    help: str


FAMILIES: Final = (
    Family("castra_info", "gauge", "Always 1; the labels say what runs here."),
    Family("castra_nodes", "gauge", "Nodes of the job."),
    Family("castra_start_time_seconds", "gauge", "When this node's program began, since 1970."),
    Family("castra_step", "gauge", "Optimizer steps done."),
    Family("castra_steps_planned", "gauge", "Optimizer steps of the whole run."),
    Family("castra_tokens_total", "counter", "Tokens of the steps done, over all ranks."),
    Family("castra_productive_seconds_total", "counter", "Time that steps took which this node has seen end."),
    Family("castra_tokens_per_second", "gauge", "Of the last step, over all ranks."),
    Family("castra_step_seconds", "gauge", "How long the last step took."),
    Family("castra_loss", "gauge", "Of the last step, in nats per token."),
    Family("castra_eval_loss", "gauge", "On held-out text, in nats per token, when last measured."),
    Family("castra_grad_norm", "gauge", "Norm of the last step's gradients before clipping."),
    Family("castra_learning_rate", "gauge", "Of the last step."),
    Family("castra_mfu_ratio", "gauge", "Model FLOPs of the last step over the peak of all accelerators."),
    Family("castra_memory_bytes", "gauge", "Held by a rank: of its GPU, or resident on a CPU."),
    Family("castra_rank_step", "gauge", "Optimizer steps that a rank has done."),
    Family("castra_heartbeat_age_seconds", "gauge", "Since a rank last showed a sign of life."),
    Family("castra_phase_age_seconds", "gauge", "Since a rank began what it is doing; the label says what."),
    Family("castra_checkpoint_step", "gauge", "Step of the newest checkpoint that this attempt saved."),
    Family("castra_checkpoint_age_seconds", "gauge", "Since it was saved; before the first, since this node began."),
    Family("castra_restarts_total", "counter", "Attempts of this run before this one."),
    Family("castra_bad_steps_total", "counter", "Steps whose update was left out, in this attempt."),
    Family("castra_node_lost_total", "counter", "Nodes of the gang that were lost, in this attempt."),
    Family("castra_hangs_total", "counter", "Hangs that were seen, in this attempt."),
    Family("castra_stragglers_total", "counter", "Looks at the ranks that found one slow, in this attempt."),
    Family("castra_upload_failures_total", "counter", "Uploads that failed, in this attempt."),
)
COUNTED: Final = {
    "bad-step": "castra_bad_steps_total",
    "node-lost": "castra_node_lost_total",
    "hang": "castra_hangs_total",
    "straggler": "castra_stragglers_total",
    "upload-failing": "castra_upload_failures_total",
}
"""Events of the log, and what counts them."""
MEASURED: Final = {
    "loss": "castra_loss",
    "eval_loss": "castra_eval_loss",
    "grad_norm": "castra_grad_norm",
    "lr": "castra_learning_rate",
    "tokens_per_second": "castra_tokens_per_second",
    "step_seconds": "castra_step_seconds",
    "mfu": "castra_mfu_ratio",
}
"""Metrics of a step in the log, and their families."""


@dataclass
class Metrics:
    """What is known of one node's work. Lines are heard by one thread, and read by others."""

    info: dict[str, str]
    """Labels of castra_info; recipe, run and node are on everything."""
    tokens_per_step: int = 0
    attempt: int = 1
    beats: Path | None = None
    """Where the ranks of this node leave their signs of life."""
    _values: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.time)
    _saved: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._values |= dict.fromkeys(COUNTED.values(), 0.0)
        self._values["castra_restarts_total"] = float(self.attempt - 1)

    def hear(self, line: bytes) -> None:
        """Take in one line of the log; what is no fact, or none that is known here, changes nothing."""
        if not line.startswith(MARK.encode()):
            return
        try:
            told = json.loads(line[len(MARK) :])
            with self._lock:
                self._learn(told)
        except Exception:  # noqa: BLE001  whatever a program prints must not end who relays it
            return

    def text(self) -> str:
        """Everything in Prometheus' text format."""
        marks = sorted(_marks(self.beats), key=lambda mark: int(mark["rank"]))  # a slow disk holds up nobody else
        with self._lock:
            samples = self._ranks(marks) | self._now() | {name: [_alone(value)] for name, value in self._values.items()}
            return "".join(self._written(family, samples[family.name]) for family in FAMILIES if family.name in samples)

    def _learn(self, told: dict[str, Any]) -> None:
        event = told.get("event")
        if event in COUNTED:
            self._values[COUNTED[event]] += 1
        elif event == "restarted":
            self._values["castra_restarts_total"] = max(self._values["castra_restarts_total"], float(told["restarts"]))
        elif event == "checkpoint":
            self._values["castra_checkpoint_step"] = float(told["step"])
            self._saved = time.monotonic()
        elif event is None and told["unit"] == "step":
            self._step(float(told["done"]), float(told["total"]), told["metrics"])

    def _step(self, done: float, total: float, metrics: Mapping[str, float]) -> None:
        took = float(metrics.get("step_seconds", 0))
        before = self._values.get("castra_productive_seconds_total", 0.0)
        self._values |= {"castra_step": done, "castra_steps_planned": total}
        self._values["castra_productive_seconds_total"] = before + took
        self._values |= {MEASURED[name]: float(value) for name, value in metrics.items() if name in MEASURED}
        if self.tokens_per_step:
            self._values["castra_tokens_total"] = done * self.tokens_per_step

    def _now(self) -> dict[str, Samples]:
        found: dict[str, Samples] = {
            "castra_info": [(self.info, 1.0)],
            "castra_nodes": [({}, float(self.info.get("nodes", 1)))],
            "castra_start_time_seconds": [({}, self._began)],
        }
        if self.info.get("node", "0") == "0":  # whose log tells of checkpoints
            found["castra_checkpoint_age_seconds"] = [({}, time.monotonic() - self._saved)]
        return found

    def _ranks(self, marks: list[dict[str, Any]]) -> dict[str, Samples]:
        """What the ranks of this node tell of themselves, and how long ago they did."""
        found: dict[str, Samples] = {}
        now = time.monotonic()
        for mark in marks:
            rank, silence = {"rank": str(mark["rank"])}, max(0.0, now - float(mark["at"]))
            phase = rank | {"phase": str(mark["phase"])}
            found.setdefault("castra_heartbeat_age_seconds", []).append((rank, silence))
            found.setdefault("castra_phase_age_seconds", []).append((phase, silence + float(mark["age_s"])))
            found.setdefault("castra_rank_step", []).append((rank, float(mark["done"])))
            found.setdefault("castra_memory_bytes", []).append((rank, float(mark["memory_bytes"])))
        if marks and "castra_step" not in self._values:  # another node's log has it
            found["castra_step"] = [({}, float(min(mark["done"] for mark in marks)))]
        return found

    def _written(self, family: Family, samples: Samples) -> str:
        common = {name: self.info[name] for name in ("recipe", "run", "node") if name in self.info}
        lines = [f"# HELP {family.name} {_escaped(family.help, quote=False)}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in samples:
            told = ",".join(f'{name}="{_escaped(text)}"' for name, text in (common | labels).items())
            lines.append(f"{family.name}{{{told}}} {_number(value)}")
        return "\n".join(lines) + "\n"


def of_node(spec: Mapping[str, Any], run: str, node: Node, processes: int, beats: Path) -> Metrics:
    """The metrics of one node of a job, from the job's recipe; `processes` are those of each node."""
    info = {
        "recipe": str(spec.get("name", "")),
        "run": run,
        "node": str(node.rank),
        "nodes": str(node.nodes),
        "world_size": str(node.nodes * max(1, processes)),
        "strategy": str(spec.get("parallel", {}).get("strategy", "")),
        "host": socket.gethostname(),
        "platform": node.platform,
        "platform_job": node.job_id,
    }
    train, data = spec.get("train", {}), spec.get("data", {})
    tokens = int(train.get("global_batch_size", 0)) * int(data.get("sequence_length", 0))
    return Metrics(info, tokens_per_step=tokens, attempt=node.attempt, beats=beats)


def serve(metrics: Metrics, address: str, log: Log) -> None:
    """Serve them from a thread of its own at host:port, and say where; what prevents that is said, and no error."""
    try:
        server = _Server(*_place(address), metrics)
    except (OSError, ValueError, OverflowError) as problem:
        log.say("metrics-off", message=f"{VARIABLE}={address} serves nothing: {problem}")
        return
    log.say("metrics", address=f"http://{server.where}{PATH}")
    threading.Thread(target=server.run, args=(log,), daemon=True).start()


class _Server:
    """The HTTP server; its modules are imported only where one is wanted."""

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        from http.server import ThreadingHTTPServer
        from socketserver import TCPServer

        class Server(ThreadingHTTPServer):
            """One that asks no name server for its own name, and keeps a client's troubles to itself."""

            daemon_threads = True

            def server_bind(self) -> None:
                TCPServer.server_bind(self)

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Nothing: who asked has gone."""

        self._http = Server((host, port), _handler(metrics))
        bound = self._http.server_address
        self.where = f"{bound[0]!s}:{bound[1]}"

    def run(self, log: Log) -> None:
        """Answer until the process ends."""
        try:
            self._http.serve_forever()
        except Exception as problem:  # noqa: BLE001  whatever it is, it must not end the training
            log.say("metrics-off", message=f"the metrics of this node are no longer served: {problem!r}")


def _handler(metrics: Metrics) -> "type[BaseHTTPRequestHandler]":
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        """Answers GET /metrics."""

        timeout = ANSWER_S

        def do_GET(self) -> None:
            """Send everything."""
            if self.path.partition("?")[0] != PATH:
                self.send_error(404, f"there is only {PATH}")
                return
            body = metrics.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  http.server's name
            """Nothing: the log is the job's."""

    return Handler


def _place(address: str) -> tuple[str, int]:
    """Raises ValueError, with a sentence's end."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError("it must be host:port, as in 127.0.0.1:9464")
    return host.strip("[]") or HOST, int(port)


def _alone(value: float) -> tuple[dict[str, str], float]:
    return {}, value


def _marks(folder: Path | None) -> Iterator[dict[str, Any]]:
    """The newest sign of life of every rank that left one."""
    for path in folder.glob("rank-*.json") if folder else ():
        try:
            yield dict(json.loads(path.read_text()))
        except (OSError, ValueError):  # it has just been removed
            continue


def _escaped(text: str, *, quote: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
