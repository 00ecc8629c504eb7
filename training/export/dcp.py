"""Folders that torch.distributed.checkpoint wrote, read without torch: .metadata says which box lies where."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from training.export import pickles
from training.export.dtypes import WIDTHS
from training.export.pickles import InFile, Record
from training.export.source import Files, Stored, box
from training.process import JobError

METADATA: Final = ".metadata"


def open_dcp(folder: Path, prefix: str = "") -> Files:
    """Open the tensors of a DCP folder whose names begin with `prefix`, which is taken off.

    Without one, the state dictionary's part "model" is taken if there is one, else everything. Raises JobError when the
    folder is incomplete or no tensor has such a name.
    """
    told = pickles.unpickled(folder / METADATA)
    state: dict[str, Any] = getattr(told, "state", {})
    tensors: dict[str, Any] = state.get("state_dict_metadata") or {}
    chosen = dict(_chosen(tensors, state.get("planner_data"), prefix))
    if not chosen:
        tops = ", ".join(sorted({name.split(".")[0] for name in tensors})[:8])
        raise JobError(f"{folder} has no tensor whose name begins with {prefix!r}; its names begin with: {tops}")
    places = {(key.state["fqn"], tuple(key.state.get("offset") or ())): place
              for key, place in state["storage_data"].items()}  # fmt: skip
    return Files({name: _stored(folder, fqn, tensors[fqn], places) for name, fqn in chosen.items()})


def _chosen(tensors: dict[str, Any], paths: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the names that are wanted and the names they have in the folder."""
    parts = {fqn: tuple(path) for fqn, path in paths.items()} if isinstance(paths, dict) else {}
    nested = not prefix and any(len(path) > 1 and path[0] == "model" for path in parts.values())
    for fqn, told in tensors.items():
        if "chunks" not in getattr(told, "state", {}):
            continue
        if nested:
            if parts[fqn][0] == "model":
                yield ".".join(map(str, parts[fqn][1:])), fqn
        elif fqn.startswith(prefix):
            yield fqn.removeprefix(prefix), fqn


def _stored(folder: Path, fqn: str, told: Record, places: dict[tuple[str, tuple[int, ...]], Record]) -> Stored:
    """Return one tensor, put together from its boxes."""
    shape, extents, dtype = tuple(told.state["size"]), [], ""
    for chunk in told.state["chunks"]:
        origin, size = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        place = places.get((fqn, origin)) or (places.get((fqn, ())) if not any(origin) else None)
        if place is None:
            raise JobError(f"{folder / METADATA} does not say where {fqn} is from {list(origin)} on; copy it again")
        saved = _saved(folder / place.state["relative_path"], place.state["offset"], place.state["length"])
        if saved.shape != size:
            raise JobError(f"{saved.path} holds {list(saved.shape)} where {METADATA} says {list(size)} for {fqn}")
        dtype = saved.dtype
        extents += [
            replace(extent, offset=saved.offset + extent.offset * WIDTHS[dtype])
            for extent in box(saved.path, 0, shape, origin, size)
        ]
    return Stored(dtype, shape, tuple(extents))


def _saved(path: Path, start: int, size: int) -> InFile:
    """Return the tensor that torch.save wrote into a stretch of a .distcp file."""
    saved = pickles.read(path, start, size)
    if not isinstance(saved, InFile):
        raise JobError(f"{path} holds something that is not a tensor at byte {start:,}; copy it again")
    return saved


def is_dcp(folder: Path) -> bool:
    """Whether a folder is one of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()
