"""Who is slow, found by measuring pairs of nodes: which pairs to measure next, and what the speeds say. No torch.

Every round is a matching: each node measures with one other, all at once, so a round takes as long on 500 nodes as on
4. First everybody meets log2(n) others; a node that was slow with all of them is a suspect, and so are both ends of a
pair that was slow although either was fast elsewhere. Then suspects are tried with nodes beyond suspicion, two out of
three, because a hiccup must not take a node out. A pair whose ends both pass is tried itself: it is a slow link.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

Pair = tuple[int, int]
"""The smaller number first."""
ENOUGH: Final = 2
"""Equal outcomes that decide a trial."""
MORE_ROUNDS: Final = 9
"""At most, after the first ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the speeds say so far. GB/s."""

    typical: float
    """Median of the upper half of the first rounds: right while at most a quarter of the nodes is slow, or one of 3."""
    nodes: dict[int, float]
    """Slow nodes, each with its median speed."""
    links: dict[Pair, float]
    """Slow links between nodes that are not slow themselves."""
    unsettled: tuple[int, ...]
    """Nodes whose trial did not come to its end."""


@dataclass(slots=True)
class Search:
    """Asks for rounds of pairs until nobody is under suspicion; every process that is told the same asks the same."""

    nodes: int
    slow_factor: float
    """A pair is slow if it is so many times slower than the typical one."""
    rounds: list[dict[Pair, float]] = field(default_factory=list)
    _typical: float = 0.0
    _trials: dict[int, list[bool]] = field(default_factory=dict)
    """By suspect, whether it was slow with nodes beyond suspicion."""
    _links: dict[Pair, list[bool]] = field(default_factory=dict)
    _asked: dict[Pair, int | None] = field(default_factory=dict)
    """The trials of the round that is being measured: a suspect's, or (None) the link's own."""

    def next(self) -> list[Pair] | None:
        """Return the pairs to measure at once; None when all is told. With an odd number of nodes one sits out."""
        if len(self.rounds) < _first_rounds(self.nodes):
            return _in_turn(self.nodes, len(self.rounds))
        over = self.nodes < 3 or len(self.rounds) >= _first_rounds(self.nodes) + MORE_ROUNDS
        self._asked = {} if over else self._try()
        return [*self._asked, *self._others()] if self._asked else None

    def tell(self, speeds: Mapping[Pair, float]) -> None:
        """Take what a round measured."""
        self.rounds.append(dict(speeds))
        for pair, suspect in self._asked.items():
            (self._links[pair] if suspect is None else self._trials[suspect]).append(self._slow(speeds[pair]))
        if len(self.rounds) == _first_rounds(self.nodes):
            self._suspect()

    @property
    def verdict(self) -> Verdict:
        """What is known now."""
        guilty = [node for node, trial in self._trials.items() if _decided(trial) is True]
        links = [pair for pair, trial in self._links.items() if _decided(trial) is True]
        return Verdict(
            self._typical,
            {node: median(self._with(node)) for node in guilty},
            {pair: median(measured[pair] for measured in self.rounds if pair in measured) for pair in links},
            tuple(node for node, trial in self._trials.items() if _decided(trial) is None),
        )

    def _slow(self, speed: float) -> bool:
        return speed * self.slow_factor < self._typical

    def _with(self, node: int) -> list[float]:
        return [speed for measured in self.rounds for pair, speed in measured.items() if node in pair]

    def _suspect(self) -> None:
        """After the first rounds: say what is typical, and who must be tried."""
        measured = {pair: speed for told in self.rounds for pair, speed in told.items()}
        known = sorted(measured.values())
        self._typical = median(known[-(len(known) // 2) :])
        slow = [pair for pair in sorted(measured) if self._slow(measured[pair])]
        fast = {node for pair in measured if pair not in slow for node in pair}
        unexplained = [pair for pair in slow if fast.issuperset(pair)]
        suspects = {node for node in range(self.nodes) if node not in fast} | {n for pair in unexplained for n in pair}
        self._trials = {node: [] for node in sorted(suspects)}
        self._links = {pair: [] for pair in unexplained}

    def _try(self) -> dict[Pair, int | None]:
        """Match suspects with nodes beyond suspicion that they met least, and links whose ends are beyond it."""
        free = [node for node in range(self.nodes) if node not in self._trials or _decided(self._trials[node]) is False]
        asked: dict[Pair, int | None] = {}
        for pair, trial in self._links.items():
            if _decided(trial) is None and set(pair) <= set(free):
                asked[pair] = None
                free = [node for node in free if node not in pair]
        for node, trial in self._trials.items():
            if _decided(trial) is None and (
                partners := [other for other in free if _pair(node, other) not in self._links]
            ):
                best = min(partners, key=lambda other: self._met(_pair(node, other)))
                asked[_pair(node, best)] = node
                free.remove(best)
        return asked

    def _met(self, pair: Pair) -> int:
        return sum(pair in measured for measured in self.rounds)

    def _others(self) -> list[Pair]:
        """Match whoever is left, so that trials run under the load that the first rounds had."""
        busy = {node for pair in self._asked for node in pair}
        rest = [node for node in range(self.nodes) if node not in busy]
        return [_pair(one, other) for one, other in zip(rest[::2], rest[1::2], strict=False)]


def _decided(trial: list[bool]) -> bool | None:
    """Whether it is slow, once two outcomes agree."""
    return next((outcome for outcome in (True, False) if trial.count(outcome) >= ENOUGH), None)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def _first_rounds(nodes: int) -> int:
    """How many rounds everybody measures: log2, but three of three nodes, which are too few to tell by two."""
    return 3 if nodes == 3 else max(1, math.ceil(math.log2(nodes)))


def _in_turn(nodes: int, number: int) -> list[Pair]:
    """Return a round of a tournament (the circle method): over n - 1 rounds everybody meets everybody once."""
    seats = nodes + nodes % 2
    turning = [(number + place) % (seats - 1) for place in range(seats - 1)]
    circle = [seats - 1, *turning]
    pairs = [(circle[place], circle[seats - 1 - place]) for place in range(seats // 2)]
    return sorted(_pair(one, other) for one, other in pairs if max(one, other) < nodes)
