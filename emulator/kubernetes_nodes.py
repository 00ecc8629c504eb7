"""The machines of an emulated Kubernetes cluster: nodes from EKS's node groups, the scheduler, the kubelets.

A pod is really run: its container's command in a guest of its own, which has the pod's host name and knows the other
pods of its Job by the names a headless service would give them. Where guests are plain processes, all of them are at
127.0.0.1, and those names become it.
"""

import contextlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from clusters import catalog
from clusters import kubernetes_plugins as plugins
from clusters.base import Refused
from clusters.manifests import JOB, TYPE, devices
from emulator import faults, guests
from emulator.api import World
from emulator.gangs import LOST, Container, container_environment
from emulator.hosts import HOSTS
from emulator.kubernetes_jobs import JOB_NAME, index_of
from emulator.kubernetes_store import Object, Objects, made, now, phase, set_condition
from emulator.memory import ACCOUNT

TICK_S = 0.03
NOTICED_S = 1.0
"""From the loss of a node until the control plane has noticed and removed it; really a minute and more."""
NEXT_TRY_S = 1.0
"""Between two attempts of a node group to get an instance where there was none."""
ZONE = "topology.kubernetes.io/zone"
GROUP = "eks.amazonaws.com/nodegroup"
MESSAGE_BYTES = 2048
"""Of the log's end, that a failed container's status keeps."""
UNITS = {"m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}


class PodLog:
    """What a container printed, with the time of each line."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self._last = 0

    def write(self, lines: Iterable[bytes]) -> None:
        """Add whole lines; no two have the same time."""
        for line in lines:
            self._last = max(time.time_ns(), self._last + 1)
            self.lines.append((self._last, line.decode(errors="replace")))

    def told(self, since: str = "", stamped: bool = False, tail: int | None = None) -> str:
        """The log as the API tells it."""
        first = int(datetime.fromisoformat(since).timestamp()) * 10**9 if since else 0
        rows = [row for row in list(self.lines) if row[0] >= first]
        rows = rows if tail is None else rows[max(0, len(rows) - tail) :]
        return "".join(f"{_stamp(at)} {line}\n" if stamped else f"{line}\n" for at, line in rows)


class PodContainer(Container):
    """A container whose log goes to its pod."""

    log: Any

    def _ship(self, read: int) -> None:
        with open(read, "rb") as source:
            for line in source:
                self.log.write([line.rstrip(b"\r\n")])


@dataclass(eq=False)
class Machines:
    """The nodes of one cluster and what runs on them."""

    name: str
    region: str
    world: Objects
    logs: dict[str, PodLog] = field(default_factory=dict)
    """By the pod's uid, until the pod is removed."""
    lost: dict[str, float] = field(default_factory=dict)
    """Nodes that were switched off, and when."""
    containers: dict[str, PodContainer] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _tried: dict[str, float] = field(default_factory=dict)
    _ports: dict[str, str] = field(default_factory=dict)
    _booting: threading.Lock = field(default_factory=threading.Lock)

    def step(self, groups: Sequence[Object]) -> None:
        """One round of node groups, scheduler and kubelets."""
        self._have_nodes(groups)
        self._bury()
        daemons = self.world.listed("DaemonSet")
        for one in self.world.listed("Node"):
            self.world.change(one, partial(_offer, _allocatable(one["metadata"]["labels"][TYPE], daemons)))
        nodes = self.world.listed("Node")
        for pod in self.world.listed("Pod"):
            uid = pod["metadata"]["uid"]
            if phase(pod) == "Pending" and not pod["spec"].get("nodeName") and not _leaving(pod):
                self._schedule(pod, nodes)
            elif pod["spec"].get("nodeName") and uid not in self._started and phase(pod) == "Pending":
                self._started.add(uid)
                threading.Thread(target=self._live, args=(pod,), daemon=True).start()
        there = {pod["metadata"]["uid"] for pod in self.world.listed("Pod")}
        for uid in [uid for uid in self.logs if uid not in there]:
            del self.logs[uid]

    def close(self) -> None:
        """End all pods."""
        for container in list(self.containers.values()):
            container.guest.stop()

    def _have_nodes(self, groups: Sequence[Object]) -> None:
        for group in groups:
            mine = [one for one in self.world.listed("Node") if one["metadata"]["labels"][GROUP] == group["name"]]
            for one in mine[group["size"] :]:
                self.world.delete(one)
            for _ in range(group["size"] - len(mine)):
                if time.monotonic() - self._tried.get(group["name"], 0.0) < NEXT_TRY_S:
                    break
                if faults.no_capacity(group["type"], group["zone"], group["market"]):
                    self._tried[group["name"]] = time.monotonic()
                    break
                one = self.world.create(_node(group))
                HOSTS[one["spec"]["providerID"].rpartition("/")[2]] = partial(self._lose, one["metadata"]["name"])

    def _bury(self) -> None:
        """What EC2, the node's controller and the pods' collector do with a lost node: remove it, and fail its pods."""
        for node, since in list(self.lost.items()):
            if time.monotonic() - since < NOTICED_S:
                continue
            del self.lost[node]
            with self.world.lock:
                for one in self.world.listed("Node"):
                    if one["metadata"]["name"] == node:
                        self.world.delete(one)
                for pod in self.world.listed("Pod"):
                    if pod["spec"].get("nodeName") == node and phase(pod) in ("Pending", "Running"):
                        self.world.change(pod, _disrupted)
                        self.world.delete(pod)

    def _lose(self, node: str) -> None:
        """A pod's guest was switched off: so is its whole node, and nobody says a word."""
        self.lost.setdefault(node, time.monotonic())
        for pod in self.world.listed("Pod"):
            container = self.containers.get(pod["metadata"]["uid"])
            if pod["spec"].get("nodeName") == node and container:
                container.guest.power_off()

    def _schedule(self, pod: Object, nodes: Sequence[Object]) -> None:
        """Bind a pod to the emptiest node that has what it asks for, or say why there is none."""
        with self.world.lock:
            taken = [one for one in self.world.listed("Pod") if phase(one) in ("Pending", "Running")]
            load = {one["metadata"]["name"]: [p for p in taken if p["spec"].get("nodeName") == one["metadata"]["name"]]
                    for one in nodes if one["metadata"]["name"] not in self.lost}  # fmt: skip
            why: dict[str, int] = {}
            for one in sorted(nodes, key=lambda one: len(load.get(one["metadata"]["name"], []))):
                name = one["metadata"]["name"]
                lacking = _lacking(pod, one, load[name]) if name in load else "node(s) were not ready"
                if not lacking:
                    self.world.change(pod, partial(_bind, name))
                    return
                why[lacking] = why.get(lacking, 0) + 1
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items())) or "no nodes"
            words = f"0/{len(nodes)} nodes are available: {reasons}."
            self.world.change(pod, lambda p: set_condition(p, "PodScheduled", False, "Unschedulable", words))

    def _live(self, pod: Object) -> None:
        """The life of a pod on its node, as its kubelet sees it."""
        uid = pod["metadata"]["uid"]
        log = self.logs.setdefault(uid, PodLog())
        try:
            container = self._boot(pod, log)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            words = str(error)
            self.world.change(pod, lambda one: _end(one, 128, words, "StartError"))
            return
        try:
            code = self._wait(pod, container)
        finally:
            del self.containers[uid]
            container.close()
        if code is LOST:
            self._lose(pod["spec"]["nodeName"])
            return
        tail = log.told()[-MESSAGE_BYTES:] if code else ""
        self.world.change(pod, lambda one: _end(one, code, tail, "Completed" if code == 0 else "Error"))

    def _boot(self, pod: Object, log: PodLog) -> PodContainer:
        told, host = pod["spec"]["containers"][0], pod["spec"].get("hostname", pod["metadata"]["name"])
        with self._booting:
            labels = pod["metadata"].get("labels", {})
            job = labels.get(JOB) or labels.get(JOB_NAME) or pod["metadata"]["uid"]
            container = PodContainer(job, index_of(pod), host, log)  # type: ignore[arg-type]  # takes lines as they do
            self.containers[pod["metadata"]["uid"]] = container
            plain = self._introduce(pod, job, container)
        about = {"podIP": container.guest.address, "startTime": now()}
        pod = self.world.change(pod, lambda one: one["status"].update(about))
        env = container_environment(World.endpoint, host)
        env |= {one["name"]: plain(one["name"], _value(one, pod)) for one in told.get("env", [])}
        container.start([*told["command"], *told.get("args", [])], env)
        self.world.change(pod, lambda one: _run(one, told["name"]))
        return container

    def _introduce(self, pod: Object, group: str, container: PodContainer) -> Callable[[str, str], str]:
        """Let the pods of a Job know each other by name; returns what to do with values of the environment."""
        domain = pod["spec"].get("subdomain", "")
        if not isinstance(container.guest, guests.NamespaceGuest):
            port = self._ports.setdefault(group, str(_free_ports()))
            return lambda name, value: (
                port
                if name.endswith("MASTER_PORT")
                else "127.0.0.1"
                if domain and value.endswith(f".{domain}")
                else value
            )
        here = [one for (of, _), one in guests.pool().guests.items() if of == group]
        known = [one for one in here if isinstance(one, guests.NamespaceGuest) and one.alive]
        names = "".join(f"{one.address} {one.name}.{domain} {one.name}\n" for one in known)
        for one in known:
            one.write("/etc/hosts", "127.0.0.1 localhost\n" + names)
        return lambda _, value: value

    def _wait(self, pod: Object, container: PodContainer) -> Any:
        """Wait for the end of a container, which is made if its pod is to be removed."""
        kill_at = None
        while (code := container.code) is None:
            time.sleep(TICK_S)
            about = pod["metadata"]
            newest = self.world.objects.get(("Pod", about["namespace"], about["name"]))
            if kill_at is None and (newest is None or _leaving(newest)):
                grace = newest["metadata"].get("deletionGracePeriodSeconds", 0) if newest else 0
                kill_at = time.monotonic() + grace
                container.terminate()
            if kill_at is not None and time.monotonic() > kill_at:
                with contextlib.suppress(ProcessLookupError):
                    container.guest.stop()
                return 137
        return code


