"""Saving: what is kept, what a failure says, and that no failure harms what was there."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from tests.training.crew import Crew
from training import checkpoint
from training.checkpoint import Identity, Piece, Reader, Saver, places
from training.job import say
from training.process import JobError
from training.ranks import World

pytestmark = [pytest.mark.torch]

WORK = "tests.training.test_checkpoint_saving:"
WHO = Identity(1, "any", 1, {"hidden_size": 32, "layers": 2})


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Ranks that start in milliseconds."""
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def world() -> Iterator[World]:
    """One rank: this process."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield World(0, 1, 0, 0, 1, torch.device("cpu"))
    distributed.destroy_process_group()


def one(value: float) -> list[Piece]:
    """One tensor, all of the same value."""
    return [Piece("w", (8, 4), (0, 0), torch.full((8, 4), value))]


def steps(output: Path) -> list[int]:
    """The checkpoints that are there, whose values must be their steps."""
    for folder in places.found(output):
        with Reader(folder) as reader:
            assert np.unique(reader.read("w")).tolist() == [reader.manifest.step]
    return [checkpoint.read(folder).step for folder in places.found(output)]


def test_the_newest_and_the_best_are_kept(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = Saver(tmp_path, WHO, world, keep=2)
    kept = []
    for step in range(1, 8):
        saver.save(step, one(step), {"scale": step / 2}, best=step in (2, 5))
        saver.wait()
        kept.append(steps(tmp_path))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    told = checkpoint.read(checkpoint.path_of(tmp_path, 5))
    assert (told.step, told.identity, told.extra, told.best) == (5, WHO, {"scale": 2.5}, True)
    said = [json.loads(line.removeprefix("@castra ")) for line in capsys.readouterr().out.splitlines()]
    assert [(fact["event"], fact["step"]) for fact in said] == [("checkpoint", step) for step in range(1, 8)]
    assert len(saver.seconds) == 7
    saver.close()


def test_what_changes_after_the_call_is_not_saved(world: World, tmp_path: Path) -> None:
    saver, pieces = Saver(tmp_path, WHO, world, keep=5), one(1)
    saver.prepare(pieces)
    for step in range(1, 6):
        saver.save(step, pieces, {})
        pieces[0].local.fill_(step + 1)
    saver.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_step_is_saved_once(world: World, tmp_path: Path) -> None:
    saver = Saver(tmp_path, WHO, world, keep=2)
    for value in (1.0, 7.0):
        saver.save(1, one(value), {}, tidy=value == 1)
    saver.close()
    assert steps(tmp_path) == [1]


def test_who_does_not_hold_what_is_told_saves_nothing(world: World, tmp_path: Path) -> None:
    def piece(rows: int, name: str = "w") -> list[Piece]:
        return [Piece(name, (8, 4), (0, 0), torch.zeros(rows, 4))]

    with pytest.raises(JobError, match=r"the ranks own 20 values of w, which has 32"):
        Saver(tmp_path, WHO, world, keep=2).save(1, piece(5), {})
    saver = Saver(tmp_path, WHO, world, keep=2)
    saver.save(1, piece(8), {})
    saver.save(2, [], {})
    with pytest.raises(JobError, match=r"w@0,0 was saved at the first checkpoint of this run and is missing now"):
        saver.wait()
    saver.save(2, piece(8, "v"), {})
    with pytest.raises(JobError, match=r"v@0,0 of this step is not as it was at the first checkpoint"):
        saver.wait()
    saver.save(3, piece(8), {"loss": float("nan")})
    with pytest.raises(JobError, match=r"the checkpoint of step 3 cannot be written to .* on .*: ValueError"):
        saver.wait()
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("harm", ["bit", "cut", "gone", "mixed", "manifest", "unfinished", "old"])
def test_a_damaged_one_is_passed_over(
    world: World, tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Saver(tmp_path, WHO, world, keep=2)
    for step in (1, 2):
        saver.save(step, one(step), {})
    saver.close()
    first, newest = places.found(tmp_path)
    (part,) = newest.glob("rank-*")
    content = bytearray(part.read_bytes())
    match harm:
        case "bit":
            content[-9] ^= 1
            part.write_bytes(content)
        case "cut":
            part.write_bytes(content[:-1])
        case "gone":
            part.unlink()
        case "mixed":
            shutil.copy(first / part.name, part)
        case "manifest":
            (newest / "manifest.json").write_text('{"files": {')
        case "unfinished":
            (newest / "manifest.json").unlink()
        case "old":
            (newest / "manifest.json").write_text('{"step": 2, "files": {}}')
    capsys.readouterr()
    assert checkpoint.latest(tmp_path) == checkpoint.latest(tmp_path, world) == first
    said = [json.loads(line.removeprefix("@castra ")) for line in capsys.readouterr().out.splitlines()]
    assert [(fact["event"], fact["checkpoint"]) for fact in said] == [("checkpoint-skipped", newest.name)] * 2
    again = Saver(tmp_path, WHO, world, keep=2)
    again.save(2, one(2), {})
    again.close()
    assert checkpoint.latest(tmp_path) == newest
    assert len(list(newest.parent.iterdir())) == 2


def test_what_may_resume_what() -> None:
    assert WHO.can_resume(Identity(1, "fsdp2 (tp 2)", 64, WHO.model | {"new": 1, "pretrained": "x"})) is None
    assert WHO.can_resume(Identity(2, "any", 1, WHO.model)) == "it was made with train.seed 2, not 1"
    other = Identity(1, "any", 1, {"hidden_size": 64, "layers": 3})
    assert (
        WHO.can_resume(other) == "it is of another model (its hidden_size 64, layers 3; here hidden_size 32, layers 2)"
    )
    lora = Identity(1, "any", 1, WHO.model, {"rank": 8})
    assert WHO.can_resume(lora) == "it was trained with the adapters {'rank': 8}, and this run has no adapters"


def test_no_room_is_told_beforehand(tmp_path: Path) -> None:
    checkpoint.check_room(1000, tmp_path)
    with pytest.raises(JobError, match=r"needs 1000000000000\.0 MB and the disk of .* has .* MB free"):
        checkpoint.check_room(10**18, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounting a disk needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_the_disk(world: World, folder: Path, *, told: bool) -> None:
    """Save 2 MB twice; the second time there is no room, which is seen beforehand only if it is `told`."""
    if not told:
        places.check_room = lambda *_: None
    rows = 256 // world.size
    held = torch.zeros(rows, 1024)  # 1 MB in all
    saver = Saver(folder, WHO, world, keep=2)
    for step in range(1, 5):
        held.fill_(step)
        saver.save(step, [Piece("w", (256, 1024), (rows * world.rank, 0), held)], {})
    saver.close()


@pytest.mark.parametrize("told", [True, False])
def test_a_full_disk_is_one_sentence_on_all_ranks(crew: Crew, small_disk: Path, told: bool) -> None:
    codes, ranks = crew.run(WORK + "fill_the_disk", 2, small_disk, told=told)
    assert codes == [2, 2], ranks.log.read_text()
    why = (
        r"a checkpoint needs 1\.0 MB and the disk" if told else r"cannot be written to .* No space left on device; free"
    )
    for fact in ranks.say("error"):
        assert re.search(why, fact["message"])
    assert steps(small_disk) == [1, 2]
    assert checkpoint.latest(small_disk) == checkpoint.path_of(small_disk, 2)
    assert list((small_disk / "checkpoints").glob(".*")) == []


def lose_the_right(world: World, folder: Path) -> None:
    """Save, then become somebody who may not write there, and save again."""
    saver = Saver(folder, WHO, world, keep=2)
    saver.save(1, one(1) if world.rank == 0 else [], {})
    saver.wait()
    world.barrier()
    os.seteuid(65534)
    saver.save(2, one(2) if world.rank == 0 else [], {})
    try:
        saver.wait()
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
def test_a_closed_folder_is_one_sentence_on_all_ranks(crew: Crew, tmp_path: Path) -> None:
    codes, ranks = crew.run(WORK + "lose_the_right", 2, tmp_path)
    assert codes == [2, 2], ranks.log.read_text()
    (first, second) = ranks.say("error")
    assert first["message"] == second["message"]
    assert "the checkpoint of step 2 cannot be written to" in first["message"]
    assert first["message"].endswith(
        f"{os.strerror(errno.EACCES)}; make the folder writable; the checkpoints before it are kept"
    )
    assert steps(tmp_path) == [1]


def lose_a_rank(world: World, folder: Path, *, after_s: float) -> None:
    """Save 64 MB twice; during the second time, rank 1 is killed."""
    rows = 4096 // world.size
    held = torch.ones(rows, 4096)
    saver = Saver(folder, WHO, world, keep=2)
    for step in (1, 2):
        held.fill_(step)
        saver.save(step, [Piece("w", (4096, 4096), (rows * world.rank, 0), held)], {})
        if step == 1:
            saver.wait()
    if world.rank == 1:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)
    saver.close()
    say("saved")


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_a_rank_that_dies_while_writing_costs_that_checkpoint_only(crew: Crew, tmp_path: Path, after_s: float) -> None:
    codes, ranks = crew.run(WORK + "lose_a_rank", 2, tmp_path, after_s=after_s)
    assert codes[1] == -signal.SIGKILL
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert steps(tmp_path) == ([1, 2] if ranks.say("saved") else [1])


def save_apart(world: World, folder: Path) -> None:
    """Two nodes with a folder each save rows, and replicas that rank 0 owns; rank 0 is sent all of it."""
    output = folder / f"node{world.node}"
    rows = torch.full((4, 4), float(world.rank))
    pieces = [
        Piece("rows", (4 * world.size, 4), (4 * world.rank, 0), rows),
        Piece("w", (2,), (0,), torch.full((2,), 3.0), owner=world.rank == 0),
    ]
    saver = Saver(output, WHO, world, keep=1)
    for step in (2, 3):
        saver.save(step, pieces, {})
    saver.close()
    found = checkpoint.path_of(output, 3)
    rows.zero_()
    checkpoint.load(found, [*pieces[:1]])
    assert (rows == world.rank).all()
    whole = checkpoint.collect(found, world)
    if world.rank == 0:
        assert whole != found
        with Reader(whole) as reader:
            assert reader.read("rows")[:, 0].tolist() == [rank for rank in range(world.size) for _ in range(4)]
        shutil.rmtree(whole)


def test_nodes_that_share_no_folder_keep_their_parts(crew: Crew, tmp_path: Path) -> None:
    env = {"CASTRA_PRIVATE_OUTPUT": "1", "CASTRA_UPLOADED": str(tmp_path / "uploaded")}
    (tmp_path / "uploaded").mkdir()
    (tmp_path / "uploaded/step-00000002").touch()
    ranks = crew.start(WORK + "save_apart", 4, tmp_path, env=env, nodes=2)
    assert ranks.wait() == [0, 0, 0, 0], ranks.log.read_text()
    for node in range(2):
        assert [path.name for path in (tmp_path / f"node{node}/checkpoints").iterdir()] == ["step-00000003"]
        parts = sorted(path.name for path in (tmp_path / f"node{node}/checkpoints/step-00000003").iterdir())
        assert parts == ["manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in (2 * node, 2 * node + 1))]


def wait_for_uploads(world: World, folder: Path) -> None:
    """Save three times; the third is the last that there is time for."""
    saver = Saver(folder, WHO, world, keep=1)
    for step in (1, 2):
        saver.save(step, one(step) if world.rank == 0 else [], {})
    time.sleep(0.2)
    say("waiting", old=len(places.found(folder)))
    saver.save(3, one(3) if world.rank == 0 else [], {}, tidy=False)
    saver.close()


def test_what_is_not_uploaded_is_not_deleted_and_a_hurry_does_not_wait_for_it(crew: Crew, tmp_path: Path) -> None:
    ranks = crew.start(WORK + "wait_for_uploads", 2, tmp_path, env={"CASTRA_UPLOADED": str(tmp_path / "uploaded")})
    assert ranks.wait() == [0, 0], ranks.log.read_text()
    assert ranks.say("waiting")[0]["old"] == 2
    assert steps(tmp_path) == [1, 2, 3]
