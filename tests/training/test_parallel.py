"""The layouts: whatever the states are spread over, the same curve; whatever wrote a checkpoint, any other reads it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.nursery import Nursery, losses, refused, result, spec, write_dataset, write_job

pytestmark = [pytest.mark.torch]

Trained = Callable[[str], Path]
DEEP = {"layers": 4}
LAYOUTS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "fsdp2 4": (4, "fsdp2", 2, {}),
    "hsdp 2x2": (4, "fsdp2", 2, {"shard": 2}),
    "tp 2": (2, "fsdp2", 4, {"tp": 2}),
    "cp 2": (2, "fsdp2", 4, {"cp": 2}),
    "pp 2": (2, "fsdp2", 2, {"pp": 2}),
    "pp 2, interleaved": (2, "fsdp2", 2, {"pp": 2, "vpp": 2}),
    "tp 2 x cp 2": (4, "fsdp2", 2, {"tp": 2, "cp": 2}),
    "tp 2 x pp 2 x dp 2": (8, "fsdp2", 2, {"tp": 2, "pp": 2}),
    "zero3, offloaded": (2, "zero3", 2, {"offload": "parameters"}),
}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset some of whose tokens are no targets, and whose documents are apart."""
    return write_dataset(tmp_path_factory.mktemp("masked") / "set", marked=True)


