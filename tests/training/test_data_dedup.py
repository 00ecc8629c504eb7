"""Cleaning and deduplication: every refusal has its name, planted copies are found, strangers are left alone."""

import random

import numpy as np
import pytest

from training.data.clean import Dropped, Limits, clean
from training.data.dedup import Seen, shingles, signature

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


def jaccard(one: str, other: str) -> float:
    a, b = (set(shingles(text).tolist()) for text in (one, other))
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
    assert clean(raw, LIMITS) == expected


def test_exact_copies_are_dropped_even_where_near_ones_may_stay() -> None:
    seen = Seen(threshold=1)
    words = text_of(random.Random(1), 300)
    assert seen.refuse(" ".join(words)) is None
    assert seen.refuse(" ".join(words[:-1])) is None
    assert seen.refuse(" ".join(words)) is Dropped.EXACT_DUPLICATE


def test_planted_near_copies_are_found_and_strangers_are_not() -> None:
    rng = random.Random(2)
    originals = [text_of(rng, rng.randint(60, 900)) for _ in range(300)]
    near = [edited(rng, words, max(1, len(words) // 100)) for words in originals]
    far = [edited(rng, words, len(words) // 8) for words in originals]
    seen = Seen(threshold=0.8)
    assert [seen.refuse(" ".join(words)) for words in originals] == [None] * 300
    planted = [(words, copy) for words, copy in zip(originals, near, strict=True) if similar(words, copy) > 0.88]
    found = [seen.refuse(" ".join(copy)) for _, copy in planted]
    assert len(planted) > 200
    assert found.count(Dropped.NEAR_DUPLICATE) >= 0.98 * len(planted)
    strangers = [copy for words, copy in zip(originals, far, strict=True) if similar(words, copy) < 0.65]
    assert len(strangers) > 250
    assert [seen.refuse(" ".join(copy)) for copy in strangers].count(None) >= 0.99 * len(strangers)


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


def test_languages_without_spaces_are_compared_by_their_characters() -> None:
    rng = random.Random(4)
    signs = [chr(code) for code in range(0x4E00, 0x5E00)]
    words = [rng.choice(signs) for _ in range(500)]
    seen = Seen(threshold=0.8)
    assert seen.refuse("".join(words)) is None
    assert seen.refuse("".join([*words[:250], rng.choice(signs), *words[250:]])) is Dropped.NEAR_DUPLICATE
    rng.shuffle(words)
    assert seen.refuse("".join(words)) is None


def test_white_space_does_not_hide_a_copy() -> None:
    words = text_of(random.Random(5), 200)
    seen = Seen(threshold=0.99)
    assert seen.refuse(" ".join(words)) is None
    assert seen.refuse("\n    ".join(words)) is Dropped.NEAR_DUPLICATE


@pytest.mark.parametrize("text", ["", "-- --", "one", "one two three"])
def test_texts_shorter_than_a_shingle_have_a_signature_too(text: str) -> None:
    assert signature(text).shape == (128,)
    assert len(shingles(text)) == (1 if text.strip("- ") else 0)


def test_signatures_are_the_same_for_every_machine_and_version() -> None:
    assert signature("the quick brown fox jumps over the lazy dog")[:4].tolist() == FIRST_MINIMA


FIRST_MINIMA = [919421772, 474326758, 689111614, 64019162]
