"""Cleaning and deduplication: every refusal has its name, planted copies are found, strangers are left alone."""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from training.data import join
from training.data.clean import REASONS, Dropped, Limits, code, decoded, judge
from training.data.dedup import shingles, signatures
from training.data.records import Fields, units
from training.data.sources import documents
from training.data.survey import Work, survey

LIMITS = Limits(20, 2000)
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]


def text_of(rng: random.Random, words: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(words)]


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    """Replace `edits` words at distinct places."""
    changed = list(words)
    for place in rng.sample(range(len(words)), edits):
        changed[place] = rng.choice(WORDS)
    return changed


def signature(text: str) -> npt.NDArray[np.uint32]:
    found: npt.NDArray[np.uint32] = signatures([text.encode()])[0]
    return found


def jaccard(one: str, other: str) -> float:
    a, b = (set(shingles([text.encode()])[0].tolist()) for text in (one, other))
    return len(a & b) / len(a | b)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"a line of plain text\r\nand another\rand a third\n", "a line of plain text\nand another\nand a third\n"),
        (b"\xef\xbb\xbfa byte order mark goes away", "a byte order mark goes away"),
        (
            "日本語の文章は空白で単語を区切らない。それでも文章である。".encode(),
            "日本語の文章は空白で単語を区切らない。それでも文章である。",
        ),
        ("latin one: caf\xe9 au lait".encode("latin-1"), Dropped.NOT_UTF8),
        (b"an executable\0 or an image of some kind", Dropped.BINARY),
        (b"bell \x07" * 10, Dropped.BINARY),
        (b"\x1b[1mcolours\x1b[0m of a terminal are fine", "\x1b[1mcolours\x1b[0m of a terminal are fine"),
        (b"nineteen characters", Dropped.TOO_SHORT),
        (b"too long " * 300, Dropped.TOO_LONG),
        (b"1.0, 2.5, 3.75; 4 | 5 | 6\n" * 10, Dropped.MOSTLY_SYMBOLS),
        (b"def f(x): return {'a': [1, 2]}[x] + 1\n", "def f(x): return {'a': [1, 2]}[x] + 1\n"),
        (b"", Dropped.TOO_SHORT),
    ],
)
def test_clean_keeps_text_and_names_what_is_wrong_with_the_rest(raw: bytes, expected: str | Dropped) -> None:
    judged = judge([decoded(raw)], LIMITS)
    assert judged.fates.tolist() == [code(expected) if isinstance(expected, Dropped) else 0]
    assert judged.texts == ([] if isinstance(expected, Dropped) else [expected])
    assert judged.raws == [text.encode() for text in judged.texts]


def outcomes(folder: Path, texts: Sequence[str], threshold: float) -> list[Dropped | None]:
    """Put texts through the steps that decide what stays, as a file of lines; None of what stays."""
    folder.mkdir(exist_ok=True)
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cut = tuple(units(documents(str(path))))
    parts = Path(tempfile.mkdtemp(dir=folder))
    work = Work(cut, Fields(False, "text", "messages", 10**6), Limits(1, 10**6), threshold, 0.001, parts)
    for i in range(len(cut)):
        survey(work, i)
    join.exact(work, None)
    if threshold < 1:
        for i in range(join.bands(threshold)):
            join.band(work, i)
        for i in range(join.pieces(work)):
            join.compare(work, i)
    join.select(work)
    fates = np.concatenate([page["fates"] for page in work.parts.open("selected").pages[1:]])
    return [None if fate < 2 else REASONS[fate - 2] for fate in fates.tolist()]


def test_exact_copies_are_dropped_even_where_near_ones_may_stay(tmp_path: Path) -> None:
    words = text_of(random.Random(1), 300)
    texts = [" ".join(words), " ".join(words[:-1]), " ".join(words)]
    assert outcomes(tmp_path, texts, 1) == [None, None, Dropped.EXACT_DUPLICATE]


