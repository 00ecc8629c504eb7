"""Which export of a model is the one in use, and the way back: a record that changes by compare-and-swap."""

import json
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from store import Conflict, Store, StoreError
from store.manifest import Place


@dataclass(frozen=True, slots=True)
class Model:
    """A promoted model: the keys of its results, and how it scored when it was promoted."""

    dataset: str
    training: str
    export: str
    bits_per_byte: float
    since: str


@dataclass(frozen=True, slots=True)
class Record:
    """The promoted models of a name, newest last, and why the newest decision fell as it did."""

    models: tuple[Model, ...] = ()
    reason: str = ""
    etag: str = field(default="", compare=False)

    @property
    def current(self) -> Model | None:
        """The model in use, None before the first promotion."""
        return self.models[-1] if self.models else None


def read(store: Store, name: str) -> Record:
    """The record of a name; empty before the first promotion."""
    if (found := store.get(_key(name))) is None:
        return Record()
    told = json.loads(found.data)
    return Record(tuple(Model(**model) for model in told["models"]), told["reason"], found.etag)


def promote(store: Store, name: str, model: Model, reason: str) -> Record:
    """Put a model in use. One that is in use already is left as it is."""
    record = read(store, name)
    if record.current and record.current.export == model.export:
        return record
    return _write(store, name, replace(record, models=(*record.models, model), reason=reason))


def keep(store: Store, name: str, reason: str) -> Record:
    """Note why the model in use stays in use."""
    return _write(store, name, replace(read(store, name), reason=reason))


def roll_back(store: Store, name: str) -> Record:
    """Put the model before the current one in use again; raises `StoreError` if there is none."""
    record = read(store, name)
    if len(record.models) < 2:
        raise StoreError(f"{name} has {len(record.models)} promoted models: there is nothing to go back to")
    return _write(
        store, name, replace(record, models=record.models[:-1], reason=f"rolled back from {record.models[-1].export}")
    )


def now() -> str:
    """The time as it is written into records: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def place(key: str) -> Place:
    """The place that a key names."""
    step, _, rest = key.partition("/")
    name, _, mark = rest.rpartition("@")
    return Place(step, name, mark)


def _key(name: str) -> str:
    return f"promoted/{name}.json"


def _write(store: Store, name: str, record: Record) -> Record:
    told = {"models": [asdict(model) for model in record.models], "reason": record.reason}
    data = json.dumps(told, indent=1).encode()
    try:
        if record.etag:
            return replace(record, etag=store.put(_key(name), data, if_match=record.etag))
        return replace(record, etag=store.put(_key(name), data, if_absent=True))
    except Conflict:
        raise StoreError(f"the promoted model of {name} was changed by another run at this moment: run again") from None
