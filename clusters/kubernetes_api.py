"""A small client of Kubernetes' API: JSON over urllib3, with the logins of EKS and of a kubeconfig.

The official client pins a python-dateutil that botocore refuses, takes 75 MB and 0.35 s, and knows no JobSet; what we
need of it is five verbs on paths. urllib3 comes with botocore.
"""

import base64
import binascii
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3
import yaml

from clusters import aws
from clusters.aws import Site
from clusters.base import ClusterError, Refused, Unreachable

Body = dict[str, Any]

COLLECTIONS = {
    "Namespace": "api/v1/namespaces",
    "PersistentVolume": "api/v1/persistentvolumes",
    "Node": "api/v1/nodes",
    "ClusterRole": "apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "DaemonSet": "apis/apps/v1/namespaces/{namespace}/daemonsets",
    "ServiceAccount": "api/v1/namespaces/{namespace}/serviceaccounts",
    "Service": "api/v1/namespaces/{namespace}/services",
    "PersistentVolumeClaim": "api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "Pod": "api/v1/namespaces/{namespace}/pods",
    "Job": "apis/batch/v1/namespaces/{namespace}/jobs",
    "JobSet": "apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
    "Workload": "apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/workloads",
}
TOKEN_S = 600.0
"""EKS takes a token for 15 minutes from its signature on; we sign a new one after 10.
docs.aws.amazon.com/eks/latest/best-practices/identity-and-access-management.html"""
PAGE = 500


class ApiError(Exception):
    """The API server's refusal: the HTTP status and its words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


@dataclass(slots=True)
class Server:
    """Where an API server is and how to log in."""

    url: str
    token: Callable[[], str] = str
    """Gives the bearer token of the moment; "" logs in otherwise."""
    tls: ssl.SSLContext | None = None
    _pool: urllib3.PoolManager | None = field(default=None, repr=False)

    def get(self, path: str, **query: str) -> Body:
        """Read one object or collection."""
        return self._json("GET", path, query=query)

    def text(self, path: str, **query: str) -> str:
        """Read something that is not JSON, such as a log."""
        return self._send("GET", path, query=query).decode(errors="replace")

    def items(self, path: str, **query: str) -> Iterator[Body]:
        """The objects of a collection, page by page."""
        more = ""
        while True:
            page = self.get(path, limit=str(PAGE), **({"continue": more} if more else {}), **query)
            yield from page["items"]
            if not (more := page.get("metadata", {}).get("continue", "")):
                return

    def create(self, manifest: Body) -> Body:
        """Make an object; unknown or doubled fields are refused by the server."""
        path = collection(manifest["kind"], manifest["metadata"].get("namespace", ""))
        return self._json("POST", path, manifest, {"fieldValidation": "Strict"})

    def patch(self, path: str, change: Body) -> Body:
        """Merge a change into an object (RFC 7386)."""
        return self._json("PATCH", path, change, {"fieldValidation": "Strict"}, "application/merge-patch+json")

    def delete(self, path: str) -> None:
        """Remove an object and, after it, what it owns."""
        self._json("DELETE", path, {"propagationPolicy": "Background"})

    def _json(
        self, verb: str, path: str, body: Body | None = None, query: Mapping[str, str] | None = None, kind: str = ""
    ) -> Body:
        answer: Body = json.loads(self._send(verb, path, body, query, kind))
        return answer

    def _send(
        self,
        verb: str,
        path: str,
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = "",
    ) -> bytes:
        """One request; raises `ApiError` for what the server refuses, `Unreachable` where it does not answer."""
        headers = {"Accept": "application/json, */*", "User-Agent": "castra"}
        if token := self.token():
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), kind or "application/json"
        asked = "&".join(f"{name}={quote(value, safe='')}" for name, value in (query or {}).items())
        url = f"{self.url}/{path}" + (f"?{asked}" if asked else "")
        try:
            answer = self._line().request(verb, url, body=data, headers=headers)
        except urllib3.exceptions.MaxRetryError as error:
            raise _no_answer(self.url, error) from error
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"Kubernetes at {self.url} broke off ({error}); run again in a moment") from error
        if answer.status >= 400:
            raise _refusal(answer.status, answer.data)
        return answer.data

    def _line(self) -> urllib3.PoolManager:
        if self._pool is None:
            # every request here may be sent twice: objects have names, changes are merged
            retry = urllib3.Retry(
                3, backoff_factor=0.2, status_forcelist=(429, 502, 503, 504), allowed_methods=None,
                raise_on_status=False, redirect=False,
            )  # fmt: skip
            limits = urllib3.Timeout(connect=5, read=30)
            self._pool = urllib3.PoolManager(retries=retry, timeout=limits, ssl_context=self.tls, maxsize=8)
        return self._pool


def collection(kind: str, namespace: str) -> str:
    """The path of all objects of a kind in a namespace."""
    return COLLECTIONS[kind].format(namespace=namespace)


def of_eks(name: str, site: Site) -> Server:
    """The API server of an EKS cluster, logged in as whoever AWS knows us as; raises `ClusterError`."""
    eks, sts = aws.client(site, "eks"), aws.client(site, "sts")
    with aws.sentences(site, f"EKS cluster {name}"):
        about = eks.describe_cluster(name=name)["cluster"]
    if about["status"] != "ACTIVE" and "endpoint" not in about:
        raise Unreachable(f"EKS cluster {name} is {about['status']}, not ACTIVE: run again when it is")
    url = about["endpoint"].rstrip("/")
    tls = _trust(base64.b64decode(about["certificateAuthority"]["data"])) if url.startswith("https") else None
    return Server(url, Signed(name, site, sts).token, tls)


@dataclass(slots=True)
class Signed:
    """EKS's tokens: a presigned request to STS that says who we are, and in a signed header to which cluster.

    Source: the `get-token` command of the AWS CLI, docs.aws.amazon.com/cli/latest/reference/eks/get-token.html.
    """

    cluster: str
    site: Site
    sts: Any
    _token: str = ""
    _until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def token(self) -> str:
        """A token that is good for some minutes."""
        with self._lock:
            if time.monotonic() > self._until:
                with aws.sentences(self.site, f"log in to EKS cluster {self.cluster}"):
                    self._token = self._sign()
                self._until = time.monotonic() + TOKEN_S
            return self._token

    def _sign(self) -> str:
        events, name = self.sts.meta.events, "before-sign.sts.GetCallerIdentity"

        def add_cluster(request: Any, **_: Any) -> None:
            request.headers["x-k8s-aws-id"] = self.cluster

        with _signing:
            events.register(name, add_cluster, unique_id="castra-eks")
            try:
                url = self.sts.generate_presigned_url("get_caller_identity", ExpiresIn=60, HttpMethod="GET")
            finally:
                events.unregister(name, unique_id="castra-eks")
        return "k8s-aws-v1." + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


_signing = threading.Lock()


def of_kubeconfig(path: str, context: str = "") -> Server:
    """The API server that a kubeconfig's context means; raises `Refused` in one sentence for what cannot be used."""
    try:
        told = yaml.safe_load(Path(path).read_text())
        here = _named(told, "contexts", context or told["current-context"])["context"]
        cluster = _named(told, "clusters", here["cluster"])["cluster"]
        user = _named(told, "users", here["user"])["user"] or {}
        url = str(cluster["server"]).rstrip("/")
        tls = _trust(_given(cluster, "certificate-authority"), bool(cluster.get("insecure-skip-tls-verify")))
        _identify(tls, user)
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, ssl.SSLError) as error:
        raise Refused(f"kubeconfig {path} cannot be used ({error!r}); try it with kubectl --kubeconfig") from error
    if "exec" in user or "auth-provider" in user:
        raise Refused(f"kubeconfig {path} logs in by a program: use one with a token or a client certificate")
    if "tokenFile" in user:
        return Server(url, lambda: Path(user["tokenFile"]).read_text().strip(), tls)
    return Server(url, lambda: str(user.get("token", "")), tls)


