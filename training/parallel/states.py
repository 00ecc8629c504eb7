"""What is trained and what AdamW keeps of it: made, measured over all axes, and told as pieces of whole tensors."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from training.checkpoint.piece import Piece
from training.model import NextTokenLoss
from training.parallel.mesh import Layout

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
Named = dict[str, nn.Parameter]


def trained(objective: NextTokenLoss) -> Named:
    """Return the trainable weights by their Hugging Face names; a tied one counts once."""
    return {name: weight for name, weight in objective.weights() if weight.requires_grad}


def adamw(weights: Iterable[nn.Parameter], train: dict[str, Any]) -> AdamW:
    """Make the optimizer: weight decay on matrices (and embeddings), none on norms and biases."""
    every = list(weights)
    groups = [
        {"params": [weight for weight in every if weight.ndim > 1], "weight_decay": train["weight_decay"]},
        {"params": [weight for weight in every if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return AdamW(kept, lr=train["learning_rate"], betas=(train["beta1"], train["beta2"]), fused=True)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's moments before the first step, so that a checkpoint can be read into them."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            fresh = {name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in MOMENTS}
            optimizer.state[weight] = {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **fresh}


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Tell AdamW how many updates it has done, for its bias correction."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(weights: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of every gradient there is."""
    return [local(weight.grad) for weight in weights if weight.grad is not None]


def square(weights: Iterable[nn.Parameter], ranks: int) -> Tensor:
    """Return this rank's share of the squared norm of all gradients: summed over all `ranks`, each counts once.

    A gradient that c ranks hold counts 1 / c on each. fp64 scalar.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for weight in weights:
        if weight.grad is not None:
            by_copies.setdefault(_copies(weight.grad, ranks), []).append(local(weight.grad))
    total: Tensor | None = None
    for copies, gradients in by_copies.items():
        part = _squares(gradients) / copies
        total = part if total is None else total + part
    return torch.zeros((), dtype=torch.float64) if total is None else total


def _squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of all squares, fp64; a CPU's own norm of millions of values is 1e-4 off, that of a row is not."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    return torch.stack([torch.linalg.vector_norm(each, dim=-1).double().square().sum() for each in tensors]).sum()


def scale_gradients(weights: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place."""
    if factor != 1.0 and (gradients := local_gradients(weights)):
        torch._foreach_mul_(gradients, factor)


def clipping(norm: float, limit: float) -> float:
    """Return what gradients of this norm are multiplied by, so that it is at most `limit` (as torch does)."""
    return min(1.0, limit / (norm + 1e-6))


def pieces(weights: Named, optimizer: torch.optim.Optimizer, layout: Layout) -> Iterator[Piece]:
    """Tell this rank's part of all weights and moments."""
    for name, weight in weights.items():
        state = optimizer.state[weight]
        yield from _piece(name, weight.detach(), layout)
        for moment in MOMENTS:
            yield from _piece(f"{moment}/{name}", state[moment], layout)


def whole_pieces(named: Iterable[tuple[str, Tensor]], owner: bool) -> Iterator[Piece]:
    """Tell tensors that every rank of a group has whole."""
    for name, tensor in named:
        yield Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor, owner)


def _piece(name: str, tensor: Tensor, layout: Layout) -> Iterator[Piece]:
    if not isinstance(tensor, DTensor):
        yield from whole_pieces([(name, tensor)], layout.data_rank == layout.place["cp"] == layout.place["tp"] == 0)
        return
    part = tensor.to_local()
    offset, shape = _box(tensor)
    if tuple(part.shape) != shape:
        raise AssertionError(f"{name} is {tuple(part.shape)} here and not {shape}")
    if part.numel():
        yield Piece(name, tuple(tensor.shape), offset, part, _is_first_copy(tensor, layout))


def _box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's part of a tensor begins, and its shape.

    The tp axis cuts first and FSDP2's axis cuts what is left, whichever of them the mesh names first (torch calls the
    latter's placement _StridedShard where both cut the same dimension).
    """
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    mesh = tensor.device_mesh
    axes = list(zip(mesh.mesh_dim_names or (), tensor.placements, range(mesh.ndim), strict=True))
    for _, placement, axis in sorted(axes, key=lambda told: told[0] != "tp"):
        dimension = _cut_dimension(placement)
        if dimension is not None:
            piece = -(-shape[dimension] // mesh.size(axis))
            begin = min(piece * mesh.get_local_rank(axis), shape[dimension])
            offset[dimension] += begin
            shape[dimension] = min(piece, shape[dimension] - begin)
    return tuple(offset), tuple(shape)


def _cut_dimension(placement: Any) -> int | None:
    """Return the dimension a placement cuts; torch's _StridedShard may be no subclass of Shard."""
    cuts = isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    return int(placement.dim) if cuts else None


def _is_first_copy(tensor: DTensor, layout: Layout) -> bool:
    """Whether this rank is the first along every axis that does not cut the tensor."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    cut = {names[axis] for axis, placement in enumerate(tensor.placements) if _cut_dimension(placement) is not None}
    if "dp_shard_cp" in cut:
        cut |= {"dp_shard", "cp"}
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    return all(name in cut or layout.place[name] == 0 for name in axes)


def _copies(gradient: Tensor, ranks: int) -> int:
    """Return how many of `ranks` hold the same part of a gradient."""
    if not isinstance(gradient, DTensor):
        return ranks
    mesh: DeviceMesh = gradient.device_mesh
    parts = 1
    for axis, placement in enumerate(gradient.placements):
        parts *= mesh.size(axis) if _cut_dimension(placement) is not None else 1
    return ranks // parts
