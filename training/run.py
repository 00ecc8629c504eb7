"""Train: the loop every rank runs, from a dataset to a checkpoint that resumes and a result.json.

    python -m training.run job.json
    torchrun --nproc-per-node 2 -m training.run job.json

Any crash, at any instant, costs the steps since the last checkpoint and nothing else: a rerun on the same number of
ranks gives the same losses and the same weights, bit for bit, as a run that was never interrupted.
"""

import hashlib
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

from training import checkpoint, ranks
from training.checkpoint import Identity, Reader, Saver
from training.data.loader import TokenBatches
from training.data.sources import SourceError
from training.evaluate import HeldOut
from training.job import NodeJob, progress, say, write_json
from training.journal import Journal
from training.process import JobError, Stopped, StopSignal
from training.ranks import World
from training.schedule import learning_rate
from training.supervise import Supervisor

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from training.parallel import Engine, Layout, Rows, Share

REHEARSED: Final = "rehearsed-failure.json"
"""Marks in the output folder that the rehearsed failure happened, so that it happens once."""


def train(job: NodeJob, world: World) -> None:
    """Train as job.spec says, from the newest checkpoint if there is one. Raises JobError and Stopped."""
    from training.parallel import Layout, Share, check, objective_of, spread

    settings, parallel = job.spec["train"], job.spec["parallel"]
    _make_deterministic(world)
    with world.agreed():
        layout = Layout.of(parallel, world.rank, world.size)
        share = Share.of(settings["global_batch_size"], parallel["micro_batch_size"], layout.data)
        check(job.spec, share, layout, world.device)
        batches = _open_dataset(job)
        held_out = HeldOut(job.inputs["dataset"], settings, layout, share, world) if settings["eval_every"] else None
        model = objective_of(job.spec, job.inputs.get("initial")).model  # weightless, and refused if impossible
        weights = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        checkpoint.check_room(weights * checkpoint.BYTES_PER_WEIGHT, _made(job.output))
    engine = spread(job.spec, job.inputs.get("initial"), share, layout, world)
    loop = Loop(job, world, engine, batches, layout, held_out)
    loop.utilisation = _utilisation(job, model, world)
    engine.settle(loop.rows(0))
    try:
        start = _resume(job, loop, world)
        if world.rank == 0:
            _introduce(job, world, share, layout, start)
        loop.run(start)
    except (JobError, Stopped):  # after a crash there is nothing to wait for
        loop.close()
        raise
    loop.close()
    final = checkpoint.path_of(job.output, settings["steps"])
    whole = checkpoint.collect(final, world)
    world.part()
    if world.rank == 0:
        job.finish(_result(job, world, loop, start, whole))
        if whole != final:
            shutil.rmtree(whole)


