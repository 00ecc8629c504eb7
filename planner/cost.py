"""What a run costs: instances while they come up and train, the image, the storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner.hardware import GIB
from planner.machine import Machine

if TYPE_CHECKING:
    from recipes.spec import Recipe

SETUP_HOURS: Final = 0.5
"""Instances are paid for while the cluster comes up: 15 to 30 minutes on EKS, 25 to 30 on PCS, by AWS's own guides."""
IMAGE_HOURS: Final = 0.5
"""One instance of the type bakes the image: installing drivers and packages, then a snapshot (an assumption)."""
DISK_GIB: Final = 500
"""Root disk of each node, gp3 (an assumption; SageMaker's volumes are as large by default)."""
KEPT_MONTHS: Final = 1.0
"""Checkpoints and the exported model stay in S3 that long after the run (an assumption)."""
CHECKPOINT_BYTES, EXPORT_BYTES = 12, 4
"""Per parameter: weights and Adam's two moments in fp32; the exported weights, in fp32 at most."""
HOURS_PER_MONTH: Final = 730.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Storage in us-east-1. Unit: US dollars per GB and month."""

    s3: float = 0.023
    """S3 Standard, the first 50 TB."""
    gp3: float = 0.08
    """EBS gp3 without further throughput."""
    lustre: float = 0.210
    """FSx for Lustre, PERSISTENT_2 on SSD with 250 MB/s per TiB, which the stacks make.

    From memory, no published table was at hand: 125 MB/s per TiB cost 0.145 (c3x.dev, aws_fsx_lustre_file_system), and
    in ap-northeast-1 250 cost 1.5 times as much as 125 (DevelopersIO's table of 2022-09-03), which would be 0.217.
    """
    as_of: str = "2026-07-20"


PRICES: Final = Prices()


@dataclass(frozen=True, slots=True)
class Extras:
    """What is paid besides instances that train."""

    parameters: float = 0.0
    checkpoints: int = 0
    """How many are kept."""
    builds_image: bool = False
    lustre_gib: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, parameters: float) -> Extras:
        """What a recipe asks for."""
        baked = recipe.image.flavour != "local" and not recipe.image.ami
        lustre = float(getattr(recipe.cluster, "lustre_gib", 0))
        return cls(parameters, recipe.train.keep_checkpoints, baked, lustre)


def bill(machine: Machine, nodes: int, seconds: float, extras: Extras, prices: Prices = PRICES) -> dict[str, float]:
    """Dollars by what they are paid for, for `seconds` of training on `nodes` machines; empty where no price is known.

    The instances' price is on demand. Storage is what the constants above assume.
    """
    if machine.local or machine.price_usd_per_hour is None:
        return {}
    hourly, hours = machine.price_usd_per_hour, seconds / 3600
    return {
        "instances": nodes * hours * hourly,
        "set-up": nodes * SETUP_HOURS * hourly,
        **({"image build": IMAGE_HOURS * hourly} if extras.builds_image else {}),
        "storage": storage(nodes, hours + SETUP_HOURS, extras, prices),
    }


def storage(nodes: int, hours: float, extras: Extras, prices: Prices = PRICES) -> float:
    """Dollars for disks and the shared file system while the nodes are up, and for what stays in S3 afterwards."""
    months, to_gb = hours / HOURS_PER_MONTH, GIB / 1e9
    disks = (nodes * DISK_GIB * prices.gp3 + extras.lustre_gib * prices.lustre) * to_gb * months
    kept = extras.parameters * (CHECKPOINT_BYTES * extras.checkpoints + EXPORT_BYTES) / 1e9
    return disks + kept * prices.s3 * (months + KEPT_MONTHS)


def per_billion_tokens(machine: Machine, nodes: int, tokens_per_second: float) -> float | None:
    """Dollars of instances for 10^9 tokens of training; None where nothing is paid or no price is known."""
    if machine.local or machine.price_usd_per_hour is None:
        return None
    return nodes * machine.price_usd_per_hour / 3600 / tokens_per_second * 1e9
