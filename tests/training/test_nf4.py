"""Weights in 4 bits: the published levels, what they cost and err, training beside them, and an honest export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training import exports
from tests.training.nursery import Nursery, losses, refused, result, spec, write_job
from tests.training.shapes import LENGTH, VOCABULARY, small
from training.export.hf import export
from training.model import (
    NextTokenLoss,
    add_adapters,
    materialise_in_4_bits,
    named_weights,
    round_to_4_bits,
    skeleton,
)
from training.model.nf4 import Nf4, levels, rounded

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""Dettmers et al. 2023, appendix E."""
QLORA: dict[str, Any] = {"lora_rank": 4, "lora_base": "nf4"}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_the_levels_are_the_published_ones() -> None:
    assert levels().tolist() == pytest.approx(PUBLISHED, abs=2e-7)


@pytest.mark.parametrize("shape", [(512, 320), (33, 7)])
def test_every_weight_becomes_the_nearest_level_of_its_block(shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    kept = Nf4(shape)
    kept.keep(weight)
    found = kept.weight()
    assert found.shape == weight.shape
    blocks = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).reshape(-1, 64)
    scales = kept._scale()
    assert ((scales - blocks.abs().amax(1)).abs() / blocks.abs().amax(1)).max() < 0.04
    tables = scales[:, None] * torch.tensor(PUBLISHED)
    least = (blocks[:, :, None] - tables[:, None, :]).abs().amin(2).reshape(-1)[: weight.numel()]
    assert torch.allclose((found - weight).abs().reshape(-1), least, atol=1e-6)


def test_what_it_costs_and_errs() -> None:
    weight = normal(1024, 1024)
    kept = Nf4((1024, 1024))
    kept.keep(weight)
    assert kept.bytes / weight.numel() == pytest.approx(0.5 + (1 + 4 / 256) / 64, rel=1e-4)
    error = float((kept.weight() - weight).norm() / weight.norm())
    even = torch.linspace(-1, 1, 16)
    scales = weight.reshape(-1, 64).abs().amax(1, keepdim=True)
    spaced = even[(weight.reshape(-1, 64, 1) / scales[:, :, None] - even).abs().argmin(2)] * scales
    assert error < 0.095
    assert error < 0.95 * float((spaced - weight.reshape(-1, 64)).norm() / weight.norm())


def test_zeros_stay_and_rounding_twice_is_rounding_once() -> None:
    assert rounded(torch.zeros(3, 64)).abs().max() == 0
    once = rounded(normal(64, 64))
    assert torch.allclose(rounded(once), once, atol=0.02 * float(once.abs().max()))


@pytest.mark.parametrize(("family", "targets"), [("llama", ("q_proj", "down_proj")), ("gpt2", ("c_attn", "c_fc"))])
def test_it_computes_and_learns_as_the_rounded_weights_do(family: str, targets: tuple[str, ...]) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))

    def learned(four_bits: bool) -> tuple[float, dict[str, torch.Tensor], int]:
        network = skeleton(small(family), LENGTH)
        add_adapters(network, 4, 8.0, targets)
        objective = NextTokenLoss(network)
        if four_bits:
            materialise_in_4_bits(objective, network, 1, None, torch.device("cpu"))
        else:
            from training.model import allocate, materialise

            allocate(objective, torch.device("cpu"))
            materialise(network, 1)
            round_to_4_bits(network)
        for name, weight in named_weights(network):
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))
        loss = objective(tokens)
        loss.backward()
        sizes = sum(weight.numel() for weight in network.parameters())
        return loss.item(), {n: w.grad for n, w in named_weights(network) if w.grad is not None}, sizes

    loss, slopes, held = learned(True)
    plain, others, all_held = learned(False)
    assert loss == pytest.approx(plain, rel=1e-6)
    assert slopes.keys() == others.keys()
    assert all(torch.allclose(slopes[name], others[name], atol=1e-5, rtol=1e-4) for name in slopes)
    assert held < all_held


def test_two_ranks_learn_what_one_does_and_a_killed_run_goes_on(
    nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    def run(name: str, ranks: int, micro: int, **train: Any) -> Path:
        job = write_job(tmp_path / name, spec("ddp", micro, **(QLORA | train)), dataset=dataset)
        nursery.run(job, ranks)
        codes, ran = nursery.run(job, ranks)
        assert set(codes) == {0}, ran.log.read_text()
        return tmp_path / name / "out"

    one, two, cut = run("one", 1, 8), run("two", 2, 4), run("cut", 2, 4, rehearse_failure_at=3)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(cut) == losses(two)
    assert result(cut)["resumed_from"] == 2
    full = write_job(tmp_path / "cut", spec("ddp", 4, lora_rank=4, steps=8), dataset=dataset)
    (tmp_path / "cut/out/result.json").unlink()
    assert "was trained with the adapters" in refused(nursery, full, 2)


def test_what_is_not_done_in_4_bits_is_told_in_one_sentence(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    def told(name: str, strategy: str, **train: Any) -> str:
        asked = spec("ddp", 4, **(QLORA | train))
        asked["parallel"]["strategy"] = strategy  # past the recipe's own check
        return refused(nursery, write_job(tmp_path / name, asked, dataset=dataset), 2)

    assert "set parallel.strategy to ddp, not fsdp2" in told("fsdp2", "fsdp2")
    assert "set parallel.strategy to ddp, not zero3" in told("zero3", "zero3")
    assert "are not compiled" in told("compile", "ddp", compile=True)


@pytest.mark.parametrize("merge", [True, False])
def test_the_export_is_what_was_trained_and_not_the_unrounded_base(merge: bool, tmp_path: Path) -> None:
    corpus = exports.write_dataset(tmp_path / "corpus")
    first = exports.recipe()
    exports.write_checkpoint(tmp_path / "base-run", first, exports.network(first))
    export(exports.job_of(first, tmp_path / "base", dataset=corpus, model=tmp_path / "base-run"))
    base = tmp_path / "base/hf"
    told = exports.recipe(model={"pretrained": str(base)}, train=QLORA, export={"merge_lora": merge})
    exports.write_checkpoint(tmp_path / "run", told, exports.network(told, base))
    manifest = tmp_path / "run/checkpoints/step-00000030/manifest.json"
    manifest.write_text(manifest.read_text().replace('"lora_rank"', '"lora_base": "nf4", "lora_rank"'))
    job = exports.job_of(told, tmp_path / "out", dataset=corpus, model=tmp_path / "run")
    export(job)
    assert exports.result(job.output)["parity_max_abs_diff"] < 1e-5
    before, after = load_file(base / "model.safetensors"), load_file(job.output / "hf/model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert torch.equal(after[name], rounded(before[name])) is not merge
    assert (job.output / "hf/adapter/adapter_config.json").is_file() is not merge
