"""What was learned of clusters and their software: constants, residuals, intervals, memory; kept as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from planner.achieved import Achieved
from planner.constants import NAMES, Constants, start
from planner.errors import PlanError
from planner.hardware import CORE
from planner.keys import Key
from planner.links import Links
from planner.memory import MemoryConstants
from planner.memory_fit import MemoryFit
from planner.residual import GROUPS, SCALES, Points, Residual, points
from planner.schema import Configs, Floats, mapped, take
from planner.speed import step_seconds

SHIPPED: Final = Path(__file__).with_name("tables")
FILE: Final = "profiles.json"
FEWEST: Final = 3
"""Measured steps from which a profile has constants of its own."""
WIDTHS: Final = tuple(f"{kind} {what}" for kind in SCALES for what in ("known", "new"))
"""Kinds of intervals: by kind of model, on clusters with and without a profile."""
NORMAL_90: Final = 1.645
"""Spreads on either side of the mean that hold 90 %, where nobody counted."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds per step, and between which 90 % of the measured ones lie, one per configuration."""

    seconds: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one profile."""

    constants: Constants
    """Each without axes."""
    steps: int
    """Measured steps it rests on."""


@dataclass(frozen=True)
class Profile:
    """What predicts one framework's steps on one accelerator in one precision."""

    key: str
    constants: Constants
    memory: MemoryConstants
    steps: int
    """Measured steps of this very profile; 0 for a prior."""
    asked: Key
    profiles: "Profiles"
    network: float = 1.0
    """What the network is multiplied by: EFA's measured share of the line over what the prior takes any network for."""

    def seconds(self, configs: Configs) -> Prediction:
        """Physics, residual and 90 % interval of every configuration; for the few best, not for sweeps."""
        count = _count(configs)
        columns = mapped(_with_bandwidth(configs, self.network), lambda item: np.broadcast_to(item, count))
        return self.profiles.predict(columns, [self.asked] * count)


