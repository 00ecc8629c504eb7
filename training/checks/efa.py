"""The Elastic Fabric Adapters of a node: those on the bus, those the kernel drives, those libfabric can use.

Counters: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-working-monitor.html; `device/p2p`, where the driver
tells who gives it the GPUs' memory: amzn/amzn-drivers, kernel/linux/efa/src/efa_sysfs.c; the limit on locked memory:
gpu-cluster-healthcheck of awslabs/awsome-distributed-ai 95b939cdc5b2, check 2.
"""

import re
import resource
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from training.checks.finding import Finding
from training.checks.machine import Hung, Machine

AMAZON: Final = 0x1D0F
VERBS: Final = "/sys/class/infiniband"
BUS: Final = "/sys/bus/pci/devices"
BAD: Final = (
    "rx_drops",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
)
LOCKED: Final = 16 << 30
"""Bytes of memory that a process must be able to lock, at least, for EFA to register its buffers."""


@dataclass(slots=True)
class Card:
    """One adapter."""

    name: str
    """As the kernel has it, `rdmap16s27`."""
    address: str
    state: str
    firmware: str
    p2p: str
    """Who gives it the GPUs' memory, `NVIDIA`, say; "" for nobody, for dma-buf, and where the driver does not tell."""
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Adapters:
    """All adapters of a node."""

    bus: list[str]
    """PCI addresses."""
    cards: list[Card]
    usable: list[str] | None
    """Names of those libfabric lists; None without libfabric."""
    direct: list[str]
    """Names of those that can send from GPUs' memory (FI_HMEM)."""
    hung: str = ""
    user_devices: int = 0
    """/dev/infiniband/uverbs*."""
    gdrcopy: bool = False

    @property
    def names(self) -> list[str]:
        """Of those that can be used; without libfabric, of those the kernel drives."""
        return self.usable if self.usable is not None else [card.name for card in self.cards]

    def told(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def read_domains(told: str) -> list[str]:
    """Read what `fi_info -p efa` prints: the names of adapters, each once; no reliable datagrams, no name."""
    entries = re.split(r"^(?=provider:)", told, flags=re.MULTILINE)
    names = [
        found[1]
        for entry in entries
        if "type: FI_EP_RDM" in entry and (found := re.search(r"domain: (\S+?)(?:-rdm)?$", entry, re.MULTILINE))
    ]
    return list(dict.fromkeys(names))


def look(machine: Machine) -> Adapters:
    """Look for adapters."""
    hung, usable, direct = "", None, []
    try:
        said = machine.run("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
        usable = None if said is None else read_domains(said.out)
        said = machine.run("fi_info", "-p", "efa", "-t", "FI_EP_RDM", "-c", "FI_HMEM") if usable else None
        direct = read_domains(said.out) if said else []
    except Hung as problem:
        hung = str(problem)
    return Adapters(
        bus=[address for address in machine.names(BUS) if _on_bus(machine, address)],
        cards=[card for name in machine.names(VERBS) if (card := _card(machine, name))],
        usable=usable,
        direct=direct,
        hung=hung,
        user_devices=len(machine.names("/dev/infiniband", "uverbs*")),
        gdrcopy=machine.at("/dev/gdrdrv").exists(),
    )


def judge(seen: Adapters, expected: int, *, gpus: bool = False, locked: int | None = None) -> list[Finding]:
    """Compare with `expected` adapters.

    `gpus`: whether their memory should be reached; `locked`: bytes a process may lock, None if it has no limit.
    """
    found = [finding for card in seen.cards for finding in _card_findings(card)]
    if not expected:
        return found
    if seen.hung:
        return [*found, Finding("refuse", seen.hung, device="EFA", todo="reboot the node", action="reboot")]
    if seen.usable is None:
        what = f"libfabric is not installed, and {expected} EFA adapters are there to be used"
        return [*found, Finding("refuse", what, device="EFA", todo="boot an image with the EFA installer's software")]
    found += _count(seen, expected)
    if seen.cards and seen.user_devices < len(seen.cards):
        what = f"/dev/infiniband has {seen.user_devices} of {len(seen.cards)} uverbs devices"
        found.append(Finding("refuse", what, device="EFA", todo="give the container its devices"))
    if gpus and seen.usable and not seen.direct:
        todo = "boot an image whose efa, libfabric and NVIDIA driver are of one release"
        found.append(Finding("warn", "no adapter sends from the GPUs' memory (FI_HMEM)", device="EFA", todo=todo))
    if locked is not None and locked < LOCKED:
        what = f"a process may lock {locked >> 20} MiB of memory, EFA needs unlimited"
        found.append(Finding("refuse", what, todo="set the limit memlock to unlimited (ulimit -l, or the container's)"))
    return found


def lost(names: Mapping[str, Collection[str]]) -> list[Finding]:
    """Find adapters that a node lacks and more than half of all have, by name: node → its adapters.

    The kernel names an adapter by its place on the bus, which is the same in all instances of a type.
    """
    having = Counter(name for mine in names.values() for name in set(mine))
    usual = {name for name, nodes in having.items() if nodes > len(names) / 2}
    return [
        Finding(
            "refuse",
            f"it lacks {', '.join(missing)}, which most nodes have",
            node,
            ", ".join(missing),
            "attach the network interface, or replace the node",
            "isolate",
        )
        for node, mine in names.items()
        if (missing := sorted(usual - set(mine)))
    ]


def lockable() -> int | None:
    """How many bytes of memory this process may lock; None if it has no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _count(seen: Adapters, expected: int) -> list[Finding]:
    """Fewer, or more, than the type of instance has; the lost ones by name where the kernel or the bus knows them."""
    usable = seen.usable or []
    if len(usable) >= expected:
        more = f"libfabric lists {len(usable)} EFA adapters where {expected} were expected"
        return [Finding("warn", more, device="EFA", todo="check the type")] if len(usable) > expected else []
    unused = [card.name for card in seen.cards if card.name not in usable]
    undriven = sorted(set(seen.bus) - {card.address for card in seen.cards})
    lost = unused + undriven
    parts = [
        f"libfabric lists {len(usable)} of {expected} EFA adapters",
        f"the kernel has, but libfabric has not: {', '.join(unused)}" if unused else "",
        f"on the bus without a driver: {', '.join(undriven)}" if undriven else "",
        "" if lost else f"there are {', '.join(usable) or 'none'}",
    ]
    todo = "attach the network interfaces the launch template should, or replace the node"
    return [Finding("refuse", "; ".join(filter(None, parts)), "", ", ".join(lost) or "EFA", todo, "isolate")]


def _card_findings(card: Card) -> list[Finding]:
    found = []
    if card.state and "ACTIVE" not in card.state:
        todo = "replace the node"
        found.append(Finding("refuse", f"its port is {card.state}", device=card.name, todo=todo, action="isolate"))
    bad = ", ".join(f"{name} {card.counters[name]}" for name in BAD if card.counters.get(name))
    if bad:
        todo = "watch whether they grow in a run"
        found.append(Finding("warn", f"since it was started: {bad}", device=card.name, todo=todo, action="monitor"))
    return found


def _on_bus(machine: Machine, address: str) -> bool:
    """Whether it is an EFA: Amazon's 0xefa0, 0xefa1, ... (linux, drivers/infiniband/hw/efa/efa_main.c)."""
    vendor, device = (machine.number(f"{BUS}/{address}/{name}") for name in ("vendor", "device"))
    return vendor == AMAZON and device is not None and device >> 4 == 0xEFA


def _card(machine: Machine, name: str) -> Card | None:
    """Read an adapter of the kernel's; None for RDMA cards of others."""
    place = machine.at(f"{VERBS}/{name}/device")
    if machine.number(f"{VERBS}/{name}/device/vendor") not in (AMAZON, None):
        return None
    counters = f"{VERBS}/{name}/ports/1/hw_counters"
    values = {counter: machine.number(f"{counters}/{counter}") for counter in machine.names(counters)}
    return Card(
        name=name,
        address=place.resolve().name if place.is_symlink() else "",
        state=machine.read(f"{VERBS}/{name}/ports/1/state").partition(": ")[2],
        firmware=machine.read(f"{VERBS}/{name}/fw_ver"),
        p2p=machine.read(f"{VERBS}/{name}/device/p2p"),
        counters={counter: value for counter, value in values.items() if value is not None},
    )
