"""NVLink and EFA as curves: how long a collective takes for its size and members, fitted from NCCL's own measurements.

    seconds = latency + hop · members + t + fill · x / (1 + x)     t = traffic / rate, x = √(traffic / half)

The last term is why a latency and a bandwidth do not do: where a chunk costs a + b · bytes (Hockney's model),
pipelining S bytes in the best number of chunks costs a + 2 √(a b S) + b S. Once chunks have their largest size, larger
buffers only mean more of them: the root saturates.

`traffic` is what has to pass the link in question, one direction, for a buffer of one byte in all:

- inside a node through each of n GPUs: 2 (n-1)/n for an all-reduce, (n-1)/n for an all-gather or reduce-scatter;
  `rate` is what nccl-tests calls bus bandwidth. It may pass the line's, where the switch adds up (NVLink SHARP).
- between N nodes through the network of each: 2 (N-1)/N for an all-reduce, the least there is: nodes sum up inside
  first, and a tree over them sends no more. nccl-tests counts 2 (n-1)/n over all n GPUs, as one ring through all would
  send, so its figure is to be multiplied by (N-1)/N · n/(n-1): 78 GB/s on two p4de are 41.8 GB/s of the node's 50
  (0.84), where a ring would have needed 1.6 times the line. (Four p6-b200 could have been either: 0.74 of the line as
  a tree, 0.95 as a ring.) Gathers and scatters do go round such a ring, (n-1)/n through each node.

An all-reduce over nodes may also be held up by the links inside: `links_busy` says for which part of its time they are
at work. Near 1, as on two p5, the network was never filled, and `share` only says what it carries at least.
"""

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from planner.errors import BadTable, NoProfile
from planner.hardware import ACCELERATORS, FACTS
from planner.schema import Floats

TABLE: Final = Path(__file__).with_name("tables") / "links.json"
YEARS: Final = {"Volta": 2017, "Turing": 2018, "Ampere": 2020, "Ada": 2022, "Hopper": 2022, "Blackwell": 2024}
"""When a generation of data-centre accelerators was announced."""
FACTORS: Final = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""How often a collective sends the buffer round."""
COUNTS: Final = ("nodes", "gpus", "bytes")
COLUMNS: Final = ("hw", "op", *COUNTS, "time_us")
HALVES: Final = np.geomspace(1e6, 1e9, 10)
"""Sizes of `Curve.half` tried, in bytes; with a larger one the rate would be an extrapolation."""
TOLERANCE: Final = 0.1
"""Relative errors beyond this count by their size and no longer by its square: protocol switches are no noise."""
ROUNDS: Final = 6
"""Reweightings of the least squares; after these the constants move by less than a thousandth."""


@dataclass(frozen=True)
class Curve:
    """Time of a collective over one kind of link; members are GPUs inside a node, nodes between them."""

    latency_s: float
    hop_s: float
    """What one more member adds; 0 where one number of members was measured."""
    rate: float
    """Bytes per second and direction at large sizes, through each member, for the largest group measured."""
    fill_s: float
    """What filling the pipeline adds at large sizes."""
    half: float
    """Traffic at which half of that is added. Unit: bytes."""
    share: float | None
    """`rate` over the line's: one GPU's NVLink, or a node's network; None where the line is not known."""
    links_busy: float | None
    """Between nodes: for which part of a large all-reduce the links inside are at work too."""
    groups: tuple[tuple[int, float], ...]
    """Members measured, and the rate of a group of so many: a V100's links reach two peers at a sixth of it."""
    points: int
    """Measurements this rests on; likewise the error: median over those of 64 KiB and more."""
    median_error: float

    def seconds(
        self,
        size: Floats | float,
        members: Floats | float,
        factor: Floats | float = 2.0,
        ranks: Floats | float | None = None,
    ) -> Floats:
        """Seconds to reduce (factor 2), gather or scatter (factor 1) `size` bytes in all; nothing for one member.

        Between nodes `members` are nodes and `ranks` all their GPUs that take part. Everything broadcasts. More bytes
        never take less time.
        """
        amount = traffic(size, members, factor, ranks)
        counts, rates = zip(*self.groups, strict=True)
        root = np.sqrt(amount / self.half)
        moving = amount / np.interp(members, counts, rates) + self.fill_s * root / (1 + root)
        return np.where(np.asarray(members) > 1, self.latency_s + self.hop_s * np.asarray(members) + moving, 0.0)

    def over(self, line: float) -> "Curve":
        """The same curve over a line of another rate, in bytes per second; raises `NoProfile` without a share."""
        if self.share is None:
            raise NoProfile("These collectives name no line that is known here: name an accelerator or an instance.")
        faster = self.share * line / self.rate
        groups = tuple((count, rate * faster) for count, rate in self.groups)
        return replace(self, rate=self.share * line, half=self.half * faster, groups=groups)