def groups_of(cluster: str, region: str) -> list[Object]:
    """A cluster's node groups: name, instance type, size, zone, market, labels."""
    from moto.backends import get_backend

    backend = get_backend("eks")[ACCOUNT][region]
    return [
        _group(backend.describe_nodegroup(cluster, name), region)
        for name in backend.list_nodegroups(cluster, 100, None)[0]
    ]


def _group(group: Any, region: str) -> Object:
    """A node group as moto keeps it; what it does not say itself stands in its launch template."""
    data = _template(group.launch_template or {}, region)
    market = {"ON_DEMAND": "on-demand", "SPOT": "spot"}.get(group.capacity_type or "ON_DEMAND", "")
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    return {
        "name": group.nodegroup_name,
        "type": data.get("InstanceType") or group.instance_types[0],
        "size": int((group.scaling_config or {}).get("desiredSize", 2)),
        "zone": _zone(group.subnets, region),
        "market": target.get("CapacityReservationId") or market,
        "labels": group.labels or {},
    }


def _template(told: Mapping[str, str], region: str) -> Mapping[str, Any]:
    from moto.backends import get_backend

    known = get_backend("ec2")[ACCOUNT][region].launch_templates
    found = known.get(told.get("id", ""))
    data: Mapping[str, Any] = found.get_version(told.get("version", "$Default")).data if found else {}
    return data


