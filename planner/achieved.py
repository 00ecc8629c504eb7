"""What a cluster itself reached in micro-benchmarks, laid over what machines of its kind are usually planned with.

A figure is an achieved one: of products the rate that `layers.gemm` would need to foretell the measured times, of
memory and links bytes per second. Over the usual figure of such machines, it is a factor on a column of the hardware.
Constants learned from real steps are fitted on top of these factors, so that what was measured in training wins.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Self

import numpy as np

from planner.errors import NoProfile, PlanError
from planner.hardware import CORE, HOST_GB_PER_S
from planner.layers import ATTENTION_BACKWARD, EXPONENTS, gemm
from planner.links import Links
from planner.machine import Machine
from planner.schema import Hardware

FIELDS: Final = {
    "flops": "matrix products",
    "attention": "attention",
    "memory": "memory",
    "intra": "links inside a node",
    "inter": "network between nodes",
    "host": "link to the host",
}
"""Columns of the hardware that are measured, and what people call them."""
UNITS: Final = dict.fromkeys(("flops", "attention"), (1e12, "TFLOP/s"))
USUAL_GEMM: Final = {"A100-40": 0.869, "A100-80": 0.869, "H100-80": 0.803, "B200": 0.776, "B300": 0.786}
"""Share of the 16-bit peak that large products reach at best on healthy GPUs. Source: stas00/ml-engineering, compute/
accelerator/README.md, "Maximum Achievable Matmul FLOPS" (commit 744d01e, 2026-08-22; CC-BY-SA, figures only)."""
GEMM: Final = 0.80
"""The same of all others; and of a CPU's core, whose constants were fitted with it."""
ATTENTION: Final = 0.52
"""Share of the peak that attention reaches on a core, as the profiles of cores have it. Of GPUs nobody measured the
usual: there it goes with the products."""
MEMORY: Final = 0.9
"""Share of the memory's bandwidth that a sum of two arrays reaches on a GPU (assumed); a core's figure is that sum."""
LINKS, NETWORK = 0.8, 0.75
"""Shares of the links and of the network where `links` knows no measurement of such accelerators."""
MOST: Final = {"flops": 1.4, "memory": 1.25, "intra": 1.6, "inter": 1.8, "host": 3.0}
"""Factors beyond these are no measurement of the machine that is meant: the datasheet lies below them."""
LEAST: Final = 0.2
"""A GPU or a link that reaches less of the usual is broken, and no plan should rest on it."""
CORE_REACH: Final = 20.0
"""Cores differ: theirs may be so much faster or slower than the usual one."""
LAUNCH_S: Final = 50e-6
"""A product that takes less measures how fast a GPU is told, not how fast it computes."""
BOUND: Final = 0.7
"""A product whose bytes take at least this share of its time measures the memory."""
VERSION: Final = 1
_KINDS: Final = ("measured", "usual")