@dataclass(frozen=True)
class Table:
    """Measured collectives, one per element, in an order of their own; those of nothing are left out."""

    hw: NDArray[np.str_]
    nodes: Floats
    gpus: Floats
    factor: Floats
    size: Floats
    """Of the whole buffer, in bytes."""
    seconds: Floats


@dataclass(frozen=True)
class Links:
    """The curves by the name of the hardware they were measured on."""

    nvlink: Mapping[str, Curve]
    efa: Mapping[str, Curve]

    def inside(self, name: str) -> Curve:
        """Between the GPUs of one node, for the name of hardware in the table, an instance, accelerator or generation.

        What was not measured itself is served by its generation, else by that nearest in years (the older of two, as
        the slower). Raises `NoProfile` for what is none of these.
        """
        return _nearest(self.nvlink, name, "inside a node")

    def between(self, name: str) -> Curve:
        """Between nodes, likewise."""
        return _nearest(self.efa, name, "between nodes")

    def to_json(self) -> dict[str, Any]:
        """The curves as JSON writes them."""
        kinds = {"nvlink": self.nvlink, "efa": self.efa}
        return {kind: {name: asdict(curve) for name, curve in curves.items()} for kind, curves in kinds.items()}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Links":
        """What `to_json` told."""
        return cls(**{kind: {name: _curve(it) for name, it in curves.items()} for kind, curves in told.items()})

    @classmethod
    @cache
    def shipped(cls) -> "Links":
        """The curves of tables/links.json: AWS's nccl-tests on p4de, p5 and p6-b200, vTrain's on A100 and V100."""
        return cls.from_json(json.loads(TABLE.read_text(encoding="utf-8")))


def traffic(
    size: Floats | float, members: Floats | float, factor: Floats | float, ranks: Floats | float | None = None
) -> Floats:
    """Bytes that pass one member's link, one direction, in a collective over `size` bytes (see the module)."""
    around = members if ranks is None else np.where(np.asarray(factor) > 1, members, ranks)
    return np.asarray(factor * (1 - 1 / np.maximum(around, 1)) * size)


def generation_of(name: str) -> str | None:
    """The generation that an accelerator, an instance, or a text with an accelerator's name in it belongs to."""
    accelerator = _accelerator(name)
    return name if name in YEARS else ACCELERATORS[accelerator].generation if accelerator else None


def read(path: Path) -> Table:
    """The collectives of a CSV table (columns hw, nodes, gpus, op, bytes, time_us); raises `BadTable`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise BadTable(f"{path} cannot be read as a table: {problem}") from None
    if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise BadTable(f"{path} lacks the column {missing[0]}: its first line must name {', '.join(COLUMNS)}.")
    if not rows:
        raise BadTable(f"{path} holds no row below its first line.")
    for line, row in enumerate(rows, 2):
        _check(path, line, row)
    return _table(row for row in rows if float(row["bytes"]) > 0)


def fit(table: Table) -> Links:
    """The curves of every hardware measured: least squares of the logarithms' differences, rounded to six digits."""
    near: dict[str, Curve] = {}
    for name in np.unique(table.hw[table.nodes == 1]):
        near[str(name)] = _fitted(table, str(name), (table.hw == name) & (table.nodes == 1), inside=None)
    efa: dict[str, Curve] = {}
    for name in np.unique(table.hw[table.nodes > 1]):
        inside = _nearest(near, str(name), "inside a node") if _known(near, str(name)) else None
        efa[str(name)] = _fitted(table, str(name), (table.hw == name) & (table.nodes > 1), inside)
    return Links(nvlink=near, efa=efa)


