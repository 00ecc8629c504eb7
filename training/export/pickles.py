"""Read what torch.save wrote without torch and without running anything of it: where each tensor's bytes lie.

A torch file is a zip that stores a pickle and, uncompressed, the bytes of every storage. A pickle is a program, and one
from elsewhere may do anything; here it can only build containers, numbers, texts and inert records.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from training.export.dtypes import WIDTHS, values
from training.process import JobError

STORAGES: Final = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
"""torch's storage classes by the types of safetensors."""
LOCAL_HEADER: Final = 30
"""Bytes of a zip member's own header before its name (APPNOTE.TXT 4.3.7); the lengths of name and extra end it."""


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor in a torch file: its type, its shape, and the byte of the file where its values begin, row-major."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Record:
    """What a pickle says of an object of a class that is not known here: its arguments and its state, inert."""

    def __init__(self, *told: Any, **named: Any) -> None:
        self.told, self.named = told, named
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {"state": state}

    def __call__(self, *told: Any, **named: Any) -> "Record":
        return Record(*told, **named)

    def __hash__(self) -> int:
        return id(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take what a dictionary's subclass is filled with, and forget it."""

    def append(self, value: Any) -> None:
        """Take what a list's subclass is filled with, and forget it."""

    def extend(self, values: Any) -> None:
        """Take what a list's subclass is filled with, and forget it."""


class Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return what torch.save put into a file (or into `size` bytes of it from `start` on), tensors as `InFile`.

    Raises JobError when it is absent, truncated or not of torch's zip format.
    """
    try:
        with path.open("rb") as file:
            window = Window(file, start, path.stat().st_size - start if size is None else size)
            with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                return _Tensors(path, *_opened(archive, file, start)).load()
    except FileNotFoundError as absent:
        raise JobError(f"{path} is absent: the checkpoint is incomplete; copy it again, whole") from absent
    except (zipfile.BadZipFile, struct.error, EOFError, StopIteration) as problem:
        raise JobError(f"{path} is truncated or not written by torch.save (zip format): copy it again") from problem
    except (pickle.UnpicklingError, AttributeError, IndexError, KeyError, TypeError, ValueError) as problem:
        raise JobError(f"{path} is not a checkpoint this program can read ({problem}); give another") from problem


def unpickled(path: Path) -> Any:
    """Return a plain pickle file's content, unknown classes as `Record`. Raises JobError when it cannot be read."""
    try:
        return _Plain(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError as absent:
        raise JobError(f"{path} is absent: the checkpoint is incomplete; copy it again, whole") from absent
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        MemoryError,
    ) as problem:
        raise JobError(f"{path} is damaged or not a checkpoint's metadata ({problem}); copy it again") from problem


def _opened(archive: zipfile.ZipFile, file: IO[bytes], start: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of a torch archive and where the bytes of every storage lie in the file: offset, size."""
    storages = {}
    for member in archive.infolist():
        folder, _, key = member.filename.rpartition("/")
        if folder.rpartition("/")[2] == "data":
            file.seek(start + member.header_offset + LOCAL_HEADER - 4)
            name, extra = struct.unpack("<HH", file.read(4))
            storages[key] = (start + member.header_offset + LOCAL_HEADER + name + extra, member.file_size)
    names = (name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl")
    return archive.read(next(names)), storages


class _Plain(pickle.Unpickler):
    """Builds containers and numbers; every other class becomes a `Record` of its name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) in (("torch", "Size"), ("builtins", "tuple")):
            return _tuple
        if (module, name) == ("builtins", "set"):
            return set
        return type(name, (Record,), {"__module__": module})


class _Tensors(_Plain):
    """Builds tensors too: as places in the file."""

    def __init__(self, path: Path, content: bytes, storages: dict[str, tuple[int, int]]) -> None:
        super().__init__(io.BytesIO(content))
        self._path, self._storages = path, storages

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return self._tensor
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return _first
        if module == "torch._tensor" and name == "_rebuild_from_type_v2":
            return _rebuilt
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def _tensor(self, storage: Any, first: int, shape: Any, stride: Any, *_: Any) -> InFile:
        _, kind, key, *_ = storage
        dtype = STORAGES.get(str(kind))
        if dtype is None:
            raise pickle.UnpicklingError(f"a tensor of {kind}")
        if not _contiguous(tuple(shape), tuple(stride)):
            raise pickle.UnpicklingError("a tensor that does not lie row by row")
        begin, size = self._storages[key]
        place = InFile(self._path, dtype, tuple(shape), begin + first * WIDTHS[dtype])
        if place.offset + values(place.shape) * WIDTHS[dtype] > begin + size:
            raise pickle.UnpicklingError("a tensor is larger than its storage")
        return place


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _tuple(told: Any = ()) -> tuple[Any, ...]:
    return tuple(told)


def _first(first: Any, *_: Any) -> Any:
    return first


def _rebuilt(build: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    return build(*arguments)
