"""Export a checkpoint as a Hugging Face folder and prove that it computes what the trained model computes.

    python -m training.export.hf job.json

The folder holds safetensors, config, generation config, tokenizer and model card. It is written beside its place,
loaded back by `AutoModelForCausalLM.from_pretrained`, compared logit by logit with the checkpoint on held-out tokens,
and only then gets its name. Nothing in it tells the time or the machine: the same checkpoint gives the same bytes.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tokenizers import Tokenizer

from training.alone import alone
from training.data.loader import open_tokens, read_facts
from training.export.card import model_card
from training.job import NodeJob, say, write_json
from training.process import JobError
from training.score import Tokens, trained

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

COMPARED: Final = (8, 256)
"""Held-out rows and tokens per row whose logits are compared: a few seconds even for a model of 8e9 weights."""


def export(job: NodeJob) -> None:
    """Write job.output/hf and result.json.

    Raises JobError when there is no complete checkpoint, or when a logit differs by more than export.parity_tolerance
    from the training model's (whose weights are first rounded to bf16 where export.dtype is bf16).
    """
    import torch

    dataset, asked = job.inputs["dataset"], job.spec["export"]
    facts = read_facts(dataset)
    model = trained(job, facts)
    for weight in model.parameters():  # the rotary embedding's frequencies stay fp32, as from_pretrained keeps them
        weight.data = weight.data.to({"fp32": torch.float32, "bf16": torch.bfloat16}[asked["dtype"]])
    fresh = job.output / ".hf.fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_tokenizer(dataset, facts, fresh)
    write_model(model, facts["eos_id"], asked["max_shard_mb"], fresh)
    check_tokenizer(dataset, facts, fresh)
    rows = held_out_rows(dataset, facts)
    difference = largest_difference(model, fresh, rows)
    if not difference <= asked["parity_tolerance"]:
        raise JobError(
            f"the exported model's logits differ by up to {difference:.2g} from the trained model's, and "
            f"export.parity_tolerance is {asked['parity_tolerance']:.2g}; raise it only if you know why they differ"
        )
    result = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": asked["dtype"],
        "bytes": sum(path.stat().st_size for path in fresh.glob("*.safetensors")),
        "weights_sha256": weights_sha256(fresh),
        "parity_max_abs_diff": difference,
        "parity_tokens": rows.size,
    }
    (fresh / "README.md").write_text(model_card(job, facts, result))
    result["files"] = sorted(path.name for path in fresh.iterdir())
    publish(fresh, job.output / "hf")
    job.finish(result)
    say("exported", **result)


def write_tokenizer(dataset: Path, facts: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json, readable by transformers 4 and 5."""
    raw = (dataset / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(raw)
    end = Tokenizer.from_buffer(raw).id_to_token(facts["eos_id"])
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "model_max_length": facts["sequence_length"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", told)
    write_json(folder / "special_tokens_map.json", {"eos_token": end})


def write_model(model: "LlamaForCausalLM", eos_id: int, max_shard_mb: int, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights, tied ones once, in files of at most max_shard_mb."""
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.config.eos_token_id = eos_id
    model.generation_config = GenerationConfig(eos_token_id=eos_id, do_sample=False)
    model.save_pretrained(folder, max_shard_size=f"{max_shard_mb}MB")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # the library leaves them closed to everyone else


def check_tokenizer(dataset: Path, facts: dict[str, Any], folder: Path) -> None:
    """Raise JobError unless AutoTokenizer cuts the first held-out document exactly as the training data was cut."""
    from transformers import AutoTokenizer

    with (dataset / "held_out.jsonl").open() as lines:
        text = json.loads(next(lines))["text"]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    expected = open_tokens(dataset, "held_out", facts)[: len(ids) + 1]
    if [*ids, facts["eos_id"]] != expected.tolist():
        raise JobError(
            f"transformers reads {dataset}/tokenizer.json differently from the tokenizers library; use another"
        )


def held_out_rows(dataset: Path, facts: dict[str, Any]) -> Tokens:
    """Return the first held-out tokens as rows to compare logits on: int64 [at most 8, at most 256]."""
    tokens = open_tokens(dataset, "held_out", facts)
    length = min(COMPARED[1], facts["sequence_length"], len(tokens))
    count = min(COMPARED[0], len(tokens) // length)
    return tokens[: count * length].astype(np.int64).reshape(count, length)


def largest_difference(model: "LlamaForCausalLM", folder: Path, rows: Tokens) -> float:
    """Load a folder afresh and return the largest absolute difference of any logit from the model's."""
    import torch
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, local_files_only=True).eval()
    with torch.inference_mode():
        batch = torch.from_numpy(rows).to(device)
        ours = model.to(device)(input_ids=batch, use_cache=False).logits.float()
        theirs = loaded.to(device)(input_ids=batch, use_cache=False).logits.float()
    return float((ours - theirs).abs().max())


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of the safetensors files' bytes, one after the other by name."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(2**22):
                digest.update(block)
    return digest.hexdigest()


def publish(fresh: Path, folder: Path) -> None:
    """Bring a finished folder to the disk and give it its name; one that a killed run left there goes."""
    for path in fresh.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


if __name__ == "__main__":
    alone(export)
