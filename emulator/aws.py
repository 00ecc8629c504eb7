"""Start and stop the emulator: a process of its own on 127.0.0.1, kept by a keeper, ended with whoever started it."""

import contextlib
import http.client
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusters import aws, keeper
from clusters.aws import ANYBODY, EMULATOR_PATH, Site
from clusters.base import ClusterError
from clusters.warden import read_json
from store.objects import state_folder

ROOT = Path(__file__).parents[1]
START_S = 60.0
REGION = "us-east-1"
SHARE = "CASTRA_EMULATOR_SHARE"
"""The folders that the emulator's nodes see, told to its server."""
RECORD = Path("services", "emulator.json")
"""In the folder of Castra's state: where the standing emulator is."""


@dataclass(frozen=True, slots=True)
class Emulator:
    """A running emulator."""

    endpoint: str
    folder: Path
    """Its log and the keeper's files; removed by `stop`."""

    def stop(self) -> None:
        """End it; everything in it is gone."""
        keeper.stop(self.folder, wait_s=keeper.GRACE_S + 10)
        shutil.rmtree(self.folder, ignore_errors=True)


def start(
    folder: Path | None = None, pace_s: float = 0.0, share: Sequence[Path] = (), port: int | None = None
) -> Emulator:
    """Start an emulator and wait until it answers; it ends with this process at the latest.

    Its own folder is made in `folder`, by default among the services of Castra's state. `pace_s` is how long every
    change of a stack's resource takes, seconds; `share` are the folders that its nodes see as this machine does; `port`
    is a free one unless it is given. Raises `ClusterError` in one sentence.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise ClusterError("the emulator needs moto, which is not installed: uv sync --extra local")
    if port and not _free(port):
        raise ClusterError(f"the emulator did not start: port {port} is in use; name another one")
    folder = folder or state_folder() / "services"
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    place = Path(tempfile.mkdtemp(prefix="emulator-", dir=folder))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"CASTRA_EMULATOR_PACE_S": str(pace_s), "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    settings |= {"CASTRA_EMULATOR_FOLDER": str(place)}
    if share:
        settings[SHARE] = os.pathsep.join(str(one.resolve()) for one in share)
    at = str(port) if port else keeper.PORT
    env = {"PYTHONPATH": path, **settings, **environment(f"http://127.0.0.1:{at}")}
    keeper.start(place, [keeper.Node([sys.executable, "-m", "emulator.server", at], env)], grace_s=1.0)
    return Emulator(_wait(place, port), place)


def standing() -> Emulator | None:
    """The emulator that `python -m emulator up` left standing, None if there is none (any more)."""
    told = read_json(state_folder() / RECORD)
    if not told or aws.vanished(Site(REGION, told["endpoint"], told["memory"])):
        return None
    return Emulator(told["endpoint"], Path(told["folder"]))


@contextlib.contextmanager
def running(folder: Path | None = None, pace_s: float = 0.0, share: Sequence[Path] = ()) -> Iterator[Emulator]:
    """An emulator for the length of a block."""
    emulator = start(folder, pace_s, share)
    try:
        yield emulator
    finally:
        emulator.stop()


def environment(endpoint: str) -> dict[str, str]:
    """What a process needs to reach the emulator, and nothing with which it could reach AWS."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ANYBODY,
        "AWS_SECRET_ACCESS_KEY": ANYBODY,
        "AWS_SESSION_TOKEN": ANYBODY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false",
    }


def _sweep(folder: Path) -> None:
    """Remove what emulators left whose owner was killed; not one that is being started at this moment."""
    for left in folder.glob("emulator-*"):
        if time.time() - left.stat().st_mtime > START_S and not keeper.alive(left):
            shutil.rmtree(left, ignore_errors=True)


def _wait(place: Path, port: int | None) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        told = keeper.started(place)
        if told and _answers(at := port or told["port"]):
            return f"http://127.0.0.1:{at}"
        if ended := keeper.ended(place):
            raise ClusterError(f"the emulator did not start ({ended['reason']}); its log is {place / 'log'}")
        time.sleep(0.02)
    keeper.stop(place, wait_s=5)
    raise ClusterError(f"the emulator did not answer within {START_S:.0f} s; its log is {place / 'log'}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(port: int) -> bool:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        line.request("GET", EMULATOR_PATH)
        return line.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        line.close()
