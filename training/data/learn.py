"""The tokenizer of a dataset: one that exists, or one learned from its training documents; and how fast it may be."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training.data import tokens
from training.data.clean import TRAIN, Dropped
from training.data.records import batches
from training.data.survey import Work, texts
from training.job import progress, say

TOKENIZER_BYTES: Final = 10_000_000
"""The tokenizer learns from about this much, taken evenly over the training documents: on the standard library three
times as much makes the text 0.9 % shorter and takes two and a half times as long."""
UNITS: Final = 64
"""Of which these many units are read, taken evenly."""
SAMPLE_UNITS: Final = 16
SAMPLE_CHARS: Final = 32_000
"""Text of the corpus on which the faster tokenizer must agree: from so many units so much of their beginning."""


def take(work: Work, path: Path, vocab_size: int) -> None:
    """Write the part "tokenizer" from one that exists. Raises SourceError when it cannot be used."""
    tokenizer = tokens.load(path, vocab_size)
    file = tokens.found_at(path)
    beside = {name: (file.parent / name).read_bytes() for name in tokens.BESIDE if (file.parent / name).is_file()}
    _write(work, tokenizer, {"tokenizer.json": file.read_bytes()} | beside)


def learn(work: Work, vocab_size: int, template: str) -> None:
    """Write the part "tokenizer" from the training documents; it has the special tokens of a known chat template."""
    from training.data.chat import TEMPLATES

    special = TEMPLATES[template].special if template in TEMPLATES else ()
    tokenizer = tokens.train(_sample(work), vocab_size, special)
    _write(work, tokenizer, {"tokenizer.json": tokenizer.to_str().encode()})


def _write(work: Work, tokenizer: Tokenizer, files: Mapping[str, bytes]) -> None:
    needed = tokens.size(tokenizer)
    frame = tokens.frame_of(tokenizer, needed)
    path = work.tokenizer
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(files["tokenizer.json"])
    sample = [] if work.fields.chat else list(_beginnings(work))
    fast = "" if work.fields.chat else tokens.agrees(path, tokenizer, sample)
    library = f"tokenizers {version('tokenizers')}"
    size = sum(len(text.encode()) for text in sample)
    told = {"library": fast or library, "reference": library, "texts": len(sample), "bytes": size}
    say("tokenizer", agrees=bool(fast), **told)
    with work.parts.write("tokenizer") as out:
        out.add({name: np.frombuffer(content, np.uint8) for name, content in files.items()})
        out.facts = {
            "fast": bool(fast),
            "library": told,
            "vocab_size": needed,
            "bos_id": frame.bos,
            "eos_id": frame.eos,
            "pad_id": tokens.pad_id(tokenizer),
            "dtype": frame.dtype,
        }


def _beginnings(work: Work) -> Iterator[str]:
    """Yield some text of units taken evenly over the corpus."""
    for unit in _evenly(range(len(work.units)), SAMPLE_UNITS):
        chars = 0
        for text in next(batches(work.units[unit], work.fields)).texts:
            if chars < SAMPLE_CHARS and not isinstance(text, Dropped):
                found = text[: SAMPLE_CHARS - chars].encode(errors="ignore").decode()
                chars += len(found)
                yield found


def _sample(work: Work) -> Iterator[str]:
    """Yield training documents, taken evenly over (some units of) the input, about TOKENIZER_BYTES of them."""
    selected = work.parts.open("selected")
    having = [i for i in range(len(work.units)) if (selected.pages[1 + i]["fates"] == TRAIN).any()]
    chosen = _evenly(having, UNITS)
    masks = [np.array(selected.pages[1 + i]["fates"] == TRAIN) for i in chosen]
    sizes = sum(_bytes(work, i, mask) for i, mask in zip(chosen, masks, strict=True))
    flat = np.concatenate(masks)
    documents = np.flatnonzero(flat)
    if sizes > TOKENIZER_BYTES:
        count = max(1, len(documents) * TOKENIZER_BYTES // sizes)
        flat[:] = False
        flat[documents[np.arange(count) * len(documents) // count]] = True
    done, total = 0, int(flat.sum())
    ends = np.cumsum([len(mask) for mask in masks])
    for unit, wanted in zip(chosen, np.split(flat, ends[:-1]), strict=True):
        if wanted.any():
            for _, text, _ in texts(work, unit, wanted):
                yield text
            done += int(wanted.sum())
            progress(done, total, "document learned from")


def _bytes(work: Work, unit: int, mask: npt.NDArray[np.bool_]) -> int:
    sizes = np.concatenate([page["sizes"] for page in work.looked_at(unit).pages])
    return int(sizes[mask].sum(dtype=np.int64))


def _evenly(items: Sequence[Any], most: int) -> Sequence[Any]:
    return [items[i * len(items) // most] for i in range(most)] if len(items) > most else items
