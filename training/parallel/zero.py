"""DeepSpeed's ZeRO: optimizer states (1), gradients (2) and weights (3) split over the ranks, or kept off a device."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from training.checkpoint.piece import Piece
from training.model import NextTokenLoss, allocate, box_of, materialise
from training.parallel.mesh import Layout, Rows, Share
from training.parallel.precision import LOW
from training.parallel.states import (
    MOMENTS,
    adamw,
    make_moments,
    pieces,
    set_rate,
    set_updates,
    square,
    trained,
)
from training.process import JobError
from training.ranks import World

AUTOCAST_UP_TO: Final = 1
"""Up to this stage weights stay fp32 and bf16 is autocast's: there is nothing split that bf16 would make smaller."""


class Zero:
    """A DeepSpeed engine, whose states are told as flat ranges of whole tensors."""

    def __init__(
        self, objective: NextTokenLoss, folder: Path | None, spec: dict[str, Any], share: Share, world: World
    ) -> None:
        """Train an objective without weights yet, drawn or read from `folder`, as the recipe asks (zero0 to zero3)."""
        train, parallel = spec["train"], spec["parallel"]
        self._stage = int(parallel["strategy"].removeprefix("zero"))
        settings = config(train, parallel, share)
        deepspeed = _deepspeed(world, compiles=train["compile"])
        _check_offload(parallel)
        if self._stage <= AUTOCAST_UP_TO and train["precision"] == "bf16":
            objective.autocast = LOW["bf16"]
        if self._stage == 3:
            _imagine(objective, world.device)
        else:
            allocate(objective, torch.device("cpu"))
            materialise(objective.model, train["seed"], folder)
        self._weights = trained(objective)
        optimizer = adamw(self._weights.values(), train)
        if self._stage == 3:
            _fill(objective, folder, train, deepspeed.zero.Init(config_dict_or_path=settings))
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=settings, dist_init_required=False
        )
        if self._stage == 3:  # the loss reads the output embedding outside the module that owns it
            deepspeed.zero.register_external_parameter(objective, objective.model.lm_head.weight)
        self._share, self._world = share, world
        self._swapped = parallel["offload"] != "none" and parallel["offload_to"] == "nvme"
        self._updates = 0
        self._measure = "_get_norm_groups" if self._stage == 3 else "scaled_global_norm"
        self._measured: Any = None
        self._make_moments()

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor]:
        parts = rows.cut(self._share.micro)
        # DeepSpeed divides by the ranks and by the number of micro-batches
        weight = self._world.size * len(parts) / max(1, rows.targets)
        total = torch.zeros((), device=rows.tokens.device)
        for number, part in enumerate(parts, 1):
            loss = self._engine(part.tokens, part.mask, part.documents)
            self._engine.backward(loss * weight)
            if number < len(parts):
                self._engine.step()
            total += loss.detach()
        return total, self._norm() ** 2 / self._world.size

    def overflowed(self) -> bool:
        return bool(self._engine.fp16_enabled()) and self._optimizer.loss_scaler.cur_scale > 1

    def update(self, rate: float, norm: float) -> None:
        del norm  # DeepSpeed clips by its own, which need not be measured again
        set_rate(self._optimizer, rate)
        if self._stage:
            setattr(self._optimizer, self._measure, lambda: self._measured)
        self._engine.step()
        if self._stage:
            delattr(self._optimizer, self._measure)
        self._updates += 1

    def discard(self) -> None:
        """Let DeepSpeed do what it does after an overflow: drop the gradients and count the step as skipped."""
        if self._stage == 0:
            self._engine.module.zero_grad(set_to_none=True)
            self._engine.micro_steps += 1  # its own step fails where there are no gradients
            return
        name = "_overflow_check_and_loss_scale_update" if self._stage == 3 else "check_overflow"
        checks, self._optimizer.check_grad_overflow = getattr(self._optimizer, "check_grad_overflow", None), True
        setattr(self._optimizer, name, self._pretend_overflow)
        self._engine.step()
        delattr(self._optimizer, name)
        self._optimizer.check_grad_overflow = checks

    def evaluate(self, rows: Rows) -> Tensor:
        self._engine.eval()
        with torch.no_grad():
            losses = [self._engine(part.tokens, part.mask, part.documents) for part in rows.cut(self._share.micro)]
        self._engine.train()
        return torch.stack(losses).sum()

    def settle(self, rows: Rows) -> None:
        """Do nothing: DeepSpeed's buckets do not move after the first step."""

    def pieces(self) -> Iterator[Piece]:
        if self._stage == 0:
            alone = Layout(self._world.rank, 1, self._world.size, 1, 1, 1)
            yield from pieces(self._weights, self._optimizer, alone)
            return
        for name, weight in self._weights.items():
            for key in (None, *MOMENTS):
                told = f"{key}/{name}" if key else name
                yield from (self._of_partition if self._stage == 3 else self._of_fragment)(told, weight, key)

    def extra(self) -> dict[str, Any]:
        scaler = getattr(self._optimizer, "loss_scaler", None)
        scale = {} if scaler is None or not self._engine.fp16_enabled() else {"loss_scale": float(scaler.cur_scale)}
        return {"updates": self._updates} | scale

    def restore(self, extra: dict[str, Any]) -> None:
        self._updates = extra["updates"]
        set_updates(self._inner, self._updates)
        if "loss_scale" in extra and self._engine.fp16_enabled():
            self._optimizer.loss_scaler.cur_scale = extra["loss_scale"]
        if self._stage == 3:
            self._spread_weights()
        elif self._stage:
            self._optimizer.update_lp_params()

    @property
    def _inner(self) -> Any:
        """The AdamW within DeepSpeed's optimizer, on this rank's flat partitions."""
        return self._optimizer if self._stage == 0 else self._optimizer.optimizer

    def _make_moments(self) -> None:
        if self._stage < 3:
            make_moments(self._inner)
            if self._stage:
                self._optimizer._lazy_init_hp_params_optimizer_state()
        elif not self._swapped:  # DeepSpeed swaps only moments it has seen a first update make
            for flat in self._optimizer.fp32_partitioned_groups_flat:
                zeros = {name: torch.zeros_like(flat) for name in MOMENTS}
                self._inner.state[flat] = {"step": torch.zeros((), device=flat.device), **zeros}

    def _norm(self) -> Tensor:
        """Return the global norm of the gradients, unscaled; infinite if it is not a number."""
        if self._stage == 0:
            return square(self._weights.values(), 1).sqrt()
        self._measured = getattr(self._optimizer, self._measure)()
        told = self._measured if self._stage == 3 else [self._measured]
        norms = torch.stack([torch.as_tensor(norm).double() for norm in told])
        # DeepSpeed tells what is not finite as -1
        return torch.tensor(torch.inf) if bool((norms < 0).any()) else norms.norm() / self._optimizer.loss_scale

    def _pretend_overflow(self, *_: Any, **__: Any) -> bool:
        self._optimizer.overflow = True
        return self._stage < 3 or bool(self._optimizer._loss_scale_update_and_overflow_cleanup())

    def _of_fragment(self, told: str, weight: Any, key: str | None) -> Iterator[Piece]:
        """Tell what stages 1 and 2 keep of a weight here, a view into the flat fp32 partition."""
        mapping = weight._hp_mapping
        if mapping is not None:
            begin = mapping.lp_fragment_address.start
            yield Piece(told, tuple(weight.shape), (), mapping.get_hp_fragment(key).detach(), flat=begin)

    def _of_partition(self, told: str, weight: Any, key: str | None) -> Iterator[Piece]:
        """Tell what stage 3 keeps of a weight here: its equal part, the last of which may be padded."""
        if self._swapped and not self._updates:
            raise JobError(
                "DeepSpeed cannot take moments back onto its NVMe swap; resume with parallel.offload_to: cpu, or start "
                "in an empty output folder"
            )
        if self._swapped:
            from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

            part = safe_get_local_optimizer_state(weight, key) if key else safe_get_local_fp32_param(weight)
        else:
            part, _ = self._optimizer._get_fp32_opt_state_partition(weight, False, key)
        begin = part.numel() * self._world.rank
        here = min(part.numel(), weight.ds_numel - begin)
        if here > 0:
            yield Piece(told, tuple(weight.ds_shape), (), part.detach()[:here], flat=begin)

    def _spread_weights(self) -> None:
        """Make the weights that stage 3 computes with from the fp32 ones, as at the end of a step."""
        optimizer = self._optimizer
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _imagine(objective: NextTokenLoss, device: torch.device) -> None:
    """Give every weight its shape in the memory of one number, and move the buffers to the device."""
    fresh: dict[int, torch.nn.Parameter] = {}
    for owner in list(objective.modules()):
        for name, weight in list(owner.named_parameters(recurse=False)):
            hollow = torch.nn.Parameter(torch.empty(1).expand(weight.shape), weight.requires_grad)
            setattr(owner, name, fresh.setdefault(id(weight), hollow))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def _fill(objective: NextTokenLoss, folder: Path | None, train: dict[str, Any], parts: Any) -> None:
    """Make one weight after the other, whole, and split it among the ranks before the next is made."""
    kind, made = LOW.get(train["precision"], torch.float32), list[torch.nn.Parameter]()

    def split() -> None:
        while made:
            weight = made.pop()
            weight.data = weight.data.to(kind)
            parts._convert_to_zero_parameters([weight])

    def pick(weight: torch.nn.Parameter) -> tuple[Tensor, tuple[slice, ...]]:
        split()
        made.append(weight)
        weight.data = torch.empty(weight.shape)
        return box_of(weight)

    materialise(objective.model, train["seed"], folder, pick)
    split()


