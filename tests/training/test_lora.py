"""Adapters: nothing at first, PEFT's names, only they learn, and merged they are the same network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.shapes import LENGTH, VOCABULARY, small
from training.adapters import merged
from training.model import (
    NextTokenLoss,
    add_adapters,
    allocate,
    build,
    flops_per_token,
    materialise,
    named_weights,
    skeleton,
)
from training.process import JobError

pytestmark = [pytest.mark.torch]

TARGETS = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn", "c_fc")}


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def adapted(family: str, folder: Path | None = None) -> NextTokenLoss:
    network = skeleton(small(family), LENGTH, folder)
    add_adapters(network, 4, 8.0, TARGETS[family])
    allocate(network, torch.device("cpu"))
    materialise(network, 1, folder)
    return NextTokenLoss(network)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_fresh_adapter_changes_nothing_and_only_adapters_learn(family: str, tmp_path: Path) -> None:
    base = build(small(family), LENGTH, seed=5)
    base.save_pretrained(tmp_path)
    objective = adapted(family, tmp_path)
    loss = objective(batch())
    assert loss.item() == pytest.approx(NextTokenLoss(base)(batch()).item(), rel=1e-6)
    loss.backward()
    learning = {name for name, weight in objective.weights() if weight.grad is not None}
    assert learning == {name for name, _ in objective.weights() if ".lora_" in name}
    assert len(learning) == 2 * 3 * 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_adapters_are_the_same_network(family: str) -> None:
    objective = adapted(family)
    weights = dict(objective.weights())
    with torch.no_grad():
        for name, weight in weights.items():
            if ".lora_B." in name:
                weight.normal_(std=0.1)
    plain = build(small(family), LENGTH, seed=1)
    with torch.no_grad():
        for name, weight in named_weights(plain):
            layer = name.removesuffix(".weight")
            down, up = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
            if up in weights:
                weight.copy_(merged(weights[name], weights[down], weights[up], 8.0 / 4, transposed=family == "gpt2"))
    assert NextTokenLoss(plain)(batch()).item() == pytest.approx(objective(batch()).item(), rel=1e-6)


def test_numpy_merges_as_torch_does() -> None:
    weight, down, up = torch.randn(5, 3), torch.randn(2, 3), torch.randn(5, 2)
    ours = merged(weight.numpy(), down.numpy(), up.numpy(), 0.5)
    assert isinstance(ours, np.ndarray)
    assert np.allclose(ours, merged(weight, down, up, 0.5).numpy(), atol=1e-6)


def test_a_target_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        JobError, match=r"lora_targets q_proj match no linear layer of gpt2; it has c_attn, c_fc, c_proj"
    ):
        add_adapters(skeleton(small("gpt2"), LENGTH), 4, 8.0, ("q_proj", "c_fc"))


def test_frozen_weights_cost_no_gradient_of_their_own() -> None:
    objective, plain = adapted("llama"), build(small(), LENGTH, seed=1)
    sizes = {name: weight.numel() for name, weight in objective.weights()}
    adapters = sum(size for name, size in sizes.items() if ".lora_" in name)
    frozen = sum(sizes.values()) - adapters - sizes["model.embed_tokens.weight"]
    assert flops_per_token(objective.model, LENGTH) == flops_per_token(plain, LENGTH) - 2 * frozen + 6 * adapters


def test_frozen_weights_may_be_kept_in_16_bits() -> None:
    network = build(small(), LENGTH, seed=1)
    add_adapters(network, 4, 8.0, ("q_proj",), torch.bfloat16)
    kinds = {".lora_" in name: weight.dtype for name, weight in named_weights(network)}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    objective = NextTokenLoss(network)
    objective.autocast = torch.bfloat16
    assert objective(batch()).isfinite()
