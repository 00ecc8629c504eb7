"""Folders that DeepSpeed wrote, ZeRO 0 to 3, read without DeepSpeed and torch: where each fp32 weight's values lie.

The rules are those of deepspeed/utils/zero_to_fp32.py (0.19.8), whose result this equals bit for bit: buffers, frozen
weights, then the fp32 master weights, then names that share a tensor. Only the frozen weights of ZeRO 1, which that
program loses, are here too.

ZeRO 1 and 2: every parameter group is one vector, its parameters in order, cut into as many partitions as ranks.
ZeRO 3: every parameter is cut by itself into equal parts, the last padded; each rank has its parts in order.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from training.export import pickles
from training.export.dtypes import WIDTHS, values
from training.export.pickles import InFile, Record
from training.export.source import Extent, Files, Stored
from training.process import JobError

GROUPS: Final = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
Shapes = dict[str, tuple[int, ...]]


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, or the folder of all of a run's."""
    return (folder / "latest").is_file() or any(folder.glob("*mp_rank_*_model_states.pt"))


def open_deepspeed(folder: Path, prefix: str = "") -> Files:
    """Open the weights of a DeepSpeed checkpoint; only names that begin with `prefix`, without it.

    `folder` is the one with the file `latest`, or that of one checkpoint. Raises JobError when it is incomplete, of
    several tensor parallel ranks, or has experts in files of their own.
    """
    place = _place(folder)
    models = [pickles.read(path) for path in _ranked(place, "*mp_rank_*_model_states.pt")]
    _check(place, models)
    optimizers = _ranked(place, "*_optim_states.pt")
    found = _zero(place, models, optimizers) if optimizers else dict(_plain(models[0]["module"]))
    shared: dict[str, str] = models[0].get("shared_params") or _same_place(found)
    tied = {name: real for name, real in shared.items() if real in found}
    for name in tied:
        found.pop(name, None)
    if not any(name.startswith(prefix) for name in found):
        raise JobError(f"{folder} has no tensor whose name begins with {prefix!r}; its first is {next(iter(found))}")
    real = {name: real.removeprefix(prefix) for name, real in _without(prefix, tied).items()}
    return Files(_without(prefix, found), real)


def _without(prefix: str, told: dict[str, Any]) -> dict[str, Any]:
    """Return what begins with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in told.items() if name.startswith(prefix)}


def _same_place(found: dict[str, Stored]) -> dict[str, str]:
    """Return which names stand for the same bytes as an earlier one; ZeRO 0 does not tell."""
    first: dict[Stored, str] = {}
    for name, tensor in found.items():
        first.setdefault(tensor, name)
    return {name: first[tensor] for name, tensor in found.items() if first[tensor] != name}


def _place(folder: Path) -> Path:
    """Return the folder of the checkpoint that `latest` names, or the folder itself."""
    if any(folder.glob("*mp_rank_*_model_states.pt")):
        return folder
    named = folder / (folder / "latest").read_text().strip()
    if not any(named.glob("*mp_rank_*_model_states.pt")):
        raise JobError(f"{folder / 'latest'} names {named.name} and {named} has no model states; copy it again")
    return named


def _ranked(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern, in the order of the ranks in their names."""
    found = [path for path in folder.glob(pattern) if "expert" not in path.name]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _check(folder: Path, models: list[Any]) -> None:
    if any(folder.glob("*expert_*_states.pt")):
        raise JobError(f"{folder} has experts in files of their own, which are not read; consolidate them first")
    if any("mp_rank_00" not in path.name for path in folder.glob("*_model_states.pt")):
        raise JobError(f"{folder} has several tensor parallel ranks, whose cuts DeepSpeed does not tell; gather them")
    if not all(isinstance(model, dict) and "module" in model for model in models):
        raise JobError(f"{folder} has model states without a model; they are not DeepSpeed's")