def _fitted(table: Table, name: str, which: NDArray[np.bool_], inside: Curve | None) -> Curve:
    nodes, ranks, seconds = table.nodes[which], table.gpus[which], table.seconds[which]
    far = bool(nodes[0] > 1)
    members = nodes if far else ranks
    amount = traffic(table.size[which], members, table.factor[which], ranks)
    counts = np.unique(members)
    tried = [(half, *_least_squares(amount, members, counts, seconds, half)) for half in HALVES]
    half, _, (latency, hop, fill, *slopes) = min(tried, key=lambda trial: trial[1])
    seen = [float(np.max(amount[members == count] / seconds[members == count])) for count in counts]
    rates = [1 / slope if slope > 0 else fastest for slope, fastest in zip(slopes, seen, strict=True)]
    line = _line(name, far)
    curve = Curve(
        latency_s=_rounded(latency),
        hop_s=_rounded(hop),
        rate=_rounded(rates[-1]),
        fill_s=_rounded(fill),
        half=_rounded(half),
        share=_rounded(rates[-1] / line) if line else None,
        links_busy=_busy(inside, rates[-1], nodes[-1], ranks[-1]) if inside else None,
        groups=tuple((int(count), _rounded(rate)) for count, rate in zip(counts, rates, strict=True)),
        points=len(seconds),
        median_error=0.0,
    )
    return replace(curve, median_error=_median_error(curve, table, which))


def _least_squares(
    amount: Floats, members: Floats, counts: Floats, seconds: Floats, half: float
) -> tuple[float, Floats]:
    """Loss, and (latency, hop, fill, seconds per byte for every number of members), none of them negative.

    Weights turn squares of differences into squares of logarithms' differences, and the large ones into their size.
    """
    root = np.sqrt(amount / half)
    hop = members if len(counts) > 1 else np.zeros_like(members)
    slopes = [amount * (members == count) for count in counts]
    columns = np.stack([np.ones_like(amount), hop, root / (1 + root), *slopes], axis=1)
    weights = 1 / seconds
    for _ in range(ROUNDS):
        found = _not_negative(columns * weights[:, None], seconds * weights)
        guess = np.maximum(columns @ found, 1e-12)
        off = np.log(guess / seconds)
        near = np.abs(off) < 1e-6
        slope = np.where(near, 1 / seconds, off / np.where(near, 1.0, guess - seconds))
        weights = slope * (1 + (off / TOLERANCE) ** 2) ** -0.25
    return float(np.sum(np.sqrt(1 + (off / TOLERANCE) ** 2) - 1)), found


def _not_negative(columns: Floats, target: Floats) -> Floats:
    """Least squares without the columns that would count negatively, the most negative left out first."""
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    unit = columns / scale
    products = unit.T @ unit + 1e-10 * np.eye(len(scale))  # so that fewer rows than columns have an answer too
    kept = np.flatnonzero(np.linalg.norm(unit, axis=0) > 0)
    while True:
        found = np.linalg.solve(products[np.ix_(kept, kept)], unit[:, kept].T @ target)
        if len(kept) == 1 or found.min() >= 0:
            break
        kept = np.delete(kept, found.argmin())
    result = np.zeros(len(scale))
    result[kept] = np.maximum(found, 0) / scale[kept]
    return result


def _busy(inside: Curve, rate: float, nodes: float, ranks: float) -> float:
    """Seconds the links inside need for a large all-reduce, over those it took."""
    needed = traffic(1.0, ranks / nodes, 2.0) / inside.rate
    return _rounded(min(1.0, float(needed / (traffic(1.0, nodes, 2.0) / rate))))


def _median_error(curve: Curve, table: Table, which: NDArray[np.bool_]) -> float:
    nodes, ranks = table.nodes[which], table.gpus[which]
    members = np.where(nodes > 1, nodes, ranks)
    guess = curve.seconds(table.size[which], members, table.factor[which], ranks)
    off = np.abs(guess / table.seconds[which] - 1)
    large = table.size[which] >= 2**16
    return _rounded(float(np.median(off[large] if large.any() else off)))