@dataclass(frozen=True)
class Achieved:
    """One calibration of a cluster. Figures are of one accelerator (a node's network whole), in FLOP/s and bytes/s."""

    date: str
    """Of the measurement, as YYYY-MM-DD."""
    nodes: int
    ranks: int
    precision: str
    how: str
    """What measured it, and on what."""
    measured: Mapping[str, float]
    """By the names of `FIELDS`; what is not there was not measured. Likewise the usual figures."""
    usual: Mapping[str, float]

    @property
    def factors(self) -> dict[str, float]:
        """What each column of the hardware is multiplied by."""
        return {name: value / self.usual[name] for name, value in self.measured.items()}

    def over(self, hardware: Hardware) -> Hardware:
        """The columns as this cluster has them."""
        factors = self.factors
        if "attention" in factors:  # it goes with the products, and what is left is its own
            factors["attention"] /= factors.get("flops", 1.0)
        return replace(hardware, **{name: getattr(hardware, name) * factor for name, factor in factors.items()})

    def __str__(self) -> str:
        """As a plan tells it: 'calibrated on 2026-11-20 (2 nodes, 16 ranks): matrix products 741 of …'."""
        told = (self._figure(name, factor) for name, factor in self.factors.items())
        where = f"{self.nodes} node{'s' * (self.nodes != 1)}, {self.ranks} rank{'s' * (self.ranks != 1)}"
        return f"calibrated on {self.date} ({where}): {', '.join(told)}"

    def _figure(self, name: str, factor: float) -> str:
        scale, unit = UNITS.get(name, (1e9, "GB/s"))
        return (
            f"{FIELDS[name]} {self.measured[name] / scale:.3g} instead of {self.usual[name] / scale:.3g} {unit} "
            f"(x {factor:.2f})"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        plain = {name: getattr(self, name) for name in ("date", "nodes", "ranks", "precision", "how")}
        return {"version": VERSION, **plain, "measured": dict(self.measured), "usual": dict(self.usual)}

    @classmethod
    def from_json(cls, told: Any, where: str) -> Self:
        """What `to_json` gave; raises `PlanError`, naming `where` it was read, for what is spoilt or impossible."""
        try:
            words = {name: str(told[name]) for name in ("date", "precision", "how")}
            counts = {name: int(told[name]) for name in ("nodes", "ranks")}
            figures = {kind: {name: float(told[kind][name]) for name in told["measured"]} for kind in _KINDS}
            found = cls(**words, **counts, **figures)  # type: ignore[arg-type]  # words, counts and figures by name
            factors = found.factors
            wrong = told["version"] != VERSION or not FIELDS.keys() >= factors.keys()
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            wrong = True
        if wrong:
            raise PlanError(f"{where} is no calibration that can be read: delete it, and calibrate again.")
        for name, factor in factors.items():
            if not 1 / CORE_REACH <= factor <= CORE_REACH:  # NaN is refused too
                raise PlanError(f"{where} says that {FIELDS[name]} reach {factor:g} times the usual: delete it.")
        return found

    @classmethod
    def of(cls, told: Mapping[str, Any], machine: Machine, links: Links | None = None) -> Self:
        """What result.json of `training.checks.calibrate` says of a cluster of such machines.

        Raises `PlanError` for measurements of another kind of machine, and for figures that cannot be true.
        """
        if not machine.local and told["device"] == "cpu":
            raise PlanError(f"this was measured on CPUs, and is no calibration of {machine.name}: measure there.")
        precision = str(told["precision"])
        usual = _usual(machine, precision, links or Links.shipped())
        measured = _measured(told, machine, precision)
        for name, value in measured.items():
            _check(name, value, usual[name], machine)
        if not measured:
            raise PlanError("nothing was measured that a plan rests on: measure gemm, memory or comms.")
        return cls(
            date=str(told["measured_at"])[:10],
            nodes=int(told["nodes"]),
            ranks=int(told["ranks"]),
            precision=precision,
            how=f"training.checks.calibrate, torch {told['torch']}, {told['accelerator'] or 'CPU'}",
            measured=measured,
            usual={name: usual[name] for name in measured},
        )


def _check(name: str, value: float, usual: float, machine: Machine) -> None:
    most, least = (CORE_REACH, 1 / CORE_REACH) if machine.local else (MOST[name], LEAST)
    scale, unit = UNITS.get(name, (1e9, "GB/s"))
    if not (math.isfinite(value) and least <= value / usual <= most):
        raise PlanError(
            f"{value / scale:.3g} {unit} were measured ({FIELDS[name]}), {machine.name} usually reaches "
            f"{usual / scale:.3g}: a plan cannot rest on that, find out what is wrong there and measure again."
        )


def _usual(machine: Machine, precision: str, links: Links) -> dict[str, float]:
    """What such machines reach, as far as it is known: of one accelerator, and of a node's network."""
    per_node = machine.accelerators
    hardware, chip = machine.hardware(precision, 1, per_node), machine.chip
    core = chip == CORE
    shares = {
        "flops": USUAL_GEMM.get(chip, GEMM) if precision != "fp32" or core else GEMM,
        "memory": 1.0 if core else MEMORY,
        "intra": 1.0 if core else _share(links, chip, inside=True),
        "inter": 1.0 if core else _share(links, chip, inside=False),
    }
    known = {name: float(getattr(hardware, name)) * share for name, share in shares.items()}
    return known | {"host": HOST_GB_PER_S * 1e9, "attention": float(hardware.flops) * ATTENTION}


def _share(links: Links, chip: str, *, inside: bool) -> float:
    """Of the line, by NCCL's own measurements of such accelerators."""
    try:
        curve = links.inside(chip) if inside else links.between(chip)
    except NoProfile:
        return LINKS if inside else NETWORK
    return curve.share or (LINKS if inside else NETWORK)


def _measured(told: Mapping[str, Any], machine: Machine, precision: str) -> dict[str, float]:
    """The figures of one accelerator; of a machine whose cores are shared among ranks, of one core."""
    rows = told["rows"]
    share = int(told["cores"]) / int(told["ranks"]) if machine.local else 1.0
    found: dict[str, float] = {}
    memory = _rate(rows, ["memory"])
    if memory:
        found["memory"] = memory / share
    if products := _products(rows, machine, precision, memory or math.inf):
        found["flops"] = products / share
    if machine.local and (attention := _attention(rows)):
        found["attention"] = attention / share
    inside = _rate(rows, ["all_reduce inside"])
    between = _rate(rows, ["all_reduce between"])
    if links := (inside or between) if machine.local else inside:  # one machine has nothing between its nodes
        found["intra"] = links
    if between and not machine.local:
        found["inter"] = between
    if not machine.local and (host := _rate(rows, ["host to device", "device to host"], worst=True)):
        found["host"] = host
    return found


def _rate(rows: Iterable[Mapping[str, Any]], names: list[str], *, worst: bool = False) -> float | None:
    """Bytes per second, by the median rank, of the best shape; of several measurements the worst."""
    shapes: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for row in rows:
        if row["what"] in shapes:
            shapes[row["what"]].setdefault(row["shape"], []).append(float(row["gb_per_s"]))
    best = [max(map(median, each.values())) for each in shapes.values() if each]
    return (min(best) if worst else max(best)) * 1e9 if best else None


def _products(rows: Iterable[Mapping[str, Any]], machine: Machine, precision: str, memory: float) -> float | None:
    """FLOP/s at which `gemm` foretells what was measured: the median over shapes, or what the MLP reached if less.

    Some processors compute the products of a backward pass more slowly; some are slow at converting to 16 bits.
    """
    hardware, found, trained = machine.hardware(precision, 1, machine.accelerators), [], []
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        seconds.setdefault((str(row["what"]), str(row["shape"])), []).append(float(row["seconds"]))
    for (what, shape), each in seconds.items():
        took = median(each)
        if what == "gemm" and (machine.local or took > LAUNCH_S):
            m, n, k = map(float, shape.split("x"))
            if _time(m, n, k, hardware, memory=memory) < BOUND * took:
                found.append(_time(m, n, k, hardware, flops=1.0) / took)
        elif what == "mlp":
            trained.append(_mlp(shape, hardware, took, memory, wide=precision == "fp32"))
    rates = [median(each) for each in (found, trained) if each]
    return min(rates) if rates else None


def _attention(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """FLOP/s at which `layers` foretells what a core's attention took, both passes: the median of the ranks."""
    found = []
    for row in rows:
        if row["what"] == "attention":
            many, heads, sequence, width = map(float, row["shape"].split("x"))
            scores = 2.0 * many * heads * sequence**2 * width * (1 + EXPONENTS / width)
            found.append(scores * (1 + ATTENTION_BACKWARD) / float(row["seconds"]))
    return median(found) if found else None


def _time(
    m: float, n: float, k: float, hardware: Hardware, *, flops: float = math.inf, memory: float = math.inf
) -> float:
    """Seconds of a product where nothing but arithmetic, or nothing but memory, takes time."""
    sides = np.asarray(m), np.asarray(n), np.asarray(k)
    return float(gemm(*sides, np.asarray(flops), np.asarray(memory), hardware.multiprocessors))


def _mlp(shape: str, hardware: Hardware, took: float, memory: float, *, wide: bool) -> float:
    """FLOP/s of the products of an MLP's forward and backward pass, less what its activations move (`layers`)."""
    sides, _, gated = shape.partition(" ")
    tokens, hidden, ffn = map(float, sides.split("x"))
    ups, moved = (2, 16.0) if gated else (1, 10.0)
    up = [(tokens, ffn, hidden), (tokens, hidden, ffn), (hidden, ffn, tokens)]
    down = [(tokens, hidden, ffn), (tokens, ffn, hidden), (ffn, hidden, tokens)]
    work = sum(_time(*each, hardware, flops=1.0) for each in [*up * ups, *down])
    beside = moved * ffn * tokens * (2 if wide else 1) / memory
    return work / max(took - beside, took / 2)
