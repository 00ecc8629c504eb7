"""What an emulated Kubernetes cluster knows: its objects, their versions, and what of them the API takes.

Objects are never changed in place: a change is a new object with a new version, so that who has read one keeps it.
"""

import copy
import re
import secrets
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]

ORPHAN_FINALIZER = "foregroundDeletion"
FIXED = {
    "Job": ("completions", "completionMode", "template", "podFailurePolicy", "selector"),
    "JobSet": ("replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy"),
}
"""Parts of a spec that the API does not let anybody change."""
LASTING = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")


class Refusal(Exception):
    """The API's answer in place of an object: an HTTP status, a reason, a message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object, as discovery tells it."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True
    short: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As error messages call it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


KINDS = (
    Kind("", "v1", "namespaces", "Namespace", namespaced=False, short="ns"),
    Kind("", "v1", "nodes", "Node", namespaced=False, short="no"),
    Kind("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False, short="pv"),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", short="pvc"),
    Kind("", "v1", "pods", "Pod", short="po"),
    Kind("", "v1", "services", "Service", short="svc"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount", short="sa"),
    Kind("", "v1", "configmaps", "ConfigMap", short="cm"),
    Kind("", "v1", "events", "Event", short="ev"),
    Kind("apps", "v1", "daemonsets", "DaemonSet", short="ds"),
    Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False),
    Kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    Kind("batch", "v1", "jobs", "Job"),
    Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
)
BY_NAME = {kind.name: kind for kind in KINDS}
Key = tuple[str, str, str]
"""Kind, namespace ("" for none), name."""


@dataclass(slots=True)
class Change:
    """Something for who watches: ADDED, MODIFIED or DELETED."""

    version: int
    type: str
    object: Object


@dataclass(eq=False)
class Objects:
    """The objects of one cluster; all changes happen under `lock`, which also wakes who waits for one."""

    version: str = "1.33"
    objects: dict[Key, Object] = field(default_factory=dict)
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=5000))
    last: int = 0
    lock: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    def __post_init__(self) -> None:
        for name in ("default", "kube-system"):
            self.create(made("Namespace", name))

    def get(self, kind: str, namespace: str, name: str) -> Object:
        """The object; raises `Refusal` (404)."""
        if (found := self.objects.get((kind, namespace, name))) is None:
            raise Refusal(404, "NotFound", f'{BY_NAME[kind].qualified} "{name}" not found')
        return found

    def listed(self, kind: str, namespace: str = "", selector: str = "") -> list[Object]:
        """The objects of a kind, of all namespaces if none is named, that a label selector fits."""
        fits = selected(selector)
        with self.lock:
            return [
                one
                for (of, within, _), one in sorted(self.objects.items())
                if of == kind and (not namespace or within == namespace) and fits(one["metadata"].get("labels") or {})
            ]

    def owned(self, owner: Object, kind: str) -> list[Object]:
        """The objects of a kind that an object owns."""
        uid = owner["metadata"]["uid"]
        return [one for one in self.listed(kind) if uid in owners(one)]

    def create(self, told: Object) -> Object:
        """Add an object; raises `Refusal` if there is one of its name, or no such namespace."""
        with self.lock:
            one = copy.deepcopy(told)
            about, kind = one["metadata"], one["kind"]
            if "name" not in about:
                about["name"] = about["generateName"] + secrets.token_hex(3)[:5]
            namespace = about.get("namespace", "")
            if namespace and self.get("Namespace", "", namespace)["metadata"].get("deletionTimestamp"):
                raise Refusal(403, "Forbidden", f"namespace {namespace} is being terminated")
            if (kind, namespace, about["name"]) in self.objects:
                told_name = f'{BY_NAME[kind].qualified} "{about["name"]}"'
                raise Refusal(409, "AlreadyExists", f"{told_name} already exists")
            about |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            if kind == "Job":
                _select(one)
            self._keep("ADDED", one)
            if kind == "Namespace":
                self.create(made("ServiceAccount", "default", about["name"]))
            return one

    def change(self, of: Object, alter: Callable[[Object], None]) -> Object:
        """Change the newest version of an object; nothing is told if nothing changes, or the object is gone."""
        with self.lock:
            about = of["metadata"]
            old = self.objects.get((of["kind"], about.get("namespace", ""), about["name"]))
            if old is None or old["metadata"]["uid"] != about["uid"]:
                return of
            one = copy.deepcopy(old)
            alter(one)
            if one != old:
                self._keep("MODIFIED", one)
                self._drop_if_free(one)
            return one

    def replace(self, told: Object) -> Object:
        """Put what a client tells in the place of what is there; raises `Refusal` (404, 409, 422)."""
        with self.lock:
            about = told["metadata"]
            old = self.get(told["kind"], about.get("namespace", ""), about["name"])
            if about.get("resourceVersion", old["metadata"]["resourceVersion"]) != old["metadata"]["resourceVersion"]:
                what = f'{BY_NAME[told["kind"]].qualified} "{about["name"]}"'
                words = f"Operation cannot be fulfilled on {what}: the object has been modified; please apply your"
                raise Refusal(409, "Conflict", f"{words} changes to the latest version and try again")
            for name in FIXED.get(told["kind"], ()):
                if told["spec"].get(name) != old["spec"].get(name):
                    raise invalid(told, f"spec.{name}: Invalid value: field is immutable")
            kept = {name: value for name, value in old["metadata"].items() if name in LASTING}
            fresh = told | {"metadata": about | kept} | ({"status": old["status"]} if "status" in old else {})
            return self.change(old, lambda one: one.update(copy.deepcopy(fresh)))

    def delete(self, of: Object, foreground: bool = False, grace_s: int | None = None) -> Object:
        """Remove an object, or mark it for removal while a finalizer or a running container holds it."""

        def mark(one: Object) -> None:
            about = one["metadata"]
            about.setdefault("deletionTimestamp", now())
            if one["kind"] == "Pod":
                usual = one["spec"].get("terminationGracePeriodSeconds", 30)
                about.setdefault("deletionGracePeriodSeconds", usual if grace_s is None else grace_s)
            if foreground and ORPHAN_FINALIZER not in about.get("finalizers", []):
                about["finalizers"] = [*about.get("finalizers", []), ORPHAN_FINALIZER]

        with self.lock:
            about = of["metadata"]
            newest = self.objects.get((of["kind"], about.get("namespace", ""), about["name"]), of)
            if not foreground and self._is_free(newest):
                self.remove(newest)
                return newest
            return self.change(of, mark)

    def remove(self, of: Object) -> None:
        """Remove an object whatever holds it."""
        with self.lock:
            about = of["metadata"]
            key = (of["kind"], about.get("namespace", ""), about["name"])
            if key in self.objects and self.objects[key]["metadata"]["uid"] == about["uid"]:
                self._tell("DELETED", self.objects.pop(key))

    def collect(self) -> None:
        """Remove what belongs to what is gone, and what waited in the foreground for that."""
        with self.lock:
            there = {one["metadata"]["uid"]: one for one in self.objects.values()}
            for one in list(self.objects.values()):
                above = owners(one)
                leaving = [there[uid] for uid in above if uid in there and _leaves(there[uid])]
                if above and (leaving or not any(uid in there for uid in above)):
                    self.delete(one)
            held = {uid for one in self.objects.values() for uid in owners(one)}
            for one in list(self.objects.values()):
                if _leaves(one) and one["metadata"]["uid"] not in held:
                    self.change(one, lambda kept: kept["metadata"]["finalizers"].remove(ORPHAN_FINALIZER))
                namespace = one["metadata"].get("namespace")
                if namespace and ("Namespace", "", namespace) not in self.objects:
                    self.delete(one)

    def wait(self, since: int, patience_s: float) -> None:
        """Wait until something happens after version `since`."""
        with self.lock:
            self.lock.wait_for(lambda: self.last > since, patience_s)

    def watch(
        self, kind: str, namespace: str, selector: str, since: int, until: Callable[[], bool]
    ) -> Iterator[Change]:
        """What happens after version `since`, as it happens."""
        fits = selected(selector)
        while not until():
            with self.lock:
                fresh = [change for change in self.changes if change.version > since]
                if not fresh:
                    self.lock.wait(0.5)
                    continue
            since = fresh[-1].version
            for change in fresh:
                about = change.object["metadata"]
                here = not namespace or about.get("namespace") == namespace
                if change.object["kind"] == kind and here and fits(about.get("labels") or {}):
                    yield change

    def _keep(self, type_: str, one: Object) -> None:
        about = one["metadata"]
        self.objects[one["kind"], about.get("namespace", ""), about["name"]] = one
        self._tell(type_, one)

    def _tell(self, type_: str, one: Object) -> None:
        self.last += 1
        one["metadata"]["resourceVersion"] = str(self.last)
        self.changes.append(Change(self.last, type_, one))
        self.lock.notify_all()

    def _is_free(self, one: Object) -> bool:
        """Whether nothing holds an object that is to be removed."""
        runs = one["kind"] == "Pod" and one["spec"].get("nodeName") and phase(one) not in ("Succeeded", "Failed")
        return not one["metadata"].get("finalizers") and not runs

    def _drop_if_free(self, one: Object) -> None:
        if one["metadata"].get("deletionTimestamp") and self._is_free(one):
            self.remove(one)


def _select(job: Object) -> None:
    """Mark the pods-to-be of a Job as its own, as the API does."""
    about, template = job["metadata"], job["spec"]["template"]
    mine = {"batch.kubernetes.io/controller-uid": about["uid"]}
    labels = mine | {"batch.kubernetes.io/job-name": about["name"], "job-name": about["name"]}
    marked = template.get("metadata") or {}
    template["metadata"] = marked | {"labels": (marked.get("labels") or {}) | labels}
    job["spec"]["selector"] = {"matchLabels": mine}


def made(kind: str, name: str, namespace: str = "", **more: Any) -> Object:
    """An object of a kind, as a controller makes it."""
    about = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": BY_NAME[kind].api_version, "kind": kind, "metadata": about, **more}


def owners(one: Object) -> list[str]:
    """The uids of what an object belongs to."""
    return [owner["uid"] for owner in one["metadata"].get("ownerReferences", [])]


def owner_of(one: Object) -> list[Object]:
    """What makes something belong to an object."""
    told = {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": one["metadata"]["name"]}
    return [told | {"uid": one["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}]


def phase(pod: Object) -> str:
    """Pending, Running, Succeeded or Failed."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def now() -> str:
    """The time as Kubernetes tells it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def is_true(one: Object, kind: str) -> bool:
    """Whether a condition holds."""
    return any(c["type"] == kind and c["status"] == "True" for c in one.get("status", {}).get("conditions", []))


def set_condition(one: Object, kind: str, truth: bool = True, reason: str = "", message: str = "") -> None:
    """Add a condition to a status, or change it."""
    told = {"type": kind, "status": str(truth), "reason": reason, "message": message}
    conditions = one.setdefault("status", {}).setdefault("conditions", [])
    there = next((found for found in conditions if found["type"] == kind), None)
    if there is None:
        conditions.append(told | {"lastTransitionTime": now()})
    elif any(there.get(name) != value for name, value in told.items()):
        there.update(told, lastTransitionTime=now())


def selected(selector: str) -> Callable[[Mapping[str, str]], bool]:
    """What a label selector means: `a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, with commas between."""
    tests = [_test(term.strip()) for term in re.split(r",(?![^(]*\))", selector) if term.strip()]
    return lambda labels: all(test(labels) for test in tests)


def invalid(one: Object, why: str) -> Refusal:
    """What the API says to what it understands and does not take."""
    kind = BY_NAME[one["kind"]]
    name = f"{kind.name}.{kind.group}" if kind.group else kind.name
    return Refusal(422, "Invalid", f'{name} "{one["metadata"].get("name", "")}" is invalid: {why}')


def _test(term: str) -> Callable[[Mapping[str, str]], bool]:
    if told := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", term):
        values = {value.strip() for value in told[3].split(",")}
        return lambda labels: (labels.get(told[1]) in values) == (told[2] == "in")
    name, operator, value = re.fullmatch(r"(!?[^!=]+)(==|=|!=)?(.*)", term).groups()  # type: ignore[union-attr]  # fits all
    if operator:
        return lambda labels: (labels.get(name) == value) == (operator != "!=")
    return lambda labels: (name[1:] not in labels) if name.startswith("!") else name in labels


def _leaves(one: Object) -> bool:
    return ORPHAN_FINALIZER in one["metadata"].get("finalizers", [])
