"""What a checkpoint says of itself: whose it is, its tensors, and size and SHA-256 of its files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from training.job import write_json

MANIFEST: Final = "manifest.json"
FORMAT: Final = 2
ELSEWHERE: Final = ("pretrained",)
"""What of a recipe's model part says where weights came from, not what the network is."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to; `strategy` tells its layout in words, `model` and `lora` are of the recipe."""

    seed: int
    strategy: str
    world_size: int
    model: dict[str, Any]
    lora: dict[str, Any] | None = None

    def can_resume(self, other: "Identity") -> str | None:
        """Return why a run of this identity cannot go on from a checkpoint of the other, or None if it can.

        Any layout goes on from any other, on any number of ranks.
        """
        if self.seed != other.seed:
            return f"it was made with train.seed {other.seed}, not {self.seed}"
        shared = sorted(self.model.keys() & other.model.keys() - {*ELSEWHERE})
        changed = [name for name in shared if self.model[name] != other.model[name]]
        if changed:
            theirs, ours = (", ".join(f"{name} {told[name]}" for name in changed) for told in (other.model, self.model))
            return f"it is of another model (its {theirs}; here {ours})"
        if self.lora != other.lora:
            theirs, ours = (f"the adapters {told}" if told else "no adapters" for told in (other.lora, self.lora))
            return f"it was trained with {theirs}, and this run has {ours}"
        return None


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json: shapes and types of the tensors by name, size (bytes) and SHA-256 of the files by name."""

    step: int
    identity: Identity
    extra: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    files: dict[str, tuple[int, str]]
    best: bool = False

    def write(self, folder: Path) -> None:
        """Write it into a folder whose files are all on the disk."""
        told = asdict(self)
        write_json(folder / MANIFEST, {"format": FORMAT, **told.pop("identity"), **told})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's manifest. Raises OSError, or ValueError when it is torn or of another version."""
        told = json.loads((folder / MANIFEST).read_text())
        try:
            if told.get("format") != FORMAT:
                raise ValueError(f"its format is {told.get('format', 1)}, not {FORMAT}")
            identity = Identity(*(told[name] for name in Identity.__slots__))
            files = {name: (int(size), str(digest)) for name, (size, digest) in told["files"].items()}
            return cls(int(told["step"]), identity, told["extra"], told["tensors"], files, bool(told["best"]))
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"{MANIFEST} lacks {problem}") from problem
