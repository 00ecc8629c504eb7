"""Prefect's server for a flow that is run by hand: the one that is up, or one that lives as long as the flow."""

import atexit
import contextlib
import os
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console

from clusters import keeper
from clusters.base import Refused, Unreachable
from store.objects import state_folder

START_S = 120.0
LOCAL = ("127.0.0.1", "localhost", "::1")


def prefect_server(console: Console) -> str:
    """Make this process use a Prefect server from here to its end; returns the URL of the UI.

    A server that answers at PREFECT_API_URL (`make ui` starts one) is used. Otherwise one is started on a free port of
    127.0.0.1, with its database in Castra's state folder, and ends with this process, however that ends.
    Raises `Unreachable` if a server elsewhere was asked for and does not answer.
    """
    wanted = str(PREFECT_API_URL.value() or "")
    if wanted and answers(wanted):
        return wanted.removesuffix("/api")
    if wanted and urlsplit(wanted).hostname not in LOCAL:
        raise Unreachable(f"the Prefect server {wanted} does not answer: check PREFECT_API_URL, or unset it")
    life = contextlib.ExitStack()
    # Not at the end of a block: Prefect sends its last logs and events while the interpreter shuts down.
    atexit.register(life.close)
    url = life.enter_context(embedded(keeper.free_port(), console))
    life.enter_context(temporary_settings({PREFECT_API_URL: f"{url}/api"}))
    return url


@contextlib.contextmanager
def embedded(port: int, console: Console) -> Iterator[str]:
    """Run a Prefect server on 127.0.0.1 for the length of the block; yields its URL.

    Raises `Refused` if the port is taken, `Unreachable` with the server's last words if it does not come up.
    """
    _refuse_taken(port)
    url, folder = f"http://127.0.0.1:{port}", _fresh_folder()
    keeper.start(folder, [keeper.Node(_argv(port), _environment(url, port))])
    try:
        with console.status("starting Prefect's server"):
            _await(f"{url}/api", folder)
        yield url
    finally:
        keeper.stop(folder, wait_s=10)
        shutil.rmtree(folder, ignore_errors=True)


def answers(api: str) -> bool:
    """Whether a Prefect server is up at this API URL."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=5) as reply:  # noqa: S310 - an http address of ours
            return bool(reply.read() == b"true")
    except (OSError, ValueError):
        return False


def _argv(port: int) -> list[str]:
    server = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    return [sys.executable, *server, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]


def _environment(url: str, port: int) -> dict[str, str]:
    return {
        "DO_NOT_TRACK": "1",
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_HOME": os.environ["PREFECT_HOME"],
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
    }


def _fresh_folder() -> Path:
    services = state_folder() / "services"
    for left in services.glob("prefect-*"):  # of runs that were killed
        if not keeper.alive(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = services / f"prefect-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise Refused(
                f"port {port} of 127.0.0.1 is in use by something that is not Prefect: stop it, or give another port"
            ) from None


def _await(api: str, folder: Path) -> None:
    until = time.monotonic() + START_S
    while not answers(api):
        if keeper.ended(folder) or time.monotonic() > until:
            log = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise Unreachable(f"Prefect's server did not come up: {log[-1] if log else 'it said nothing'}")
        time.sleep(0.1)