def test_planted_near_copies_are_found_and_strangers_are_not(tmp_path: Path) -> None:
    rng = random.Random(2)
    originals = [text_of(rng, rng.randint(60, 900)) for _ in range(300)]
    near = [edited(rng, words, max(1, len(words) // 100)) for words in originals]
    far = [edited(rng, words, len(words) // 8) for words in originals]
    planted = [copy for words, copy in zip(originals, near, strict=True) if similar(words, copy) > 0.88]
    strangers = [copy for words, copy in zip(originals, far, strict=True) if similar(words, copy) < 0.65]
    assert len(planted) > 200
    assert len(strangers) > 250
    found = outcomes(tmp_path, [" ".join(words) for words in originals + planted + strangers], 0.8)
    assert found[:300] == [None] * 300
    assert found[300 : 300 + len(planted)].count(Dropped.NEAR_DUPLICATE) >= 0.98 * len(planted)
    assert found[300 + len(planted) :].count(None) >= 0.99 * len(strangers)


def test_the_passes_of_a_big_input_find_what_one_pass_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    originals = [text_of(rng, 80) for _ in range(60)]
    texts = [" ".join(words) for words in originals + [edited(rng, words, 1) for words in originals] + originals[:20]]
    whole = outcomes(tmp_path, texts, 0.8)
    assert whole.count(Dropped.NEAR_DUPLICATE) > 50
    assert whole.count(Dropped.EXACT_DUPLICATE) == 20
    monkeypatch.setattr(join, "PASS", 40)
    monkeypatch.setattr(join, "DOCUMENTS_PER_PIECE", 30)
    monkeypatch.setattr(join, "PAIRS_AT_ONCE", 20)
    monkeypatch.setattr("training.data.survey.PAGE_BYTES", 5000)
    monkeypatch.setattr("training.data.records.UNIT_BYTES", 20_000)
    monkeypatch.setattr("training.data.files.BLOCK", 777)
    assert outcomes(tmp_path, texts, 0.8) == whole


def test_a_copy_of_a_dropped_copy_may_stay(tmp_path: Path) -> None:
    """What counts is how much is like a document that is there, not a chain of likenesses."""
    rng = random.Random(7)
    first = text_of(rng, 400)
    second = edited(rng, first, 6)
    third = edited(rng, second, 60)
    texts = [" ".join(words) for words in (first, second, first, third)]
    assert outcomes(tmp_path, texts, 0.8) == [None, Dropped.NEAR_DUPLICATE, Dropped.EXACT_DUPLICATE, None]


def similar(one: list[str], other: list[str]) -> float:
    return jaccard(" ".join(one), " ".join(other))


def test_signatures_estimate_the_true_similarity_without_bias() -> None:
    rng = random.Random(3)
    errors = []
    for edits in (5, 10, 20, 40, 80) * 20:
        words = text_of(rng, 400)
        one, other = " ".join(words), " ".join(edited(rng, words, edits))
        errors.append(float((signature(one) == signature(other)).mean()) - jaccard(one, other))
    assert abs(np.mean(errors)) < 0.012  # a standard error of the mean is 0.004
    assert np.std(errors) < 0.05


def test_languages_without_spaces_are_compared_by_their_characters(tmp_path: Path) -> None:
    rng = random.Random(4)
    signs = [chr(code) for code in range(0x4E00, 0x5E00)]
    words = [rng.choice(signs) for _ in range(500)]
    mixed = rng.sample(words, len(words))
    texts = ["".join(words), "".join([*words[:250], rng.choice(signs), *words[250:]]), "".join(mixed)]
    assert outcomes(tmp_path, texts, 0.8) == [None, Dropped.NEAR_DUPLICATE, None]


def test_white_space_does_not_hide_a_copy(tmp_path: Path) -> None:
    words = text_of(random.Random(5), 200)
    assert outcomes(tmp_path, [" ".join(words), "\n    ".join(words), "another"], 0.99)[1] is Dropped.NEAR_DUPLICATE


def test_texts_signed_together_have_the_signatures_they_have_alone() -> None:
    rng = random.Random(8)
    texts = [" ".join(text_of(rng, rng.choice([0, 1, 3, 5, 50, 900]))) for _ in range(200)]
    raws = [text.encode() for text in texts]
    alone = np.concatenate([signatures([raw]) for raw in raws])
    assert (signatures(raws) == alone).all()


@pytest.mark.parametrize("text", ["", "-- --", "one", "one two three"])
def test_texts_shorter_than_a_shingle_have_a_signature_too(text: str) -> None:
    assert signature(text).shape == (128,)
    assert len(shingles([text.encode()])[0]) == (1 if text.strip("- ") else 0)


def test_signatures_are_the_same_for_every_machine_and_version() -> None:
    assert signature("the quick brown fox jumps over the lazy dog")[:4].tolist() == FIRST_MINIMA


FIRST_MINIMA = [790068962, 469429167, 169819921, 7374745]
