"""Bring up everything a person needs to use Castra from the browser: server, emulated AWS, deployments, a worker.

    python -m deployments.up        # or: make ui

Stays in the foreground; Ctrl-C ends all of it, runs included. Nothing listens beyond 127.0.0.1.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import cyclopts
from prefect.settings import PREFECT_API_URL, temporary_settings

from clusters import keeper
from clusters.base import Refused
from deployments import automations
from emulator import aws as emulated
from flows._house import MISTAKES
from flows._input import sentences
from flows._server import answers, embedded
from store.objects import state_folder
from tasks.phrases import CONSOLE

PROJECT = Path(__file__).parents[1]
POOL = "castra"


def main(port: int = 4200) -> None:
    """Run until Ctrl-C. Exit code 2 with one sentence if the port is taken."""
    with sentences(MISTAKES), contextlib.ExitStack() as up:
        if answers(f"http://127.0.0.1:{port}/api"):
            raise Refused(f"a Prefect server is up at http://127.0.0.1:{port} already: use it, or stop it first")
        url = up.enter_context(embedded(port, CONSOLE))
        up.enter_context(temporary_settings({PREFECT_API_URL: f"{url}/api"}))
        aws = up.enter_context(emulated.running())
        env = {"PREFECT_API_URL": f"{url}/api", "CASTRA_PROJECT": str(PROJECT), **emulated.environment(aws.endpoint)}
        with CONSOLE.status("deploying every flow"):
            deploy(env)
        worker = start_worker(env)
        up.callback(keeper.stop, worker, 15)
        CONSOLE.print(f"Castra is up: {url}\n\n  [bold]prefect deployment run 'lifecycle/rehearsal' --watch[/]\n")
        CONSOLE.print("[dim]Ctrl-C ends all of it[/]")
        while keeper.alive(worker):
            time.sleep(1)
        raise Refused(f"the worker ended: {_last_line(worker)}")


def deploy(env: Mapping[str, str]) -> None:
    """Create the work pool, the deployments and the automations on the server that `env` names."""
    _prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"], env)
    _prefect(["deploy", "--all", "--prefect-file", "deployments/prefect.yaml"], env)
    asyncio.run(automations.ensure())


def start_worker(env: Mapping[str, str]) -> Path:
    """Start a worker that ends with this process, and its runs with it; returns its keeper's folder."""
    folder = state_folder() / "services" / f"worker-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    argv = [*_command(), "worker", "start", "--pool", POOL, "--name", f"castra-{os.getpid()}"]
    beat = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(automations.HEARTBEAT_S), "PREFECT_WORKER_QUERY_SECONDS": "2"}
    keeper.start(folder, [keeper.Node(argv, {**env, **beat})])
    return folder


def _prefect(words: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(
        [*_command(), "--no-prompt", *words],
        env=os.environ | env,
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise Refused(f"`prefect {' '.join(words[:2])}` failed: {said[-1] if said else 'it said nothing'}")


def _command() -> list[str]:
    return [sys.executable, "-m", "prefect"]


def _last_line(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    cyclopts.run(main)
