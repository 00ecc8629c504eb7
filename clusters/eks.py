"""Kubernetes as a cluster: EKS by its name, or any API server by a kubeconfig.

A job is a Job or a JobSet (`clusters.manifests`), found by its name, so that it is never doubled. Its id is the
object's name. The control plane keeps nothing: all states come from the API server, for many jobs in one to three
calls. Logs are those of the pods, as long as these exist: a pod that is removed (a restart, a cancelled job, a lost
node) takes its last lines with it, unless the cluster ships logs elsewhere.

Address: region, endpoint, memory, Cluster (EKS) or kubeconfig and context; and what `manifests.Place` reads.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from clusters import aws, manifests, names, payload
from clusters import kubernetes_api as api
from clusters import kubernetes_plugins as plugins
from clusters import kubernetes_states as states
from clusters.aws import Site
from clusters.base import Address, ClusterError, Job, Refused, State, Status, Unreachable
from clusters.kubernetes_api import ApiError, Body, Server
from clusters.manifests import CANCELLED, JOB, MANAGED, NAME, Place, object_name
from store import Store, StoreError

FEW = 20
"""Up to so many jobs are asked for by name; for more, all of ours are."""
SAVING_S = 5
"""A node has this much less than its pod's grace to save, so that it says how it ended before it is killed."""
TRIES = 5
QUARANTINED = "castra/quarantined"
"""Annotation of a node that no job is to get any more: why."""


