"""The network and its loss: equal to plain cross entropy, starting at chance, comparable by a hash."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from training import model as models
from training.model import LinearCrossEntropy, NextTokenLoss, build, flops_per_token, start_from, weights_sha256
from training.process import JobError
from training.run import learning_rate

pytestmark = [pytest.mark.torch]

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_size": 48,
    "vocab_size": 300,
    "tie_embeddings": True,
    "rope_theta": 10000.0,
}


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_sliced_loss_is_the_cross_entropy(
    kind: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.LOGITS_AT_ONCE, "cpu", 64 * 500)
    torch.manual_seed(0)
    hidden = torch.randn(150, 16, dtype=kind, requires_grad=True)  # 64 + 64 + 22 rows
    weight = torch.randn(500, 16, dtype=kind, requires_grad=True)
    targets = torch.randint(0, 500, (150,))
    ours = LinearCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    plain = functional.cross_entropy((hidden.double() @ weight.double().T), targets)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(plain.item(), rel=tolerance)
    for mine, theirs in zip(gradients(3 * ours, hidden, weight), gradients(3 * plain, hidden, weight), strict=True):
        assert mine.dtype == kind
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_a_slice_and_a_whole_give_the_same_gradients_through_tied_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    objective = NextTokenLoss(build(SMALL, 40))
    tokens = torch.randint(0, 300, (5, 41))
    weights = list(objective.parameters())
    whole = gradients(objective(tokens), *weights)
    monkeypatch.setitem(models.LOGITS_AT_ONCE, "cpu", 1)
    for sliced, other in zip(gradients(objective(tokens), *weights), whole, strict=True):
        assert torch.allclose(sliced, other, atol=1e-7, rtol=1e-4)


def test_an_untrained_model_is_at_chance() -> None:
    torch.manual_seed(0)
    loss = NextTokenLoss(build(SMALL, 64))(torch.randint(0, 300, (8, 65)))
    # Tied embeddings with SmallInit give logits a variance of 2/5, which costs half of that over a uniform guess.
    assert loss.item() == pytest.approx(math.log(300) + 0.2, abs=0.05)


def test_the_hash_follows_every_bit_and_nothing_else() -> None:
    torch.manual_seed(0)
    one = build(SMALL, 64)
    other = build(SMALL, 64)
    other.load_state_dict(one.state_dict())
    assert weights_sha256(one) == weights_sha256(other)
    with torch.no_grad():
        other.model.norm.weight[3] = math.nextafter(1.0, 2.0) + 1e-6
    assert weights_sha256(one) != weights_sha256(other)


@pytest.mark.parametrize("tied", [True, False])
def test_training_starts_from_an_exported_folder(tmp_path: Path, tied: bool) -> None:
    plan = SMALL | {"tie_embeddings": tied}
    taught, fresh = build(plan, 64), build(plan, 64)
    taught.save_pretrained(tmp_path)
    start_from(fresh, tmp_path)
    assert weights_sha256(fresh) == weights_sha256(taught)


def test_foreign_weights_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"holds no \*\.safetensors"):
        start_from(build(SMALL, 64), tmp_path)
    build(SMALL, 64).save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"model\.embed_tokens\.weight is \[300, 32\] in .* and \[301, 32\]"):
        start_from(build(SMALL | {"vocab_size": 301}, 64), tmp_path)
    with pytest.raises(JobError, match=r"lack model\.layers\.2\."):
        start_from(build(SMALL | {"layers": 3}, 64), tmp_path)


def test_the_cost_of_a_token_by_hand() -> None:
    # per block: q and o 32x32, k and v 16x32, three MLP matrices 32x48, two norms of 32; then a norm and 300x32
    weights = 2 * (2 * 1024 + 2 * 512 + 3 * 1536 + 64) + 32 + 9600
    assert flops_per_token(build(SMALL, 64), 64) == 6 * weights + 12 * 2 * 32 * 64
    untied = build(SMALL | {"tie_embeddings": False}, 64)
    assert flops_per_token(untied, 64) == 6 * weights + 12 * 2 * 32 * 64


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = {"learning_rate": 1e-2, "warmup_steps": 4, "min_lr_ratio": 0.1, "steps": 24}
    rates = [learning_rate(step, settings) for step in range(1, 25)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[13] == pytest.approx(0.0055)  # half-way down
    assert rates[-1] == pytest.approx(0.001)
    assert rates[3:] == sorted(rates[3:], reverse=True)
