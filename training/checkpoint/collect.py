"""One place with all files of a checkpoint, where the nodes share no folder."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from training.checkpoint.manifest import MANIFEST
from training.checkpoint.places import read
from training.ranks import World

PART: Final = 64 << 20
"""Bytes that travel at once from one node's disk to another's."""


def collect(checkpoint: Path, world: World) -> Path:
    """Return where rank 0 finds all files of a complete checkpoint; every rank must call it.

    That is the checkpoint itself or, where the nodes share no folder, another one for which rank 0 is sent the files of
    the other nodes; delete it after use.
    """
    files = read(checkpoint).files
    here = {name for name in files if (checkpoint / name).exists()}
    holders = world.gather(here if world.keeper else set())
    missing = sorted(set(files) - holders[0])
    if not missing:
        return checkpoint
    uploaded = os.environ.get("CASTRA_UPLOADED")
    whole = Path(uploaded).with_name("collected") if uploaded else Path(tempfile.gettempdir(), "castra-collected")
    if world.rank == 0:
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir(parents=True)
        for name in (*sorted(here), MANIFEST):
            (whole / name).symlink_to((checkpoint / name).absolute())
    for name in missing:
        holder = next(rank for rank, names in enumerate(holders) if name in names)
        source = checkpoint / name if world.rank == holder else whole / name
        _pass_on(source, files[name][0], holder, world)
    return whole


def _pass_on(path: Path, size: int, holder: int, world: World) -> None:
    """Copy a file of the holder's to rank 0, part by part; all ranks keep step, so that none waits for long."""
    import torch
    from torch import distributed

    for begin in range(0, size, PART):
        part = torch.empty(min(PART, size - begin), dtype=torch.uint8)
        if world.rank == holder:
            with path.open("rb") as file:
                file.seek(begin)
                file.readinto(part.numpy().data)
            distributed.send(part, 0)
        elif world.rank == 0:
            distributed.recv(part, holder)
            with path.open("ab") as file:
                file.write(part.numpy().data)
        world.barrier()
