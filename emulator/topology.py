"""What EC2 refuses in a launch template: network cards, EFA interfaces and ways to buy that an instance type lacks.

The limits are those of `clusters/instances.json`; a type that is not in there passes.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from clusters import catalog
from clusters.catalog import Instance

KINDS = ("interface", "efa", "efa-only")
EFA = ("efa", "efa-only")


def check(data: Mapping[str, Any], instance_type: str = "") -> None:
    """Look at a launch template's data, for one instance type if one is known; raises `ValueError` in EC2's words."""
    cards = [_card(number, told) for number, told in enumerate(data.get("NetworkInterfaces", []))]
    for kind in (kind for _, _, kind in cards if kind not in KINDS):
        raise ValueError(f"InvalidParameterValue: Invalid value '{kind}' for InterfaceType: one of {', '.join(KINDS)}")
    places = Counter((card, device) for card, device, _ in cards)
    for (card, device), times in places.items():
        if times > 1:
            told = f"network card index {card} and device index {device} are given {times} times"
            raise ValueError(f"InvalidParameterCombination: {told}")
    if cards and (0, 0, "efa-only") in cards:
        raise ValueError("InvalidParameterCombination: the primary network interface cannot be of type efa-only")
    if cards and (0, 0) not in places:
        raise ValueError("InvalidParameterCombination: there is no primary network interface (card 0, device 0)")
    if cards and data.get("SecurityGroupIds"):
        told = "Network interfaces and an instance-level security groups may not be specified on the same request"
        raise ValueError(f"InvalidParameterCombination: {told}")
    _market(data)
    known = catalog.load().get(instance_type or str(data.get("InstanceType", "")))
    if known:
        _fits(cards, known, market(data))


def market(data: Mapping[str, Any]) -> str:
    """How a launch template buys: on-demand, spot or capacity-block."""
    return str(data.get("InstanceMarketOptions", {}).get("MarketType", "on-demand"))


def reservation(data: Mapping[str, Any]) -> str:
    """The capacity reservation that a launch template aims at, "" if none."""
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    return str(target.get("CapacityReservationId", ""))


def _card(number: int, told: Mapping[str, Any]) -> tuple[int, int, str]:
    if "DeviceIndex" not in told:
        raise ValueError(f"MissingParameter: network interface {number} has no device index")
    card, device = int(told.get("NetworkCardIndex", 0)), int(told["DeviceIndex"])
    return card, device, str(told.get("InterfaceType", "interface"))


def _market(data: Mapping[str, Any]) -> None:
    kind = market(data)
    if kind != "capacity-block":
        return
    if data.get("Placement", {}).get("GroupName") or data.get("Placement", {}).get("GroupId"):
        raise ValueError("InvalidParameterCombination: a Capacity Block cannot be used with a placement group")
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    if not target:
        told = "MarketType capacity-block needs a CapacityReservationTarget with the id of the Capacity Block"
        raise ValueError(f"InvalidParameterCombination: {told}")


def _fits(cards: list[tuple[int, int, str]], known: Instance, bought: str) -> None:
    if bought != "on-demand" and bought not in known.capacity:
        raise ValueError(f"UnsupportedOperation: {known.name} cannot be bought as {bought}")
    for card, device, kind in cards:
        if card >= known.network_cards:
            told = f"{known.name} has {known.network_cards} network cards: there is no card index {card}"
            raise ValueError(f"InvalidNetworkCardIndex: {told}")
        if device >= known.enis_per_card:
            told = (
                f"maximum devices on a network card of {known.name} is {known.enis_per_card}: no device index {device}"
            )
            raise ValueError(f"AttachmentLimitExceeded: {told}")
        if kind in EFA and card == 0 and 0 < known.efa_interfaces < known.network_cards:
            raise ValueError(f"InvalidParameterCombination: network card 0 of {known.name} does not support EFA")
    wanted = sum(kind in EFA for _, _, kind in cards)
    if wanted > known.efa_interfaces:
        told = f"{known.name} takes {known.efa_interfaces} EFA interfaces at most, {wanted} are asked for"
        raise ValueError(f"AttachmentLimitExceeded: {told}")
    crowded = Counter(card for card, _, kind in cards if kind in EFA)
    if crowded and max(crowded.values()) > 1:
        raise ValueError(f"InvalidParameterCombination: a network card of {known.name} takes one EFA interface")
