"""ECR's registry: Debian's docker-registry on a port of its own, with the password that moto's ECR gives away.

It starts when somebody first asks how to log in; the emulator's keeper ends it, and removes what was pushed. Without
the program repositories are records, and nothing can be pushed.
"""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusters.warden import free_port
from emulator import memory
from emulator.extension import Call, Fault, answers

PROGRAM = "docker-registry"
FOLDER = "CASTRA_EMULATOR_FOLDER"
START_S = 20.0
USER, PASSWORD = "AWS", f"{memory.ACCOUNT}-auth-token"
"""What moto's ECR tells everybody."""
ENTRY = "AWS:$2b$04$castraemulator.registet2lqG1LwB7gRyvnxSSTMQEQDO/ZRmZe\n"
"""The same, as the registry wants to know it (bcrypt)."""
CONFIG = """version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}/blobs}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
auth: {{htpasswd: {{realm: ecr, path: {folder}/passwords}}}}
"""
ACCEPT = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_lock = threading.Lock()


@dataclass
class Running:
    """The registry of this emulator."""

    port: int = 0
    process: subprocess.Popen[bytes] | None = None


_running = Running()


def possible() -> bool:
    """Whether containers can be pushed to the emulator."""
    return shutil.which(PROGRAM) is not None


@answers("ecr", "GetAuthorizationToken")
def get_authorization_token(_: Call) -> dict[str, Any]:
    """How to log in to the registry."""
    if not possible():
        raise Fault("ServerException", f"{PROGRAM} is not installed where the emulator runs: apt-get install {PROGRAM}")
    token = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    row = {"authorizationToken": token, "expiresAt": time.time() + 12 * 3600, "proxyEndpoint": _url()}
    return {"authorizationData": [row]}


@answers("ecr", "DescribeImages")
def describe_images(call: Call) -> dict[str, Any]:
    """The images of a repository that are asked for by their tags."""
    from moto.ecr.models import ecr_backends

    name = call.told["repositoryName"]
    if name not in ecr_backends[memory.ACCOUNT][call.region].repositories:
        raise Fault("RepositoryNotFoundException", f"The repository with name '{name}' does not exist")
    rows = []
    for tag in (asked["imageTag"] for asked in call.told.get("imageIds", ())):
        if not _running.port or not (digest := _digest(name, tag)):
            raise Fault("ImageNotFoundException", f"The image with imageId {{imageTag:'{tag}'}} does not exist")
        rows.append({"repositoryName": name, "registryId": memory.ACCOUNT, "imageDigest": digest, "imageTags": [tag]})
    return {"imageDetails": rows}


def _digest(name: str, tag: str) -> str:
    login = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Accept": ACCEPT}
    line = http.client.HTTPConnection("127.0.0.1", _running.port, timeout=10)
    with contextlib.closing(line):
        line.request("HEAD", f"/v2/{name}/manifests/{tag}", headers=headers)
        return line.getresponse().headers.get("Docker-Content-Digest", "")


def _url() -> str:
    """Where the registry is; it is started if it is not there."""
    with _lock:
        if _running.process is None or _running.process.poll() is not None:
            _start()
        return f"http://127.0.0.1:{_running.port}"


def _start() -> None:
    folder = Path(tempfile.mkdtemp(prefix="registry-", dir=os.environ.get(FOLDER)))
    (folder / "passwords").write_text(ENTRY)
    port = free_port()
    (folder / "config.yml").write_text(CONFIG.format(folder=json.dumps(str(folder))[1:-1], port=port))
    with (folder / "log").open("wb") as log:
        _running.process = subprocess.Popen([PROGRAM, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    _running.port = port
    until = time.monotonic() + START_S
    while time.monotonic() < until and _running.process.poll() is None:
        with contextlib.suppress(ConnectionError):
            _digest("castra/none", "none")
            return
        time.sleep(0.05)
    raise Fault("ServerException", f"{PROGRAM} does not start: {(folder / 'log').read_text()}", 500)
