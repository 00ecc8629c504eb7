"""The network interfaces of an instance type, for a launch template: which card, which device, EFA or not."""

from collections import Counter
from typing import Any

from clusters.catalog import Instance

Interface = dict[str, Any]


def interfaces(instance: Instance, groups: list[Any]) -> list[Interface]:
    """One plain interface with an IP address, and an EFA-only one on every network card that has EFA.

    The layout is the one AWS recommends (EC2 user guide, "Maximize network bandwidth on Amazon EC2 instances with
    multiple network cards", read 2026-11): card 0, device 0 is a plain interface, for an EFA-only one cannot be the
    primary; card 0, device 1 is EFA-only if that card has EFA; each further card has EFA-only as device 0. A node takes
    a single IP address so. Card 0 has no EFA where there are more cards than EFA interfaces (p6-b300: 17 and 16).
    `groups` are the security groups, which a launch template with interfaces wants on each of them.
    """
    first = 0 if instance.efa_interfaces >= instance.network_cards else 1
    cards = range(first, first + instance.efa_interfaces)
    return [_interface(0, 0, "interface", groups)] + [
        _interface(card, 0 if card else 1, "efa-only", groups) for card in cards
    ]


def problems(instance: Instance, layout: list[Interface]) -> list[str]:
    """What EC2 would refuse in a layout, one sentence each: a place that is not there or taken, too many EFA."""
    places = [(one.get("NetworkCardIndex", 0), one["DeviceIndex"]) for one in layout]
    kinds = [one.get("InterfaceType", "interface") for one in layout]
    efa = sum(kind != "interface" for kind in kinds)
    primary = [kind for place, kind in zip(places, kinds, strict=True) if place == (0, 0)]
    wrong = [
        f"{instance.name}: two interfaces are on card {card}, device {device}"
        for (card, device), times in Counter(places).items()
        if times > 1
    ]
    wrong += [
        f"{instance.name}: an interface is on card {card}, device {device}, and there are {instance.network_cards} "
        f"cards of {instance.enis_per_card} devices"
        for card, device in places
        if card >= instance.network_cards or device >= instance.enis_per_card
    ]
    if efa > instance.efa_interfaces:
        wrong.append(f"{instance.name}: {efa} EFA interfaces are wanted, and the type has {instance.efa_interfaces}")
    if primary in ([], ["efa-only"]):
        wrong.append(f"{instance.name}: card 0, device 0 must be an interface with an IP address")
    return wrong


def _interface(card: int, device: int, kind: str, groups: list[Any]) -> Interface:
    return {
        "NetworkCardIndex": card,
        "DeviceIndex": device,
        "InterfaceType": kind,
        "Groups": groups,
        "DeleteOnTermination": True,
    }
