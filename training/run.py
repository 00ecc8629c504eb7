"""Train: the loop every rank runs, from a dataset to a checkpoint that resumes and a result.json.

    python -m training.run job.json
    torchrun --nproc-per-node 2 -m training.run job.json

Any crash, at any instant, costs the steps since the last checkpoint and nothing else: a rerun on the same number of
ranks gives the same losses and the same weights, bit for bit, as a run that was never interrupted.
"""

import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from training import ranks
from training.data.loader import TokenBatches
from training.data.sources import SourceError
from training.job import NodeJob, progress, say, write_json
from training.process import JobError, Stopped, StopSignal
from training.ranks import World

if TYPE_CHECKING:
    from torch import Tensor

    from training.checkpoint import Identity
    from training.model import NextTokenLoss
    from training.parallel import Engine, Share

REHEARSED: Final = "rehearsed-failure.json"
"""Marks in the output folder that the rehearsed failure happened, so that it happens once."""


def train(job: NodeJob, world: World) -> None:
    """Train as job.spec says, from the newest checkpoint if there is one. Raises JobError and Stopped."""
    from training import checkpoint
    from training.parallel import Share, spread

    settings, parallel = job.spec["train"], job.spec["parallel"]
    _make_deterministic(world)
    with world.agreed():
        share = Share.of(settings["global_batch_size"], parallel["micro_batch_size"], world.size)
        batches = _open_dataset(job)
        objective = _make_objective(job)
        weights = sum(weight.numel() for weight in objective.parameters())
        checkpoint.check_room(weights * checkpoint.BYTES_PER_WEIGHT, _made(job.output))
    utilisation = _utilisation(objective, batches.sequence_length, settings["precision"], world)
    engine = spread(parallel["strategy"], objective, settings, share, world)
    _settle(engine, share, batches.sequence_length, world)
    identity = checkpoint.Identity(settings["seed"], parallel["strategy"], world.size)
    start = _resume(job, engine, identity, world)
    loop = Loop(job, world, engine, batches, identity, utilisation)
    if world.rank == 0:
        _introduce(job, world, share, start)
    loop.run(start)
    final = checkpoint.path_of(job.output, settings["steps"])
    whole = checkpoint.collect(final, world)
    world.part()
    if world.rank == 0:
        job.finish(_result(job, world, loop, start, whole))
        if whole != final:
            shutil.rmtree(whole)


def learning_rate(step: int, settings: dict[str, Any]) -> float:
    """Return the rate of step 1..steps: linear warm-up to the peak, then half a cosine down to its `min_lr_ratio`."""
    peak, warmup, floor = settings["learning_rate"], settings["warmup_steps"], settings["min_lr_ratio"]
    if step <= warmup:
        return float(peak * step / warmup)
    done = (step - warmup) / (settings["steps"] - warmup)
    return float(peak * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2))


