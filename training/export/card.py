"""The model card: what the model is, what it learned from, how good it is, and what nobody should expect of it."""

import json
from pathlib import Path
from typing import Any

from training.job import NodeJob


def model_card(job: NodeJob, facts: dict[str, Any], export: dict[str, Any]) -> str:
    """Return README.md for the exported folder: a pure function of the recipe, the data's facts and the results.

    `facts` is dataset.json, `export` the export's own result. Training and score are told where inputs["model"] and
    inputs["score"] have a result.json; spec["lineage"], a flat dictionary, is repeated as it is.
    """
    name, spec = job.spec["name"], job.spec
    parts = [
        _front_matter(spec),
        f"# {name}\n\n{spec['description'] or 'A Llama-architecture language model, trained from scratch.'}",
        "## Model\n\n" + _table(_architecture(spec, facts, export)),
        "## Data\n\n" + _data(spec, facts),
        "## Training\n\n" + _table(_training(spec, _result(job, "model"))),
        "## Evaluation\n\n" + _evaluation(_result(job, "score"), export),
        "## Use\n\n" + _use(),
        "## Limits\n\n" + _limits(spec),
    ]
    if lineage := spec.get("lineage"):
        parts.append("## Lineage\n\n" + _table({str(key): f"`{value}`" for key, value in lineage.items()}))
    return "\n\n".join(parts) + "\n"


def _front_matter(spec: dict[str, Any]) -> str:
    lines = [
        f"license: {spec['export']['license']}",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- llama",
        "- castra",
    ]
    return "---\n" + "\n".join(lines) + "\n---"


def _architecture(spec: dict[str, Any], facts: dict[str, Any], export: dict[str, Any]) -> dict[str, str]:
    model = spec["model"]
    return {
        "parameters": f"{export['parameters']:,}",
        "architecture": f"{model['family']}, {model['layers']} layers, width {model['hidden_size']}, "
        f"{model['heads']} heads ({model['kv_heads']} key/value), MLP {model['ffn_size']}",
        "vocabulary": f"{model['vocab_size']:,}, of which the tokenizer uses {facts['vocab_size']:,}",
        "embeddings": "tied" if model["tie_embeddings"] else "separate",
        "context": f"{facts['sequence_length']:,} tokens",
        "weights": f"{export['dtype']}, {export['bytes'] / 1e6:,.1f} MB, SHA-256 `{export['weights_sha256']}`",
    }


def _data(spec: dict[str, Any], facts: dict[str, Any]) -> str:
    rows = {
        part.replace("_", "-"): f"{facts[part]['documents']:,} documents, {facts[part]['bytes']:,} bytes, "
        f"{facts[part]['tokens']:,} tokens"
        for part in ("train", "held_out")
    }
    dropped = {f"dropped: {reason.replace('_', ' ')}": f"{n:,} documents" for reason, n in facts["dropped"].items()}
    source = {"source": f"`{spec['data']['source']}` ({', '.join(f'`{one}`' for one in spec['data']['include'])})"}
    return (
        _table(source | rows | dropped)
        + "\n\nCopies were removed before the split, which is by a hash of each document's name: no held-out document, "
        "nor a near copy of one found by MinHash, was trained on."
    )


def _training(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, str]:
    train = spec["train"]
    rows = {
        "optimizer": f"AdamW, peak learning rate {train['learning_rate']:g}, cosine decay, "
        f"weight decay {train['weight_decay']:g}",
        "steps": f"{train['steps']:,} of {train['global_batch_size']:,} sequences",
        "precision": train["precision"],
        "seed": str(train["seed"]),
    }
    told = {"tokens": "{:,}", "loss_first": "{:.4f} nats per token", "loss_last": "{:.4f} nats per token"}
    return rows | {key.replace("_", " "): form.format(run[key]) for key, form in told.items() if key in run}


def _evaluation(score: dict[str, Any], export: dict[str, Any]) -> str:
    against = (
        "the trained weights" if export["dtype"] == "fp32" else f"the trained weights rounded to {export['dtype']}"
    )
    proof = (
        f"The exported files were loaded back and their logits compared with {against} on {export['parity_tokens']:,} "
        f"held-out tokens: the largest difference is {export['parity_max_abs_diff']:.2g}."
    )
    if not score:
        return f"Not scored.\n\n{proof}"
    rows = {"**this model**": score["bits_per_byte"], **score["baselines"]}
    table = "| on the held-out documents | bits per byte |\n|---|---|\n"
    table += "\n".join(f"| {name} | {value:.4f} |" for name, value in sorted(rows.items(), key=lambda row: row[1]))
    scope = (
        f"{score['documents']:,} documents, {score['bytes']:,} bytes, {score['tokens']:,} tokens; perplexity "
        f"{score['perplexity']:.2f} per token. Lower is better. gzip is `gzip -9` of all the documents in one file; "
        "unigram is an ideal coder that knows how often each token occurs in the training data. Neither is a strong "
        "compressor or a language model: beating them shows that the model learned, not that it is good."
    )
    return f"{table}\n\n{scope}\n\n{proof}"


def _use() -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")\nmodel = AutoModelForCausalLM.from_pretrained(".")\n'
        'inputs = tokenizer("def ", return_tensors="pt", return_token_type_ids=False)\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n```"
    )


def _limits(spec: dict[str, Any]) -> str:
    return (
        f"It continues text like that in `{spec['data']['source']}` and knows nothing else. It was not tuned to follow "
        "instructions nor checked for harmful, private or wrong output, and may repeat its training data verbatim. "
        "Whether its data may be used for your purpose is for you to find out: the licence above is the recipe's."
    )


def _table(rows: dict[str, str]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _result(job: NodeJob, name: str) -> dict[str, Any]:
    """Return result.json of an input, {} where there is none."""
    path = job.inputs.get(name, Path()) / "result.json"
    told: dict[str, Any] = json.loads(path.read_text()) if name in job.inputs and path.is_file() else {}
    return told
