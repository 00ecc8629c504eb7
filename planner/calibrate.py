"""Learn profiles from measured steps: priors for what nobody measured, constants, residuals, and honest intervals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner import memory_fit
from planner.constants import Constants, start
from planner.fit import fit, log_ratios
from planner.keys import Key, key_of
from planner.links import Links
from planner.predict import predict
from planner.profiles import FEWEST, NORMAL_90, WIDTHS, Known, Profiles
from planner.residual import SCALES, Residual, points, rows_by
from planner.rows import MEASURED, NUMBERS, WORDS, Row, Steps, steps
from planner.schema import take

CROWDED: Final = 0.75
"""How much less each row of a cluster says of other clusters, the more rows there are: its power of their number."""
FOLDS: Final = 4
FEWEST_SCORES: Final = 20
"""Rows foretold from others, from which their errors say how wide an interval must be."""
NEW_FOLDS: Final = 6
"""In how many parts the clusters are left out, to find how wide the interval of a new one is."""


def calibrate(rows: Sequence[Row], links: Links | None = None, *, intervals: bool = True) -> Profiles:
    """Everything that measured steps teach; rows without a time teach about memory at most.

    Nothing depends on the order of rows, their ids or their sources. Without `intervals`, in a tenth of the time, they
    are as wide as the process itself says.
    """
    curves = links or Links.shipped()
    table = _Table.of(steps(sorted(rows, key=_contents), curves))
    whole, timed = replace(_learn(table), links=curves), table.timed
    if not intervals:
        return whole
    scores = [*_scores(timed, timed.group, FOLDS), *_scores(timed, timed.cluster, NEW_FOLDS)]
    return replace(whole, widths={**whole.widths, **_widths(scores)})


def adapt(profiles: Profiles, rows: Sequence[Row]) -> Profiles:
    """The profiles with what some more measured steps teach about theirs; the priors stay as they are.

    Where the cluster was calibrated, the steps are its own: what it achieved is laid over their hardware too.
    """
    table = _Table.of(on_site(profiles, steps(sorted(rows, key=_contents), profiles.links))).timed
    if not len(table.keys):
        return profiles
    changed = _with_own(profiles, table)
    kept = dict(profiles.residuals)
    for kind, residual in _residuals(changed, table).items():
        kept[kind] = _joined(kept[kind], residual) if kind in kept else residual
    return replace(changed, residuals=kept)


def on_site(profiles: Profiles, measured: Steps) -> Steps:
    """Steps measured on the cluster that the profiles are for, on its hardware as it was calibrated."""
    if profiles.achieved is None:
        return measured
    configs = replace(measured.configs, hardware=profiles.achieved.over(measured.configs.hardware))
    return replace(measured, configs=configs)


@dataclass(frozen=True)
class _Table:
    """Measured steps with the profile of each."""

    steps: Steps
    keys: list[Key]

    @classmethod
    def of(cls, measured: Steps) -> "_Table":
        return cls(measured, [key_of(row) for row in measured.rows])

    def where(self, which: NDArray[np.bool_]) -> "_Table":
        return _Table(self.steps.of(which), [key for key, kept in zip(self.keys, which, strict=True) if kept])

    @property
    def timed(self) -> "_Table":
        """The rows that have a time."""
        return self.where(np.isfinite(self.steps.seconds))

    @property
    def group(self) -> NDArray[np.str_]:
        """What names each row's configuration, whatever was measured and whoever did."""
        return np.array([sha256(repr(_configuration(row)).encode()).hexdigest() for row in self.steps.rows])

    @property
    def cluster(self) -> NDArray[np.str_]:
        """Where each row was measured, and with what software."""
        return np.array([f"{key.accelerator} {key.framework} {key.cluster}" for key in self.keys])


def _contents(row: Row) -> tuple[str, ...]:
    return (*_configuration(row), *(row.get(name, "") for name in MEASURED))


def _configuration(row: Row) -> tuple[str, ...]:
    return (row["hw"], str(key_of(row)), *(row[name] for name in (*NUMBERS, *WORDS)))


def _learn(table: _Table) -> Profiles:
    memory = memory_fit.fit(table.steps, [key.software for key in table.keys])
    table = table.timed
    empty = Profiles({}, {}, {}, {}, dict.fromkeys(WIDTHS, NORMAL_90), memory, Links.shipped())
    kinds = np.array([key.kind for key in table.keys])
    everything = {str(kind): _prior(table.where(kinds == kind), start()) for kind in np.unique(kinds)}
    named = np.array([key.family for key in table.keys])
    families = {
        str(name): _prior(table.where(named == name), everything[str(name).split()[0]]) for name in np.unique(named)
    }
    found = _with_own(replace(empty, everything=everything, families=families), table)
    return replace(found, residuals=_residuals(found, table))


