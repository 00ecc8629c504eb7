"""Where checkpoints are: their names, their order, and which of them can be trusted.

<output>/checkpoints/step-00000060/rank-00000.safetensors …    one file per rank that owns something
<output>/checkpoints/step-00000060/manifest.json               written last; then the folder gets this name
"""

import hashlib
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from training.checkpoint.manifest import Manifest
from training.job import say, sync
from training.process import JobError
from training.ranks import World

BYTES_PER_WEIGHT: Final = 12
"""fp32 weight and two fp32 moments (Rajbhandari et al., "ZeRO", 2020, section 3.1)."""


def path_of(output: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return place_of(output) / f"step-{step:08d}"


def place_of(output: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return output / "checkpoints"


def found(output: Path) -> list[Path]:
    """List what bears a checkpoint's name, oldest first."""
    return sorted(place_of(output).glob("step-*"))


def read(checkpoint: Path) -> Manifest:
    """Return what a complete checkpoint says of itself. Raises JobError."""
    try:
        return Manifest.read(checkpoint)
    except (OSError, ValueError) as problem:
        raise JobError(f"{checkpoint} is no complete checkpoint ({problem})") from problem


def latest(run_output: Path, world: World | None = None) -> Path | None:
    """Return the newest checkpoint whose every file has the size and hash of its manifest, or None.

    A damaged one is skipped with a line in the log. With a `world`, all ranks must call it and share the reading.
    """
    here = [checkpoint.name for checkpoint in found(run_output)]
    for name in reversed(world.gather(here)[0] if world else here):
        checkpoint = place_of(run_output) / name
        flaw = _flaw(checkpoint, world)
        if flaw is None:
            return checkpoint
        if world is None or world.rank == 0:
            say("checkpoint-skipped", checkpoint=checkpoint.name, reason=flaw)
    return None


def outdated(output: Path, keep: int) -> list[Path]:
    """Return all checkpoints but the newest `keep` and the newest that was the best when it was made."""
    old = found(output)[:-keep]
    best = None
    for checkpoint in reversed(found(output)):
        try:
            if Manifest.read(checkpoint).best:
                best = checkpoint
                break
        except (OSError, ValueError):  # a damaged one is nobody's best
            continue
    return [checkpoint for checkpoint in old if checkpoint != best]


def discard(checkpoints: Sequence[Path]) -> None:
    """Delete checkpoints so that a crash leaves nothing that bears their name. Raises OSError."""
    for checkpoint in checkpoints:
        doomed = checkpoint.with_name(f".{checkpoint.name}.old")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def make_fresh(output: Path, step: int, needed: int) -> Path:
    """Make an empty folder to write a checkpoint of `needed` bytes to. Raises JobError and OSError."""
    place = place_of(output)
    for leftover in place.glob(".step-*"):  # what a crash left of checkpoints being written or deleted
        shutil.rmtree(leftover)
    fresh = fresh_of(output, step)
    fresh.mkdir(parents=True)
    check_room(needed, output)
    return fresh


def fresh_of(output: Path, step: int) -> Path:
    """Return where a step's checkpoint is while it is being written."""
    return place_of(output) / f".step-{step:08d}.fresh"


def publish(fresh: Path, final: Path) -> None:
    """Give a complete checkpoint its name; a damaged one of the same name, if any, goes once that is done."""
    sync(fresh)
    damaged = final.with_name(f".{final.name}.damaged")
    if final.exists():
        final.rename(damaged)
    fresh.rename(final)
    sync(final.parent)
    shutil.rmtree(damaged, ignore_errors=True)


def check_room(needed: int, output: Path) -> None:
    """Raise JobError unless the disk of `output` has room for a checkpoint of `needed` bytes."""
    free = shutil.disk_usage(output).free
    if needed > free:
        raise JobError(
            f"a checkpoint needs {needed / 1e6:.1f} MB and the disk of {output} has {free / 1e6:.1f} MB free; "
            "free space or lower train.keep_checkpoints"
        )


def _flaw(checkpoint: Path, world: World | None) -> str | None:
    """Return what is wrong with a checkpoint, or None; the ranks of a world each read a share of it."""
    flaw: str | None = None
    try:
        told = Manifest.read(checkpoint).files
        mine = sorted(told)[world.share if world else slice(None)]
        flaw = _damaged(mine, {name: told[name] for name in mine}, checkpoint)
    except (OSError, ValueError) as problem:
        flaw = f"it is incomplete ({problem})"
    return next((told for told in (world.gather(flaw) if world else [flaw]) if told), None)


def _damaged(names: Sequence[str], told: dict[str, tuple[int, str]], checkpoint: Path) -> str | None:
    """Compare files with their size, which is quick, then with their SHA-256, read by several threads."""

    def is_whole(name: str) -> bool:
        with (checkpoint / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == told[name][1]

    cut = next((name for name in names if (checkpoint / name).stat().st_size != told[name][0]), None)
    if cut is not None:
        return f"{cut} has not the size its manifest tells"
    with ThreadPoolExecutor(8) as threads:
        sound = dict(zip(names, threads.map(is_whole, names), strict=True))
    return next((f"{name} is damaged" for name in names if not sound[name]), None)
