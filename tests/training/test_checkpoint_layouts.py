"""Any layout's checkpoint is read by any other layout: whatever cut the tensors up, into boxes or flat ranges."""

import tempfile
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from training import checkpoint
from training.checkpoint import Identity, Manifest, Piece, Reader, loading, reader
from training.checkpoint.image import Image, type_name
from training.process import JobError

pytestmark = [pytest.mark.torch]

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Tensors, ranks: list[list[Piece]]) -> Path:
    """Write a checkpoint of several ranks as they would."""
    files = {}
    for rank, pieces in enumerate(ranks):
        image = Image(pieces, pinned=False)
        image.fill(reversed(pieces))
        if image.size:
            name = f"rank-{rank:05d}.safetensors"
            files[name] = image.write(folder / name)
    told = {name: {"shape": list(held.shape), "dtype": type_name(held.dtype)} for name, held in tensors.items()}
    Manifest(1, Identity(1, "any", len(ranks), {}), {}, told, files).write(folder)
    return folder


def empty(tensors: Tensors, ranks: list[list[Piece]]) -> tuple[Tensors, list[list[Piece]]]:
    """The same pieces of tensors without values, for another layout to be loaded into."""
    blank = {name: torch.zeros_like(held) for name, held in tensors.items()}
    emptied = [
        [
            Piece(told.name, told.shape, told.offset, torch.zeros_like(told.local), told.owner, told.flat)
            for told in pieces
        ]
        for pieces in ranks
    ]
    return blank, emptied


def put(blank: Tensors, ranks: list[list[Piece]]) -> Tensors:
    """The whole tensors from all pieces of all ranks, whether they own them or not."""
    for piece in (piece for pieces in ranks for piece in pieces):
        if piece.flat is not None:
            blank[piece.name].view(-1)[piece.flat : piece.flat + piece.local.numel()] = piece.local
        else:
            place = tuple(slice(a, a + b) for a, b in zip(piece.offset, piece.local.shape, strict=True))
            blank[piece.name][place] = piece.local
    return blank


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensors:
    """A few tensors of any shape and type, no value of which is like another."""
    made: Tensors = {}
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 6), max_size=4))
        kind = draw(st.sampled_from(KINDS))
        values = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float64) % 251
        made[f"model.{index}@x.weight"] = (
            (values.view(shape) % 2 == 0) if kind is torch.bool else values.view(shape).to(kind)
        )
    return made


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """A dimension in pieces."""
    inner = draw(st.lists(st.integers(0, size), max_size=2))
    return list(pairwise(sorted({0, size, *inner})))


@st.composite
def layouts(draw: st.DrawFn, tensors: Tensors) -> list[list[Piece]]:
    """The tensors, cut up among some ranks: as boxes of a grid, some held twice, or as flat ranges like ZeRO's."""
    ranks: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, held in tensors.items():
        cut = _ranges(draw, name, held) if draw(st.booleans()) else _boxes(draw, name, held)
        for piece in cut:
            owner = draw(st.integers(0, len(ranks) - 1))
            ranks[owner].append(piece)
            if len(ranks) > 1 and draw(st.booleans()):
                copy = Piece(name, piece.shape, piece.offset, piece.local, owner=False, flat=piece.flat)
                ranks[(owner + 1) % len(ranks)].append(copy)
    return ranks


def _ranges(draw: st.DrawFn, name: str, held: torch.Tensor) -> Iterator[Piece]:
    for begin, end in draw(cuts(held.numel())):
        yield Piece(name, tuple(held.shape), (), held.reshape(-1)[begin:end], flat=begin)


def _boxes(draw: st.DrawFn, name: str, held: torch.Tensor) -> Iterator[Piece]:
    for box in product(*(draw(cuts(size)) for size in held.shape)):
        local = held[tuple(slice(*cut) for cut in box)]  # not contiguous, as a rule
        yield Piece(name, tuple(held.shape), tuple(begin for begin, _ in box), local)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_one_layout_wrote_another_reads(data: st.DataObject) -> None:
    tensors = data.draw(some_tensors())
    wrote, reads = data.draw(layouts(tensors)), data.draw(layouts(tensors))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(reader, "BLOCK", data.draw(st.sampled_from([1, 24, 1 << 20])))
        patch.setattr(reader, "LONG", data.draw(st.sampled_from([8, 1 << 20])))
        patch.setattr(loading, "BLOCK", data.draw(st.sampled_from([1, 64, 1 << 20])))
        folder = write(Path(place), tensors, wrote)
        blank, pieces = empty(tensors, reads)
        for rank in pieces:
            checkpoint.load(folder, rank)
        for name, held in put(blank, pieces).items():
            assert torch.equal(held, tensors[name])
        with Reader(folder) as opened:
            assert opened.names() == sorted(tensors)
            for name, held in tensors.items():
                box = tuple(data.draw(cuts(size).flatmap(st.sampled_from)) for size in held.shape)
                wanted = held[tuple(slice(*cut) for cut in box)]
                found = opened.read(name, box)
                assert torch.equal(_tensor(found, held.dtype), wanted)


