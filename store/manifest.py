"""A step's result in the store: `<step>/<name>@<fingerprint>/`, complete when, and only when, its manifest exists."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from store.objects import Store

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one step's result lives. The fingerprint covers what changes the result, and nothing else."""

    step: str
    name: str
    fingerprint: str

    @property
    def key(self) -> str:
        """The folder's key in the store."""
        return f"{self.step}/{self.name}@{self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished step says of itself, written last."""

    step: str
    name: str
    fingerprint: str
    identity: dict[str, Any]
    """What the fingerprint is the hash of."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Keys of the results this one was made from: the lineage."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was found out: figures for people and for the steps that follow."""
    files: dict[str, int] = field(default_factory=dict)
    """Relative path → size in bytes of each file of the result."""
    started: str = ""
    finished: str = ""
    """UTC, ISO 8601."""

    @property
    def key(self) -> str:
        """The folder's key in the store."""
        return Place(self.step, self.name, self.fingerprint).key


def fingerprint(identity: dict[str, Any]) -> str:
    """Hash what changes a result: 12 hexadecimal digits of the SHA-256 of its canonical JSON."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def read_manifest(store: Store, place: Place) -> Manifest | None:
    """The manifest of a finished result; None if the step is not done, or if its files were lost since."""
    found = store.get(f"{place.key}/{MANIFEST}")
    if found is None:
        return None
    manifest = Manifest(**json.loads(found.data))
    there = set(store.keys(f"{place.key}/"))
    whole = all(f"{place.key}/{file}" in there for file in manifest.files)
    return manifest if whole else None


def seal(store: Store, place: Place, manifest: Manifest) -> Manifest:
    """Write the manifest over the published files of `place`; returns it with the files."""
    files = {name: size for name, size in store.sizes(place.key).items() if name != MANIFEST}
    sealed = Manifest(**asdict(manifest) | {"files": files})
    store.put(f"{place.key}/{MANIFEST}", json.dumps(asdict(sealed), indent=1, sort_keys=True).encode())
    return sealed
