"""The dataset on disk: shards cut anywhere alike, files whole or absent, damage told by name."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.format import (
    TARGET,
    Layout,
    PartWriter,
    ShardWriter,
    file_sha256,
    held_out_tokens,
    ids_of,
    layout_of,
    open_counts,
    part_facts,
    read_facts,
    shards_of,
    verify,
    write_facts,
)
from training.data.sources import SourceError

MARKED = Layout(length=8, stride=8, dtype="uint16", marks=True)


def written(folder: Path, rows: int, sizes: list[int]) -> list[tuple[str, bytes]]:
    """Write a stream in pieces of these sizes; return the files."""
    total = sum(sizes)
    ids, marks = np.arange(total), (np.arange(total) % 3 > 0).astype(np.uint8)
    with PartWriter(folder, "train", MARKED, rows) as out:
        place = 0
        for size in sizes:
            out.write(ids[place : place + size], marks[place : place + size])
            place += size
        out.close()
    return [(path.name, path.read_bytes()) for path in sorted((folder / "train").iterdir())]


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(0, 100), max_size=6), rows=st.integers(1, 5))
def test_how_a_stream_comes_in_pieces_changes_no_byte(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], rows: int
) -> None:
    edges = sorted({0, 100, *cuts})
    pieces = written(tmp_path_factory.mktemp("pieces"), rows, list(np.diff(edges)))
    assert pieces == written(tmp_path_factory.mktemp("whole"), rows, [100])
    bins = [np.frombuffer(raw, "<u2") for name, raw in pieces if name.endswith(".bin")]
    assert all(one[-1] == after[0] for one, after in pairwise(bins))
    assert np.concatenate([bins[0], *(one[1:] for one in bins[1:])]).tolist() == list(range(100))


def dataset(folder: Path) -> Path:
    """Write a marked dataset of two full shards, the rest of its stream, one of held-out documents."""
    with PartWriter(folder, "train", MARKED, rows=2) as out:
        out.write(np.arange(35), np.full(35, TARGET, np.uint8))
        train = part_facts(out.close(), 35, documents=3, size=70)
    with PartWriter(folder, "held_out", MARKED, rows=2) as out:
        out.write(np.arange(5), np.full(5, TARGET, np.uint8))
        held_out = part_facts(out.close(), 5, documents=1, size=9)
    (folder / "tokenizer.json").write_text("{}")
    facts = {"dtype": "uint16", "sequence_length": 8, "stride": 8, "vocab_size": 99, "eos_id": 0, "marks": True}
    facts |= {"documents_apart": False, "tokenizer_sha256": file_sha256(folder / "tokenizer.json")}
    write_facts(folder, facts | {"train": train, "held_out": held_out})
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    facts = verify(dataset(tmp_path))
    assert (facts["train"]["sequences"], facts["train"]["targets"]) == (4, 32)
    assert np.concatenate(list(ids_of(tmp_path, facts, "train"))).tolist() == list(range(35))
    assert held_out_tokens(tmp_path, facts).tolist() == [0, 1, 2, 3, 4]  # fewer than a row, and not lost
    shards = shards_of(tmp_path, facts, "train")
    assert [shard.name for shard in shards] == ["train/00000.bin", "train/00001.bin", "train/00002.bin"]
    assert [open_counts(tmp_path, shard).tolist() for shard in shards] == [[8, 8], [8, 8], []]
    assert layout_of(facts | {"stride": 9}, "held_out").stride == 8


def test_a_shard_that_was_not_closed_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", 3, MARKED) as out:
        out.write(np.arange(9), np.ones(9, np.uint8))
        assert len(list((tmp_path / "train").iterdir())) == 2
    assert list((tmp_path / "train").iterdir()) == []


def test_marks_are_asked_for_where_the_layout_has_them(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", 0, MARKED) as out, pytest.raises(ValueError, match="9 ids need as many marks"):
        out.write(np.arange(9))
    plain = Layout(8, 8, "uint16", marks=False)
    with ShardWriter(tmp_path, "train", 0, plain) as out, pytest.raises(ValueError, match="9 ids need no marks"):
        out.write(np.arange(9), np.ones(9, np.uint8))


@pytest.mark.parametrize("name", ["train/00001.bin", "train/00000.marks", "train/00001.counts"])
def test_a_truncated_or_absent_file_is_named(tmp_path: Path, name: str) -> None:
    facts = read_facts(dataset(tmp_path))
    path = tmp_path / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(
        SourceError, match=rf"{name} is truncated: it has {len(raw) - 1} bytes, .* run preprocess again"
    ):
        shards_of(tmp_path, facts, "train")
    path.unlink()
    with pytest.raises(SourceError, match=rf"{name} cannot be read \(No such file"):
        shards_of(tmp_path, facts, "train")


@pytest.mark.parametrize("name", ["train/00001.bin", "held_out/00000.marks", "tokenizer.json"])
def test_a_changed_byte_is_found_by_verifying(tmp_path: Path, name: str) -> None:
    path = dataset(tmp_path) / name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    shards_of(tmp_path, read_facts(tmp_path), "train")
    with pytest.raises(SourceError, match=name):
        verify(tmp_path)


def test_facts_that_do_not_fit_are_told_in_one_sentence(tmp_path: Path) -> None:
    path = dataset(tmp_path) / "dataset.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"format": 1}))
    with pytest.raises(SourceError, match="is not of format 2, which this version reads; run preprocess again"):
        read_facts(tmp_path)
    path.write_text(json.dumps(facts | {"stride": None}))
    with pytest.raises(SourceError, match="has no stride, or not one of type int"):
        read_facts(tmp_path)
    facts["train"]["shards"][1]["sequences"] = 3
    with pytest.raises(SourceError, match=r"train/00001\.bin cannot have 3 rows"):
        shards_of(tmp_path, facts, "train")
    with pytest.raises(SourceError, match="does not tell the shards of train"):
        shards_of(tmp_path, facts | {"train": {"shards": [{"name": "x"}]}}, "train")