class Journal:
    """progress.jsonl: one line per finished step, in order, each step once."""

    def __init__(self, output: Path, start: int) -> None:
        """Open the journal of a run that stands at step `start`, forgetting what was told of later steps."""
        self._path = output / "progress.jsonl"
        kept = [record for record in self.records() if record["step"] <= start]
        fresh = self._path.with_suffix(".fresh")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in kept))
        fresh.replace(self._path)
        self._file = self._path.open("a")

    def add(self, record: dict[str, float]) -> None:
        """Append one step."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Put all lines on the disk, so that no checkpoint knows a step the journal lost."""
        os.fsync(self._file.fileno())

    def records(self) -> list[dict[str, float]]:
        """Return every whole line; a crash may have torn the last."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines() if line.endswith("}")]


class Loop:
    """The steps: batch, gradient, update, one line told, a checkpoint when it is due."""

    def __init__(
        self,
        job: NodeJob,
        world: World,
        engine: "Engine",
        batches: TokenBatches,
        identity: "Identity",
        utilisation: float | None,
    ) -> None:
        self._job, self._world, self._engine, self._batches, self._identity = job, world, engine, batches, identity
        self._settings = job.spec["train"]
        self._utilisation = utilisation
        self._failure = None if (job.output / REHEARSED).exists() else self._settings["rehearse_failure_at"]
        self._stop = StopSignal()
        self.journal: Journal
        self.saves: list[float] = []
        """How long the loop stood still for each checkpoint. Unit: seconds."""

    def run(self, start: int) -> None:
        """Do steps start + 1 .. steps. Raises Stopped after a stop signal, JobError when the loss is not finite."""
        steps, every = self._settings["steps"], self._settings["checkpoint_every"]
        if self._world.rank == 0:
            self.journal = Journal(self._job.output, start)
        self._world.barrier()
        for step in range(start + 1, steps + 1):
            stop = self._step(step)
            if step == self._failure:
                _die(self._job.output, step, self._world)
            if stop or step == steps or step % every == 0:
                self._save(step, tidy=not stop)
            if stop and step < steps:
                if self._world.rank == 0:
                    say("stopped", step=step)
                raise Stopped

    def _step(self, step: int) -> bool:
        """Do one optimizer step, tell it, and return whether any rank was asked to stop."""
        import torch

        began = time.perf_counter()
        rows = self._batches.batch(step - 1, self._world.rank, self._world.size)
        rate = learning_rate(step, self._settings)
        tokens = torch.from_numpy(rows).to(self._world.device, non_blocking=True)
        part, size = self._engine.step(tokens, rate)
        loss, stop = self._share(part)
        norm = float(size)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise JobError(
                f"the loss is {loss} and the gradient norm {norm} at step {step}: training diverged; lower "
                "train.learning_rate or lengthen train.warmup_steps (the checkpoints before it are kept)"
            )
        if self._world.rank == 0:
            self._tell(step, time.perf_counter() - began, {"loss": loss, "lr": rate, "grad_norm": norm})
        return stop

    def _share(self, loss: "Tensor") -> tuple[float, bool]:
        """Return the mean loss over all ranks and whether any of them was asked to stop, in one small all-reduce."""
        from torch import distributed

        told = loss.new_tensor([0.0, float(self._stop.asked)])
        told[0] = loss
        if self._world.size > 1:
            distributed.all_reduce(told)
        total, asked = told.tolist()
        return total / self._world.size, asked > 0

    def _tell(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        speed = self._settings["global_batch_size"] * self._batches.sequence_length / seconds
        metrics |= {"tokens_per_second": speed, "step_seconds": seconds, "memory_gib": _memory_gib(self._world)}
        if self._utilisation is not None:
            metrics["mfu"] = speed * self._utilisation
        self.journal.add({"step": step, **metrics})
        progress(step, self._settings["steps"], "step", **metrics)

    def _save(self, step: int, *, tidy: bool) -> None:
        """Save a checkpoint; `tidy` deletes old ones, which may have to wait for uploads."""
        from training import checkpoint

        began = time.perf_counter()
        if self._world.rank == 0:
            self.journal.sync()
        saved = checkpoint.save(self._job.output, step, self._engine, self._identity, self._world)
        if tidy:
            checkpoint.prune(self._job.output, self._settings["keep_checkpoints"], self._world)
        self.saves.append(time.perf_counter() - began)
        if self._world.rank == 0:
            say("checkpoint", step=step, name=saved.name)


def _make_deterministic(world: World) -> None:
    """Ask CUDA for the same bits every time; on a CPU they are the same already."""
    import torch
    from torch.utils import deterministic

    if world.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property made at run time


def _made(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise JobError(f"the output folder {output} cannot be made: {problem.strerror}") from problem
    return output


def _open_dataset(job: NodeJob) -> TokenBatches:
    settings = job.spec["train"]
    if "dataset" not in job.inputs:
        raise JobError('the job names no inputs.dataset, the output folder of "training.data.prepare"')
    try:
        batches = TokenBatches(job.inputs["dataset"], settings["global_batch_size"], settings["seed"])
    except SourceError as problem:
        raise JobError(str(problem)) from problem
    length, vocabulary = job.spec["data"]["sequence_length"], job.spec["model"]["vocab_size"]
    if batches.sequence_length != length:
        raise JobError(f"the dataset is packed to {batches.sequence_length} tokens, data.sequence_length is {length}")
    if batches.vocab_size > vocabulary:
        raise JobError(
            f"the tokenizer has {batches.vocab_size} tokens and model.vocab_size is {vocabulary}; raise it to as many"
        )
    return batches


def _make_objective(job: NodeJob) -> "NextTokenLoss":
    """Make the same model on every rank, whole and outside any sharding, so that every strategy starts alike."""
    import torch

    from training.model import NextTokenLoss, build, start_from

    torch.manual_seed(job.spec["train"]["seed"])
    model = build(job.spec["model"], job.spec["data"]["sequence_length"])
    if "initial" in job.inputs:
        start_from(model, job.inputs["initial"])
    return NextTokenLoss(model)


def _utilisation(objective: "NextTokenLoss", length: int, precision: str, world: World) -> float | None:
    """Return the share of all devices' peak that one token per second is, where the peak is known."""
    from training.model import flops_per_token, peak_flops

    peak = peak_flops(world.device, precision)
    return None if peak is None else flops_per_token(objective.model, length) / (peak * world.size)


