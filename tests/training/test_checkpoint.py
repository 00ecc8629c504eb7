"""Checkpoints of real runs: whatever strategy wrote them, they resume and their weights go into a plain model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.nursery import Nursery, losses, result, spec, write_job
from training import checkpoint
from training.model import build, weights_sha256

pytestmark = [pytest.mark.torch]

Trained = Callable[[str], Path]


def test_only_the_newest_are_kept(trained: Trained) -> None:
    output = trained("ddp")
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    newest = checkpoint.latest(output)
    assert newest == checkpoint.path_of(output, 6)
    told = checkpoint.read(newest)
    assert (told.step, told.identity.seed, told.identity.world_size) == (6, 1, 2)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None


def test_a_run_resumes_before_the_damage_and_replaces_it(
    trained: Trained, tmp_path: Path, nursery: Nursery, dataset: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(trained("ddp"), output)
    (output / "result.json").unlink()
    part = min((output / "checkpoints/step-00000006").glob("rank-*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (output / "checkpoints/.step-00000005.fresh").mkdir()
    with (output / "progress.jsonl").open("a") as torn:
        torn.write('{"step": 7, "lo')
    codes, run = nursery.run(write_job(tmp_path, spec("ddp", micro=2), dataset=dataset), 2)
    assert codes == [0, 0], run.log.read_text()
    assert [fact["checkpoint"] for fact in run.say("checkpoint-skipped")] == ["step-00000006"]
    assert run.say("resumed")[0]["step"] == 4
    assert losses(output) == losses(trained("ddp"))
    assert result(output)["weights_sha256"] == result(trained("ddp"))["weights_sha256"]
    assert checkpoint.latest(output) == output / "checkpoints/step-00000006"
    assert len(list((output / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_the_weights_of_any_strategy_go_into_a_plain_model(strategy: str, trained: Trained) -> None:
    plan = spec()["model"]
    model, reference = build(plan, 32), build(plan, 32)
    newest = checkpoint.latest(trained(strategy))
    assert newest is not None
    checkpoint.load_weights(newest, model)
    assert weights_sha256(model) == result(trained(strategy))["weights_sha256"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    single = checkpoint.latest(trained("single"))
    assert single is not None
    checkpoint.load_weights(single, reference)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