def _named(told: Body, kind: str, name: str) -> Body:
    found: Body = next(one for one in told[kind] if one["name"] == name)
    return found


def _given(told: Body, name: str) -> bytes | None:
    """A value that stands in the kubeconfig itself or in a file beside it."""
    if f"{name}-data" in told:
        return base64.b64decode(told[f"{name}-data"])
    return Path(told[name]).read_bytes() if name in told else None


def _trust(authority: bytes | None, anyone: bool = False) -> ssl.SSLContext:
    """TLS that trusts this authority alone (PEM), or the system's; raises `ClusterError` if it is not one."""
    tls = ssl.create_default_context() if authority is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    if anyone:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if authority is not None:
        try:
            tls.load_verify_locations(cadata=authority.decode())
        except (ssl.SSLError, UnicodeDecodeError, binascii.Error) as error:
            raise ClusterError(f"the cluster's certificate authority cannot be read ({error})") from error
    return tls


def _identify(tls: ssl.SSLContext, user: Body) -> None:
    certificate, key = _given(user, "client-certificate"), _given(user, "client-key")
    if certificate and key:
        with tempfile.NamedTemporaryFile() as both:  # OpenSSL reads it from a file only
            both.write(certificate + b"\n" + key)
            both.flush()
            tls.load_cert_chain(both.name)


def _refusal(status: int, data: bytes) -> ApiError:
    try:
        told = json.loads(data)
        return ApiError(status, told.get("reason", ""), told.get("message", ""))
    except (ValueError, AttributeError):
        return ApiError(status, "", data[:200].decode(errors="replace"))


def _no_answer(url: str, error: urllib3.exceptions.MaxRetryError) -> ClusterError:
    if isinstance(error.reason, urllib3.exceptions.SSLError):
        return Refused(f"Kubernetes at {url} shows a certificate that its authority did not sign ({error.reason})")
    return Unreachable(f"Kubernetes at {url} does not answer; check the network (and the cluster), then run again")
