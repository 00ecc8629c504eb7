"""A node beside its GPUs and network cards: processors, memory, limits, names."""

import ipaddress
import os
import resource
import socket
from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from training.checks.finding import Finding
from training.checks.machine import Hung, Machine, within

OPEN_FILES: Final = 8192
"""That a process may have open, at least: NCCL has sockets and shared memory per pair of ranks and channel."""
SHARED: Final = 1 << 30
"""Bytes of /dev/shm, at least, where GPUs of a node talk through it; containers begin with 64 MiB. Source: NCCL's user
guide, "Troubleshooting", sharing data."""
SHM: Final = "/dev/shm"  # noqa: S108  # nothing is written there
LITTLE_SHARED: Final = 64 << 20
"""Bytes of /dev/shm that loaders of data need."""


def look(machine: Machine) -> dict[str, Any]:
    """Numbers and settings of this node."""
    shared = os.statvfs(machine.at(SHM)) if machine.at(SHM).is_dir() else None
    memory = dict(line.partition(":")[::2] for line in machine.read("/proc/meminfo").splitlines())
    return {
        "cpus": os.cpu_count() or 0,
        "usable_cpus": len(os.sched_getaffinity(0)),
        "governor": machine.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_gib": round(_kib(memory.get("MemTotal", "")) / 2**20),
        "available_gib": round(_kib(memory.get("MemAvailable", "")) / 2**20, 1),
        "hugepages": _kib(memory.get("HugePages_Total", "")),
        "shared_memory_bytes": shared.f_frsize * shared.f_blocks if shared else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "numa_nodes": len(machine.names("/sys/devices/system/node", "node[0-9]*")),
        "boot": machine.read("/proc/sys/kernel/random/boot_id"),
        "address": _address(),
    }


def alike(seen: dict[str, Any]) -> dict[str, str]:
    """Of what was seen, what nodes of one type have alike."""
    names = ("cpus", "usable_cpus", "governor", "memory_gib", "hugepages", "open_files", "locked_memory", "numa_nodes")
    # how much of its memory the kernel keeps to itself differs a little
    return {name: str(seen[name]) for name in names} | {"memory_gib": f"{seen['memory_gib']:.2g}"}


def judge(seen: dict[str, Any], *, gpus: bool, nodes: int) -> list[Finding]:
    """Judge a node; `gpus`: whether it has some, `nodes`: how many there are."""
    found = []
    least = SHARED if gpus else LITTLE_SHARED
    if seen["shared_memory_bytes"] < least:
        what = f"{SHM} has {seen['shared_memory_bytes'] >> 20} MiB, {least >> 20} MiB are needed"
        todo = "give the container a larger /dev/shm (--shm-size)"
        found.append(Finding("refuse" if gpus else "warn", what, device=SHM, todo=todo))
    if 0 <= seen["open_files"] < OPEN_FILES:
        what = f"a process may open {seen['open_files']} files, NCCL may need {OPEN_FILES}"
        found.append(Finding("warn", what, todo="raise the limit nofile"))
    if seen["governor"] not in ("", "performance"):
        what = f"the processors' governor is {seen['governor']}"
        found.append(Finding("warn", what, todo="cpupower frequency-set -g performance"))
    if seen["usable_cpus"] < seen["cpus"]:
        what = f"{seen['usable_cpus']} of {seen['cpus']} processors may be used"
        found.append(Finding("warn", what, todo="ask the scheduler for whole nodes"))
    return found + _named(seen["address"], nodes)


def twins(nodes: Mapping[str, tuple[str, str]]) -> list[Finding]:
    """Find nodes that have one name: a launcher that goes by names reaches one of them only.

    `nodes` are label → host and boot id; with one boot id too, they are one machine.
    """
    found = []
    for (one, (name, boot)), (other, (its, its_boot)) in combinations(nodes.items(), 2):
        if name == its and boot == its_boot:
            what = f"it is the same machine as {one}: what is measured between them is not a network"
            found.append(Finding("warn", what, other, todo="start one process per machine"))
        elif name == its:
            what = f"it has the name of {one}"
            found.append(Finding("refuse", what, other, todo="give every node a name of its own"))
    return found


def _named(address: str, nodes: int) -> list[Finding]:
    """Peers find a node by the address of its name."""
    if nodes < 2:
        return []
    if not address:
        return [Finding("warn", "its own name has no address", todo="see DNS, or /etc/hosts")]
    if ipaddress.ip_address(address).is_loopback:
        what = f"its own name has the address {address}, by which peers do not find it"
        return [Finding("warn", what, todo="correct /etc/hosts, or name the network's interface")]
    return []


def _address() -> str:
    """The address of this machine's name, "" if it has none, or the name service does not answer."""
    try:
        return within(5.0, "the name service", lambda: socket.gethostbyname(socket.gethostname()))
    except (OSError, Hung):
        return ""


def _kib(told: str) -> int:
    """A line of /proc/meminfo: `16384 kB`."""
    word = told.split()
    return int(word[0]) if word else 0
