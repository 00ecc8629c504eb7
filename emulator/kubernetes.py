"""The Kubernetes API servers of the emulated EKS clusters, at /kubernetes/<cluster>/…, and what makes them go.

Storage, versions, watches, strict validation, Jobs and JobSets that really run their pods; enough of discovery for
kubectl. A token must be what EKS takes, a signed request to STS; whoever signed it may do everything.

    kubectl --server http://127.0.0.1:4566/kubernetes/tiny get jobs
    POST /castra/lose {"job": "tiny-train", "node": 1}        # pull the plug of that pod's node: see emulator.gangs
"""

import base64
import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from emulator import journal
from emulator.api import World
from emulator.extension import Call, Fault, answers
from emulator.kubernetes_jobs import reconcile
from emulator.kubernetes_nodes import TICK_S, Machines, groups_of
from emulator.kubernetes_rules import OLDEST, admit
from emulator.kubernetes_store import KINDS, Kind, Object, Objects, Refusal
from emulator.memory import ACCOUNT

PREFIX = "/kubernetes/"
IDLE_S = 0.2
"""Between two rounds of the controllers while nothing happens."""
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
TOLD = (
    "name arn version roleArn resourcesVpcConfig kubernetesNetworkConfig logging identity status certificateAuthority "
    "clientRequestToken tags encryptionConfig"
)
"""What EKS says about a cluster, as moto keeps it."""
MERGES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class Cluster:
    """One cluster; it goes for as long as EKS has it."""

    def __init__(self, name: str, region: str, version: str) -> None:
        self.name, self.about = name, _of_eks(name)
        self.world = Objects(version)
        self.machines = Machines(name, region, self.world)
        threading.Thread(target=self._go, daemon=True).start()

    def _go(self) -> None:
        while (about := _of_eks(self.name)) and self.about and about[2] is self.about[2]:
            started = time.monotonic()
            seen = self.world.last
            try:
                reconcile(self.world)
                self.machines.step(groups_of(self.name, about[0]))
            except Exception:  # noqa: BLE001  a controller tries again, whatever happened
                traceback.print_exc()
            spent = time.monotonic() - started
            self.world.wait(seen, IDLE_S)
            time.sleep(max(TICK_S, spent))  # busy for half of the time at most
        self.machines.close()
        _clusters.pop(self.name, None)


_clusters: dict[str, Cluster] = {}
_lock = threading.Lock()


def cluster(name: str) -> Cluster:
    """The cluster that EKS knows by that name; raises `Refusal`."""
    with _lock:
        if name not in _clusters:
            if (about := _of_eks(name)) is None:
                raise Refusal(404, "NotFound", f"EKS has no cluster {name}")
            region, version, _ = about
            told = tuple(int(part) for part in version.split("."))
            _clusters[name] = Cluster(name, region, version if told >= OLDEST else "1.33")
        return _clusters[name]


@answers("eks", "GET /clusters/{name}")
def describe_cluster(call: Call) -> Mapping[str, Any]:
    """EKS's own answer, but for the endpoint, which leads here."""
    name = call.path["name"]
    if (about := _of_eks(name)) is None or about[0] != call.region:
        raise Fault("ResourceNotFoundException", f"No cluster found for name: {name}.", 404)
    from moto.backends import get_backend

    found = vars(get_backend("eks")[ACCOUNT][call.region].clusters[name])
    told = {
        one: value for one in TOLD.split() if (value := found.get(re.sub("([A-Z])", r"_\1", one).lower())) is not None
    }
    told["createdAt"] = found["created_at"].timestamp()
    return {"cluster": told | {"endpoint": f"{World.endpoint}{PREFIX}{name}"}}


