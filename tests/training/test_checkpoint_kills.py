"""Saving is killed at any moment: no torn checkpoint is ever trusted, and the newest complete one resumes."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.crew import Crew
from training import checkpoint
from training.checkpoint import Identity, Piece, Reader, Saver
from training.job import say
from training.ranks import World

pytestmark = [pytest.mark.torch]

SHAPE = (64, 96)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Ranks that start in milliseconds."""
    crew = Crew()
    yield crew
    crew.close()


def shard(world: World, values: list[torch.Tensor]) -> list[Piece]:
    """This rank's rows of some tensors."""
    rows = SHAPE[0] // world.size
    return [Piece(f"w{index}", SHAPE, (world.rank * rows, 0), held) for index, held in enumerate(values)]


def save_for_ever(world: World, folder: Path, *, rank_that_waits: int = -1) -> None:
    """Go on from the newest checkpoint and save every step; all values of a checkpoint are its step."""
    values = [torch.zeros(SHAPE[0] // world.size, SHAPE[1]) for _ in range(4)]
    found = checkpoint.latest(folder, world)
    step = 0
    if found is not None:
        step = checkpoint.read(found).step
        checkpoint.load(found, shard(world, values))
        assert all((held == step).all() for held in values), f"{found} is torn"
    if world.rank == 0:
        say("begin", step=step)
    saver = Saver(folder, Identity(1, "any", world.size, {}), world, keep=2)
    while True:
        step += 1
        for held in values:
            held.add_(1)
        saver.save(step, shard(world, values), {"step": step})


def content(folder: Path) -> int:
    """The step of a complete checkpoint, all values of which must be that step."""
    with Reader(folder) as reader:
        for name in reader.names():
            assert np.unique(reader.read(name)).tolist() == [reader.manifest.step]
        assert reader.manifest.extra == {"step": reader.manifest.step}
        return reader.manifest.step


def test_a_hundred_kills_while_saving(crew: Crew, tmp_path: Path) -> None:
    dice, out, reached, fresh = random.Random(5), tmp_path / "out", 0, 0
    for attempt in range(100):
        ranks = crew.start("tests.training.test_checkpoint_kills:save_for_ever", 2 if attempt % 4 == 0 else 1, out)
        begun = ranks.hear("begin")[0]["step"]
        assert begun == reached
        ranks.hear("checkpoint", dice.randrange(3))
        time.sleep(dice.random() * 0.01)
        ranks.kill()
        assert set(ranks.wait()) == {-signal.SIGKILL}, ranks.log.read_text()
        told = [fact["step"] for fact in ranks.say("checkpoint")]
        newest = checkpoint.latest(out)
        reached = content(newest) if newest else 0
        assert reached >= max(told, default=begun)
        fresh += bool(list((out / "checkpoints").glob(".step-*")))
    assert reached >= 50
    assert fresh >= 10  # so many kills, at least, came in the middle of a save