def _nearest(curves: Mapping[str, Curve], name: str, where: str) -> Curve:
    """The curve of that name, else of its accelerator, else of the generation nearest in years."""
    if name in curves:
        return curves[name]
    if not _known(curves, name):
        raise NoProfile(
            f"No collectives {where} were measured on {name!r}, and none on a GPU like it: "
            f"measure some, or name one of {', '.join([*curves, *YEARS])}."
        )
    year, chip = YEARS[generation_of(name) or ""], _accelerator(name)

    def distance(other: str) -> tuple[bool, bool, int, int, int, str]:
        generation = generation_of(other) or ""
        alike = generation == generation_of(name)
        return (
            not alike or _accelerator(other) != chip,
            not alike,
            abs(YEARS[generation] - year),
            YEARS[generation],
            -curves[other].points,
            other,
        )

    return curves[min((other for other in curves if generation_of(other) in YEARS), key=distance)]


def _known(curves: Mapping[str, Curve], name: str) -> bool:
    return name in curves or (generation_of(name) in YEARS and any(generation_of(other) in YEARS for other in curves))


@cache
def _instances() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))["instances"]
    return found


@cache
def _accelerator(name: str) -> str | None:
    """The first of `ACCELERATORS` that is meant: by its own name, its instance's, or as a word of a text."""
    if name in ACCELERATORS:
        return name
    text = _instances()[name]["accelerator"] if name in _instances() else name
    words = re.findall(r"[A-Z]+\d+[A-Z]*", text.upper())
    return next((known for known in ACCELERATORS if known.split("-")[0] in words), None)


def _line(name: str, far: bool) -> float | None:
    """Bytes per second and direction of a node's network, or of one GPU's links."""
    if far:
        instance = _instances().get(name)
        return float(instance["network_gbps"]) * 1e9 / 8 if instance else None
    accelerator = _accelerator(name)
    return ACCELERATORS[accelerator].links_gb_per_s * 1e9 or None if accelerator else None


def _check(path: Path, line: int, row: Mapping[str, str]) -> None:
    if None in row or any(value is None for value in row.values()):
        raise BadTable(f"{path}, line {line}: it has another number of cells than the first line has columns.")
    where = f"{path}, line {line}, column"
    if not row["hw"].strip():
        raise BadTable(f"{where} hw: it is empty, name what was measured.")
    if row["op"] not in FACTORS:
        raise BadTable(f"{where} op: {row['op']!r} is none of {', '.join(FACTORS)}.")
    for name in (*COUNTS, "time_us"):
        _check_number(f"{where} {name}", row[name], least=0 if name == "bytes" else 1 if name in COUNTS else 1e-9)
    for name in ("nodes", "gpus"):
        if float(row[name]) % 1:
            raise BadTable(f"{where} {name}: {row[name]} is no whole number.")
    if float(row["gpus"]) < max(2.0, float(row["nodes"])):
        raise BadTable(f"{where} gpus: {row['gpus']} are too few for {row['nodes']} nodes (count those of all nodes).")


def _check_number(where: str, text: str, least: float) -> None:
    try:
        value = float(text)
    except ValueError:
        raise BadTable(f"{where}: {text!r} is not a number.") from None
    if not least <= value < np.inf:
        raise BadTable(f"{where}: {text} is not a possible value.")


def _table(rows: Iterable[Mapping[str, str]]) -> Table:
    """Sorted, so that the order of the lines changes nothing, not even a sum's last digit."""
    found = sorted(
        (row["hw"], *(float(row[name]) for name in COUNTS), FACTORS[row["op"]], float(row["time_us"]) / 1e6)
        for row in rows
    )
    hw, nodes, gpus, size, factor, seconds = zip(*found, strict=True) if found else ((),) * 6
    return Table(
        hw=np.array(hw, dtype=np.str_),
        nodes=np.array(nodes),
        gpus=np.array(gpus),
        factor=np.array(factor),
        size=np.array(size),
        seconds=np.array(seconds),
    )


def _curve(told: Mapping[str, Any]) -> Curve:
    return Curve(**{**told, "groups": tuple((int(count), float(rate)) for count, rate in told["groups"])})


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m planner.links COLLECTIVES.csv > planner/tables/links.json")
    try:
        links = fit(read(Path(arguments[0])))
    except BadTable as problem:
        sys.exit(str(problem))
    print(json.dumps(links.to_json(), indent=1))


if __name__ == "__main__":
    _main(sys.argv[1:])