def _tensor(values: Any, kind: torch.dtype) -> torch.Tensor:
    """An array of the reader's as a tensor."""
    if kind is torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def whole(tensors: Tensors) -> list[Piece]:
    """All of them on one rank."""
    return [Piece(name, tuple(held.shape), (0,) * held.ndim, held) for name, held in tensors.items()]


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "a": torch.tensor(7), "c": torch.rand(3, 5)}
    ((name, told),) = Manifest.read(write(tmp_path, tensors, [whole(tensors)])).files.items()
    found = load_file(tmp_path / name)
    assert sorted(found) == ["a@", "b@0,0", "c@0,0"]
    assert all(torch.equal(found[key], tensors[key[0]]) for key in found)
    assert told[0] == (tmp_path / name).stat().st_size


def test_another_type_is_converted(tmp_path: Path) -> None:
    tensors = {"w": torch.rand(5, 7)}
    low = torch.zeros(7, 5, dtype=torch.bfloat16).T
    write(tmp_path, tensors, [whole(tensors)])
    checkpoint.load(tmp_path, [Piece("w", (5, 7), (0, 0), low)])
    assert torch.equal(low, tensors["w"].to(torch.bfloat16))


def test_a_piece_is_filled_before_the_next_is_asked_for(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    write(tmp_path, tensors, [whole(tensors)])
    seen = []

    def pieces() -> Iterator[Piece]:
        for name in tensors:
            passing = torch.zeros(3)
            yield Piece(name, (3,), (0,), passing)
            seen.append(passing.tolist())

    checkpoint.load(tmp_path, pieces())
    assert seen == [[1.0] * 3, [2.0] * 3]


def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path: Path) -> None:
    tensors = {"w": torch.rand(4, 4)}
    write(tmp_path, tensors, [whole(tensors)])
    with pytest.raises(JobError, match=r"has no tensor v$"):
        checkpoint.load(tmp_path, [Piece("v", (4, 4), (0, 0), torch.zeros(4, 4))])
    with pytest.raises(JobError, match=r"has w in shape \[4, 4\], and this run in \[8, 4\]$"):
        checkpoint.load(tmp_path, [Piece("w", (8, 4), (0, 0), torch.zeros(4, 4))])


def test_missing_and_cut_files_are_one_sentence(tmp_path: Path) -> None:
    held = torch.rand(4, 4)
    halves = [[Piece("w", (4, 4), (2 * rank, 0), held[2 * rank : 2 * rank + 2])] for rank in range(2)]
    write(tmp_path, {"w": held}, halves)
    with Reader(tmp_path) as opened:
        (tmp_path / "rank-00001.safetensors").write_bytes((tmp_path / "rank-00001.safetensors").read_bytes()[:-4])
        with pytest.raises(JobError, match=r"a file of .* is cut short"):
            opened.read("w")
    (tmp_path / "rank-00001.safetensors").unlink()
    with Reader(tmp_path) as opened:
        assert np.array_equal(opened.read("w", ((0, 2), (1, 3))), held[:2, 1:3].numpy())
        with pytest.raises(JobError, match=r"has not all of w: 8 of 16 values wanted"):
            opened.read("w")
    with pytest.raises(JobError, match=r"is no complete checkpoint"):
        Reader(tmp_path / "nowhere")


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.ModuleDict({"inner": torch.nn.Linear(3, 5, bias=False), "outer": torch.nn.Linear(3, 5)})
        made["outer"].weight = made["inner"].weight
        return made

    first, second = model(), model()
    write(tmp_path, dict(first.named_parameters()), [whole({n: w.detach() for n, w in first.named_parameters()})])
    checkpoint.load_weights(tmp_path, second)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first.parameters(), second.parameters(), strict=True))
    second["other"] = torch.nn.Linear(2, 2)  # type: ignore[operator]  # a ModuleDict
    with pytest.raises(JobError, match=r"has no tensor other\.weight"):
        checkpoint.load_weights(tmp_path, second)


@pytest.mark.parametrize("columns", [(0, 4096), (17, 33)])
def test_reading_needs_little_memory(tmp_path: Path, columns: tuple[int, int]) -> None:
    tensors = {"w": torch.rand(4096, 4096)}  # 67 MB
    write(tmp_path, tensors, [whole(tensors)])
    begin, end = columns
    with Reader(tmp_path) as opened:
        tracemalloc.start()
        found = opened.read("w", ((0, 4096), (begin, end)))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < found.nbytes + reader.BLOCK + 1_000_000
    assert np.array_equal(found, tensors["w"].numpy()[:, begin:end])


def test_loading_into_another_type_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": torch.rand(2048, 2048)}  # 17 MB
    write(tmp_path, tensors, [whole(tensors)])
    monkeypatch.setattr(loading, "BLOCK", 1 << 20)
    low = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    tracemalloc.start()
    checkpoint.load(tmp_path, [Piece("w", (2048, 2048), (0, 0), low)])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < (3 << 20)
    assert torch.equal(low, tensors["w"].to(torch.bfloat16))
