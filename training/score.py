"""Score a trained model on held-out documents, in bits per byte, beside what compressing them without a model takes.

    python -m training.score job.json

Bits per byte does not depend on the tokenizer, so it compares models and compressors alike. Whole documents are scored,
in the dataset's order, as one stream of tokens cut into windows of data.sequence_length that do not overlap: each
window starts without context, so a model that looks further back is judged a little too harshly. The token that ends a
document is paid for by the model and costs the compressors nothing.
"""

import gzip
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from training.alone import alone
from training.data.loader import open_tokens, read_facts
from training.job import NodeJob, progress, say
from training.process import JobError

if TYPE_CHECKING:
    import torch
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

Tokens = npt.NDArray[np.int64]

TOKENS_AT_ONCE: Final = 4096
"""Tokens per forward pass, at least one window: enough to keep the processor busy."""
READ_AT_ONCE: Final = 2**24
"""Training tokens counted at a time."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The documents that are scored: how many, their tokens (each followed by the end token) and their text."""

    documents: int
    tokens: Tokens
    text: bytes


def score(job: NodeJob) -> None:
    """Write result.json: bits per byte, perplexity, loss (nats per token) and the baselines on the same documents.

    Raises JobError when there is no complete checkpoint, SourceError when the dataset is damaged.
    """
    dataset = job.inputs["dataset"]
    facts = read_facts(dataset)
    held_out = choose(dataset, facts, job.spec["score"]["max_tokens"])
    model = trained(job, facts)
    nats = total_nats(model, held_out.tokens, facts, job.spec["train"]["precision"])
    counted, size = len(held_out.tokens), len(held_out.text)
    result = {
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(nats / counted),
        "loss": nats / counted,
        "tokens": counted,
        "bytes": size,
        "documents": held_out.documents,
        "baselines": {
            "gzip": gzip_bits(held_out.text) / size,
            "unigram": unigram_bits(dataset, facts, held_out) / size,
        },
    }
    job.finish(result)
    say("scored", **result)


def choose(dataset: Path, facts: dict[str, Any], max_tokens: int) -> HeldOut:
    """Take whole held-out documents, from the first on, while they fit in `max_tokens`; always at least one."""
    tokens = open_tokens(dataset, "held_out", facts)
    ends = np.flatnonzero(tokens == facts["eos_id"]) + 1
    count = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
    with (dataset / "held_out.jsonl").open() as lines:
        text = "".join(json.loads(line)["text"] for _, line in zip(range(count), lines, strict=False))
    return HeldOut(count, tokens[: ends[count - 1]].astype(np.int64), text.encode())


def trained(job: NodeJob, facts: dict[str, Any]) -> "LlamaForCausalLM":
    """Build the recipe's model with the weights of the newest complete checkpoint of inputs["model"].

    Raises JobError when there is none, or when the dataset has more tokens than the model.
    """
    import torch

    from training import checkpoint
    from training.model import build

    vocab_size = job.spec["model"]["vocab_size"]
    if facts["vocab_size"] > vocab_size:
        raise JobError(
            f"the dataset has {facts['vocab_size']} different tokens but model.vocab_size is {vocab_size}; "
            "make it at least as large and train again"
        )
    newest = checkpoint.latest(job.inputs["model"])
    if newest is None:
        raise JobError(f"{job.inputs['model']} holds no complete checkpoint; run train first")
    torch.set_num_threads(os.cpu_count() or 1)  # the launcher may have told OpenMP to use one
    model = build(job.spec["model"], facts["sequence_length"])
    checkpoint.load_weights(newest, model)
    return model.eval()


def total_nats(model: "LlamaForCausalLM", tokens: Tokens, facts: dict[str, Any], precision: str) -> float:
    """Return -log probability of all tokens together, in nats; the first one follows an end token."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    length = int(facts["sequence_length"])
    stream = torch.from_numpy(np.concatenate([[facts["eos_id"]], tokens]))
    whole = len(tokens) // length
    windows = [stream[i * length : i * length + length + 1] for i in range(whole)]
    rows = max(1, TOKENS_AT_ONCE // length)
    batches = [torch.stack(windows[i : i + rows]) for i in range(0, whole, rows)]
    if whole * length < len(tokens):
        batches.append(stream[None, whole * length :])
    total, done = 0.0, 0
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        for batch in batches:
            total += _nats(model, batch.to(device))
            done += batch.shape[0] * (batch.shape[1] - 1)
            progress(done, len(tokens), "token scored", bits_per_token=total / done / math.log(2))
    return total


def _nats(model: "LlamaForCausalLM", batch: "torch.Tensor") -> float:
    """Sum the cross entropy of int64 [rows, length + 1], a slice of the logits at a time."""
    import torch

    from training.model import LOGITS_AT_ONCE

    hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    targets = batch[:, 1:].flatten()
    rows = max(64, LOGITS_AT_ONCE[batch.device.type] // model.config.vocab_size)
    total = 0.0
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        logits = model.lm_head(hidden[part]).float()
        total += float(torch.nn.functional.cross_entropy(logits, targets[part], reduction="sum"))
    return total


def gzip_bits(text: bytes) -> int:
    """Return how many bits gzip -9 needs for all documents in one file, where it may use one to shorten the next."""
    return 8 * len(gzip.compress(text, 9, mtime=0))


def unigram_bits(dataset: Path, facts: dict[str, Any], held_out: HeldOut) -> float:
    """Return the bits of an ideal entropy coder that knows how often each token occurs in training (plus one)."""
    train = open_tokens(dataset, "train", facts)
    counts = np.ones(facts["vocab_size"])
    for start in range(0, len(train), READ_AT_ONCE):
        counts += np.bincount(train[start : start + READ_AT_ONCE], minlength=len(counts))
    return float(-np.log2(counts / counts.sum())[held_out.tokens].sum())


if __name__ == "__main__":
    alone(score)
