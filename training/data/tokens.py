"""Text to token ids: train a byte-level BPE on the corpus itself, or use one that exists; as fast as it stays right.

The ids are those of the library `tokenizers`. `fastokens` gives the same ones some thirty times as fast, which is not
taken on trust: it is used only when it agrees on texts of the very corpus, otherwise the reference encodes.
"""

import functools
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data.sources import SourceError

Ids = npt.NDArray[np.unsignedinteger[Any]]
Lengths = npt.NDArray[np.int64]

END_OF_TEXT: Final = "<|endoftext|>"
"""Follows every document; a tokenizer trained here has it as id 0."""
KNOWN_ENDS: Final = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")
"""What the tokenizers of open models call it."""
KNOWN_PADS: Final = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]")
"""What they fill up with; others, and a tokenizer trained here, fill up with the token that ends a text."""
BESIDE: Final = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""What belongs to a tokenizer besides tokenizer.json, where it lies beside it."""

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
ODD: Final = ("", " ", "\n\n \t\n", "  naïve 日本語\u0000 \U0001f468\u200d\U0001f469 e\u0301 \u00ad'S 12345678 \u2028x")
"""Texts at the edges, which every check has besides those of the corpus."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around every document, and the type that holds every id."""

    bos: int | None
    eos: int
    dtype: str


class Encoder:
    """A tokenizer that turns texts into ids, by one library or the other."""

    def __init__(self, path: Path, frame: Frame, *, fast: bool, tokenizer: Tokenizer | None = None) -> None:
        self._frame = frame
        self._fast: Any = None
        if fast:
            self._fast = _fast(path)
        else:
            self._reference = _plain(tokenizer or Tokenizer.from_file(str(path)))

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Return the documents' ids, one dimension, each with what stands around it, and how many each has.

        A special token spelt out in a text is text like any other.
        """
        if self._fast is None:
            encoded = self._reference.encode_batch_fast(list(texts), add_special_tokens=False)
            found = [np.array(one.ids, np.uint32) for one in encoded]
            counts = np.array([len(ids) for ids in found], np.int64)
            flat = np.concatenate([np.empty(0, np.uint32), *found])
            return _framed(flat, counts, self._frame)
        raw, ends = self._fast.encode_batch_flat(list(texts), split_special_tokens=True)
        lengths = np.subtract(*(np.frombuffer(ends, "<i8")[i:][: len(texts)] for i in (1, 0)))
        return _framed(np.frombuffer(raw, "<u4"), lengths, self._frame)


def agrees(path: Path, tokenizer: Tokenizer, sample: Sequence[str]) -> str:
    """Return the name of the faster library if it gives the reference's ids on these texts and some odd ones, or "".

    `path` is where that tokenizer lies.
    """
    try:
        _fastokens()
    except ImportError:
        return ""
    frame = Frame(None, 0, "<u4")
    reference = Encoder(path, frame, fast=False, tokenizer=tokenizer)
    spelt = [one.content for one in tokenizer.get_added_tokens_decoder().values()][:64]
    texts = [*sample, *ODD, *(f"a{token} {token}\n" for token in spelt)]
    try:
        found = Encoder(path, frame, fast=True).encode(texts)
    except Exception:  # noqa: BLE001  # it refuses tokenizers it does not know by whatever its parser raises
        return ""
    right = all(np.array_equal(one, other) for one, other in zip(found, reference.encode(texts), strict=True))
    return f"fastokens {version('fastokens')}" if right else ""


def train(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
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
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def found_at(path: Path) -> Path:
    """Return the tokenizer.json that a path names: itself, or the one in a folder. Raises SourceError."""
    inside = path / "tokenizer.json" if path.is_dir() else path
    if not inside.is_file():
        raise SourceError(f"data.tokenizer: there is no file {inside}; name a tokenizer.json, or write 'train'")
    return inside


def load(path: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer.json. Raises SourceError when it is absent, unreadable or has more tokens than the model."""
    try:
        tokenizer = Tokenizer.from_file(str(found_at(path)))
    except SourceError:
        raise
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
    found = _first_known(tokenizer, KNOWN_ENDS)
    if found is None:
        raise SourceError(
            f"data.tokenizer: it has no token that ends a text ({', '.join(KNOWN_ENDS)}); add one of them"
        )
    return found


def begin_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that the tokenizer itself puts before a text (Llama's, Gemma's), None where it puts none."""
    around = tokenizer.encode("").ids
    return int(around[0]) if around and around[0] != end_id(tokenizer) else None


def pad_id(tokenizer: Tokenizer) -> int:
    """Return the id that fills rows up."""
    found = _first_known(tokenizer, KNOWN_PADS)
    return end_id(tokenizer) if found is None else found


def frame_of(tokenizer: Tokenizer, needed: int) -> Frame:
    """Return what stands around a document of this tokenizer, which has `needed` ids."""
    return Frame(begin_id(tokenizer), end_id(tokenizer), kind_of(needed).str)


def kind_of(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@functools.lru_cache(maxsize=1)
def _fast(path: Path) -> Any:
    """Read a tokenizer.json with the faster library, once: that takes a second for 128,000 tokens."""
    tokenizer = _fastokens().Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _fastokens() -> Any:
    """Return the faster library. Raises ImportError where it is not installed."""
    return importlib.import_module("fastokens")


def _first_known(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    known = (tokenizer.token_to_id(name) for name in names)
    return next((int(one) for one in known if one is not None), None)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Have a tokenizer encode whole texts as text, whatever its file says of cutting and filling up."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _framed(flat: Ids, lengths: Lengths, frame: Frame) -> tuple[Ids, Lengths]:
    """Put the beginning and the end around each document."""
    extra = 1 if frame.bos is None else 2
    whole = lengths + extra
    ends = np.cumsum(whole)
    out = np.empty(len(flat) + extra * len(lengths), np.dtype(frame.dtype))
    inside = np.ones(len(out), np.bool_)
    out[ends - 1] = frame.eos
    inside[ends - 1] = False
    if frame.bos is not None:
        out[ends - whole] = frame.bos
        inside[ends - whole] = False
    out[inside] = flat
    return out, whole
