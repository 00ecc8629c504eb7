"""What a job takes along to a cluster: code and job.json as objects of the store, and the command of every node.

    jobs/<job's name>/job.json       what `training.node` reads
    code/training-<sha256>.zip       the package `training`, as it is here; Python can import it as it is

A node fetches both (from S3 with boto3; a shared folder needs nothing) and runs `python -m training.node job.json`.
Where a platform brings the objects to the node itself, that command and `PYTHONPATH=<the zip>` are all it takes.
"""

import contextlib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from clusters.base import Job, Refused
from store.objects import Conflict, Store

CODE: Final = Path(__file__).parents[1] / "training"
GRACE_S: Final = 25.0
"""From the polite stop to the kill; Batch and Kubernetes kill 30 s after their own polite one."""
PASSED: Final = ("CASTRA_COMM_TIMEOUT_S", "CASTRA_GANG_SILENCE_S", "CASTRA_GANG_START_S", "CASTRA_METRICS")
"""Settings that reach the nodes from the environment here; the job's own env goes before them."""
BOOTSTRAP: Final = """\
import json, os, shutil, sys, tempfile
from urllib.parse import unquote, urlsplit
def fetch(url, folder):
    place = urlsplit(url)
    path = unquote(place.path)
    if place.scheme != "s3":
        return path if os.path.exists(path) else sys.exit(refuse(url, "no such file on this node"))
    import boto3
    from botocore.config import Config
    s3 = boto3.client("s3", config=Config(retries={"mode": "standard", "total_max_attempts": 10}))
    s3.download_file(place.netloc, path[1:], os.path.join(folder, os.path.basename(path)))
    return os.path.join(folder, os.path.basename(path))
def refuse(what, why):
    shutil.rmtree(os.environ.get("CASTRA_NODE_FOLDER", ""), ignore_errors=True)
    print("@castra " + json.dumps({"event": "error", "message": f"this node cannot start: {what}: {why}"}), flush=True)
    return 1
if sys.version_info < (3, 11):
    sys.exit(refuse(sys.executable, "Python 3.11 or newer is needed, this is " + sys.version.split()[0]))
folder = os.environ["CASTRA_NODE_FOLDER"] = tempfile.mkdtemp(prefix="castra-")
try:
    code, job = (fetch(url, folder) for url in sys.argv[1:])
except ImportError:
    sys.exit(refuse("boto3 is not installed", "install it in the image, or use a store on a shared folder"))
except Exception as error:
    sys.exit(refuse(" ".join(sys.argv[1:]), str(error)))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")]))
os.execv(sys.executable, [sys.executable, "-m", "training.node", job])
"""


@dataclass(frozen=True, slots=True)
class Payload:
    """A job, ready to travel."""

    objects: Mapping[str, bytes]
    """Key in the store → content: first the code, then job.json."""
    command: tuple[str, ...]
    """What every node runs, word by word; no shell is needed."""
    env: Mapping[str, str]
    """The environment of every node, beside the platform's own."""

    def shown(self) -> dict[str, Any]:
        """The objects for people: job.json as it is, the code by its hash."""
        return {
            key: json.loads(content) if key.endswith(".json") else f"sha256:{hashlib.sha256(content).hexdigest()}"
            for key, content in self.objects.items()
        }


def pack(job: Job, store_url: str, python: str = "python3", grace_s: float = GRACE_S) -> Payload:
    """Pack a job for nodes that reach the store at `store_url`: `s3://bucket/prefix`, or `file:///shared/folder`.

    `python` is the interpreter on the nodes (3.11 or newer). A program that is asked to stop has `grace_s` seconds to
    save. Pure: nothing is read but the code, nothing is written. Raises `Refused` for a job that cannot be told.
    """
    url = _url(store_url)
    code, key = _code(), f"jobs/{job.name}/job.json"
    archive = f"code/training-{hashlib.sha256(code).hexdigest()[:16]}.zip"
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return Payload(
        objects={archive: code, key: _told(job, grace_s)},
        command=(python, "-c", BOOTSTRAP, f"{url}/{archive}", f"{url}/{key}"),
        env=passed | dict(job.env) | {"CASTRA_JOB": job.name, "PYTHONSAFEPATH": "1"},
    )


def deliver(payload: Payload, store: Store) -> None:
    """Put the objects into the store; code that is there already is not sent again. Raises `StoreError`."""
    for key, content in payload.objects.items():
        with contextlib.suppress(Conflict):
            store.put(key, content, if_absent=key.startswith("code/"))


def _url(store_url: str) -> str:
    if store_url.startswith(("s3://", "file:///")):
        return store_url.rstrip("/")
    if "://" in store_url:
        raise Refused(f"nodes cannot reach a store at {store_url}: use s3://bucket/prefix or a shared folder")
    return Path(store_url).absolute().as_uri()


def _told(job: Job, grace_s: float) -> bytes:
    try:
        told = {
            "name": job.name,
            "module": job.module,
            "spec": job.config["spec"],
            "inputs": dict(job.config.get("inputs", {})),
            "output": job.config["output"],
            "nodes": job.nodes,
            "processes_per_node": job.processes_per_node,
            "timeout_s": job.timeout_s,
            "grace_s": grace_s,
        }
        return json.dumps(told, indent=1, sort_keys=True, allow_nan=False).encode()
    except KeyError as lacking:
        raise Refused(f"job {job.name}: its config lacks {lacking}; it needs spec and output") from lacking


@cache
def _code() -> bytes:
    """The package as a zip of the same bytes wherever it is made: sorted, without dates, not compressed."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(CODE.rglob("*.py")):
            name = zipfile.ZipInfo(path.relative_to(CODE.parent).as_posix())
            name.external_attr = 0o644 << 16
            archive.writestr(name, path.read_bytes())
    return whole.getvalue()
