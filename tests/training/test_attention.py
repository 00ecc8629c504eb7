"""Attention: documents apart, sequences cut among ranks, windows and caps, each the same as without."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from tests.training.peers import together
from tests.training.shapes import FAMILIES, LENGTH, VOCABULARY, small
from training.model import NextTokenLoss, attention, build

pytestmark = [pytest.mark.torch]

CUTS = [(0, 5, 6, 17, LENGTH), (0, 12, LENGTH)]
"""Where the documents of each row begin and the last ends."""


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, a mask of targets, and documents of two rows."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    documents = torch.zeros(2, LENGTH, dtype=torch.int64)
    for row, cuts in enumerate(CUTS):
        for number, (start, stop) in enumerate(pairwise(cuts)):
            documents[row, start:stop] = number
    return tokens, torch.rand(2, LENGTH, generator=generator) < 0.8, documents


def learned(objective: NextTokenLoss, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss and every gradient, by name."""
    names, weights = zip(*objective.weights(), strict=True)
    return {"loss": loss.detach()} | dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).norm() <= 1e-5 * theirs[name].norm() + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_apart_are_learned_as_if_alone(family: str) -> None:
    objective = NextTokenLoss(build(small(family), LENGTH, seed=1))
    objective.model.config.router_aux_loss_coef = 0.0  # experts are balanced over a sequence, not a document
    tokens, mask, documents = batch()
    together_ = learned(objective, objective(tokens, mask, documents))
    alone = [
        objective(tokens[row : row + 1, start : stop + 1], mask[row : row + 1, start:stop])
        for row, cuts in enumerate(CUTS)
        for start, stop in pairwise(cuts)
    ]
    assert_equal(together_, learned(objective, torch.stack(alone).sum()))


def test_many_capped_scores_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 150  # 64 + 64 + 22 queries
    objective = NextTokenLoss(build(small("gemma2"), length, seed=1))
    tokens = torch.randint(0, VOCABULARY, (1, length + 1))
    at_once = learned(objective, objective(tokens))
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1)
    assert_equal(learned(objective, objective(tokens)), at_once)


def part_of_sequences(rank: int, family: str, apart: bool) -> dict[str, Tensor]:
    objective = NextTokenLoss(build(small(family), LENGTH, seed=1))
    objective.cp = distributed.group.WORLD
    tokens, mask, documents = batch()
    return learned(objective, objective(tokens, mask, documents if apart else None))


@pytest.mark.parametrize(
    ("ranks", "family", "apart"), [(2, "llama", False), (2, "gemma2", True), (3, "mistral", False), (2, "gpt2", True)]
)
def test_sequences_cut_among_ranks_are_learned_as_by_one(ranks: int, family: str, apart: bool, tmp_path: Path) -> None:
    objective = NextTokenLoss(build(small(family), LENGTH, seed=1))
    tokens, mask, documents = batch()
    whole = learned(objective, objective(tokens, mask, documents if apart else None))
    parts = together(ranks, part_of_sequences, tmp_path, family, apart)
    assert_equal({name: sum((part[name] for part in parts), torch.zeros(())) for name in whole}, whole)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_cache_generates_what_the_whole_sequence_would(family: str) -> None:
    network = build(small(family), LENGTH, seed=1).eval()
    tokens = batch()[0][:, :12]
    with torch.no_grad():
        whole = network(tokens).logits
        first = network(tokens[:, :9], use_cache=True)
        rest = network(tokens[:, 9:], past_key_values=first.past_key_values).logits
    assert torch.allclose(rest, whole[:, 9:], atol=1e-5)


def test_a_padded_prompt_does_not_see_its_padding() -> None:
    network = build(small(), LENGTH, seed=1).eval()
    tokens = batch()[0][:1, :8]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), tokens], 1)
    seen = (torch.arange(11) >= 3).long().unsqueeze(0)
    places = (torch.arange(11) - 3).clamp(min=0).unsqueeze(0)
    with torch.no_grad():
        alone = network(tokens).logits
        beside = network(padded, attention_mask=seen, position_ids=places).logits[:, 3:]
    assert torch.allclose(alone, beside, atol=1e-5)