def config(train: dict[str, Any], parallel: dict[str, Any], share: Share) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe's `train` and `parallel` parts (deepspeed.ai/docs/config-json)."""
    stage = int(parallel["strategy"].removeprefix("zero"))
    settings: dict[str, Any] = {
        "train_batch_size": train["global_batch_size"],
        "train_micro_batch_size_per_gpu": share.micro,
        "gradient_accumulation_steps": share.accumulation,
        "gradient_clipping": train["grad_clip"],
        "zero_optimization": {"stage": stage} | _offload(parallel),
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on CPUs too, and needs no compiler
        "steps_per_print": 2**31,
    }
    if train["precision"] == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
    if train["precision"] == "bf16" and stage > AUTOCAST_UP_TO:
        settings["bf16"] = {"enabled": True}
    if "bf16" in settings or "fp16" in settings:
        settings |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return settings


def _offload(parallel: dict[str, Any]) -> dict[str, Any]:
    if parallel.get("offload", "none") == "none":
        return {}
    place: dict[str, Any] = {"device": parallel["offload_to"], "pin_memory": torch.cuda.is_available()}
    if parallel["offload_to"] == "nvme":
        place["nvme_path"] = parallel["nvme_path"]
    told = {"offload_optimizer": place}
    return told | ({"offload_param": place} if parallel["offload"] == "parameters" else {})


def _check_offload(parallel: dict[str, Any]) -> None:
    """Raise JobError where a disk is asked for and DeepSpeed cannot read and write it asynchronously."""
    if parallel.get("offload", "none") == "none" or parallel["offload_to"] != "nvme":
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise JobError(
            "parallel.offload_to is nvme and DeepSpeed's async_io cannot be built here; install libaio-dev and a C++ "
            "compiler on the nodes, or set offload_to: cpu"
        )


def _deepspeed(world: World, *, compiles: bool) -> Any:
    """Import DeepSpeed so that it neither talks nor needs a C++ compiler on a CPU."""
    if not compiles:  # its Muon optimizer, never used here, would load torch's compiler on import
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
