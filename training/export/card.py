"""The model card: what the model is, what it learned from, how good it is, and what nobody should expect of it."""

import json
from pathlib import Path
from typing import Any

from training.job import NodeJob


def model_card(job: NodeJob, facts: dict[str, Any], export: dict[str, Any]) -> str:
    """Return README.md for the exported folder: a pure function of the recipe, the data's facts and the results.

    `facts` is dataset.json, `export` the export's own result. Training and score are told where inputs["model"] and
    inputs["score"] have a result.json; spec["lineage"] (recipe, dataset, plan, commit, …) is repeated as it is.
    """
    name, spec = job.spec["name"], job.spec
    parts = [
        _front_matter(spec),
        f"# {name}\n\n{spec['description'] or _described(spec)}",
        "## Model\n\n" + _table(_architecture(spec, facts, export)),
        "## Data\n\n" + _data(spec, facts),
        "## Training\n\n" + _table(_training(spec, _result(job, "model"))),
        "## Evaluation\n\n" + _evaluation(_result(job, "score"), export),
        "## Use\n\n" + _use(facts, export),
        "## Limits\n\n" + _limits(spec),
    ]
    if quantized := export.get("quantized"):
        parts.insert(-2, "## Quantised copy\n\n" + _quantised(quantized))
    if lineage := spec.get("lineage"):
        parts.append("## Lineage\n\n" + _table({key: f"`{value}`" for key, value in _flat(lineage).items()}))
    return "\n\n".join(parts) + "\n"


def _front_matter(spec: dict[str, Any]) -> str:
    lines = [
        f"license: {spec['export']['license']}",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        f"- {spec['model']['family']}",
        "- castra",
    ]
    return "---\n" + "\n".join(lines) + "\n---"


def _architecture(spec: dict[str, Any], facts: dict[str, Any], export: dict[str, Any]) -> dict[str, str]:
    model = spec["model"]
    return {
        "parameters": f"{export['parameters']:,}",
        "architecture": f"{model['family']}, {model['layers']} layers, width {model['hidden_size']}, "
        f"{model['heads']} heads ({model['kv_heads']} key/value), MLP {model['ffn_size']}{_routed(model)}",
        "vocabulary": f"{model['vocab_size']:,}, of which the tokenizer uses {facts['vocab_size']:,}",
        "embeddings": "tied" if model["tie_embeddings"] else "separate",
        "context": f"{facts['sequence_length']:,} tokens",
        "weights": f"{export['dtype']}, {export['bytes'] / 1e6:,.1f} MB, SHA-256 `{export['weights_sha256']}`",
    }


def _routed(model: dict[str, Any]) -> str:
    return f", {model['experts']} experts of which a token visits {model['topk']}" if model.get("experts") else ""


def _data(spec: dict[str, Any], facts: dict[str, Any]) -> str:
    rows = {
        part.replace("_", "-"): f"{facts[part]['documents']:,} documents, {facts[part]['bytes']:,} bytes, "
        f"{facts[part]['tokens']:,} tokens"
        for part in ("train", "held_out")
    }
    dropped = {f"dropped: {reason.replace('_', ' ')}": f"{n:,} documents" for reason, n in facts["dropped"].items()}
    patterns = ", ".join(f"`{one}`" for one in spec["data"]["include"])
    source = {"source": f"{', '.join(f'`{one}`' for one in _sources(spec))} ({patterns})"}
    ledger = {
        f"tokens of {name}": f"{told['tokens']:,} in {told['documents']:,} documents"
        for name, told in facts.get("sources", {}).items()
    }
    return (
        _table(source | rows | ledger | dropped)
        + "\n\nCopies were removed before the split, which is by a hash of each document's name: no held-out document, "
        "nor a near copy of one found by MinHash, was trained on."
    )


