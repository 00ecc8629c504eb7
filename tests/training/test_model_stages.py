"""Pipeline stages and savings: parts that compose to the whole, activations made again, blocks compiled."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.training.shapes import FAMILIES, LENGTH, VOCABULARY, small
from training.model import (
    NextTokenLoss,
    allocate,
    build,
    checkpoint_activations,
    compile_blocks,
    materialise,
    skeleton,
)
from training.process import JobError

pytestmark = [pytest.mark.torch]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    documents = (torch.arange(LENGTH) > 9).long().expand(2, -1)
    return tokens, torch.rand(2, LENGTH, generator=generator) < 0.8, documents


def learned(objective: NextTokenLoss, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*objective.weights(), strict=True)
    return {"loss": loss.detach()} | dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def part(family: str, index: int, count: int) -> NextTokenLoss:
    stage = NextTokenLoss(skeleton(small(family), LENGTH), index, count)
    allocate(stage, torch.device("cpu"))
    materialise(stage.model, 1)
    return stage


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "mixtral"])  # its experts are not cut into stages
def test_stages_compose_to_the_whole(family: str) -> None:
    whole = NextTokenLoss(build(small(family), LENGTH, seed=1))
    expected = learned(whole, whole(*batch()))
    stages = [part(family, index, 2) for index in range(2)]  # two blocks and one
    hidden: Tensor | None = None
    for stage in stages:
        hidden = stage(*batch(), hidden=hidden)
    assert hidden is not None
    assert torch.equal(hidden, expected.pop("loss"))
    slopes: dict[str, Tensor] = {}
    names, weights = zip(*(pair for stage in stages for pair in stage.weights()), strict=True)
    for name, slope in zip(names, torch.autograd.grad(hidden, weights), strict=True):
        slopes[name] = slopes[name] + slope if name in slopes else slope  # a tied embedding is on both
    assert slopes.keys() == expected.keys()
    for name, slope in slopes.items():
        assert torch.allclose(slope, expected[name], rtol=1e-4, atol=1e-5), name


def test_a_tied_embedding_is_shared_by_the_first_and_the_last_stage() -> None:
    stages = [part("gemma", index, 3) for index in range(3)]
    first, middle, last = (stage.shared for stage in stages)
    assert first is not None
    assert last is not None
    assert middle is None
    assert torch.equal(first, last)
    assert [len(stage.blocks) for stage in stages] == [1, 1, 1]
    assert part("llama", 0, 2).shared is None
    assert NextTokenLoss(skeleton(small("gemma"), LENGTH)).shared is None
    with pytest.raises(JobError, match=r"4 pipeline stages need as many layers and model.layers is 3"):
        part("llama", 0, 4)


def saved_bytes(objective: NextTokenLoss) -> tuple[dict[str, Tensor], int]:
    """Return what is learned, and how much the forward pass keeps for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective(*batch())
    return learned(objective, loss), sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_activations_made_again_change_memory_and_nothing_else(family: str) -> None:
    found = {}
    for mode in (False, "selective", True):
        objective = NextTokenLoss(build(small(family), LENGTH, seed=1))
        checkpoint_activations(objective, mode)
        found[mode] = saved_bytes(objective)
    for mode in ("selective", True):
        for name, value in found[mode][0].items():
            assert torch.equal(value, found[False][0][name]), name
    assert found[True][1] < 0.5 * found[False][1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks there itself
def test_compiled_blocks_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # the machine code would take a minute to make; the capture of the graph is torch.compile's own
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    objective = NextTokenLoss(build(small(), LENGTH, seed=1))
    expected = learned(objective, objective(*batch()))
    checkpoint_activations(objective, True)
    compile_blocks(objective)
    for name, value in learned(objective, objective(*batch())).items():
        assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-5), name


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match=r"train.compile needs a C\+\+ compiler"):
        compile_blocks(NextTokenLoss(skeleton(small(), LENGTH)))
