"""The job: which documents, which model, which baselines, and result.json."""

import math
from pathlib import Path
from typing import Any

from training.data.format import read_facts
from training.job import NodeJob, say
from training.score import tasks
from training.score.baselines import folder_nats, gzip_bits, unigram_bits
from training.score.likelihood import total_nats
from training.score.text import HeldOut, choose
from training.score.trained import trained


def score(job: NodeJob) -> None:
    """Write result.json: bits per byte, perplexity, loss (nats per token) and the baselines on the same documents.

    Raises JobError when there is no complete checkpoint or it is of another model, SourceError when the dataset is
    damaged.
    """
    dataset, asked = job.inputs["dataset"], job.spec["score"]
    tasks.check(asked.get("tasks", ()))
    facts = read_facts(dataset)
    held_out = choose(dataset, facts, asked["max_tokens"])
    length, size = int(facts["sequence_length"]), len(held_out.text)
    model = trained(job, facts)
    nats = total_nats(model, held_out, length, facts["eos_id"], job.spec["train"]["precision"])
    counted = len(held_out.tokens) if held_out.learned is None else int(held_out.learned.sum())
    baselines = {"gzip": gzip_bits(held_out.text) / size, "unigram": unigram_bits(dataset, facts, held_out) / size}
    result: dict[str, Any] = {
        **_figures(nats, counted, size),
        "tokens": len(held_out.tokens),
        "targets": counted,
        "bytes": size,
        "documents": held_out.documents,
        "baselines": baselines,
        "tasks": tasks.run(asked.get("tasks", ()), model, dataset),
    }
    if asked.get("baseline"):
        del model
        result["baseline"] = _baseline(job, asked["baseline"], held_out, length)
        baselines["baseline"] = result["baseline"]["bits_per_byte"]
    job.finish(result)
    say("scored", **result)


def _baseline(job: NodeJob, named: str, held_out: HeldOut, length: int) -> dict[str, Any]:
    """Score another model's folder, inputs["baseline"] or the one that is named, on the same text."""
    nats, counted = folder_nats(job.inputs.get("baseline", Path(named)), held_out, length)
    return {"folder": named, **_figures(nats, counted, len(held_out.text))}


def _figures(nats: float, counted: int, size: int) -> dict[str, float]:
    """Return the three ways to tell one figure: `nats` for `counted` tokens and `size` bytes."""
    return {"bits_per_byte": nats / math.log(2) / size, "perplexity": math.exp(nats / counted), "loss": nats / counted}