def _training(spec: dict[str, Any], run: dict[str, Any]) -> dict[str, str]:
    train = spec["train"]
    rows = {
        "optimizer": f"AdamW, weight decay {train['weight_decay']:g}",
        "learning rate": f"{train['learning_rate']:g} at its peak, schedule {train.get('schedule', 'cosine')}",
        "steps": f"{train['steps']:,} of {train['global_batch_size']:,} sequences",
        "precision": train["precision"],
        "seed": str(train["seed"]),
    }
    if train.get("lora_rank"):
        base = ", in 4 bits (NF4), to which the exported weights are rounded" if train.get("lora_base") == "nf4" else ""
        rows["adapters"] = f"LoRA of rank {train['lora_rank']}, alpha {train['lora_alpha']:g}; all else frozen{base}"
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
        f"{score['perplexity']:.2f} per token. Lower is better. {_other(score)}gzip is `gzip -9` of all the documents "
        "in one file; "
        "unigram is an ideal coder that knows how often each token occurs in the training data. Neither is a strong "
        "compressor or a language model: beating them shows that the model learned, not that it is good."
    )
    return f"{table}\n\n{scope}\n\n{proof}"


def _other(score: dict[str, Any]) -> str:
    """Say which model "baseline" is."""
    return f"baseline is the model in `{score['baseline']['folder']}`. " if "baseline" in score else ""


def _described(spec: dict[str, Any]) -> str:
    model = spec["model"]
    start = f"trained further from {model['pretrained']}" if model.get("pretrained") else "trained from scratch"
    return f"A language model of {model['family']} architecture, {start}."


def _quantised(told: dict[str, Any]) -> str:
    return _table(
        {
            "weights": f"{told['kind']}, {told['bytes'] / 1e6:,.1f} MB, {told['matrices']} matrices; embeddings stay",
            "relative error of a matrix": f"{told['error_mean']:.2%} on average, {told['error_max']:.2%} at most",
            "held-out loss": f"{told['loss']:.4f} nats per token, {told['loss_change']:+.4f}; "
            f"{told['loss_limit']} more is allowed",
            "layout": "Castra's own: `training/export/quantize.py` documents it, reads it and makes an ordinary folder "
            "of it again",
        }
    )


def _use(facts: dict[str, Any], export: dict[str, Any]) -> str:
    adapter = (
        "\n\nThe weights are those that training kept frozen; the trained adapters are in `adapter/`, as PEFT reads "
        'them: `PeftModel.from_pretrained(model, "adapter")`.'
        if export.get("adapter")
        else ""
    )
    if facts.get("kind") == "chat":
        return (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained(".")\nmodel = AutoModelForCausalLM.from_pretrained(".")\n'
            'inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Who are you?"}],\n'
            '    add_generation_prompt=True, return_tensors="pt", return_dict=True)\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n```"
        ) + adapter
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")\nmodel = AutoModelForCausalLM.from_pretrained(".")\n'
        'inputs = tokenizer("def ", return_tensors="pt", return_token_type_ids=False)\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n```"
    ) + adapter


def _limits(spec: dict[str, Any]) -> str:
    learned = ", ".join(f"`{one}`" for one in _sources(spec))
    if spec["data"].get("kind") == "chat":
        first = f"It answers as the assistant does in {learned}."
    elif spec["model"].get("pretrained"):
        first = f"It continues text like that in {learned}, besides what the model it began with learned."
    else:
        first = f"It continues text like that in {learned} and nothing else; it was not tuned to follow instructions."
    return (
        f"{first} It was not checked for harmful, private or wrong output, and may repeat its training data verbatim. "
        "Whether its data may be used for your purpose is for you to find out: the licence above is the recipe's."
    )


def _sources(spec: dict[str, Any]) -> list[str]:
    source = spec["data"]["source"]
    return [source] if isinstance(source, str) else list(source)


def _flat(told: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested facts as one table: a.b for b in a."""
    rows: dict[str, Any] = {}
    for key, value in told.items():
        rows |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return rows


def _table(rows: dict[str, str]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _result(job: NodeJob, name: str) -> dict[str, Any]:
    """Return result.json of an input, {} where there is none."""
    path = job.inputs.get(name, Path()) / "result.json"
    told: dict[str, Any] = json.loads(path.read_text()) if name in job.inputs and path.is_file() else {}
    return told
