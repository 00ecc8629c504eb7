"""How nodes differ that should be alike: what is usual, and who is odd."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from training.checks.finding import Finding, Severity


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of something that differs."""

    what: str
    value: str
    nodes: tuple[str, ...]
    """Who has it."""
    usual: str | None
    """What most of all nodes have; None if no value has most of them."""


def differences(reports: Mapping[str, Mapping[str, str]]) -> list[Difference]:
    """Compare nodes' reports: node → what → value. What a node does not tell is "" there.

    Where one value has more than half of the nodes, the others are told; else (2 against 2, 3 ways) all values are.
    """
    told = dict.fromkeys(what for report in reports.values() for what in report)
    return [difference for what in told for difference in _of(what, reports)]


def _of(what: str, reports: Mapping[str, Mapping[str, str]]) -> list[Difference]:
    having: dict[str, list[str]] = defaultdict(list)
    for node, report in reports.items():
        having[report.get(what, "")].append(node)
    if len(having) < 2:
        return []
    ((value, number),) = Counter({value: len(nodes) for value, nodes in having.items()}).most_common(1)
    usual = value if number > len(reports) / 2 else None
    return [Difference(what, value, tuple(nodes), usual) for value, nodes in having.items() if value != usual]


def judge(found: Collection[Difference], one: Collection[str]) -> list[Finding]:
    """Say what differs: of `one`, all nodes must be alike.

    An odd node is named; where nothing is usual, nobody is blamed, and the sentence tells who has what.
    """
    odd = [
        Finding(
            _severity(difference.what, one),
            f"{difference.what} is {difference.value or 'unknown'} here, {difference.usual or 'unknown'} on most nodes",
            node=node,
            device=difference.what,
            todo="replace the node, or boot all from one image",
        )
        for difference in found
        if difference.usual is not None
        for node in difference.nodes
    ]
    split: dict[str, list[Difference]] = defaultdict(list)
    for difference in found:
        if difference.usual is None:
            split[difference.what].append(difference)
    return odd + [_split(what, sides, one) for what, sides in split.items()]


def _severity(what: str, one: Collection[str]) -> Severity:
    return "refuse" if what in one else "warn"


def _split(what: str, sides: list[Difference], one: Collection[str]) -> Finding:
    said = "; ".join(f"{side.value or 'unknown'} on {', '.join(side.nodes)}" for side in sides)
    todo = "boot all nodes from one image"
    return Finding(_severity(what, one), f"{what} differs, and no value has most nodes: {said}", device=what, todo=todo)
