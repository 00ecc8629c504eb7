"""A weight-only quantised copy, in a layout of Castra's own: no published one for int8 or int4 loads without a GPU.

    python -m training.export.quantize HF_FOLDER OUT int4      # make one of any Hugging Face folder
    python -m training.export.convert OUT BACK --dtype bf16    # and an ordinary folder of it again

The folder is that of the model with other safetensors. In place of a matrix "w" of [rows, columns], but embeddings and
the output embedding, which stay as they are, it has

    int8: "w.int8"   I8 [rows, columns]                and "w.scale" F32 [rows]
    int4: "w.int4"   U8 [rows, ceil(columns / 2)]      and "w.scale" F32 [rows, ceil(columns / 128)]

Weight = integer times its row's (int4: its group of 128 columns') scale. Of an int4 byte the low half is the even
column, the high half the odd one, each a two's complement number from -8 to 7. Rows are those of the stored matrix.
config.json says so in "castra_quantization": {"bits", "group", "columns": {"w": columns}}.
"""

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from training.export import stream
from training.export.dtypes import FLOATS, Array, converter
from training.export.source import Source, Stored, safetensors, tensor
from training.job import write_json
from training.process import JobError

BITS: Final = {"int8": 8, "int4": 4}
GROUP: Final = 128
"""Columns that share a scale in int4 (Frantar et al., "GPTQ", 2023, section 4, uses the same)."""
SHRUNK: Final = tuple(1 - step / 50 for step in range(13))
"""Scales tried for int4, as a share of the one that reaches the group's largest weight: that of the least square error
is taken, as a few large weights are worth being cut for the many small ones."""
KEY: Final = "castra_quantization"
LOSS_RISE: Final = {"int8": 0.01, "int4": 0.15}
"""How much the held-out loss may rise by quantising before it is refused. Unit: nats per token."""
APART: Final = ("embed", "wte", "wpe", "lm_head")
"""Parts of the names of matrices that stay: embeddings are looked up, and the output one is the most sensitive."""


def is_quantised(folder: Path) -> bool:
    """Whether a folder is one that `quantise` wrote."""
    return KEY in _config(folder)


def quantise(
    source: Source, names: Iterable[str], kind: str, dtype: str, folder: Path, max_shard_mb: int = 5000
) -> dict[str, Any]:
    """Write the named tensors of a source to a folder, its matrices as `kind` ("int8" or "int4"), the rest in `dtype`.

    config.json must be there already and is told of it. Returns the bytes written and the relative error of the
    weights, |w - q| / |w| over a matrix (Frobenius): {"bytes", "error_mean", "error_max", "matrices"}.
    """
    if kind not in BITS:
        raise JobError(f"{kind} is not a way to quantise; int8 and int4 are")
    names = list(names)
    chosen = [name for name in names if _is_matrix(name, source.tensors[name])]
    errors = _Errors(chosen)
    targets: dict[str, stream.Target] = {}
    for name, plain in stream.targets(source, names, dtype).items():
        if name in errors.kept:
            targets |= _quantised(name, source.tensors[name], kind, errors)
        else:
            targets[name] = plain
    files = stream.shards(targets, max_shard_mb)
    for stale in folder.glob("*.safetensors"):  # of an earlier try, whose errors nobody knows
        stale.unlink()
    stream.fits(targets, files, folder)
    stream.write(source, targets, files, folder)
    columns = {name: source.tensors[name].shape[1] for name in chosen}
    told = {"bits": BITS[kind], "group": GROUP if kind == "int4" else None, "columns": columns}
    write_json(folder / "config.json", _config(folder) | {KEY: told})
    size = sum((folder / file.name).stat().st_size for file in files)
    return {"bytes": size, "matrices": len(chosen)} | errors.told()


class Quantised:
    """A quantised folder as a source: its matrices as fp32, made row by row when they are read."""

    def __init__(self, folder: Path) -> None:
        """Open a folder that `quantise` wrote. Raises JobError when it is damaged or is none."""
        told = _config(folder).get(KEY)
        if told is None:
            raise JobError(f"{folder} is not a quantised copy of Castra: config.json has no {KEY}")
        self._files, self._columns, self._kind = safetensors(folder), told["columns"], f"int{told['bits']}"
        self._scales = {name: tensor(self._files, f"{name}.scale") for name in self._columns}
        self.tied: dict[str, str] = {}
        self.tensors = {name: found for name, found in self._files.tensors.items() if self._is_plain(name)}
        for name, columns in self._columns.items():
            rows = self._files.tensors[f"{name}.{self._kind}"].shape[0]
            self.tensors[name] = Stored("F32", (rows, columns), ())

    def read(self, name: str, first: int, out: Array) -> None:
        columns = self._columns.get(name)
        if columns is None:
            self._files.read(name, first, out)
            return
        begin, rows = first // columns, len(out) // columns
        width = self._files.tensors[f"{name}.{self._kind}"].shape[1]
        packed = np.empty(rows * width, np.int8 if self._kind == "int8" else np.uint8)
        self._files.read(f"{name}.{self._kind}", begin * width, packed)
        whole = packed.reshape(rows, width)
        numbers = whole if self._kind == "int8" else unpacked(whole, columns)
        scale = self._scales[name][begin : begin + rows]
        out.reshape(rows, columns)[...] = dequantize(numbers, scale)

    def files(self) -> Sequence[Path]:
        return self._files.files()

    def _is_plain(self, name: str) -> bool:
        base, _, end = name.rpartition(".")
        return end not in (self._kind, "scale") or base not in self._columns


