"""The model that a job is about: the recipe's network with the weights of its newest complete checkpoint."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.job import NodeJob
from training.process import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def base_folder(job: NodeJob) -> Path | None:
    """Return the Hugging Face folder that training began with, as far as the recipe tells; None: random weights.

    That is inputs["initial"], or model.pretrained where that is a folder here. Raises JobError when it cannot be read.
    """
    if "initial" in job.inputs:
        return job.inputs["initial"]
    named = job.spec["model"].get("pretrained")
    if not named:
        return None
    if not (Path(named) / "config.json").is_file():
        raise JobError(f"model.pretrained: {named} has no config.json here; bring the folder to this node")
    return Path(named)


def newest(job: NodeJob) -> Path:
    """Return the newest complete checkpoint of inputs["model"]. Raises JobError when there is none."""
    from training import checkpoint

    found = checkpoint.latest(job.inputs["model"])
    if found is None:
        raise JobError(f"{job.inputs['model']} holds no complete checkpoint; run train first")
    return found


def skeleton_of(job: NodeJob, facts: dict[str, Any]) -> "PreTrainedModel":
    """Return the recipe's network, its weights without memory. Raises JobError when its vocabulary is too small."""
    from training.model import skeleton

    model = job.spec["model"]
    if facts["vocab_size"] > model["vocab_size"]:
        raise JobError(
            f"the dataset has {facts['vocab_size']} different tokens but model.vocab_size is {model['vocab_size']}; "
            "make it at least as large and train again"
        )
    return skeleton(model, facts["sequence_length"], base_folder(job))


def trained(job: NodeJob, facts: dict[str, Any]) -> "PreTrainedModel":
    """Build the recipe's network on the CPU, fp32, with the trained weights, adapters beside the frozen ones.

    Raises JobError when there is no complete checkpoint, when it is of another model, or when the dataset has more
    tokens than the model.
    """
    import torch

    from training import checkpoint
    from training.model import add_adapters, allocate, materialise, round_to_4_bits

    train = job.spec["train"]
    network = skeleton_of(job, facts)
    place = newest(job)
    agree(job, place)
    torch.set_num_threads(os.cpu_count() or 1)  # the launcher may have told OpenMP to use one
    if train.get("lora_rank"):
        add_adapters(network, train["lora_rank"], train["lora_alpha"], train["lora_targets"])
    allocate(network, torch.device("cpu"))
    if train.get("lora_rank"):
        materialise(network, train["seed"], base_folder(job))
        if train.get("lora_base") == "nf4":  # the adapters learned beside that
            round_to_4_bits(network)
    checkpoint.load_weights(place, network)
    return network.eval()


def agree(job: NodeJob, place: Path) -> None:
    """Raise JobError when a checkpoint is of another model than the recipe's."""
    from training import checkpoint

    theirs, ours = checkpoint.read(place).identity.model, job.spec["model"]
    changed = [name for name in sorted(theirs.keys() & ours.keys() - {"pretrained"}) if theirs[name] != ours[name]]
    if changed:
        told = ", ".join(f"{name} {theirs[name]} there and {ours[name]} here" for name in changed)
        raise JobError(f"{place} is of another model than the recipe's: {told}")
