"""The loss: plain cross entropy, whatever is sliced, capped, masked or cut among ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional

from tests.training.peers import together
from tests.training.shapes import LENGTH, VOCABULARY, small
from training import model as models
from training.model import NextTokenLoss, build, summed_cross_entropy

pytestmark = [pytest.mark.torch]

ROWS, WIDTH = 150, 16


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 150 rows cut into 64 + 64 + 22."""
    monkeypatch.setitem(models.LOGITS_AT_ONCE, "cpu", 1)


def example(kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(kind).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(kind).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits, targets, reduction="sum")


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


def near(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool((mine - theirs).norm() <= tolerance * theirs.norm())


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_the_sliced_loss_is_the_cross_entropy(kind: torch.dtype, tolerance: float, softcap: float | None) -> None:
    hidden, weight, targets = example(kind)
    ours, theirs = summed_cross_entropy(hidden, weight, targets, softcap), plain(hidden, weight, targets, softcap)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    for mine, other in zip(gradients(3 * ours, hidden, weight), gradients(3 * theirs, hidden, weight), strict=True):
        assert mine.dtype == kind
        assert near(mine, other, tolerance)


def test_a_small_gradient_is_not_lost_before_the_loss_scale_of_fp16() -> None:
    hidden, weight, targets = example(torch.float16)
    with torch.no_grad():
        hidden.mul_(1e-4)
    scale = 2.0**16
    exact = gradients(plain(hidden, weight, targets, None), weight)[0]
    (mine,) = gradients(scale * summed_cross_entropy(hidden, weight, targets), weight)
    assert near(mine.double() / scale, exact.double(), 5e-2)


def test_autocast_multiplies_in_16_bits_and_gives_fp32_gradients() -> None:
    hidden, weight, targets = example()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_cross_entropy(hidden, weight, targets)
    theirs = plain(hidden, weight, targets, None)
    for mine, other in zip(gradients(loss, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        assert mine.dtype == torch.float32
        assert near(mine, other, 2e-2)


def test_no_gradient_is_made_that_nobody_wants() -> None:
    hidden, weight, targets = example()
    frozen = summed_cross_entropy(hidden, weight.detach(), targets)
    assert near(gradients(frozen, hidden)[0], gradients(plain(hidden, weight, targets, None), hidden)[0], 2e-6)
    with torch.no_grad():
        assert not summed_cross_entropy(hidden, weight, targets).requires_grad


def cut_vocabulary(rank: int, softcap: float | None, kind: torch.dtype) -> tuple[Tensor, ...]:
    models.LOGITS_AT_ONCE["cpu"] = 1
    hidden, weight, targets = example(kind)
    rows = weight.detach().chunk(2)[rank].requires_grad_()  # 151 and 150
    everyone = distributed.new_group()
    assert everyone is not None
    loss = summed_cross_entropy(hidden, rows, targets, softcap, (everyone, VOCABULARY))
    return (loss.detach(), *gradients(3 * loss, hidden, rows))


@pytest.mark.parametrize(
    ("softcap", "kind", "tolerance"),
    [(None, torch.float32, 2e-6), (3.0, torch.float32, 2e-6), (None, torch.bfloat16, 2e-2)],
)
def test_a_vocabulary_cut_among_ranks_gives_the_same(
    softcap: float | None, kind: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    hidden, weight, targets = example(kind)
    whole = plain(hidden, weight, targets, softcap)
    by_hidden, by_weight = gradients(3 * whole, hidden, weight)
    ranks: list[Any] = together(2, cut_vocabulary, tmp_path, softcap, kind)
    for rank, (loss, mine, rows) in enumerate(ranks):
        assert loss.item() == pytest.approx(whole.item(), rel=tolerance)
        assert near(mine, by_hidden, tolerance)
        assert near(rows, by_weight.chunk(2)[rank], tolerance)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_masked_targets_are_not_learned(family: str) -> None:
    objective = NextTokenLoss(build(small(family), LENGTH, seed=1))
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH + 1))
    mask = torch.rand(3, LENGTH) < 0.5
    logits = objective.model(tokens[:, :-1]).logits
    theirs = functional.cross_entropy(logits[mask], tokens[:, 1:][mask], reduction="sum")
    assert objective(tokens, mask).item() == pytest.approx(theirs.item(), rel=1e-5)
    assert objective(tokens, torch.zeros_like(mask)).item() == 0