def _settle(engine: "Engine", share: "Share", length: int, world: World) -> None:
    """Let DDP rearrange its buckets, as it does once, before step 1 and not within a run.

    With three ranks or more a sum's rounding depends on its place in a bucket: without this, the first step after a
    resume would differ in the last bit from the same step of an uninterrupted run.
    """
    import torch

    if world.size > 2:
        engine.settle(torch.zeros((share.micro * share.accumulation, length + 1), dtype=torch.int64).to(world.device))


def _resume(job: NodeJob, engine: "Engine", identity: "Identity", world: World) -> int:
    """Load the newest sound checkpoint, if any, and return its step (0 without one)."""
    from training import checkpoint

    found = checkpoint.latest(job.output, world)
    if found is None:
        return 0
    step, other = checkpoint.read(found)
    obstacle = identity.can_resume(other)
    if obstacle:
        raise JobError(f"the checkpoint {found.name} cannot be resumed: {obstacle}")
    engine.load(found)
    if world.rank == 0:
        say("resumed", step=step, name=found.name)
    return step


def _introduce(job: NodeJob, world: World, share: "Share", start: int) -> None:
    say(
        "training",
        strategy=job.spec["parallel"]["strategy"],
        ranks=world.size,
        nodes=world.nodes,
        device=world.device.type,
        micro_batch_size=share.micro,
        accumulation=share.accumulation,
        step=start,
    )


def _die(output: Path, step: int, world: World) -> None:
    """Rehearse a failure: every rank kills itself, once the marker that prevents a second time is on the disk."""
    if world.rank == 0:
        say("rehearsed-failure", step=step)
        write_json(output / REHEARSED, {"step": step})
    world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _memory_gib(world: World) -> float:
    """Return the most memory this process has held so far, in GiB: of its GPU, or resident on a CPU."""
    if world.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(world.device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _result(job: NodeJob, world: World, loop: Loop, start: int, whole: Path) -> dict[str, Any]:
    """Sum the run up, over all its attempts; the weights are read back from the final checkpoint on the disk."""
    import torch

    from training import checkpoint
    from training.model import build, weights_sha256

    settings, told = job.spec["train"], loop.journal.records()
    model = build(job.spec["model"], job.spec["data"]["sequence_length"])
    checkpoint.load_weights(whole, model)
    tokens = settings["steps"] * settings["global_batch_size"] * job.spec["data"]["sequence_length"]
    seconds = sum(record["step_seconds"] for record in told)
    result = {
        "steps": settings["steps"],
        "loss_first": told[0]["loss"],
        "loss_last": told[-1]["loss"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "checkpoint": checkpoint.path_of(job.output, settings["steps"]).relative_to(job.output).as_posix(),
        "weights_sha256": weights_sha256(model),
        "world_size": world.size,
        "strategy": job.spec["parallel"]["strategy"],
        "resumed_from": start or None,
        "torch": torch.__version__,
        "device": world.device.type,
    }
    if loop.saves:  # none if it resumed at its very end
        result["save_seconds"] = median(loop.saves)
    shares = [record["mfu"] for record in told if "mfu" in record]
    return result | ({"mfu": sum(shares) / len(shares)} if shares else {})


if __name__ == "__main__":
    ranks.run(train)