class EksCluster:
    """Runs jobs on Kubernetes; `store` is where they read and write."""

    def __init__(self, address: Address, store: Store) -> None:
        self.address, self.store = dict(address), store

    def render(self, job: Job) -> dict[str, Any]:
        """Everything `submit` creates: `manifests` in the API server, `objects` in the store; raises `Refused`.

        `plugins` are made where nobody has installed device plugins.
        """
        packed, made = self._made(job)
        needed = plugins.wanted(self.place.instance) if self.place.instance else []
        return {
            "plugins": [one for plugin in needed for one in plugins.objects(plugin)],
            "manifests": [*manifests.ground(self.place), made],
            "objects": {key: _readable(key, data) for key, data in packed.objects.items()},
        }

    def submit(self, job: Job) -> str:
        """Start the job, or attach to the one of its name; returns its id."""
        packed, made = self._made(job)
        if found := self.find(job.name):
            return found
        if self.place.image.startswith("${"):
            raise Refused(f"job {job.name}: no container image is named; set image.container in the recipe")
        try:
            payload.deliver(packed, self.store)
        except StoreError as error:
            raise ClusterError(f"job {job.name} cannot be brought to the store: {error}") from error
        with self._sentences(f"job {job.name}"):
            for one in (*self._plugins(), *manifests.ground(self.place)):
                self._ensure(one)
            return self._create(job, made)

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        ids = [one for one in dict.fromkeys(job_ids) if re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", one)]
        lost = {one: Status(State.LOST, f"no job {one} in namespace {self.place.namespace}") for one in job_ids}
        if not ids:
            return lost
        with self._sentences("the states of the jobs"):
            found = {one["metadata"]["name"]: one for one in self._listed(self._kind, ids)}
            unclear = [one for one in ids if one in found and states.needs_pods(found[one])]
            pods = self._grouped("Pod", unclear)
            jobs = self._grouped("Job", unclear) if self._kind == "JobSet" else {}
        known = {one: states.status(found[one], jobs.get(one, []), pods.get(one, [])) for one in ids if one in found}
        return lost | known

    def status(self, job_id: str) -> Status:
        return self.statuses([job_id])[job_id]

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        """The whole lines of all pods since `after`, in the order of their times."""
        with self._sentences(f"the log of {job_id}"):
            pods = sorted(self._grouped("Pod", [job_id]).get(job_id, []), key=states.order)
            seen, rows = _cursor(after), []
            for pod in pods:
                name = pod["metadata"]["name"]
                fresh, seen[name] = _fresh(self._log(pod, seen.get(name)), seen.get(name))
                rows += fresh
        if not pods:
            return [], after
        here = {pod["metadata"]["name"] for pod in pods}
        kept = {name: place for name, place in seen.items() if name in here and place}
        lines = [line for _, line in sorted(rows, key=lambda row: row[0])]
        return lines, json.dumps(kept, sort_keys=True, separators=(",", ":")) if kept else after

    def cancel(self, job_id: str) -> None:
        """Make the pods end: SIGTERM, then `grace_s` seconds. The ended job stays, as cancelled."""
        with self._sentences(f"cancel {job_id}"):
            for _ in range(TRIES):
                there = self._get(self._path(self._kind, job_id))
                if there is None or states.ended(there) or states.note(there, CANCELLED):
                    return
                with contextlib.suppress(_Changed):
                    self._stop(there)
                    return
        raise Unreachable(f"{job_id} changes all the time and could not be cancelled; run again")

    def quarantine(self, job_id: str, node: int, why: str) -> str:
        """Cordon the node and, on EKS, terminate its instance, in whose place the node group starts another."""
        with self._sentences(f"the node of pod {node} of {job_id}"):
            pods = sorted(self._grouped("Pod", [job_id]).get(job_id, []), key=states.order)
            places = [one["spec"].get("nodeName") for one in pods if states.order(one)[1] == node]
            if not (name := next(filter(None, reversed(places)), None)):
                raise Refused(f"no pod says on which machine node {node} of {job_id} ran ({why})")
            path = f"{api.collection('Node', '')}/{name}"
            if (there := self._get(path)) is None:
                return f"{name} is gone already"
            marks = {"annotations": {QUARANTINED: why}}
            self.server.patch(path, {"metadata": marks, "spec": {"unschedulable": True}})
        instance = str(there["spec"].get("providerID", "")).rpartition("/")[2]
        if "Cluster" not in self.address or not instance.startswith("i-"):
            return f"{name} is cordoned"
        return f"{name} is cordoned, {aws.terminate(Site.at(self.address), [instance])}"

    def find(self, name: str) -> str | None:
        job_id = object_name(name)
        with self._sentences(f"job {name}"):
            there = self._get(self._path(self._kind, job_id))
        return job_id if there and states.note(there, NAME) == name else None

    def forget(self, job_id: str) -> None:
        """Delete the Job or JobSet with its pods and their logs."""
        with self._sentences(f"forget {job_id}"), _unless(404):
            self.server.delete(self._path(self._kind, job_id))

    def lacks(self) -> list[str]:
        """What somebody must install before jobs run as the recipe says, a sentence each."""
        here = self.place
        needs = {
            "apis/jobset.x-k8s.io/v1alpha2": (here.workload == "jobset", plugins.JOBSET),
            "apis/kueue.x-k8s.io/v1beta1": (bool(here.queue), plugins.KUEUE),
            "apis/storage.k8s.io/v1/csidrivers/fsx.csi.aws.com": (here.files is not None, plugins.FILES),
        }
        with self._sentences("what is installed"):
            return [how for path, (needed, how) in needs.items() if needed and self._get(path) is None]

    @cached_property
    def place(self) -> Place:
        """What the address says; raises `Refused`."""
        return Place.at(self.address)

    @cached_property
    def server(self) -> Server:
        """The API server, found at the first call; raises `ClusterError`."""
        if path := self.address.get("kubeconfig"):
            return api.of_kubeconfig(path, self.address.get("context", ""))
        if not (name := self.address.get("Cluster")):
            raise Refused("the address names no EKS cluster and no kubeconfig: provision the cluster first")
        return api.of_eks(name, Site.at(self.address))

    @property
    def _kind(self) -> str:
        return "JobSet" if self.place.workload == "jobset" else "Job"

    def _path(self, kind: str, name: str) -> str:
        return f"{api.collection(kind, self.place.namespace)}/{name}"

    def _made(self, job: Job) -> tuple[payload.Payload, Body]:
        grace_s = max(1, self.place.grace_s - SAVING_S)
        names.check(job)  # before its name becomes a key of the store
        packed = payload.pack(job, self.store.url, grace_s=grace_s)
        return packed, manifests.workload(job, self.place, packed.command, packed.env)

    def _create(self, job: Job, made: Body) -> str:
        job_id = str(made["metadata"]["name"])
        try:
            self.server.create(made)
        except ApiError as error:
            if error.status == 404:
                raise Refused(
                    f"this cluster knows no {made['kind']}: {plugins.JOBSET}; or set cluster.workload to job"
                ) from error
            if error.status != 409:
                raise
            if self.find(job.name) is None:
                raise Refused(f"job {job.name}: another {made['kind']} is called {job_id} already") from error
        return job_id

    def _plugins(self) -> list[Body]:
        """The device plugins that are not there."""
        if self.place.instance is None:
            return []
        nodes = self.server.items(api.collection("Node", ""))
        daemons = self.server.items("apis/apps/v1/daemonsets")
        lacking = plugins.lacking(self.place.instance, nodes, daemons)
        return [one for plugin in lacking for one in plugins.objects(plugin)]

    def _ensure(self, one: Body) -> None:
        """Make what is not there; who may not make it may still use it."""
        about = one["metadata"]
        try:
            self.server.create(one)
        except ApiError as error:
            path = f"{api.collection(one['kind'], about.get('namespace', ''))}/{about['name']}"
            if error.status == 409 or (error.status == 403 and self._get(path)):
                return
            raise

    def _stop(self, there: Body) -> None:
        """End a Job by its own deadline, a JobSet by suspending it; raises `_Changed` if it changed meanwhile."""
        about = there["metadata"]
        change = {"suspend": True} if there["kind"] == "JobSet" else {"activeDeadlineSeconds": 1}
        marks = {"annotations": {CANCELLED: "true"}, "resourceVersion": about["resourceVersion"]}
        try:
            self.server.patch(self._path(there["kind"], about["name"]), {"metadata": marks, "spec": change})
        except ApiError as error:
            if error.status == 409:
                raise _Changed from error
            raise
        if self.place.queue:
            self._release(about["uid"])

    def _release(self, uid: str) -> None:
        """Tell Kueue that the job is not to be admitted again, which it would do with what is only suspended."""
        workloads = api.collection("Workload", self.place.namespace)
        with _unless(404):
            for one in self.server.items(workloads, labelSelector=f"kueue.x-k8s.io/job-uid={uid}"):
                self.server.patch(f"{workloads}/{one['metadata']['name']}", {"spec": {"active": False}})

    def _get(self, path: str) -> Body | None:
        with _unless(404):
            return self.server.get(path)
        return None

    def _listed(self, kind: str, ids: Sequence[str]) -> list[Body]:
        selector = f"{JOB} in ({','.join(ids)})" if len(ids) <= FEW else f"{MANAGED}=castra"
        found = self.server.items(api.collection(kind, self.place.namespace), labelSelector=selector)
        # a list's items do not say their kind
        return [one | {"kind": kind} for one in found if one["metadata"].get("labels", {}).get(JOB) in ids]

    def _grouped(self, kind: str, ids: Sequence[str]) -> dict[str, list[Body]]:
        grouped: dict[str, list[Body]] = {}
        for one in self._listed(kind, ids) if ids else []:
            grouped.setdefault(one["metadata"]["labels"][JOB], []).append(one)
        return grouped

    def _log(self, pod: Body, seen: "Seen | None") -> str:
        """What a pod said from the second of the last line on; nothing if it has not begun, or is gone."""
        since = {"sinceTime": f"{seen[0][:19]}Z"} if seen else {}
        path = f"{self._path('Pod', pod['metadata']['name'])}/log"
        try:
            text = self.server.text(path, container=manifests.CONTAINER, timestamps="true", **since)
        except ApiError as error:
            if error.status in (401, 403):
                raise
            return ""
        except Unreachable:  # the API server answers, the pod's node does not: the other nodes' lines matter
            return ""
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return text if ended or text.endswith("\n") else text[: text.rfind("\n") + 1]

    @contextlib.contextmanager
    def _sentences(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            raise _told(error, doing, self.address) from error


Seen = tuple[str, int]
"""The time of a pod's last line, and how many lines of that time were seen."""


class _Changed(Exception):
    """The object is not what it was when it was read."""


@contextlib.contextmanager
def _unless(*statuses: int) -> Iterator[None]:
    """Some refusals are an answer."""
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise


def _cursor(after: str) -> dict[str, Seen | None]:
    try:
        return {name: (str(at), int(count)) for name, (at, count) in json.loads(after or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _fresh(text: str, seen: Seen | None) -> tuple[list[tuple[str, str]], Seen | None]:
    """The lines after those seen, with their times, and where to go on."""
    last, count = seen or ("", 0)
    rows, skip = [], count
    for told in text.removesuffix("\n").split("\n"):
        stamp, _, line = told.partition(" ")
        at = _time(stamp)
        if not at or at < last or (at == last and skip > 0):
            skip -= at == last
            continue
        count = count + 1 if at == last else 1
        last, skip = at, 0
        rows.append((at, line))
    return rows, (last, count) if last else None


def _time(stamp: str) -> str:
    """A line's time in UTC with nine digits, so that times sort as texts; "" for what is none."""
    told = re.fullmatch(r"(.{19})(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", stamp)
    if told is None:
        return ""
    whole = datetime.fromisoformat(told[1] + told[3].replace("Z", "+00:00")).astimezone(UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{told[2] or '':0<9}Z"


def _readable(key: str, data: bytes) -> Any:
    return json.loads(data) if key.endswith(".json") else f"{len(data)} bytes"


def _told(error: ApiError, doing: str, address: Mapping[str, str]) -> ClusterError:
    where = address.get("Cluster") or address.get("kubeconfig", "Kubernetes")
    message = error.message.rstrip(".")
    if error.status == 401:
        return Refused(f"{doing}: {where} does not know who we are; give this AWS identity an access entry there")
    if error.status == 403:
        return Refused(f"{doing}: {where} does not allow it ({message}); ask for that permission")
    if error.status in (408, 409, 410, 429) or error.status >= 500:
        return Unreachable(f"{doing}: {where} cannot answer now ({error.status} {message}); run again in a moment")
    return Refused(f"{doing}: {where} refuses it ({error.status} {message})")