def _prior(table: _Table, known: Constants) -> Constants:
    """Constants that profiles have in common, and the scale in the middle of their clusters'.

    A cluster of n rows weighs n^¼: many rows of one say little more of the others than few. What was known before
    counts as two clusters.
    """
    number = np.unique([str(key) for key in table.keys], return_inverse=True)[1]
    clusters = rows_by(table.cluster)
    weights = np.empty(len(number))
    for rows in clusters:
        weights[rows] = len(rows) ** -CROWDED
    found = fit(table.steps, known, centred=number, weights=weights)
    off = -log_ratios(table.steps, found)
    middle = np.median([0.0, 0.0, *(float(np.median(off[rows])) for rows in clusters)])
    return replace(found, scale=np.asarray(float(found.scale) * np.exp(middle)))


def _with_own(profiles: Profiles, table: _Table) -> Profiles:
    """The profiles of a table's rows, on top of what is known.

    Too few steps make no profile beside better known clusters of their kind: they stand for any other cluster.
    """
    own, counts = dict(profiles.own), Counter(table.keys)
    known = {key.anywhere for key, count in counts.items() if count >= FEWEST}
    known |= {key.anywhere for key, one in own.items() if one.steps >= FEWEST}
    for key in sorted(key for key, count in counts.items() if count >= FEWEST or key.anywhere not in known):
        mine = table.where(np.array([other == key for other in table.keys]))
        count = len(mine.keys)
        prior = profiles.baseline(key.anywhere)
        constants = prior
        if count >= FEWEST:
            constants = fit(mine.steps, prior, centred=np.zeros(count, dtype=np.int64))
        off = -float(np.median(log_ratios(mine.steps, constants))) * count / (count + 0.2)
        own[key] = Known(replace(constants, scale=np.asarray(float(prior.scale) * np.exp(off))), count)
    return replace(profiles, own=own)


def _residuals(profiles: Profiles, table: _Table) -> dict[str, Residual]:
    """What the constants leave over, by kind of model."""
    kinds, result = np.array([key.kind for key in table.keys]), {}
    for kind in np.unique(kinds):
        part = table.where(kinds == kind)
        # The configuration that explains a row's time stands for it.
        modelled = profiles.modelled(part.steps.configs, [part.keys[row] for row in part.steps.own])
        seconds, first = part.steps.fastest(modelled)
        names = [key if key in profiles.own else key.anywhere for key in part.keys]
        at = points(take(part.steps.configs, first), names)
        result[str(kind)] = Residual.learn(at, np.log(part.steps.seconds / seconds), SCALES[str(kind)])
    return result


def _joined(old: Residual, new: Residual) -> Residual:
    """One process over the rows of both; the new ones replace those of the same profile."""
    keys = tuple(sorted({*old.at.keys, *new.at.keys}))
    kept = np.array([old.at.keys[number] not in new.at.keys for number in old.at.number])
    before = old.at.of(kept)
    features = {name: np.concatenate([before.features[name], new.at.features[name]]) for name in before.features}
    number = [keys.index(at.keys[one]) for at in (before, new.at) for one in at.number]
    at = replace(
        before,
        features=features,
        release=np.concatenate([before.release, new.at.release]),
        keys=keys,
        number=np.array(number, dtype=np.int64),
    )
    return Residual.learn(at, np.concatenate([old.found[kept], new.found]), old.scales)


def _scores(table: _Table, label: NDArray[np.str_], folds: int) -> list[tuple[str, float]]:
    """How many spreads each row lies off what the rows of other labels foretell, and the kind of that interval."""
    parts, result = rows_by(label), list[tuple[str, float]]()
    if len(parts) < 2 * folds:
        return result
    for fold in range(folds):
        held = np.zeros(len(label), dtype=np.bool_)
        held[np.concatenate(parts[fold::folds])] = True
        mine, profiles = table.where(held), _learn(table.where(~held))
        told = predict(profiles, mine.steps, mine.keys)
        spread = np.log(told.high / told.seconds) / NORMAL_90
        off = np.abs(np.log(mine.steps.seconds / told.seconds)) / spread
        result += zip([profiles.interval(key) for key in mine.keys], off.tolist(), strict=True)
    return result


def _widths(scores: list[tuple[str, float]]) -> dict[str, float]:
    """By kind of interval the spreads on either side of the mean that hold 90 % of rows not seen.

    Split-conformal with several splits: the quantile of (n + 1) 90 % of the scores (Vovk et al. 2005).
    """
    result = {}
    for name in WIDTHS:
        found = sorted(score for kind, score in scores if kind == name)
        if len(found) >= FEWEST_SCORES:
            result[name] = found[min(int(np.ceil((len(found) + 1) * 0.9)) - 1, len(found) - 1)]
    return result
