"""What NCCL_DEBUG=INFO says of the network NCCL chose, by host: provider, interfaces, plugin. Standard library only."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SAID: Final = re.compile(r"([\w.-]+):\d+:\d+ \[\d+\] (?:\S.* )?NCCL (INFO|WARN) (.*)")
"""`host:pid:thread [device] (where in the source) NCCL INFO …`; WARN has the place, in some versions a time before."""
PROVIDER: Final = re.compile(r"NET/OFI Selected [Pp]rovider is (\w[\w;-]*)(?:.*\(found (\d+) nics\))?")
DEVICE: Final = re.compile(r"NET/OFI NIC group \d+ device #\d+ (\S+)")
PLUGIN: Final = re.compile(r"NET/OFI (?:Initializing|Using) aws-ofi-nccl (\S+)")
LIBFABRIC: Final = re.compile(r"NET/OFI Using Libfabric version (\S+)")
NETWORK: Final = re.compile(r"Using network (\w.*)")
OWN: Final = re.compile(r"NET/(Socket|IB) : Using")
NCCL: Final = re.compile(r"NCCL version (\d\S*)")
KINDS: Final = {"socket": "tcp", "ib": "ib", "libfabric": "libfabric", "aws libfabric": "libfabric"}
WARNINGS: Final = 5
TELLING: Final = 200


@dataclass(frozen=True, slots=True)
class Fabric:
    """What the processes of one host said."""

    provider: str | None = None
    """efa, tcp, ib, …; `libfabric` where only that is known; several, joined by +, where its processes disagree."""
    nics: int | None = None
    """Interfaces the plugin found; the fewest of any process."""
    devices: tuple[str, ...] = ()
    """Their PCI addresses, where the plugin lists them; machines of one type have the same."""
    plugin: str = ""
    """Version of aws-ofi-nccl."""
    libfabric: str = ""
    nccl: str = ""
    warnings: tuple[str, ...] = ()
    """The first of NCCL's own."""


def fabrics(text: str) -> dict[str, Fabric]:
    """Read NCCL's lines, of any number of processes; by host. Lines of other origin are passed over."""
    said: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if found := SAID.search(line):
            said.setdefault(found[1], []).append((found[2], found[3].strip()))
    everywhere = NCCL.search(text)  # one process prints it, without a host, in versions before 2.26
    return {host: _fabric(lines, everywhere[1] if everywhere else "") for host, lines in said.items()}


def telling(text: str) -> str:
    """Return the lines of a process that say something of its network, the first of them."""
    patterns = (PROVIDER, DEVICE, PLUGIN, LIBFABRIC, NETWORK, OWN, NCCL)
    lines = [line for line in text.splitlines() if "NCCL WARN" in line or any(one.search(line) for one in patterns)]
    return "\n".join(lines[:TELLING])


def common(found: Iterable[Fabric]) -> str | None:
    """Return the provider of all; joined by + where hosts disagree, None where none said anything."""
    return "+".join(sorted({fabric.provider for fabric in found if fabric.provider})) or None


def _fabric(lines: list[tuple[str, str]], nccl: str) -> Fabric:
    told = [text for _, text in lines]
    nics = [int(found[2]) for found in map(PROVIDER.search, told) if found and found[2]]
    own = [found[1] for found in map(NCCL.search, told) if found]
    return Fabric(
        provider="+".join(sorted(_providers(told))) or None,
        nics=min(nics, default=None),
        devices=tuple(sorted({found[1] for found in map(DEVICE.search, told) if found})),
        plugin=_first(PLUGIN, told),
        libfabric=_first(LIBFABRIC, told),
        nccl=own[0] if own else nccl,
        warnings=tuple(dict.fromkeys(text for kind, text in lines if kind == "WARN"))[:WARNINGS],
    )


def _providers(told: list[str]) -> set[str]:
    """The networks the processes of a host use: what each settled on, else what it tried."""
    libfabric = {found[1].partition(";")[0].lower() for found in map(PROVIDER.search, told) if found}
    networks = {found[1].strip().lower() for found in map(NETWORK.search, told) if found}
    if networks:
        kinds = {KINDS.get(network, network) for network in networks}
        return (kinds - {"libfabric"}) | (libfabric or {"libfabric"} if "libfabric" in kinds else set())
    return libfabric or {KINDS[found[1].lower()] for found in map(OWN.search, told) if found}


def _first(pattern: re.Pattern[str], told: list[str]) -> str:
    return next((found[1] for found in map(pattern.search, told) if found), "")
