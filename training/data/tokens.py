"""Text to token ids: train a byte-level BPE on the corpus itself, or use one that exists."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data.sources import SourceError

END_OF_TEXT: Final = "<|endoftext|>"
"""Follows every document; a tokenizer trained here has it as id 0."""
KNOWN_ENDS: Final = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
"""What the tokenizers of open models call it."""

PIECES: Final = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with the space, quote or underscore before it
    r"|\p{N}{1,3}"  # digits by threes, so that numbers stay countable
    r"| ?[^\s\p{L}\p{N}]+"  # operators and brackets
    r"|[\r\n]+[ \t]*"  # line ends with the next line's indentation: code is full of them
    r"|\s+(?!\S)|\s+"
)
"""No token reaches over the border of a piece. Against GPT-2's rule it saves 5 % of the tokens of Python code."""
LONGEST: Final = 32
"""Bytes a learned token may have: none is spent on one file's ruler of dashes."""
BATCH: Final = 512
"""Documents encoded at once: enough to keep every core busy, few enough to bound memory."""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of at most `vocab_size` tokens; the same texts give the same tokenizer on any machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer.json. Raises SourceError when it is absent, unreadable or has more tokens than the model."""
    if not path.is_file():
        raise SourceError(f"data.tokenizer: there is no file {path}; name a tokenizer.json, or write 'train'")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises nothing narrower
        raise SourceError(f"data.tokenizer: {path} is not a tokenizer.json of the tokenizers library") from problem
    needed = size(tokenizer)
    if needed > vocab_size:
        raise SourceError(
            f"data.tokenizer: {path} has {needed} tokens, more than model.vocab_size ({vocab_size}); "
            f"set model.vocab_size to {-(-needed // 64) * 64}"
        )
    return tokenizer


def size(tokenizer: Tokenizer) -> int:
    """Return the highest token id plus one: how many rows an embedding needs."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1


def end_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a document. Raises SourceError when the tokenizer has none that we know."""
    known = (tokenizer.token_to_id(name) for name in KNOWN_ENDS)
    found = next((int(one) for one in known if one is not None), None)
    if found is None:
        raise SourceError(
            f"data.tokenizer: it has no token that ends a text ({', '.join(KNOWN_ENDS)}); add one of them"
        )
    return found


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[npt.NDArray[np.unsignedinteger[Any]]]:
    """Yield each text's ids and the end token, in order. A special token spelt out in a text is text like any other."""
    kind, end = kind_of(size(tokenizer)), end_id(tokenizer)
    tokenizer.encode_special_tokens = True
    source = iter(texts)
    while batch := list(islice(source, BATCH)):
        for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([*encoded.ids, end], kind)


def kind_of(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def spread(items: Sequence[Any], sizes: Sequence[int], budget: int) -> Sequence[Any]:
    """Return items taken evenly over the list so that their sizes add up to about `budget`; all where they fit."""
    total = sum(sizes)
    if total <= budget:
        return items
    count = max(1, len(items) * budget // total)
    return [items[i * len(items) // count] for i in range(count)]