def _zone(subnets: Sequence[str], region: str) -> str:
    """The availability zone of the first subnet that exists."""
    from moto.backends import get_backend

    known = get_backend("ec2")[ACCOUNT][region].subnets
    zones = [
        one.availability_zone for name in subnets or [] for by_zone in known.values() if (one := by_zone.get(name))
    ]
    return zones[0] if zones else f"{region}a"


def _node(group: Mapping[str, Any]) -> Object:
    labels = {TYPE: group["type"], ZONE: group["zone"], GROUP: group["name"]} | dict(group["labels"])
    node = made("Node", f"ip-10-0-{secrets.randbelow(250)}-{secrets.token_hex(3)}.ec2.internal")
    node["metadata"]["labels"] = labels
    node["spec"] = {"providerID": f"aws:///{group['zone']}/i-{secrets.token_hex(9)[:17]}"}
    node["status"] = {"allocatable": {}}
    set_condition(node, "Ready", reason="KubeletReady", message="kubelet is posting ready status")
    return node


def _allocatable(kind: str, daemons: Sequence[Object]) -> dict[str, str]:
    """What an instance of that type offers to pods; devices only by the plugins that are installed."""
    try:
        found = catalog.find(kind)
    except Refused:
        return {"cpu": "3.9", "memory": "15Gi", "pods": "58"}
    offered = [one.resource for one in plugins.wanted(found) if one.installed(daemons)]
    there = {name: str(count) for name, count in devices(found).items() if name in offered}
    pages = {"hugepages-2Mi": "5128Mi"} if found.efa_interfaces else {}
    return (
        {"cpu": f"{found.vcpus * 0.98:.1f}", "memory": f"{int(found.ram_gib * 0.94)}Gi", "pods": "110"} | there | pages
    )


