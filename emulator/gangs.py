"""What a batch system starts on its instances: containers, each in a guest of its own, logging to CloudWatch."""

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emulator import faults, guests
from emulator.aws import environment
from emulator.extension import PAGES
from emulator.memory import ACCOUNT

LARGEST_EVENT = 262_118
"""Bytes that Docker's awslogs driver puts into one event at most; longer lines are split."""
POLL_S = 0.02
STOP_S = "CASTRA_EMULATOR_STOP_S"
"""Environment variable: seconds from SIGTERM to SIGKILL, where the services' own 30 s and 120 s are too long."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOST: Any = object()
"""In place of an exit code: the instance is gone, nobody knows."""


class LogStream:
    """A stream of CloudWatch Logs, written into moto's memory: what went to it can be read at once."""

    def __init__(self, region: str, group: str, name: str, make_group: bool) -> None:
        """Raises `LookupError` if the group does not exist and is not to be made."""
        from moto.backends import get_backend

        self.group, self.name = group, name
        self._logs = get_backend("logs")[ACCOUNT][region]
        if group not in self._logs.groups:
            if not make_group:
                raise LookupError("ResourceNotFoundException: The specified log group does not exist.")
            self._logs.create_log_group(group, {})
        self._logs.create_log_stream(group, name)

    def write(self, lines: Iterable[bytes]) -> None:
        """Add lines; empty ones are no events, as CloudWatch takes none."""
        now = int(time.time() * 1000)
        pieces = [line[at : at + LARGEST_EVENT] for line in lines for at in range(0, len(line), LARGEST_EVENT)]
        events = [{"timestamp": now, "message": piece.decode(errors="replace")} for piece in pieces]
        if events:
            self._logs.put_log_events(self.group, self.name, events)


class Container:
    """The command of one node of a job, in a guest of its own."""

    def __init__(self, job: str, node: int, host: str, log: LogStream) -> None:
        """Boot the guest: `host` is its name, the guests of a job know each other."""
        self._place = job, node
        self.guest, self.log = guests.pool().boot(host, job), log
        if (odd := faults.of_node(node)) and isinstance(self.guest, guests.NamespaceGuest):
            self.guest.write(odd.path, odd.text, 0o755)
        RUNNING[self._place] = self
        self.instance = f"i-{secrets.token_hex(9)[:17]}"
        self._process: Any = None
        self._pump: threading.Thread | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Run the command; raises `OSError` if it cannot be."""
        read, write = os.pipe()
        try:
            self._process = self.guest.start(argv, env, write)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._pump = threading.Thread(target=self._ship, args=(read,), daemon=True)
        self._pump.start()

    @property
    def disk(self) -> Path | None:
        """Its root folder as this process sees it, None where it has no disk of its own."""
        return Path(f"/proc/{self.guest.pid}/root") if isinstance(self.guest, guests.NamespaceGuest) else None

    @property
    def code(self) -> Any:
        """None while it runs, then its exit code as Docker tells it, or `LOST`."""
        code = self._process.poll()
        if not self.guest.alive:
            return LOST
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End all that is left of it and wait until its log is complete."""
        RUNNING.pop(self._place, None)
        self.guest.stop()
        if self._pump:
            self._pump.join(10)

    def _ship(self, read: int) -> None:
        rest = b""
        with os.fdopen(read, "rb", buffering=0) as source:
            while data := source.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                self.log.write(line.rstrip(b"\r") for line in lines)
        self.log.write([rest])


RUNNING: dict[tuple[str, int], Container] = {}
"""The containers of this emulator, by job and node."""


def lose(told: Any) -> dict[str, str]:
    """POST /castra/lose {"job": …, "node": 1}: the instance of that node is gone, as if its plug were pulled."""
    place = str(told["job"]), int(told.get("node", 0))
    if (container := RUNNING.get(place)) is None:
        raise ValueError(f"no node {place[1]} of a job {place[0]} is running")
    container.guest.power_off()
    return {"instance": container.instance}


PAGES["/castra/lose"] = lose


def stop(containers: Sequence[Container], grace_s: float) -> None:
    """Ask all to end, give them `grace_s` seconds, end those that are left."""
    for one in containers:
        one.terminate()
    until = time.monotonic() + float(os.environ.get(STOP_S) or grace_s)
    while any(one.code is None for one in containers) and time.monotonic() < until:
        time.sleep(POLL_S)
    for one in containers:
        if one.code is None:
            one.kill()


def container_environment(endpoint: str, host: str) -> dict[str, str]:
    """What every container finds in its environment: a path, a home, and the emulator in place of AWS."""
    others = {name: value for name, value in os.environ.items() if name.startswith("AWS_ENDPOINT_URL_")}
    return {"PATH": PATH, "HOME": "/root", "HOSTNAME": host, **environment(endpoint), **others}