class Loop:
    """The steps: batch, gradients, judgement, update, one line told, a checkpoint when it is due."""

    def __init__(
        self,
        job: NodeJob,
        world: World,
        engine: "Engine",
        batches: TokenBatches,
        layout: "Layout",
        held_out: HeldOut | None,
    ) -> None:
        self._job, self._world, self.engine, self._batches = job, world, engine, batches
        self._layout, self._held_out = layout, held_out
        self._settings = job.spec["train"]
        self._failure = None if (job.output / REHEARSED).exists() else self._settings["rehearse_failure_at"]
        self._stop = StopSignal()
        self.identity = _identity(job, layout)
        self._supervisor = Supervisor(job, world)
        self._saver = Saver(job.output, self.identity, world, self._settings["keep_checkpoints"])
        self.utilisation: float | None = None
        self.best = math.inf
        """The lowest loss on held-out data so far."""
        self.journal: Journal
        self.saves: list[float] = []
        """How long the loop stood still for each checkpoint. Unit: seconds."""

    def run(self, start: int) -> None:
        """Do steps start + 1 .. steps. Raises Stopped after a stop signal, JobError when too many steps are bad."""
        if self._world.rank == 0:
            self.journal = Journal(self._job.output, start)
        self._saver.prepare(self.engine.pieces())
        for step in range(start + 1, self._settings["steps"] + 1):
            self._finish(step, stop=self._step(step))
        self._saver.wait()

    def restore(self, extra: dict[str, Any]) -> None:
        """Go on from what a checkpoint has besides the pieces."""
        self.engine.restore(extra)
        self._supervisor.restore(extra.get("supervisor", {}))
        self.best = extra.get("best", math.inf)

    def close(self) -> None:
        """End the saving, and the watch, which lasts until nothing can hang any more."""
        try:
            self._saver.close()
        finally:
            self._supervisor.close()

    def rows(self, step: int) -> "Rows":
        """Return this rank's part of a step's batch, on its device; `step` counts from 0."""
        import torch

        from training.parallel import Rows

        batch = self._batches.batch(step, self._layout.data_rank, self._layout.data)
        arrays = (batch.tokens, batch.mask, batch.documents)
        tensors = (None if array is None else torch.from_numpy(array) for array in arrays)
        device = self._world.device
        moved = [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors]
        assert moved[0] is not None
        return Rows(moved[0], moved[1], moved[2], batch.targets)

    def _step(self, step: int) -> bool:
        """Do one optimizer step, tell it, and return whether any rank was asked to stop."""
        began = time.perf_counter()
        self._supervisor.at(step, "batch")
        rows, rate = self.rows(step - 1), learning_rate(step, self._settings)
        self._supervisor.at(step, "gradients")
        part, square = self.engine.gradients(rows)
        own = time.perf_counter() - began
        self._supervisor.at(step, "update")
        total, squares, stops = self._add_up(part, square, self._stop.asked)
        loss, norm = total / max(1, rows.targets), math.sqrt(squares) if squares >= 0 else math.nan
        done = self._update(step, loss, norm, rate)
        self._eval_loss: float | None = None
        self._supervisor.stepped(step, own)
        told = {"loss": loss, "lr": rate, "grad_norm": norm} | ({} if done else {"skipped": 1.0})
        if self._held_out and step % self._settings["eval_every"] == 0:
            self._supervisor.at(step, "evaluation")
            self._eval_loss = self._held_out.loss(self.engine, self._world)
            told["eval_loss"] = self._eval_loss
        if self._world.rank == 0:
            self._tell(step, time.perf_counter() - began, told)
        return stops > 0

    def _update(self, step: int, loss: float, norm: float, rate: float) -> bool:
        """Update the weights unless the step is bad, and return whether it was done."""
        overflow = math.isfinite(loss) and not math.isfinite(norm) and self.engine.overflowed()
        if not overflow and self._supervisor.judge(step, loss, norm):
            self.engine.update(rate, norm)
            return True
        self.engine.discard()
        return False

    def _add_up(self, loss: "Tensor", square: "Tensor", stop: bool) -> list[float]:
        """Sum three numbers over all ranks in one small all-reduce."""
        import torch
        from torch import distributed

        # made on the device: three copies to the host would each wait for it
        told = torch.empty(3, dtype=torch.float64, device=loss.device)
        told[0], told[1], told[2] = loss, square, float(stop)
        if self._world.size > 1:
            distributed.all_reduce(told)
        sums: list[float] = told.tolist()
        return sums

    def _tell(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        speed = self._settings["global_batch_size"] * self._batches.sequence_length / seconds
        metrics |= {"tokens_per_second": speed, "step_seconds": seconds, "memory_gib": _memory_gib(self._world)}
        if self.utilisation is not None:
            metrics["mfu"] = speed * self.utilisation
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.journal.add({"step": step, **finite})
        progress(step, self._settings["steps"], "step", **finite)

    def _finish(self, step: int, *, stop: bool) -> None:
        """Save a step that is to be saved. Raises Stopped once it is on the disk, if any rank was asked to stop."""
        steps, every = self._settings["steps"], self._settings["checkpoint_every"]
        if step == self._failure:
            self._saver.wait()
            _die(self._job.output, step, self._world)
        better = self._eval_loss is not None and self._eval_loss < self.best
        self.best = min(self.best, math.inf if self._eval_loss is None else self._eval_loss)
        if stop or better or step == steps or step % every == 0:
            self._save(step, best=better, tidy=not stop)
        if stop and step < steps:
            self._saver.wait()
            if self._world.rank == 0:
                say("stopped", step=step)
            raise Stopped

    def _save(self, step: int, *, best: bool, tidy: bool) -> None:
        """Begin a checkpoint; `tidy` deletes old ones, which may have to wait for uploads."""
        self._supervisor.at(step, "checkpoint")
        began = time.perf_counter()
        if self._world.rank == 0:
            self.journal.sync()
        extra = self.engine.extra() | {"supervisor": self._supervisor.state()}
        extra |= {"best": self.best} if math.isfinite(self.best) else {}
        self._saver.save(step, self.engine.pieces(), extra, best=best, tidy=tidy)
        self.saves.append(time.perf_counter() - began)


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
    if settings["checkpoint_every"] == "auto":
        raise JobError("train.checkpoint_every is auto, which only a plan can settle; write a number of steps")
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


def _utilisation(job: NodeJob, model: "PreTrainedModel", world: World) -> float | None:
    """Return the share of all devices' peak that one token per second is, where the peak is known."""
    from training.model import flops_per_token, peak_flops

    peak = peak_flops(world.device, job.spec["train"]["precision"])
    length = job.spec["data"]["sequence_length"]
    return None if peak is None else flops_per_token(model, length) / (peak * world.size)


def _identity(job: NodeJob, layout: "Layout") -> Identity:
    settings = job.spec["train"]
    adapters = {name: settings[name] for name in ("lora_rank", "lora_alpha", "lora_targets")}
    adapters |= {"lora_base": settings["lora_base"]} if settings["lora_base"] != "full" else {}
    strategy = f"{job.spec['parallel']['strategy']} ({layout})"
    return Identity(
        settings["seed"], strategy, layout.size, job.spec["model"], adapters if settings["lora_rank"] else None
    )


def _resume(job: NodeJob, loop: Loop, world: World) -> int:
    """Load the newest sound checkpoint, if any, and return its step (0 without one)."""
    found = checkpoint.latest(job.output, world)
    if found is None:
        return 0
    there = checkpoint.read(found)
    obstacle = loop.identity.can_resume(there.identity)
    if obstacle:
        raise JobError(f"the checkpoint {found.name} cannot be resumed: {obstacle}")
    with world.agreed():
        checkpoint.load(found, loop.engine.pieces())
    loop.restore(there.extra)
    if world.rank == 0:
        say("resumed", step=there.step, name=found.name)
    return there.step


def _introduce(job: NodeJob, world: World, share: "Share", layout: "Layout", start: int) -> None:
    say(
        "training",
        strategy=job.spec["parallel"]["strategy"],
        layout=str(layout),
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


def weights_sha256(folder: Path) -> str:
    """Return `training.model.weights_sha256` of the trained weights in a checkpoint, read one by one."""
    digest = hashlib.sha256()
    with Reader(folder) as reader:
        for name in sorted(name for name in reader.names() if "/" not in name):
            digest.update(f"{name} torch.float32 {list(reader.shape(name))}\n".encode())
            digest.update(reader.read(name).data.cast("B"))
    return digest.hexdigest()


def _result(job: NodeJob, world: World, loop: Loop, start: int, whole: Path) -> dict[str, Any]:
    """Sum the run up, over all its attempts; the weights are read back from the final checkpoint on the disk."""
    import torch

    settings, told = job.spec["train"], loop.journal.records()
    tokens = settings["steps"] * settings["global_batch_size"] * job.spec["data"]["sequence_length"]
    seconds = sum(record["step_seconds"] for record in told)
    losses = [record["loss"] for record in told if "loss" in record]
    result = {
        "steps": settings["steps"],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "checkpoint": checkpoint.path_of(job.output, settings["steps"]).relative_to(job.output).as_posix(),
        "weights_sha256": weights_sha256(whole),
        "world_size": world.size,
        "strategy": job.spec["parallel"]["strategy"],
        "resumed_from": start or None,
        "torch": torch.__version__,
        "device": world.device.type,
    }
    if loop.saves:  # none if it resumed at its very end
        result["save_seconds"] = median(loop.saves)
    if math.isfinite(loop.best):
        result["eval_loss_best"] = loop.best
    shares = [record["mfu"] for record in told if "mfu" in record]
    return result | ({"mfu": sum(shares) / len(shares)} if shares else {})


if __name__ == "__main__":
    ranks.run(train)