@pytest.fixture(scope="module")
def alone(nursery: Nursery, masked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one process, with a loss on held-out data every second step."""
    folder = tmp_path_factory.mktemp("alone")
    codes, run = nursery.run(write_job(folder, plan("ddp", 8), dataset=masked))
    assert codes == [0], run.log.read_text()
    return folder / "out"


def plan(strategy: str, micro: int, parallel: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    return spec(strategy, micro, DEEP, parallel, eval_every=2, eval_sequences=7, **train)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_what_one_process_learns(
    layout: str, alone: Path, masked: Path, nursery: Nursery, tmp_path: Path
) -> None:
    ranks, strategy, micro, parallel = LAYOUTS[layout]
    codes, run = nursery.run(write_job(tmp_path, plan(strategy, micro, parallel), dataset=masked), ranks)
    assert set(codes) == {0}, run.log.read_text()
    for name in ("loss", "grad_norm", "eval_loss"):
        assert losses(tmp_path / "out", name) == pytest.approx(losses(alone, name), rel=1e-5), name


@pytest.mark.parametrize(("family", "layout"), [("gemma2", "tp 2"), ("gpt2", "pp 2")])
def test_other_families_too(family: str, layout: str, nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    def curve(name: str, ranks: int, strategy: str, micro: int, parallel: dict[str, Any]) -> list[float]:
        job = write_job(tmp_path / name, spec(strategy, micro, DEEP | {"family": family}, parallel), dataset=dataset)
        codes, run = nursery.run(job, ranks)
        assert set(codes) == {0}, run.log.read_text()
        return losses(tmp_path / name / "out")

    assert curve("spread", *LAYOUTS[layout]) == pytest.approx(curve("alone", 1, "ddp", 8, {}), rel=1e-5)


def test_a_run_goes_from_layout_to_layout(alone: Path, masked: Path, nursery: Nursery, tmp_path: Path) -> None:
    """Tensor parallel on 4 ranks, ZeRO-3, ZeRO-2, pipeline stages, one process: one curve."""
    legs = [(4, "fsdp2", 2, {"tp": 2}), (2, "zero3", 2, {}), (2, "zero2", 2, {}), (2, "fsdp2", 2, {"pp": 2})]
    for leg, (ranks, strategy, micro, parallel) in enumerate([*legs, (1, "ddp", 2, {})], 1):
        steps = plan(strategy, micro, parallel)
        steps["train"]["checkpoint_every"] = 1
        if leg <= len(legs):
            steps["train"]["rehearse_failure_at"] = leg + 1
            (tmp_path / "out/rehearsed-failure.json").unlink(missing_ok=True)
        _, run = nursery.run(write_job(tmp_path, steps, dataset=masked), ranks)
        assert leg == 1 or run.say("resumed")[0]["step"] == leg - 1, run.log.read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-5)
    assert result(tmp_path / "out")["resumed_from"] == 4


@pytest.mark.parametrize("layout", ["tp 2", "zero3, offloaded"])
def test_a_killed_layout_resumes_to_the_same_bits(layout: str, nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    ranks, strategy, micro, parallel = LAYOUTS[layout]
    whole = write_job(tmp_path / "whole", spec(strategy, micro, DEEP, parallel), dataset=dataset)
    assert set(nursery.run(whole, ranks)[0]) == {0}
    cut = write_job(tmp_path / "cut", spec(strategy, micro, DEEP, parallel, rehearse_failure_at=5), dataset=dataset)
    assert set(nursery.run(cut, ranks)[0]) == {-9}
    assert set(nursery.run(cut, ranks)[0]) == {0}
    assert losses(tmp_path / "cut/out") == losses(tmp_path / "whole/out")
    assert len({result(tmp_path / name / "out")["weights_sha256"] for name in ("cut", "whole")}) == 1


@pytest.mark.parametrize(("ranks", "strategy", "parallel"), [(2, "fsdp2", {"pp": 2}), (2, "zero2", {})])
def test_adapters_alone_are_trained_and_saved(
    ranks: int, strategy: str, parallel: dict[str, Any], nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    for name, count, how, micro, layout in (("one", 1, "ddp", 8, {}), ("many", ranks, strategy, 2, parallel)):
        job = write_job(tmp_path / name, spec(how, micro, DEEP, layout, lora_rank=4), dataset=dataset)
        codes, run = nursery.run(job, count)
        assert set(codes) == {0}, run.log.read_text()
    one, many = (tmp_path / name / "out" for name in ("one", "many"))
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)
    manifest = (many / result(many)["checkpoint"] / "manifest.json").read_text()
    assert "layers.3.self_attn.q_proj.lora_B.weight" in manifest
    assert "embed_tokens" not in manifest


def test_fp16_finds_its_loss_scale_and_goes_on_with_it(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    for name, precision in (("low", "fp16"), ("high", "fp32")):
        job = write_job(tmp_path / name, spec("fsdp2", 2, DEEP, precision=precision, steps=16), dataset=dataset)
        codes, run = nursery.run(job, 2)
        assert set(codes) == {0}, run.log.read_text()
    low, high = tmp_path / "low/out", tmp_path / "high/out"
    skipped = losses(low, "skipped")
    assert 0 < len(skipped) < 8  # the first scale is too large, as intended
    assert losses(low)[0] == pytest.approx(losses(high)[0], rel=1e-3)
    assert losses(low)[-1] < losses(low)[0] - 1
    shutil.rmtree(low / "checkpoints/step-00000016")
    (low / "result.json").unlink()
    codes, run = nursery.run(tmp_path / "low/job.json", 2)
    assert set(codes) == {0}, run.log.read_text()
    assert losses(low, "skipped") == skipped


def test_what_cannot_be_laid_out_is_told_in_one_sentence(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    def told(name: str, ranks: int, *arguments: Any, **train: Any) -> str:
        return refused(nursery, write_job(tmp_path / name, spec(*arguments, **train), dataset=dataset), ranks)

    assert "a gpt2 model has no tensor parallel plan" in told("gpt2", 2, "fsdp2", 4, {"family": "gpt2"}, {"tp": 2})
    assert "3 ranks are no multiple of parallel.pp x cp x tp" in told("ranks", 3, "fsdp2", 4, {}, {"tp": 2})
    assert "does not divide model.kv_heads (1)" in told("heads", 2, "fsdp2", 4, {"kv_heads": 1}, {"tp": 2})
    assert "needs as many micro-batches" in told("micro", 2, "fsdp2", 8, {}, {"pp": 2})
    assert "model.layers (2) is below" in told("layers", 2, "fsdp2", 2, {}, {"pp": 2, "vpp": 2})
    assert "adapters are not cut up" in told("lora", 2, "fsdp2", 4, {}, {"tp": 2}, lora_rank=2)
    assert "compiled blocks cannot be cut up" in told("compile", 2, "fsdp2", 4, {}, {"tp": 2}, compile=True)
    assert "(2) does not divide the 3 data parallel" in told("shard", 3, "fsdp2", 1, {}, {"shard": 2})