@dataclass(frozen=True)
class Profiles:
    """All profiles, and the priors of what nobody measured."""

    everything: Mapping[str, Constants]
    """By kind of model (dense, experts); likewise by family."""
    families: Mapping[str, Constants]
    own: Mapping[Key, Known]
    residuals: Mapping[str, Residual]
    """By kind of model."""
    widths: Mapping[str, float]
    """Spreads on either side of the mean that hold 90 % of steps not seen, by `WIDTHS`."""
    memory: MemoryFit
    links: Links
    achieved: Achieved | None = None
    """What the cluster that is planned for reached itself, if it was calibrated; it is not kept with the profiles."""
    plain: "Profiles | None" = None
    """The same without that, to compare with."""

    @classmethod
    @cache
    def shipped(cls) -> Self:
        """Those learned from the published steps in tables/measured.csv."""
        return cls.load(SHIPPED)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Those that `python -m planner calibrate` left in a folder; raises `PlanError` if there are none."""
        try:
            return cls.from_json(json.loads((folder / FILE).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise PlanError(
                f"{folder} holds no profiles that can be read ({type(problem).__name__}: {problem}): make them with "
                "`python -m planner calibrate --rows ROWS.csv --collectives C.csv --out FOLDER`."
            ) from None

    def save(self, folder: Path) -> None:
        """Keep them in a folder, which is made if need be; raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{FILE}.new"
        fresh.write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n")
        fresh.replace(folder / FILE)

    def find(
        self,
        accelerator: str,
        framework: str,
        precision: str,
        *,
        experts: bool = False,
        per_node: float = 0,
        gbps: float = 0,
    ) -> Profile:
        """The profile for a name of `ACCELERATORS`, or the prior of its family, or everybody's.

        Without a cluster (accelerators per node, Gbit/s between nodes) the only one of its kind is meant.
        """
        asked = Key(accelerator, framework, precision, experts, per_node, gbps)
        others = self._clusters(asked)
        if not per_node and len(others) == 1:
            asked = others[0]
        known, prior = self.own.get(asked), self._prior(asked)
        network = 1.0 if known else self._efa(asked) / float(prior.network)
        return Profile(
            key=self.name(asked),
            constants=known.constants if known else replace(prior, network=prior.network * network),
            network=network,
            memory=self.memory.at(asked.software),
            steps=known.steps if known else 0,
            asked=asked,
            profiles=self,
        )

    def predict(self, configs: Configs, keys: Sequence[Key]) -> Prediction:
        """Seconds of every configuration (all columns have its length), each with the profile that `keys` names.

        More bandwidth is never slower, between clusters too: a cluster that nobody measured well is kept between what
        clusters of its kind with less and with more bandwidth reach. What was measured well stands for itself.
        """
        seconds, spread = self._estimate(configs, keys)
        lowest, highest = self._between(configs, keys)
        middle = np.minimum(np.maximum(seconds, lowest), highest)
        width = spread * np.array([self.widths[self.interval(key)] for key in keys])
        return Prediction(middle, middle * np.exp(-width), middle * np.exp(width))

    def interval(self, key: Key) -> str:
        """Which of `WIDTHS` a key's predictions have."""
        return f"{key.kind} {'known' if key in self.own else 'new'}"

    def baseline(self, key: Key) -> Constants:
        """The constants that a profile's residuals are measured from: its own, with its family's scale."""
        prior, known = self._prior(key), self.own.get(key)
        return replace(known.constants, scale=prior.scale) if known else prior

    def modelled(self, configs: Configs, keys: Sequence[Key]) -> Floats:
        """Seconds of every configuration by physics alone, with the baseline of its key."""
        each = {key: self.baseline(key) for key in set(keys)}
        columns = {name: np.array([float(getattr(each[key], name)) for key in keys]) for name in NAMES}
        return step_seconds(configs, Constants(**columns))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "everything": {kind: _told(constants) for kind, constants in self.everything.items()},
            "families": {name: _told(constants) for name, constants in sorted(self.families.items())},
            "profiles": [
                {**_key_json(key), "steps": known.steps, "constants": _told(known.constants)}
                for key, known in sorted(self.own.items())
            ],
            "residuals": {kind: _residual_json(residual) for kind, residual in self.residuals.items()},
            "widths": dict(self.widths),
            "memory": self.memory.to_json(),
            "links": self.links.to_json(),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        own = {_key(item): Known(_constants(item["constants"]), item["steps"]) for item in told["profiles"]}
        return cls(
            everything={kind: _constants(values) for kind, values in told["everything"].items()},
            families={name: _constants(values) for name, values in told["families"].items()},
            own=own,
            residuals={kind: _residual(kind, values) for kind, values in told["residuals"].items()},
            widths=told["widths"],
            memory=MemoryFit.from_json(told["memory"]),
            links=Links.from_json(told["links"]),
        )

    def _between(self, configs: Configs, keys: Sequence[Key]) -> tuple[Floats, Floats]:
        """Seconds that each configuration takes at least and at most, by what other clusters of its kind reach."""
        lowest, highest = np.zeros(len(keys)), np.full(len(keys), np.inf)
        kinds = {key.anywhere for key in keys}
        for other in sorted(known for known in self.own if known.anywhere in kinds):
            rows = [at for at, key in enumerate(keys) if _rivals(key, other) and not self._known(key)]
            if not rows:
                continue
            gbps = np.array([keys[row].gbps for row in rows])
            told, _ = self._estimate(_with_bandwidth(take(configs, rows), other.gbps / gbps), [other] * len(rows))
            highest[rows] = np.where(gbps > other.gbps, np.minimum(highest[rows], told), highest[rows])
            if self._known(other):
                lowest[rows] = np.where(gbps < other.gbps, np.maximum(lowest[rows], told), lowest[rows])
        return lowest, highest

    def _efa(self, key: Key) -> float:
        """Share of the line that collectives over EFA were measured to reach with such accelerators."""
        if key.accelerator == CORE:
            return float(self._prior(key).network)
        return self.links.between(key.generation).share or float(self._prior(key).network)

    def _clusters(self, key: Key) -> list[Key]:
        """The known clusters that differ from a key in accelerators per node and bandwidth at most."""
        return [known for known in self.own if known.anywhere == key.anywhere and self._known(known)]

    def _known(self, key: Key) -> bool:
        return key in self.own and self.own[key].steps >= FEWEST

    def name(self, key: Key) -> str:
        """What a key's predictions rest on."""
        if key in self.own:
            return str(key)
        return f"prior: {key.family if key.family in self.families else key.kind}"

    def _estimate(self, configs: Configs, keys: Sequence[Key]) -> tuple[Floats, Floats]:
        """Seconds, and the spread of their logarithm."""
        at = points(configs, keys)
        mean, spread = self._correction(at)
        return self.modelled(configs, keys) * np.exp(mean), spread

    def _correction(self, at: Points) -> tuple[Floats, Floats]:
        mean, spread = np.zeros(len(at.number)), np.full(len(at.number), 0.3)
        kinds = np.array([key.kind for key in at.keys])[at.number]
        for kind, residual in self.residuals.items():
            rows = np.flatnonzero(kinds == kind)
            if len(rows):
                mean[rows], spread[rows] = residual.predict(at.of(rows))
        return mean, spread

    def _prior(self, key: Key) -> Constants:
        return self.families.get(key.family) or self.everything.get(key.kind) or start()


def _rivals(key: Key, other: Key) -> bool:
    """Whether what is known of another cluster bounds a key's."""
    return key.gbps > 0 and key.anywhere == other.anywhere and key != other and key.per_node == other.per_node


def _with_bandwidth(configs: Configs, factor: Floats | float) -> Configs:
    return replace(configs, hardware=replace(configs.hardware, inter=configs.hardware.inter * factor))


def _count(configs: Configs) -> int:
    sizes: list[int] = [1]
    mapped(configs, lambda item: sizes.append(int(np.size(item))))
    return max(sizes)


def _told(constants: Constants) -> dict[str, float]:
    return {name: float(getattr(constants, name)) for name in NAMES}


def _constants(told: Mapping[str, float]) -> Constants:
    return Constants(**{name: np.asarray(told[name], dtype=np.float64) for name in NAMES})


def _key_json(key: Key) -> dict[str, Any]:
    return {field.name: getattr(key, field.name) for field in fields(Key)}


def _key(told: Mapping[str, Any]) -> Key:
    return Key(**{field.name: told[field.name] for field in fields(Key)})


def _residual_json(residual: Residual) -> dict[str, Any]:
    at = residual.at
    return {
        "features": {name: np.round(at.features[name], 9).tolist() for name in GROUPS},
        "release": at.release.tolist(),
        "keys": [_key_json(key) for key in at.keys],
        "number": at.number.tolist(),
        "found": residual.found.tolist(),
    }


def _residual(kind: str, told: Mapping[str, Any]) -> Residual:
    features = {name: np.array(told["features"][name], dtype=np.float64) for name in GROUPS}
    keys = tuple(_key(key) for key in told["keys"])
    at = Points(features, np.array(told["release"]), keys, np.array(told["number"], dtype=np.int64))
    return Residual.learn(at, np.array(told["found"]), SCALES[kind])
