"""What others make of the same text: compressors that know no language, and another model."""

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from training.data.format import ids_of
from training.process import JobError
from training.score.likelihood import summed
from training.score.text import HeldOut

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

READ_AT_ONCE: Final = 2**24
"""Training tokens counted at a time."""
SCALED: Final = ("logit_scale", "logits_scaling")
"""Settings of families whose logits are not the product with the output embedding alone."""


def gzip_bits(text: bytes) -> int:
    """Return how many bits gzip -9 needs for all documents in one file, where it may use one to shorten the next."""
    return 8 * len(gzip.compress(text, 9, mtime=0))


def unigram_bits(dataset: Path, facts: dict[str, Any], held_out: HeldOut) -> float:
    """Return the bits of an ideal entropy coder that knows how often each token occurs in training (plus one)."""
    counts = np.ones(facts["vocab_size"])
    for shard in ids_of(dataset, facts, "train"):
        for start in range(0, len(shard), READ_AT_ONCE):
            counts += np.bincount(shard[start : start + READ_AT_ONCE], minlength=len(counts))
    if facts.get("packing") == "best-fit" and facts.get("pad_id") != facts["eos_id"]:
        counts[facts["pad_id"]] = 1  # what fills up rows is no text
    paid = held_out.tokens if held_out.learned is None else held_out.tokens[held_out.learned]
    return float(-np.log2(counts / counts.sum())[paid].sum())


def folder_nats(folder: Path, held_out: HeldOut, length: int) -> tuple[float, int]:
    """Return what a Hugging Face folder's model pays for the same text, in nats, and for how many of its tokens.

    Its own tokenizer cuts every document, and each is followed by its end token. Raises JobError when the folder does
    not load, or for conversations, whose turns another tokenizer would tell apart differently.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if held_out.learned is not None:
        raise JobError("score.baseline compares text, not conversations; leave it empty for data.kind chat")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise JobError(f"score.baseline: {folder} is not a Hugging Face folder that loads ({why})") from problem
    end = tokenizer.eos_token_id
    if end is None:
        raise JobError(f"score.baseline: the tokenizer of {folder} has no token that ends a text")
    ids = [
        [*tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"], end]
        for text in held_out.texts
    ]
    theirs = HeldOut(
        held_out.documents, np.array([one for document in ids for one in document], np.int64), held_out.texts
    )
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return summed(lambda tokens, _mask, _documents: _nats(model, tokens), theirs, length, end), len(theirs.tokens)


def _nats(model: "PreTrainedModel", tokens: "Tensor") -> "Tensor":
    """Sum the cross entropy of int64 [rows, length + 1] under any causal model of transformers."""
    import torch

    from training.model import summed_cross_entropy

    head, config = model.get_output_embeddings(), model.config
    targets = tokens[:, 1:].flatten()
    plain = isinstance(head, torch.nn.Linear) and head.bias is None
    if plain and not any(getattr(config, name, None) not in (None, 1.0) for name in SCALED):
        hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        return summed_cross_entropy(hidden, head.weight, targets, getattr(config, "final_logit_softcapping", None))
    nats = [
        torch.nn.functional.cross_entropy(
            model(input_ids=row[None, :-1], use_cache=False).logits[0].float(), row[1:], reduction="sum"
        )
        for row in tokens
    ]
    return torch.stack(nats).sum()
