"""Checkpoints: whole or absent, never trusted unverified, readable whatever wrote them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.nursery import Nursery, losses, result, spec, write_job
from training import checkpoint
from training.checkpoint import Identity
from training.model import build, weights_sha256
from training.process import JobError

pytestmark = [pytest.mark.torch]

Trained = Callable[[str], Path]


@pytest.fixture
def output(trained: Trained, tmp_path: Path) -> Path:
    """A run's output with checkpoints of steps 4 and 6, to be damaged."""
    shutil.copytree(trained("ddp"), tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_only_the_newest_are_kept(output: Path) -> None:
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert checkpoint.latest(output) == output / "checkpoints/step-00000006"
    assert checkpoint.read(output / "checkpoints/step-00000006") == (6, Identity(1, "ddp", 2))


@pytest.mark.parametrize("harm", ["bit", "cut", "gone", "manifest", "unfinished"])
def test_a_damaged_checkpoint_is_passed_over(output: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    newest = output / "checkpoints/step-00000006"
    shard = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    match harm:
        case "bit":
            flip(shard)
        case "cut":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "gone":
            shard.unlink()
        case "manifest":
            (newest / "manifest.json").write_text('{"files": {')
        case "unfinished":
            (newest / "manifest.json").unlink()
    assert checkpoint.latest(output) == output / "checkpoints/step-00000004"
    said = json.loads(capsys.readouterr().out.removeprefix("@castra "))
    assert (said["event"], said["checkpoint"]) == ("checkpoint-skipped", "step-00000006")


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None


def test_a_run_resumes_before_the_damage_and_replaces_it(
    output: Path, trained: Trained, nursery: Nursery, dataset: Path
) -> None:
    (output / "result.json").unlink()
    flip(output / "checkpoints/step-00000006/.metadata")
    (output / "checkpoints/.step-00000005.fresh").mkdir()
    with (output / "progress.jsonl").open("a") as torn:
        torn.write('{"step": 7, "lo')
    codes, run = nursery.run(write_job(output.parent, spec("ddp", micro=2), dataset=dataset), 2)
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


def test_what_may_resume_what() -> None:
    assert Identity(1, "ddp", 2).can_resume(Identity(1, "fsdp2", 8)) is None
    assert Identity(1, "zero3", 2).can_resume(Identity(1, "zero3", 2)) is None
    assert "seed 2, not 1" in str(Identity(1, "ddp", 2).can_resume(Identity(2, "ddp", 2)))
    assert "only with the same strategy and ranks" in str(Identity(1, "ddp", 2).can_resume(Identity(1, "zero1", 2)))


def test_a_full_disk_is_told_before_the_run(tmp_path: Path) -> None:
    checkpoint.check_room(1000, tmp_path)
    with pytest.raises(JobError, match=r"needs 1000000000000\.0 MB and the disk of .* has .* MB free"):
        checkpoint.check_room(10**18, tmp_path)
