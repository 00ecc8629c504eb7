"""What EC2's accelerator instances are and cost: `python -m clusters.catalog [words] [--json]` prints them.

The figures live in instances.json beside this file, each with its source and the date it was true. Standard library
only, so that a flow can look a type up in milliseconds; the table on the terminal alone needs rich.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from clusters.base import Refused

FACTS = Path(__file__).with_name("instances.json")


@dataclass(frozen=True, slots=True)
class Instance:
    """One EC2 instance type. None means that no source we trust says it."""

    name: str
    vcpus: int
    ram_gib: int
    accelerator: str
    """Maker and model, as in 'NVIDIA H100'."""
    accelerators: int
    accelerator_memory_gib: float
    """Of one accelerator."""
    network_gbps: float
    """Of the whole instance, one direction. Unit: Gbit/s."""
    network_bursts: bool
    """EC2 promises `network_gbps` for bursts only ("up to")."""
    healthy_line_fraction: float
    """Of `network_gbps`, that a healthy all-reduce of 2 GiB or more moves per node, at least."""
    network_cards: int
    efa_interfaces: int
    """Elastic Fabric Adapter interfaces at most; 0 where the type has none."""
    enis_per_card: int
    """Network interfaces at most on each network card."""
    nvme_drives: int
    nvme_gb_each: int
    """Size of one local drive. Unit: GB (10^9 bytes)."""
    capacity: tuple[str, ...]
    """How it can be bought: 'capacity-block', 'on-demand', 'spot'."""
    price_usd_per_hour: float | None
    """On demand, Linux, in `price_region`."""
    price_region: str
    price_as_of: str
    as_of: str
    """When EC2 said the rest."""
    bf16_tflops: float | None
    """Dense tensor peak of one accelerator, as are the other TFLOPS."""
    fp16_tflops: float | None
    fp8_tflops: float | None
    fp32_tflops: float | None
    """Plain fp32, not TF32: what PyTorch does unless told otherwise."""
    hbm_gb_per_s: float | None
    """Memory bandwidth of one accelerator. Unit: GB/s."""
    nvlink_gb_per_s: float | None
    """Links to the other accelerators of the instance, one direction, per accelerator; 0 where there are none."""
    achievable_bf16_tflops: float | None
    """The largest matrix product anybody measured."""
    unsettled: tuple[str, ...]
    """Fields whose sources disagree, or that only one source states."""


@cache
def load() -> dict[str, Instance]:
    """Every instance type we have facts for, by its EC2 name, in the order of instances.json."""
    facts = json.loads(FACTS.read_text())
    dates = {
        "as_of": facts["as_of"]["instances"],
        "price_as_of": facts["as_of"]["prices"],
        "price_region": facts["price_region"],
    }
    shares = facts["healthy_line_fraction"]
    return {
        name: _instance(
            name,
            told | {"healthy_line_fraction": shares.get(name, shares["default"])},
            facts["accelerators"],
            dates,
        )
        for name, told in facts["instances"].items()
    }


def find(name: str) -> Instance:
    """The facts of one instance type; raises `Refused`, naming the nearest types, if there are none."""
    known = load()
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`python -m clusters.catalog` lists them."
    raise Refused(f"{name!r} is not an accelerator instance type this catalogue knows: {hint}")


def matching(words: list[str]) -> list[Instance]:
    """The types whose name, accelerator, capacity kinds or 'efa' contain every word, whatever its case."""
    return [item for item in load().values() if all(word.lower() in _text(item) for word in words)]


def _instance(name: str, told: dict[str, Any], accelerators: dict[str, Any], dates: dict[str, str]) -> Instance:
    chip = accelerators[told["accelerator"]]
    lists = {"capacity": tuple(told["capacity"]), "unsettled": tuple(chip["unsettled"])}
    return Instance(name=name, **told | chip | dates | lists)


def _text(item: Instance) -> str:
    efa = "efa" if item.efa_interfaces else ""
    return " ".join((item.name, item.accelerator, *item.capacity, efa)).lower()


def _row(item: Instance) -> tuple[str, ...]:
    return (
        item.name,
        f"{item.accelerators:2} x {item.accelerator.partition(' ')[2]}",
        f"{item.accelerator_memory_gib:.4g}",
        f"{item.efa_interfaces or '-'}",
        f"{'≤ ' if item.network_bursts else ''}{item.network_gbps:g}",
        "yes" if "capacity-block" in item.capacity else "-",
        "-" if item.price_usd_per_hour is None else f"{item.price_usd_per_hour:,.2f}",
    )


def _show(items: list[Instance]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    first = items[0]
    notes = f"USD/h: on demand, {first.price_region}, {first.price_as_of}; the rest: {first.as_of}. --json says more."
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, caption=notes, caption_justify="left")
    for head in ("type", "accelerators", "GiB each", "EFA", "Gbit/s", "blocks", "USD/h"):
        table.add_column(head, justify="left" if head in {"type", "accelerators"} else "right", no_wrap=True)
    for item in items:
        table.add_row(*_row(item))
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Print the catalogue; 1 if nothing matches the words."""
    parser = argparse.ArgumentParser(prog="python -m clusters.catalog", description="EC2 accelerator instances.")
    parser.add_argument("words", nargs="*", help="only types that contain all of these, as in: h100 efa")
    parser.add_argument("--json", action="store_true", help="for programs")
    asked = parser.parse_args(argv)
    items = matching(asked.words)
    if not items:
        print(f"no instance type matches {' '.join(asked.words)!r}: try h100, p5, efa or spot", file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps([asdict(item) for item in items], indent=1))
    else:
        _show(items)
    return 0


if __name__ == "__main__":
    sys.exit(main())
