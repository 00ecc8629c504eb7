"""Checkpoints that are whole or absent: hashed, written beside, renamed last, verified before they are trusted.

    <output>/checkpoints/step-00000060/          what the strategy wrote: torch DCP (ddp, fsdp2) or DeepSpeed (zero)
    <output>/checkpoints/step-00000060/manifest.json    step, seed, strategy, ranks, size and SHA-256 of every file

The place in the data is the step itself, so a checkpoint needs nothing else.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.job import say, write_json
from training.process import JobError
from training.ranks import World

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    from training.parallel import Engine

MANIFEST: Final = "manifest.json"
BYTES_PER_WEIGHT: Final = 12
"""fp32 weight and two fp32 moments (Rajbhandari et al., "ZeRO", 2020, section 3.1)."""
PIECE: Final = 64 << 20
"""Bytes that travel at once from one node's disk to another's."""
UPLOAD_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to."""

    seed: int
    strategy: str
    world_size: int

    def can_resume(self, other: "Identity") -> str | None:
        """Return why a run of this identity cannot go on from a checkpoint of the other, or None if it can."""
        if self.seed != other.seed:
            return f"it was made with train.seed {other.seed}, not {self.seed}"
        sharded = "zero" in self.strategy + other.strategy
        if sharded and (self.strategy, self.world_size) != (other.strategy, other.world_size):
            return (
                f"it was written by {other.strategy} on {other.world_size} ranks and this run is {self.strategy} on "
                f"{self.world_size}; DeepSpeed resumes only with the same strategy and ranks"
            )
        return None


def path_of(output: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return _place(output) / f"step-{step:08d}"


def save(output: Path, step: int, engine: "Engine", identity: Identity, world: World) -> Path:
    """Write a checkpoint with all ranks and return it; only a complete one ever bears its name."""
    final = path_of(output, step)
    fresh = final.with_name(f".{final.name}.fresh")
    with world.agreed():
        if world.keeper:
            _make(fresh, output)
    engine.save(fresh)
    world.barrier()
    digests = world.gather(_digests(_files(fresh)[world.share], fresh, sync=True))
    if world.keeper:
        files = {name: told for share in digests for name, told in share.items()}
        write_json(fresh / MANIFEST, {"step": step, **asdict(identity), "files": files})
        _publish(fresh, final)
    world.barrier()
    return final


def prune(output: Path, keep: int, world: World) -> None:
    """Delete all but the newest `keep` checkpoints; call it once a newer one is complete, on all ranks.

    Where a node program uploads what is written here, it names in the folder CASTRA_UPLOADED what of this node it has
    uploaded: before that a checkpoint is not deleted, and the ranks wait, so that one always gets there in the end.
    """
    outdated = _all(output)[:-keep] if world.keeper else []
    if uploaded := os.environ.get("CASTRA_UPLOADED"):
        marks = [Path(uploaded) / old.name for old in outdated if (old / MANIFEST).exists()]
        while not all(world.gather(all(mark.exists() for mark in marks))):
            time.sleep(UPLOAD_POLL_S)
    for old in outdated:
        doomed = old.with_name(f".{old.name}.old")
        old.rename(doomed)
        shutil.rmtree(doomed)


def collect(checkpoint: Path, world: World) -> Path:
    """Return where rank 0 finds all files of a complete checkpoint; every rank must call it.

    That is the checkpoint itself or, where the nodes share no folder, another one for which rank 0 is sent the files of
    the other nodes; delete it after use.
    """
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    here = {name for name in files if (checkpoint / name).exists()}
    holders = world.gather(here if world.keeper else set())
    missing = sorted(set(files) - holders[0])
    if not missing:
        return checkpoint
    uploaded = os.environ.get("CASTRA_UPLOADED")
    whole = Path(uploaded).with_name("collected") if uploaded else Path(tempfile.gettempdir(), "castra-collected")
    if world.rank == 0:
        shutil.rmtree(whole, ignore_errors=True)
        for name in (*sorted(here), MANIFEST):
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            (whole / name).symlink_to((checkpoint / name).absolute())
    for name in missing:
        holder = next(rank for rank, names in enumerate(holders) if name in names)
        source = checkpoint / name if world.rank == holder else whole / name
        _pass_on(source, files[name][0], holder, world)
    return whole


def latest(run_output: Path, world: World | None = None) -> Path | None:
    """Return the newest checkpoint whose every file has the size and hash of its manifest, or None.

    A damaged one is skipped with a line in the log. With a `world`, all ranks must call it and share the reading.
    """
    found = [checkpoint.name for checkpoint in _all(run_output)]
    for name in reversed(world.gather(found)[0] if world else found):
        checkpoint = _place(run_output) / name
        flaw = _flaw(checkpoint, world)
        if flaw is None:
            return checkpoint
        if world is None or world.rank == 0:
            say("checkpoint-skipped", checkpoint=checkpoint.name, reason=flaw)
    return None


def read(checkpoint: Path) -> tuple[int, Identity]:
    """Return the step of a complete checkpoint and what it belongs to."""
    told = json.loads((checkpoint / MANIFEST).read_text())
    return told["step"], Identity(told["seed"], told["strategy"], told["world_size"])


def load_weights(checkpoint: Path, model: "LlamaForCausalLM") -> None:
    """Copy the fp32 weights of a checkpoint, whatever strategy wrote it, into a plain model of one process."""
    _, identity = read(checkpoint)
    if identity.strategy.startswith("zero"):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="zero")
        model.load_state_dict({name.removeprefix("model."): weight for name, weight in found.items()})
        return
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    names = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # one process is what is meant
        load({"model": names}, storage_reader=FileSystemReader(checkpoint), no_dist=True)


