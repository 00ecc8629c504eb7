"""Castra's own checkpoints as a source of weights: what `training.checkpoint.Reader` reads, rows at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from training.checkpoint.reader import Reader
from training.experts import Part, on_disk
from training.export.dtypes import Array, values
from training.export.source import Stored

MOMENTS: Final = ("exp_avg/", "exp_avg_sq/")


class Own:
    """The weights of one checkpoint, not its moments; any layout's. Routed experts have their names on the disk."""

    def __init__(self, folder: Path) -> None:
        """Open a complete checkpoint. Raises JobError."""
        self._folder, self.reader = folder, Reader(folder)
        names = [name for name in self.reader.names() if not name.startswith(MOMENTS)]
        self.tensors: dict[str, Stored] = {}
        self._places: dict[str, tuple[str, Part | None]] = {}
        for name in names:
            kind, shape = self.reader.dtype(name), self.reader.shape(name)
            for theirs, part in on_disk(name, shape).items():
                self._places[theirs] = name, part
                self.tensors[theirs] = Stored(kind, shape if part is None else (part[2] - part[1], *shape[2:]), ())
        self.tied: dict[str, str] = {}

    def read(self, name: str, first: int, out: Array) -> None:
        shape, (ours, part) = self.tensors[name].shape, self._places[name]
        if not shape:
            self.reader.read(ours, (), out.reshape(()))
            return
        row = max(1, values(shape[1:]))
        begin, count = first // row, len(out) // row
        rest = tuple((0, size) for size in shape[1:])
        if part is None:
            self.reader.read(ours, ((begin, begin + count), *rest), out.reshape(count, *shape[1:]))
            return
        expert, top, _ = part
        box = ((expert, expert + 1), (top + begin, top + begin + count), *rest)
        self.reader.read(ours, box, out.reshape(1, count, *shape[1:]))

    def files(self) -> Sequence[Path]:
        return [self._folder / name for name in sorted(self.reader.manifest.files)]

    def close(self) -> None:
        """Close its files."""
        self.reader.close()