def _zero(folder: Path, models: list[Any], paths: list[Path]) -> dict[str, Stored]:
    states = [_optimizer(path) for path in paths]
    stage, count = _number(states[0]["zero_stage"]), states[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if stage not in GROUPS:
        raise JobError(f"{paths[0]} is of ZeRO stage {stage}, which is not known; stages 0 to 3 are read")
    if count != len(paths):
        raise JobError(
            f"{folder} was written by {count} ranks and has *_optim_states.pt of {len(paths)}; copy all of them"
        )
    if stage == 3 and len(models) != count:
        raise JobError(f"{folder} was written by {count} ranks and has model states of {len(models)}; copy all of them")
    model = models[0]
    groups = [[_tensor(part) for part in state[GROUPS[stage]]] for state in states]
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    found = dict(_buffers(model))
    if stage == 3:
        found |= dict(_frozen_parts(models))
        return found | dict(_interleaved({name: shape for group in shapes for name, shape in group.items()}, groups))
    found |= dict(_plain(model.get("frozen_param_fragments") or {}))
    gaps = states[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for number, group in enumerate(shapes):
        found |= dict(_sequential(group, [rank[number] for rank in groups], gaps[number]))
    return dict(_plain(model["module"])) | found  # stage 1 keeps frozen weights there alone


def _optimizer(path: Path) -> dict[str, Any]:
    told = pickles.read(path)
    state = told.get("optimizer_state_dict") if isinstance(told, dict) else None
    if not isinstance(state, dict) or "zero_stage" not in state:
        raise JobError(f"{path} is not an optimizer state of ZeRO; give a DeepSpeed checkpoint")
    return state


def _number(told: Any) -> Any:
    """Return the value of an enumeration's member, as a pickle tells it."""
    return told.told[0] if isinstance(told, Record) and told.told else told


def _tensor(told: Any) -> InFile:
    if not isinstance(told, InFile):
        raise JobError("the checkpoint has something that is not a tensor among its weights; copy it again")
    return told


def _plain(told: dict[str, Any]) -> Iterator[tuple[str, Stored]]:
    for name, place in told.items():
        if isinstance(place, InFile):
            yield name, Stored.whole(place)


def _buffers(model: dict[str, Any]) -> Iterator[tuple[str, Stored]]:
    names = set(model.get("buffer_names") or ())
    return _plain({name: place for name, place in model["module"].items() if name in names})


def _sequential(shapes: Shapes, partitions: Sequence[InFile], gaps: Sequence[int]) -> Iterator[tuple[str, Stored]]:
    """Yield the parameters of one group of ZeRO 1 or 2: one vector, cut into the ranks' partitions."""
    starts = [0, *accumulate(values(part.shape) for part in partitions)]
    first = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        last = first + values(shape)
        extents = [
            _part(part, max(first, start) - start, max(first, start) - first, min(last, end) - max(first, start))
            for part, start, end in zip(partitions, starts, starts[1:], strict=False)
            if max(first, start) < min(last, end)
        ]
        yield name, Stored(partitions[0].dtype, shape, tuple(extents))
        first = last + gap


def _interleaved(shapes: Shapes, ranks: Sequence[Sequence[InFile]]) -> Iterator[tuple[str, Stored]]:
    """Yield the parameters of ZeRO 3: rank r has part r of each, at the same place of its flat groups."""
    first = 0
    for name, shape in shapes.items():
        share = -(-values(shape) // len(ranks))
        extents: list[Extent] = []
        for rank, groups in enumerate(ranks):
            extents += _stretch(groups, first, rank * share, min(share, values(shape) - rank * share))
        yield name, Stored(ranks[0][0].dtype, shape, tuple(extents))
        first += share


def _stretch(groups: Sequence[InFile], first: int, start: int, count: int) -> Iterator[Extent]:
    """Yield where `count` values from `first` on lie in a rank's groups, which follow each other."""
    base = 0
    for group in groups:
        begin, end = max(first, base), min(first + count, base + values(group.shape))
        if begin < end:
            yield _part(group, begin - base, start + begin - first, end - begin)
        base += values(group.shape)


def _frozen_parts(models: list[Any]) -> Iterator[tuple[str, Stored]]:
    """Yield the frozen parameters of ZeRO 3, of which every rank has a part."""
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [_tensor(model["frozen_param_fragments"][name]) for model in models]
        yield from _sequential({name: tuple(shape)}, parts, [0])


def _part(place: InFile, skipped: int, start: int, count: int) -> Extent:
    return Extent(place.path, place.offset + skipped * WIDTHS[place.dtype], start, count)