def application(environ: Mapping[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Answer one request to an API server."""
    try:
        name, _, path = unquote(environ["PATH_INFO"]).removeprefix(PREFIX).partition("/")
        query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        request = Request(cluster(name), environ, path.strip("/"), query, body)
        request.authenticate()
        status, answer = request.answer()
    except Refusal as refusal:
        status, answer = refusal.status, _status(refusal)
    if isinstance(answer, Iterator):
        start_response("200 OK", [("Content-Type", "application/json")])
        return answer
    text = isinstance(answer, str)
    start_response(f"{status} -", [("Content-Type", "text/plain" if text else "application/json")])
    return [(answer if isinstance(answer, str) else json.dumps(answer)).encode()]


class Request:
    """One request: `answer` does what its path and verb say."""

    def __init__(
        self, to: Cluster, environ: Mapping[str, Any], path: str, query: Mapping[str, str], body: bytes
    ) -> None:
        self.cluster, self.world, self.query = to, to.world, query
        self.verb, self.type = environ["REQUEST_METHOD"], environ.get("CONTENT_TYPE", "").partition(";")[0]
        self.login = environ.get("HTTP_AUTHORIZATION", "")
        self.parts = path.split("/") if path else []
        self.body = body

    def authenticate(self) -> None:
        """Take a token that is a request to STS, signed for a cluster, or none: kubectl sends none over http."""
        if not self.login:
            return
        try:
            token = self.login.removeprefix("Bearer k8s-aws-v1.")
            url = urlsplit(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
            told = parse_qs(url.query)
            signed = told["X-Amz-SignedHeaders"][0].split(";")
            if told["Action"] != ["GetCallerIdentity"] or "x-k8s-aws-id" not in signed:
                raise ValueError
        except (ValueError, KeyError) as error:
            raise Refusal(401, "Unauthorized", "Unauthorized") from error

    def answer(self) -> tuple[int, Object | str | Iterator[bytes]]:
        """The status and what is said; raises `Refusal`."""
        if (told := _discovery(self.parts, self.world.version)) is not None:
            return 200, told
        group, rest = self._group()
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = next((one for one in KINDS if (one.group, one.plural) == (group, rest[0])), None)
        if kind is None or len(rest) > 3:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if len(rest) == 1:
            return self._collection(kind, namespace)
        return self._object(kind, namespace, rest[1], rest[2] if len(rest) == 3 else "")

    def _group(self) -> tuple[str, list[str]]:
        versions = {(one.group, one.version) for one in KINDS}
        if self.parts[:2] == ["api", "v1"] and len(self.parts) > 2:
            return "", self.parts[2:]
        if self.parts[:1] == ["apis"] and len(self.parts) > 3 and tuple(self.parts[1:3]) in versions:
            return self.parts[1], self.parts[3:]
        raise Refusal(404, "NotFound", "the server could not find the requested resource")

    def _collection(self, kind: Kind, namespace: str) -> tuple[int, Object | str | Iterator[bytes]]:
        if self.verb == "POST":
            told = admit(self._told(), kind, namespace, self.world.version)
            made = self.world.create(told)
            if told["kind"] in ("Job", "JobSet"):
                journal.taken("eks", told["metadata"]["name"])
            return 201, made
        if self.verb != "GET":
            raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        selector, since = self.query.get("labelSelector", ""), self.query.get("resourceVersion") or ""
        if self.query.get("watch") in ("true", "1"):
            return 200, self._watch(kind, namespace, selector, int(since) if since else self.world.last)
        with self.world.lock:
            about = {"resourceVersion": str(self.world.last)}
            found = self.world.listed(kind.name, namespace, selector)
        field = dict(parse_qsl(self.query.get("fieldSelector", "").replace(",", "&"))).get("metadata.name")
        bare = [
            {key: value for key, value in one.items() if key not in ("kind", "apiVersion")}
            for one in found
            if field in (None, one["metadata"]["name"])
        ]
        return 200, {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": about, "items": bare}

    def _watch(self, kind: Kind, namespace: str, selector: str, since: int) -> Iterator[bytes]:
        end = time.monotonic() + float(self.query.get("timeoutSeconds", "300"))
        for change in self.world.watch(kind.name, namespace, selector, since, lambda: time.monotonic() > end):
            yield json.dumps({"type": change.type, "object": change.object}).encode() + b"\n"

    def _object(self, kind: Kind, namespace: str, name: str, part: str) -> tuple[int, Object | str | Iterator[bytes]]:
        there = self.world.get(kind.name, namespace, name)
        if part == "log" and kind.name == "Pod":
            return 200, self._log(there)
        if part not in ("", "status"):
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if self.verb == "GET":
            return 200, there
        if self.verb == "DELETE":
            return 200, self._delete(there)
        if self.verb == "PATCH" and self.type not in MERGES:
            raise Refusal(415, "UnsupportedMediaType", f"the body of the request was in {self.type}, not a merge patch")
        if self.verb not in ("PATCH", "PUT"):
            raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        told = self._told()
        with self.world.lock:
            return 200, self._changed(kind, self.world.get(kind.name, namespace, name), told, part)

    def _changed(self, kind: Kind, there: Object, told: Object, part: str) -> Object:
        """An object with a client's changes, for which nobody else may change it meanwhile."""
        if self.verb == "PATCH":
            version = told.get("metadata", {}).get("resourceVersion")
            told = _merged(there, told)
            told["metadata"]["resourceVersion"] = version or there["metadata"]["resourceVersion"]
        if part == "status":
            return self.world.change(there, lambda one: one.update(status=told.get("status", {})))
        namespace = there["metadata"].get("namespace", "")
        return self.world.replace(admit(told, kind, namespace, self.world.version))

    def _delete(self, there: Object) -> Object:
        told = self._told() if self.body else {}
        foreground = (told.get("propagationPolicy") or self.query.get("propagationPolicy")) == "Foreground"
        grace = told.get("gracePeriodSeconds") or self.query.get("gracePeriodSeconds")
        return self.world.delete(there, foreground, None if grace is None else int(grace))

    def _log(self, pod: Object) -> str:
        log = self.cluster.machines.logs.get(pod["metadata"]["uid"])
        if log is None:
            name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
            words = f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
            raise Refusal(400, "BadRequest", words)
        tail = int(self.query["tailLines"]) if "tailLines" in self.query else None
        return log.told(self.query.get("sinceTime", ""), self.query.get("timestamps") == "true", tail)

    def _told(self) -> Object:
        try:
            told: Object = json.loads(self.body)
        except ValueError as error:
            raise Refusal(400, "BadRequest", f"the object provided is unrecognized: {error}") from error
        return told


def _of_eks(name: str) -> tuple[str, str, object] | None:
    """The region and the version of the cluster of that name, and moto's cluster itself."""
    from moto.backends import get_backend

    for region, backend in list(get_backend("eks")[ACCOUNT].items()):
        if found := backend.clusters.get(name):
            return region, found.version, found
    return None


def _discovery(parts: list[str], version: str) -> Object | None:
    """What the server says about itself, None if it was asked for something else."""
    groups = {(one.group, one.version) for one in KINDS if one.group}
    match parts:
        case ["version"]:
            major, minor = version.split(".")[:2]
            return {
                "major": major,
                "minor": minor,
                "gitVersion": f"v{major}.{minor}.0-castra",
                "platform": "linux/amd64",
            }
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*one) for one in sorted(groups)]}
        case ["api", "v1"]:
            return _resources("", "v1")
        case ["apis", group, of] if (group, of) in groups:
            return _resources(group, of)
    return None


def _group(group: str, version: str) -> Object:
    served = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _resources(group: str, version: str) -> Object:
    rows = [
        {
            "name": one.plural,
            "singularName": one.name.lower(),
            "namespaced": one.namespaced,
            "kind": one.name,
            "verbs": VERBS,
        }
        | ({"shortNames": [one.short]} if one.short else {})
        for one in KINDS
        if (one.group, one.version) == (group, version)
    ]
    named = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": named, "resources": rows}


def _merged(there: Any, change: Any) -> Any:
    """A merge patch, applied (RFC 7386)."""
    if not isinstance(change, dict):
        return change
    told = dict(there) if isinstance(there, dict) else {}
    for key, value in change.items():
        if value is None:
            told.pop(key, None)
        else:
            told[key] = _merged(told.get(key), value)
    return told


def _status(refusal: Refusal) -> Object:
    told = {"status": "Failure", "message": refusal.message, "reason": refusal.reason, "code": refusal.status}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **told}