def _lacking(pod: Object, node: Object, there: Sequence[Object]) -> str:
    """Why a pod does not fit on a node beside the pods that are there; "" if it does."""
    labels = node["metadata"]["labels"]
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    if any(labels.get(key) != value for key, value in pod["spec"].get("nodeSelector", {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    free = {name: _quantity(text) for name, text in node["status"]["allocatable"].items()}
    for one in [*there, pod]:
        for name, amount in _asked(one).items():
            free[name] = free.get(name, 0.0) - amount
    short = [name for name in _asked(pod) if free[name] < 0]
    return f"Insufficient {short[0]}" if short else ""


def _asked(pod: Object) -> dict[str, float]:
    asked: dict[str, float] = {"pods": 1.0}
    for one in pod["spec"]["containers"]:
        for name, text in one.get("resources", {}).get("requests", {}).items():
            asked[name] = asked.get(name, 0.0) + _quantity(text)
    return asked


def _quantity(text: Any) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", str(text)).groups()  # type: ignore[union-attr]  # the API let it pass
    return float(number) * UNITS.get(unit, 1.0)


def _offer(offer: dict[str, str], node: Object) -> None:
    node["status"]["allocatable"] = offer


def _bind(node: str, pod: Object) -> None:
    pod["spec"]["nodeName"] = node
    set_condition(pod, "PodScheduled")


def _run(pod: Object, container: str) -> None:
    state = {"name": container, "ready": True, "restartCount": 0, "state": {"running": {"startedAt": now()}}}
    pod["status"] |= {"phase": "Running", "containerStatuses": [state]}
    set_condition(pod, "Ready")


def _end(pod: Object, code: int, message: str, reason: str) -> None:
    ended = {"exitCode": code, "reason": reason, "finishedAt": now()} | ({"message": message} if message else {})
    name = pod["spec"]["containers"][0]["name"]
    state = {"name": name, "ready": False, "restartCount": 0, "state": {"terminated": ended}}
    pod["status"] |= {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}
    set_condition(pod, "Ready", truth=False, reason="PodFailed" if code else "PodCompleted")


def _disrupted(pod: Object) -> None:
    words = "PodGC: node no longer exists"
    set_condition(pod, "DisruptionTarget", reason="DeletionByPodGC", message=words)
    pod["status"]["phase"] = "Failed"


def _leaving(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _value(told: Object, pod: Object) -> str:
    """A variable's value: itself, or a field of the pod."""
    if "value" in told or "valueFrom" not in told:
        return str(told.get("value", ""))
    path = told["valueFrom"]["fieldRef"]["fieldPath"]
    if keyed := re.fullmatch(r"metadata\.(annotations|labels)\['(.+)'\]", path):
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    found: Any = pod
    for part in path.split("."):
        found = found[part]
    return str(found)


def _free_ports() -> int:
    """A port that is free, as is the one after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def _stamp(at: int) -> str:
    return f"{datetime.fromtimestamp(at // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{at % 10**9:09d}Z"
