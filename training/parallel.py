"""The strategies: one optimizer step of the same mathematics, with the model's states spread in different ways.

`single` process, `ddp` and `fsdp2` are torch's own; `zero1`, `zero2`, `zero3` are DeepSpeed's. Every engine sums the
gradients of `accumulation` micro-batches on every rank, so that the loss is the mean over the global batch, clips
their global norm and lets AdamW step.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from training.model import NextTokenLoss
from training.process import JobError
from training.ranks import World


@dataclass(frozen=True, slots=True)
class Share:
    """How a global batch is divided: `micro` sequences at a time, `accumulation` times, on each rank."""

    micro: int
    accumulation: int

    @classmethod
    def of(cls, global_batch_size: int, micro_batch_size: int, ranks: int) -> "Share":
        """Divide the batch exactly. Raises JobError when that is impossible."""
        at_once = micro_batch_size * ranks
        if global_batch_size % at_once:
            raise JobError(
                f"train.global_batch_size ({global_batch_size}) is no multiple of parallel.micro_batch_size x ranks "
                f"({micro_batch_size} x {ranks} = {at_once}); change one of them"
            )
        return cls(micro_batch_size, global_batch_size // at_once)

    def cut(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Cut a rank's rows, [micro * accumulation, …], into micro-batches."""
        return torch.split_with_sizes(tokens, [self.micro] * self.accumulation)


class Engine(Protocol):
    """A model whose states are spread over the ranks, ready to train."""

    def step(self, tokens: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """Do one optimizer step on this rank's int64 [micro * accumulation, length + 1] at learning rate `rate`.

        Returns the mean loss of these rows and the global gradient norm before clipping, fp32 scalars.
        """

    def settle(self, tokens: Tensor) -> None:
        """Go once through a step's communication, on rows shaped as `step` takes them, changing no weight."""

    def save(self, folder: Path) -> None:
        """Write this rank's part of weights and optimizer states into a folder all ranks share."""

    def load(self, folder: Path) -> None:
        """Read weights and optimizer states that `save` wrote."""


def spread(strategy: str, objective: NextTokenLoss, train: dict[str, Any], share: Share, world: World) -> Engine:
    """Spread an objective, equal on every rank, by `strategy` for the recipe's `train` part."""
    if train["activation_checkpointing"]:
        objective.model.gradient_checkpointing_enable({"use_reentrant": False})
    if strategy.startswith("zero"):
        return Zero(int(strategy.removeprefix("zero")), objective, train, share, world)
    return Native(strategy, objective, train, share, world)


def adamw(model: nn.Module, train: dict[str, Any]) -> AdamW:
    """Make the optimizer: weight decay on matrices (and embeddings), none on the norms' gains."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": train["weight_decay"]},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=train["learning_rate"], betas=(train["beta1"], train["beta2"]), fused=True)


class Native:
    """torch's strategies: one process, DDP, or FSDP2 with a shard group per decoder block."""

    def __init__(
        self, strategy: str, objective: NextTokenLoss, train: dict[str, Any], share: Share, world: World
    ) -> None:
        self._share, self._clip = share, train["grad_clip"]
        self._module: nn.Module = objective
        low = train["precision"] == "bf16"
        if strategy == "fsdp2":
            self._shard(objective, world, low)
        else:
            objective.to(world.device).autocast = low
            if world.size > 1:
                self._module = DistributedDataParallel(objective, gradient_as_bucket_view=True, broadcast_buffers=False)
        self._objective = objective
        self._part = torch.tensor(1 / share.accumulation, device=world.device)
        self._weights = list(objective.parameters())
        self._optimizer = adamw(objective, train)

    def step(self, tokens: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        loss = self._accumulate(tokens)
        norm = nn.utils.clip_grad_norm_(self._weights, self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def settle(self, tokens: Tensor) -> None:
        self._accumulate(tokens)
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), storage_writer=FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, storage_reader=FileSystemReader(folder))
        set_state_dict(
            self._objective,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _accumulate(self, tokens: Tensor) -> Tensor:
        total = torch.zeros_like(self._part)
        for index, micro in enumerate(self._share.cut(tokens)):
            with self._communicate(index + 1 == self._share.accumulation):
                loss = self._module(micro)
                loss.backward(self._part)
            total += loss.detach()
        return total * self._part

    def _communicate(self, now: bool) -> AbstractContextManager[None]:
        """Sum gradients over the ranks in the last micro-batch only."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(now)
        elif isinstance(self._module, DistributedDataParallel) and not now:
            return cast("AbstractContextManager[None]", self._module.no_sync())
        return nullcontext()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self._objective, self._optimizer)
        return {"model": weights, "optimizer": moments}

    @staticmethod
    def _shard(objective: NextTokenLoss, world: World, low: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        kinds = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        for block in objective.model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=kinds)
        fully_shard(objective, mesh=mesh, mp_policy=kinds)


class Zero:
    """DeepSpeed's ZeRO: optimizer states (1), gradients (2) and weights (3) split over the ranks."""

    def __init__(self, stage: int, objective: NextTokenLoss, train: dict[str, Any], share: Share, world: World) -> None:
        deepspeed = _deepspeed(world)
        # with bf16 weights, stage 1 would keep its fp32 ones in a form zero_to_fp32 cannot read back
        objective.autocast = stage == 1 and train["precision"] == "bf16"
        rotary = objective.model.model.rotary_emb
        frequencies = rotary.inv_freq.clone()
        self._engine, *_ = deepspeed.initialize(
            model=objective,
            optimizer=adamw(objective, train),
            config=_zero_config(stage, train, share),
            dist_init_required=False,
        )
        # DeepSpeed casts buffers to bf16 too, which would round the rotary frequencies
        rotary.inv_freq = frequencies.to(world.device)
        if stage == 3:  # the loss reads the output embedding outside the module that owns it
            deepspeed.zero.register_external_parameter(objective, objective.model.lm_head.weight)
        self._share, self._device = share, world.device

    def step(self, tokens: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=tokens.device)
        for micro in self._share.cut(tokens):
            loss = self._engine(micro)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach().float() / self._share.accumulation
        return total, torch.as_tensor(self._engine.get_global_grad_norm(), device=self._device, dtype=torch.float32)

    def settle(self, tokens: Tensor) -> None:
        """Do nothing: DeepSpeed's buckets do not move after the first step."""

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag="zero")

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="zero")


def _deepspeed(world: World) -> Any:
    """Import DeepSpeed so that it neither talks nor needs a C++ compiler on a CPU."""
    import os

    # its Muon optimizer, never used here, would load torch's compiler on import
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    if world.device.type == "cpu":
        # else it compiles shared-memory collectives at start-up; gloo serves as well, and needs no C++ compiler
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend="gloo" if world.device.type == "cpu" else "nccl", verbose=False)
    return deepspeed


def _zero_config(stage: int, train: dict[str, Any], share: Share) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": train["global_batch_size"],
        "train_micro_batch_size_per_gpu": share.micro,
        "gradient_accumulation_steps": share.accumulation,
        "gradient_clipping": train["grad_clip"],
        "zero_optimization": {"stage": stage},
        "steps_per_print": 2**31,
    }
    if train["precision"] == "bf16" and stage > 1:
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return config
