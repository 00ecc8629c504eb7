"""The ladder of ways to get instances: which market, which type, which zone is tried, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from recipes.cluster import AwsCluster

Market = Literal["on-demand", "spot", "block", "reservation", "plan"]


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to get the instances."""

    market: Market
    id: str
    """Of the capacity block or reservation (cr-…) or the training plan (its ARN); empty where nothing is reserved."""
    instance_type: str
    zone: str
    """Empty leaves the zone to AWS."""

    @property
    def capacity(self) -> str:
        """As a recipe's `cluster.capacity` spells it: `block:cr-…`, `on-demand`."""
        return f"{self.market}:{self.id}" if self.id else self.market

    def __str__(self) -> str:
        return f"{self.instance_type}, {self.capacity}{f', in {self.zone}' if self.zone else ''}"


def parse(capacity: str, instance_type: str, zone: str = "") -> Rung:
    """The rung of one entry of `cluster.capacity`, which the recipe has found well-formed."""
    market, _, reserved = capacity.partition(":")
    return Rung(cast("Market", market), reserved, instance_type, zone)


def ladder(cluster: AwsCluster, offered: Sequence[str] = ()) -> list[Rung]:
    """All rungs in the order in which they are tried: each capacity, on each type, in each zone, one after another.

    A gang always stands in one zone. `offered` are the zones of a recipe that names none
    (`clusters.preflight.offered`); without them the zone of a rung is left open.
    """
    types = (cluster.instance_type, *cluster.alternatives)
    zones = cluster.zones or tuple(offered) or ("",)
    return [parse(capacity, kind, zone) for capacity in cluster.capacity for kind in types for zone in zones]
