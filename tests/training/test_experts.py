"""Routed experts: the published network and its balance, one curve in every layout, the published names on the disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.training.nursery import Nursery, losses, refused, result, spec, write_job
from tests.training.shapes import LENGTH, VOCABULARY, small
from training.model import NextTokenLoss, build, flops_per_token, named_weights
from training.model.experts import balance

pytestmark = [pytest.mark.torch]

ROUTED = {"family": "mixtral", "experts": 4, "topk": 2, "layers": 3, "tie_embeddings": False}


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def test_the_loss_is_transformers_cross_entropy_and_the_balance_of_each_sequence() -> None:
    network = build(small("mixtral"), LENGTH, seed=1)
    objective, batch = NextTokenLoss(network), tokens()
    with torch.no_grad():
        plain = objective(batch)
        theirs = network(input_ids=batch[:, :-1], output_router_logits=True)
    assert plain.item() == pytest.approx(
        torch.nn.functional.cross_entropy(theirs.logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item(),
        rel=1e-5,
    )
    balances = [
        load_balancing_loss_func((logits[row * LENGTH : (row + 1) * LENGTH],), 4, 2).item()
        for logits in theirs.router_logits
        for row in range(2)
    ]
    added = (objective(batch) - plain).item() / network.config.router_aux_loss_coef
    assert added == pytest.approx(sum(balances) / 3 * LENGTH, rel=1e-3)


def test_even_routing_has_the_least_balance() -> None:
    logits = torch.eye(4).repeat(1, 2, 1) * 1e-3
    even = balance(logits, torch.tensor([[[0, 1], [1, 2], [2, 3], [3, 0]] * 2]))
    assert even.item() == pytest.approx(2, rel=1e-3)
    crowded = balance(torch.tensor([9.0, 9.0, 0.0, 0.0]).expand(1, 8, 4), torch.tensor([[[0, 1]] * 8]))
    assert crowded.item() > 3.9


def test_a_tokens_cost_counts_the_experts_that_it_visits() -> None:
    two, four = (build(small("mixtral", topk=topk), LENGTH, seed=1) for topk in (2, 4))
    experts = sum(weight.numel() for name, weight in named_weights(two) if "experts" in name)
    assert flops_per_token(four, LENGTH) - flops_per_token(two, LENGTH) == 6 * experts / 2


LAYOUTS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "ddp 2": (2, "ddp", 2, {}),
    "fsdp2 2": (2, "fsdp2", 2, {}),
    "fsdp2 3, which does not divide": (3, "fsdp2", 1, {}),
    "zero0": (2, "zero0", 2, {}),
    "zero1": (2, "zero1", 2, {}),
    "zero2": (2, "zero2", 2, {}),
}


@pytest.fixture(scope="module")
def alone(nursery: Nursery, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    codes, run = nursery.run(write_job(folder, plan("ddp", 12), dataset=dataset))
    assert codes == [0], run.log.read_text()
    return folder / "out"


def plan(strategy: str, micro: int, parallel: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    return spec(strategy, micro, ROUTED, parallel, **({"global_batch_size": 12, "eval_every": 3} | train))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_what_one_process_learns(
    layout: str, alone: Path, dataset: Path, nursery: Nursery, tmp_path: Path
) -> None:
    ranks, strategy, micro, parallel = LAYOUTS[layout]
    codes, run = nursery.run(write_job(tmp_path, plan(strategy, micro, parallel), dataset=dataset), ranks)
    assert set(codes) == {0}, run.log.read_text()
    for name in ("loss", "grad_norm", "eval_loss"):
        assert losses(tmp_path / "out", name) == pytest.approx(losses(alone, name), rel=1e-5), name
    ours, theirs = (json.loads((there / result(there)["checkpoint"] / "manifest.json").read_text())["tensors"]
                    for there in (tmp_path / "out", alone))  # fmt: skip
    assert {name: told["shape"] for name, told in ours.items()} == {
        name: told["shape"] for name, told in theirs.items()
    }


def test_what_cannot_be_laid_out_is_told_in_one_sentence(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    def told(name: str, *arguments: Any, **train: Any) -> str:
        return refused(nursery, write_job(tmp_path / name, plan(*arguments, **train), dataset=dataset), 2)

    assert "a mixtral model has no tensor parallel plan" in told("tp", "fsdp2", 4, {"tp": 2})
    assert "a model with experts is not cut into pipeline stages" in told("pp", "fsdp2", 2, {"pp": 2})
    assert "a model with experts are not shared by ranks" in told("cp", "fsdp2", 4, {"cp": 2})
    assert "not trained with zero3" in told("zero3", "zero3", 2)
    assert "blocks with experts are not compiled" in told("compile", "fsdp2", 2, compile=True)
