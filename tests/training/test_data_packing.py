"""Packing: best-fit decreasing as one document at a time would place them, nothing lost, nothing learned wrongly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.data.format import BEGINS, TARGET
from training.data.packing import best_fit, filled, stream_marks

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing as its definition says; return the room left in each row."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(lengths=LENGTHS, capacity=st.integers(60, 150))
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    rows = best_fit(np.array(lengths), capacity)
    used = np.add.reduceat(rows.length, rows.first[:-1])
    assert sorted((capacity - used).tolist()) == one_by_one(lengths, capacity)
    assert sorted(rows.document.tolist()) == list(range(len(lengths)))


@given(lengths=LENGTHS, capacity=st.integers(2, 30), masked=st.booleans())
def test_every_id_that_can_be_learned_is_learned_once(lengths: list[int], capacity: int, masked: bool) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(offsets[-1], dtype=np.uint16)
    marks = np.random.default_rng(0).integers(0, 2, len(ids)).astype(np.uint8) if masked else None
    rows = best_fit(np.array(lengths), capacity)
    halves = [rows.between(0, len(rows) // 2), rows.between(len(rows) // 2, len(rows))]
    parts = [filled(half, ids, offsets, marks, pad_id=60_000) for half in halves]
    table, found = (np.concatenate([part[i] for part in parts]) for i in range(2))
    assert table.shape == (len(rows), capacity)
    assert not (found[table == 60_000] & TARGET).any()
    learned = np.sort(table[(found & TARGET) > 0])
    wanted = ids if marks is None else ids[marks > 0]
    assert learned.tolist() == wanted.tolist()
    for row, row_marks in zip(table.astype(int), found, strict=True):
        goes_on = np.diff(row) == 1  # ids count up, so one that follows another is of the same stretch
        same = np.isin(row[1:], offsets[1:-1])
        begins = (row_marks[1:] & BEGINS) > 0
        assert (begins[goes_on & ~same] == 0).all()
        assert begins[goes_on & same].all()


def test_a_long_document_is_cut_where_a_row_ends_and_its_border_is_read_again() -> None:
    rows = best_fit(np.array([10, 3]), capacity=4)
    ids = np.array([*range(10), *range(20, 23)], np.uint16)
    table, marks = filled(rows, ids, np.array([0, 10, 13]), None, pad_id=99)
    assert table.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [20, 21, 22, 99]]
    assert marks.tolist() == [[3, 1, 1, 1], [2, 1, 1, 1], [2, 1, 1, 1], [3, 1, 1, 2]]


def test_a_stream_is_marked_where_documents_begin() -> None:
    trained = np.array([False, True, False, False, True])
    assert stream_marks(np.array([2, 3]), trained).tolist() == [2, 1, 2, 0, 1]
    assert stream_marks(np.array([2, 3]), None).tolist() == [3, 1, 3, 1, 1]
