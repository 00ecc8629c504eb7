"""Where GPUs and network cards sit: processor (NUMA node) and PCIe path, and which card is nearest to which GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.checks.machine import Machine

BUS = "/sys/bus/pci/devices"
NVIDIA = 0x10DE
SHOWN = ("0x0300", "0x0302")
"""PCI classes of GPUs: with and without a display."""
BRIDGE = ("0x0680",)
"""The PCI class of NVSwitches."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device on the bus."""

    address: str
    numa: int
    """-1 where the machine does not tell."""
    path: tuple[str, ...]
    """The bridges above it, from the root."""


def gpu_addresses(machine: Machine) -> list[str]:
    """The PCI addresses of NVIDIA GPUs, as nvidia-smi writes them, whether a driver answers for them or not."""
    return [f"0000{address}".upper() for address in addresses(machine, SHOWN)]


def addresses(machine: Machine, classes: tuple[str, ...]) -> list[str]:
    """The PCI addresses of NVIDIA's devices of some classes."""
    return [
        address
        for address in machine.names(BUS)
        if machine.number(f"{BUS}/{address}/vendor") == NVIDIA
        and machine.read(f"{BUS}/{address}/class").startswith(classes)
    ]


def place(machine: Machine, address: str) -> Place:
    """Look a device up by its address, in the kernel's form or nvidia-smi's."""
    name = address.lower()[-12:]
    numa = machine.number(f"{BUS}/{name}/numa_node")
    real = machine.at(f"{BUS}/{name}").resolve()
    bridges = tuple(part for part in real.parts if ":" in part)[:-1]
    return Place(name, -1 if numa is None else numa, bridges)


def look(machine: Machine, gpus: Sequence[tuple[str, str]], cards: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Place devices, told as (name, address): NUMA node of each, and of each GPU the nearest cards."""
    where = {name: place(machine, address) for name, address in (*gpus, *cards)}
    near = {}
    for gpu, _ in gpus:
        shared = {card: _common(where[gpu].path, where[card].path) for card, _ in cards}
        most = max(shared.values(), default=0)
        near[gpu] = [card for card, bridges in shared.items() if bridges == most] if most else []
    return {"numa": {name: found.numa for name, found in where.items()}, "nearest": near}


def alike(seen: dict[str, Any]) -> str:
    """A topology in a line, which nodes of one type have alike."""
    numa = " ".join(f"{name}@{node}" for name, node in sorted(seen["numa"].items()))
    near = " ".join(f"{gpu}~{'+'.join(cards)}" for gpu, cards in sorted(seen["nearest"].items()) if cards)
    return f"{numa} {near}".strip() or "no devices"


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many bridges two paths share, from the root."""
    count = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        count += 1
    return count
