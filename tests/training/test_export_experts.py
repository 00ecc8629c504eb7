"""Routed experts at the end of training: the published names on the disk, the same bits, and a start from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.training.exports import columns, job_of, network, recipe, result, rows, write_checkpoint, write_dataset
from training.export.convert import convert
from training.export.hf import export
from training.job import NodeJob
from training.model import build, named_weights
from training.model.experts import stored_weights
from training.process import JobError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODEL = {"family": "mixtral", "experts": 3, "topk": 2, "tie_embeddings": False}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("corpus") / "data")


def job(corpus: Path, folder: Path, cut: Any = rows, **parts: dict[str, Any]) -> NodeJob:
    spec = recipe(model=MODEL | parts.pop("model", {}), **parts)
    write_checkpoint(folder / "run", spec, network(spec), cut)
    return job_of(spec, folder / "out", dataset=corpus, model=folder / "run")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


@pytest.mark.parametrize("cut", [rows, columns])
def test_the_folder_has_the_published_names_and_computes_the_same(cut: Any, corpus: Path, tmp_path: Path) -> None:
    asked = job(corpus, tmp_path, cut, export={"max_shard_mb": 1})
    export(asked)
    folder, told = asked.output / "hf", result(asked.output)
    assert told["parity_max_abs_diff"] == 0.0
    found = weights(folder)
    one = "model.layers.1.block_sparse_moe."
    assert {f"{one}gate.weight", f"{one}experts.2.w1.weight", f"{one}experts.0.w2.weight"} <= found.keys()
    ours = dict(stored_weights(network(asked.spec)))
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)
    stranger = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert stranger.config.num_local_experts == 3
    assert all(torch.equal(weight, dict(named_weights(network(asked.spec)))[name])
               for name, weight in named_weights(stranger))  # fmt: skip
    assert weights(folder).keys() == weights_saved_by(stranger, tmp_path / "theirs").keys()


def weights_saved_by(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return weights(folder)


def test_training_starts_from_such_a_folder_whatever_part_a_rank_has(corpus: Path, tmp_path: Path) -> None:
    asked = job(corpus, tmp_path)
    export(asked)
    spec, folder = asked.spec, asked.output / "hf"
    again = build(spec["model"], spec["data"]["sequence_length"], folder)
    first = dict(named_weights(network(spec)))
    assert all(torch.equal(weight, first[name]) for name, weight in named_weights(again))
    from training.model.pretrained import Pretrained

    name = "model.layers.0.mlp.experts.gate_up_proj"
    box = (slice(1, 3), slice(60, 70), slice(0, 32))  # over the border of gates and the rest
    assert torch.equal(Pretrained(folder).read(name, box, first[name].shape), first[name][box])
    with pytest.raises(JobError, match="experts is 3 there and 4 here"):
        build(spec["model"] | {"experts": 4}, spec["data"]["sequence_length"], folder)


def test_a_checkpoint_is_converted_to_the_published_names(corpus: Path, tmp_path: Path) -> None:
    asked = job(corpus, tmp_path, columns)
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    convert(checkpoint, tmp_path / "bf16", "bf16")
    ours = {name: weight.to(torch.bfloat16) for name, weight in stored_weights(network(asked.spec))}
    found = weights(tmp_path / "bf16")
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)


def test_quantised_copies_and_adapters_work_with_experts_too(corpus: Path, tmp_path: Path) -> None:
    lora = {"lora_rank": 2, "lora_targets": ["q_proj", "o_proj"]}
    asked = job(corpus, tmp_path, train=lora, export={"quantize": "int8"})
    export(asked)
    told = result(asked.output)
    assert told["parity_max_abs_diff"] < 1e-5
    assert told["quantized"]["loss_change"] < told["quantized"]["loss_limit"]