def load(folder: Path) -> dict[str, Array]:
    """Return all weights of a quantised folder as float32 arrays (what is not floating, as it is)."""
    source = Quantised(folder)
    found = {}
    for name, stored in source.tensors.items():
        whole = tensor(source, name)
        found[name] = converter(name, stored.dtype, "F32")(whole) if stored.dtype in FLOATS else whole
    return found


def dequantize(numbers: Array, scale: Array) -> Array:
    """Return integers [rows, columns] times their scales, [rows] or [rows, groups of 128 columns], as float32."""
    if scale.ndim == 1:
        return numbers.astype(np.float32) * scale[:, None]
    whole: Array = numbers.astype(np.float32) * np.repeat(scale, GROUP, 1)[:, : numbers.shape[1]]
    return whole


def to_int8(rows: Array) -> tuple[Array, Array]:
    """Return float32 [rows, columns] as int8 from -127 to 127 and the scale of each row, float32 [rows]."""
    scale = _scale(np.abs(rows).max(1, initial=0.0), 127)
    return np.rint(rows / scale[:, None]).astype(np.int8), scale


def to_int4(rows: Array) -> tuple[Array, Array]:
    """Return float32 [rows, columns] as int8 from -8 to 7 and the scales, float32 [rows, ceil(columns / 128)]."""
    count, columns = rows.shape
    groups = -(-columns // GROUP)
    padded = np.zeros((count, groups * GROUP), np.float32)
    padded[:, :columns] = rows
    parts = padded.reshape(count, groups, GROUP)
    largest = np.abs(parts).max(2)
    best, scale = np.full(largest.shape, np.inf, np.float32), np.ones(largest.shape, np.float32)
    for share in SHRUNK:
        tried = _scale(largest * np.float32(share), 7)
        left = parts - _rounded(parts, tried) * tried[..., None]
        error = np.einsum("rgc,rgc->rg", left, left)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, tried, scale)
    return _rounded(parts, scale).astype(np.int8).reshape(count, -1)[:, :columns], scale


def packed(numbers: Array) -> Array:
    """Return int8 [rows, columns] from -8 to 7 as bytes of two: uint8 [rows, ceil(columns / 2)]."""
    even, odd = numbers[:, 0::2].view(np.uint8) & 15, numbers[:, 1::2].view(np.uint8) & 15
    out = even.copy()
    out[:, : odd.shape[1]] |= odd << 4
    return out


def unpacked(pairs: Array, columns: int) -> Array:
    """Return what `packed` packed: int8 [rows, columns]."""
    out = np.empty((len(pairs), 2 * pairs.shape[1]), np.int8)
    out[:, 0::2], out[:, 1::2] = pairs & 15, pairs >> 4
    out[out > 7] -= 16
    return out[:, :columns]


class _Errors:
    """The square of every matrix, and of what quantising takes from it, added up by several threads."""

    def __init__(self, names: Sequence[str]) -> None:
        self.kept = {name: [0.0, 0.0] for name in names}
        self._lock = threading.Lock()

    def add(self, name: str, rows: Array, numbers: Array, scale: Array) -> None:
        left = dequantize(numbers, scale) - rows
        with self._lock:
            self.kept[name][0] += float(np.vdot(left, left))
            self.kept[name][1] += float(np.vdot(rows, rows))

    def told(self) -> dict[str, float]:
        shares = [(lost / whole) ** 0.5 for lost, whole in self.kept.values() if whole]
        return {"error_mean": sum(shares) / len(shares) if shares else 0.0, "error_max": max(shares, default=0.0)}


def _quantised(name: str, stored: Stored, kind: str, errors: _Errors) -> dict[str, stream.Target]:
    """Return the two tensors that a matrix becomes."""
    rows, columns = stored.shape
    cut = to_int8 if kind == "int8" else to_int4

    def numbers() -> Callable[[Array], Array]:
        widen = converter(name, stored.dtype, "F32")

        def convert(block: Array) -> Array:
            part = widen(block).reshape(-1, columns)
            whole, scale = cut(part)
            errors.add(name, part, whole, scale)
            return whole if kind == "int8" else packed(whole)

        return convert

    def scales() -> Callable[[Array], Array]:
        widen = converter(name, stored.dtype, "F32")
        return lambda block: cut(widen(block).reshape(-1, columns))[1]

    if kind == "int8":
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (rows, columns), (rows,)
        return {
            f"{name}.int8": stream.Target("I8", shapes[0], name, numbers),
            f"{name}.scale": stream.Target("F32", shapes[1], name, scales),
        }
    shapes = (rows, -(-columns // 2)), (rows, -(-columns // GROUP))
    return {
        f"{name}.int4": stream.Target("U8", shapes[0], name, numbers),
        f"{name}.scale": stream.Target("F32", shapes[1], name, scales),
    }


def _is_matrix(name: str, stored: Stored) -> bool:
    return len(stored.shape) == 2 and stored.dtype in FLOATS and not any(part in name for part in APART)


def _scale(largest: Array, top: int) -> Array:
    """Return what the largest weight is to be divided by; 1 where all are 0."""
    scale: Array = (largest / np.float32(top)).astype(np.float32)
    scale[scale == 0] = 1
    return scale


def _rounded(parts: Array, scale: Array) -> Array:
    return np.clip(np.rint(parts / scale[..., None]), -8, 7)


def _config(folder: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return told
