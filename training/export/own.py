"""Castra's own checkpoints as a source of weights: what `training.checkpoint.Reader` reads, rows at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from training.checkpoint.reader import Reader
from training.export.dtypes import Array, values
from training.export.source import Stored

MOMENTS: Final = ("exp_avg/", "exp_avg_sq/")


class Own:
    """The weights of one checkpoint, not its moments; any layout's."""

    def __init__(self, folder: Path) -> None:
        """Open a complete checkpoint. Raises JobError."""
        self._folder, self.reader = folder, Reader(folder)
        names = [name for name in self.reader.names() if not name.startswith(MOMENTS)]
        self.tensors = {name: Stored(self.reader.dtype(name), self.reader.shape(name), ()) for name in names}
        self.tied: dict[str, str] = {}

    def read(self, name: str, first: int, out: Array) -> None:
        shape = self.tensors[name].shape
        if not shape:
            self.reader.read(name, (), out.reshape(()))
            return
        row = max(1, values(shape[1:]))
        begin, count = first // row, len(out) // row
        box = ((begin, begin + count), *((0, size) for size in shape[1:]))
        self.reader.read(name, box, out.reshape(count, *shape[1:]))

    def files(self) -> Sequence[Path]:
        return [self._folder / name for name in sorted(self.reader.manifest.files)]

    def close(self) -> None:
        """Close its files."""
        self.reader.close()