def check_room(needed: int, output: Path) -> None:
    """Raise JobError unless the disk of `output` has room for a checkpoint of `needed` bytes."""
    free = shutil.disk_usage(output).free
    if needed > free:
        raise JobError(
            f"a checkpoint needs {needed / 1e6:.1f} MB and the disk of {output} has {free / 1e6:.1f} MB free; "
            "free space or lower train.keep_checkpoints"
        )


def _pass_on(path: Path, size: int, holder: int, world: World) -> None:
    """Copy a file of the holder's to rank 0, piece by piece; all ranks keep step, so that none waits for long."""
    import torch
    from torch import distributed

    for begin in range(0, size, PIECE):
        piece = torch.empty(min(PIECE, size - begin), dtype=torch.uint8)
        if world.rank == holder:
            with path.open("rb") as file:
                file.seek(begin)
                file.readinto(piece.numpy().data)
            distributed.send(piece, 0)
        elif world.rank == 0:
            distributed.recv(piece, holder)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(piece.numpy().data)
        world.barrier()


def _place(output: Path) -> Path:
    return output / "checkpoints"


def _all(output: Path) -> list[Path]:
    """List what bears a checkpoint's name, oldest first."""
    return sorted(_place(output).glob("step-*"))


def _make(fresh: Path, output: Path) -> None:
    """Make an empty folder to write to, once there is room for another checkpoint like the newest."""
    try:
        _sweep(output)
        fresh.mkdir(parents=True)
        for newest in _all(output)[-1:]:
            check_room(sum(path.stat().st_size for path in newest.rglob("*")), output)
    except OSError as problem:
        raise JobError(f"no checkpoint can be written to {fresh.parent}: {problem.strerror}") from problem


def _sweep(output: Path) -> None:
    """Remove what a crash left of checkpoints that were being written or deleted."""
    for leftover in _place(output).glob(".step-*"):
        shutil.rmtree(leftover)


def _publish(fresh: Path, final: Path) -> None:
    """Give a complete checkpoint its name; a damaged one of the same name, if any, goes once that is done."""
    for inner in (*(path for path in fresh.rglob("*") if path.is_dir()), fresh):
        _sync(inner)
    damaged = final.with_name(f".{final.name}.damaged")
    if final.exists():
        final.rename(damaged)
    fresh.rename(final)
    _sync(final.parent)
    shutil.rmtree(damaged, ignore_errors=True)


def _files(checkpoint: Path) -> list[str]:
    found = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if path.as_posix() != MANIFEST)


def _digests(names: Sequence[str], checkpoint: Path, *, sync: bool = False) -> dict[str, tuple[int, str]]:
    """Return size (bytes) and SHA-256 of files, read by several threads; with `sync`, they are on the disk then."""

    def digest(name: str) -> tuple[int, str]:
        with (checkpoint / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            told = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), told

    with ThreadPoolExecutor(8) as threads:
        return dict(zip(names, threads.map(digest, names), strict=True))


def _flaw(checkpoint: Path, world: World | None) -> str | None:
    """Return what is wrong with a checkpoint, or None; the ranks of a world each read a share of it."""
    flaw: str | None = None
    try:
        told = json.loads((checkpoint / MANIFEST).read_text())["files"]
        mine = sorted(told)[world.share if world else slice(None)]
        found = _digests(mine, checkpoint)
        flaw = next((f"{name} is damaged" for name in mine if list(found[name]) != told[name]), None)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        flaw = f"it is incomplete ({problem})"
    return next((told for told in (world.gather(flaw) if world else [flaw]) if told), None)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
