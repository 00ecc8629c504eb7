"""The loader: a permutation per epoch, the same batches for every world size, exact at any step, honest errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.format import BEGINS, TARGET, Layout, Marks, PartWriter, part_facts, write_facts
from training.data.loader import TokenBatches, shuffled
from training.data.sources import SourceError


def dataset(
    folder: Path, sequences: int, length: int, kind: str = "uint16", marks: Marks | None = None, **facts: Any
) -> Path:
    """Write a dataset whose tokens count up, so that a row tells where it came from, in shards of 7 rows."""
    layout = Layout(length, facts.get("stride", length), kind, marks is not None)
    ids = np.arange(sequences * layout.stride + layout.shared)
    with PartWriter(folder, "train", layout, rows=7) as out:
        out.write(ids, marks)
        train = part_facts(out.close(), len(ids), documents=1, size=1)
    told = {"dtype": kind, "sequence_length": length, "stride": layout.stride, "vocab_size": 70_000, "eos_id": 0}
    told |= {"documents_apart": False, "marks": layout.marks, "train": train, "held_out": part_facts([], 0, 0, 0)}
    write_facts(folder, told | facts)
    return folder


@settings(deadline=None)
@given(size=st.integers(1, 3000), epoch=st.integers(0, 10**6), seed=st.integers(0, 2**63))
def test_every_epoch_is_a_permutation(size: int, epoch: int, seed: int) -> None:
    places = shuffled(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    assert np.array_equal(np.sort(places), np.arange(size))


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2**21, 2**40), start=st.integers(0, 2**20), seed=st.integers(0, 2**63))
def test_places_of_a_huge_dataset_differ_and_need_no_memory(size: int, start: int, seed: int) -> None:
    places = shuffled(np.arange(start, min(size, start + 2000)), size, seed)
    assert len(np.unique(places)) == len(places)
    assert places.min() >= 0
    assert places.max() < size


def test_the_order_never_changes_with_a_library() -> None:
    assert shuffled(np.arange(12), 12, 1).tolist() == ORDER
    assert shuffled(np.arange(24), 12, 1).tolist()[12:] != ORDER


def test_the_order_looks_random() -> None:
    size, epochs = 10_007, 20
    order = np.stack([shuffled(np.arange(e * size, (e + 1) * size), size, 7) for e in range(epochs)])
    table, _, _ = np.histogram2d(order[:, :-1].ravel(), order[:, 1:].ravel(), bins=15)
    excess = ((table - table.mean()) ** 2 / table.mean()).sum()
    assert excess < 300  # chi-square of 224 degrees of freedom: above this once in 2000 true shuffles
    assert abs(np.abs(np.diff(order, axis=1)).mean() / (size / 3) - 1) < 0.01


@settings(deadline=None, max_examples=40)
@given(
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 10**7),
    sequences=st.integers(12, 200),
    seed=st.integers(0, 99),
)
def test_the_ranks_together_read_the_same_batch_for_every_world_size(
    tmp_path_factory: pytest.TempPathFactory, world: int, step: int, sequences: int, seed: int
) -> None:
    folder = dataset(tmp_path_factory.mktemp("set"), sequences, 4)
    alone = TokenBatches(folder, 12, seed).batch(step).tokens
    shares = [TokenBatches(folder, 12, seed).batch(step, rank, world).tokens for rank in range(world)]
    together = np.empty_like(alone)
    for rank, share in enumerate(shares):
        together[rank::world] = share
    assert np.array_equal(together, alone)


def test_steps_in_any_order_give_the_same_batches_and_each_epoch_reads_everything_once(tmp_path: Path) -> None:
    batches = TokenBatches(dataset(tmp_path, 100, 8), 10, seed=3)
    assert batches.sequences == 100
    onward = [batches.batch(step).tokens for step in range(1000)]
    back = [TokenBatches(tmp_path, 10, seed=3).batch(step).tokens for step in reversed(range(1000))]
    assert all(np.array_equal(a, b) for a, b in zip(onward, reversed(back), strict=True))
    for epoch in range(100):
        first = np.concatenate([rows[:, 0] for rows in onward[epoch * 10 : epoch * 10 + 10]])
        assert np.array_equal(np.sort(first), np.arange(100) * 8)


def test_rows_are_inputs_and_targets_shifted_by_one(tmp_path: Path) -> None:
    rows = TokenBatches(dataset(tmp_path, 50, 16, kind="uint32"), 5, seed=1).batch(0).tokens
    assert rows.shape == (5, 17)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, rows[:, :1] + np.arange(17))
    assert set(rows[:, 0] % 16) == {0}


def test_seeds_differ(tmp_path: Path) -> None:
    dataset(tmp_path, 64, 4)
    assert not np.array_equal(TokenBatches(tmp_path, 32, 1).places(0), TokenBatches(tmp_path, 32, 2).places(0))


def test_without_marks_every_target_counts_and_documents_are_told_by_their_end(tmp_path: Path) -> None:
    batches = TokenBatches(dataset(tmp_path, 16, 8, eos_id=20, documents_apart=True), 16, 1)
    batch = batches.batch(0, 1, 2)
    assert batch.mask is None
    assert batch.targets == 16 * 8  # of both ranks
    assert batch.documents is not None
    whole = TokenBatches(tmp_path, 16, 1).batch(0)
    row = int(np.flatnonzero((whole.tokens[:, :-1] == 20).any(axis=1))[0])
    assert whole.documents is not None
    assert whole.documents[row].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]  # 16..23: the 20 is the last of its own
    assert TokenBatches(dataset(tmp_path / "together", 8, 8), 4, 1).batch(0).documents is None


@pytest.mark.parametrize("stride", [8, 9])
def test_marks_say_what_is_learned_and_where_documents_begin(tmp_path: Path, stride: int) -> None:
    random = np.random.default_rng(stride)
    marks = random.integers(0, 4, 30 * stride + 9 - stride).astype(np.uint8)
    dataset(tmp_path, 30, 8, marks=marks, stride=stride, documents_apart=True)
    batches = TokenBatches(tmp_path, 10, seed=5)
    for step in range(6):
        shares = [batches.batch(step, rank, 2) for rank in range(2)]
        for share in shares:
            assert share.mask is not None
            assert share.documents is not None
            mine = marks[share.tokens]  # the tokens count up: each is its own place
            assert np.array_equal(share.mask, (mine[:, 1:] & TARGET) > 0)
            assert np.array_equal(share.documents, np.cumsum((mine[:, :-1] & BEGINS) > 0, axis=1))
            assert share.targets == sum(int(one.mask.sum()) for one in shares if one.mask is not None)


def test_the_held_out_part_is_read_likewise(tmp_path: Path) -> None:
    folder = dataset(tmp_path, 16, 8, stride=9, marks=np.ones(16 * 9, np.uint8))
    facts = TokenBatches(folder, 2, 1).facts
    with PartWriter(folder, "held_out", Layout(8, 8, "uint16", marks=True), rows=3) as out:
        out.write(np.arange(41), np.ones(41, np.uint8))
        write_facts(folder, facts | {"held_out": part_facts(out.close(), 41, 1, 1)})
    batches = TokenBatches(folder, 5, 1, part="held_out")
    assert batches.sequences == 5
    assert np.array_equal(np.sort(batches.batch(0).tokens[:, 0]), np.arange(0, 40, 8))


def test_what_cannot_be_loaded_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no dataset .* run preprocess first"):
        TokenBatches(tmp_path, 4, 1)
    folder = dataset(tmp_path / "small", 3, 8)
    with pytest.raises(SourceError, match="has 3 sequences of 8 tokens, fewer than one batch of 4; lower"):
        TokenBatches(folder, 4, 1)
    with pytest.raises(ValueError, match=r"global_batch_size \(3\) must be a multiple of 2 ranks"):
        TokenBatches(dataset(tmp_path / "good", 3, 8), 3, 1).batch(0, 0, 2)


ORDER = [8, 9, 1, 11, 7, 4, 5, 0, 3, 2, 10, 6]
