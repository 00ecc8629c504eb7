"""The first weights: read or drawn box by box, so that every layout starts from the same bits and none holds more.

A drawn weight depends on its name, its shape and the seed alone: not on the device, the ranks or the other weights.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig, PreTrainedModel

from training.model.anatomy import named_weights
from training.model.pretrained import Box, Pretrained

AT_ONCE: Final = 2**20
"""Numbers drawn from one state of the generator; a rank draws only the blocks of rows that it has a part of."""


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the weights on the meta device memory on `device`, without a value yet, and move the buffers there."""
    buffers = {name: buffer.to(device) for name, buffer in module.named_buffers()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for own, weight in owner.named_parameters(recurse=False):
            places.setdefault(id(weight), []).append((owner, own))
    module.to_empty(device=device)
    for name, buffer in buffers.items():
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, buffer)
    for first, *others in places.values():  # to_empty makes a tied weight two
        for place in others:
            setattr(*place, getattr(*first))


@torch.no_grad()
def materialise(
    network: PreTrainedModel,
    seed: int,
    folder: Path | None = None,
    pick: Callable[[nn.Parameter], tuple[Tensor, Box]] | None = None,
) -> None:
    """Fill every weight of a network or a stage: from the Hugging Face `folder` where it has it, else drawn for `seed`.

    `pick` tells what is filled: this rank's part of a weight, and the box of the whole tensor that it is (`box_of` if
    not given). Beside the weights only one block of rows, 4 MB, or one box of the folder is in memory.
    """
    pretrained = None if folder is None else Pretrained(folder)
    for name, weight in named_weights(network):
        fill((pick or box_of)(weight), name, tuple(weight.shape), network.config, seed, pretrained)


def fill(
    place: tuple[Tensor, Box],
    name: str,
    shape: tuple[int, ...],
    config: PretrainedConfig,
    seed: int,
    pretrained: Pretrained | None,
) -> None:
    """Fill this rank's part, and box, of a weight: from the folder where that has it, else drawn."""
    part, box = place
    if pretrained is not None and pretrained.has(name, shape):
        part.copy_(pretrained.read(name, box, shape))
    else:
        _draw(part, box, name, shape, law(name, shape, config), seed)


def box_of(weight: Tensor) -> tuple[Tensor, Box]:
    """Return this rank's part of a weight, sharing its memory, and where in the whole tensor it lies."""
    if not isinstance(weight, DTensor):
        return weight.detach(), tuple(slice(0, size) for size in weight.shape)
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return weight.to_local().detach(), box


def law(name: str, shape: tuple[int, ...], config: PretrainedConfig) -> tuple[str, float]:
    """Return how a weight starts: ("normal", deviation), ("uniform", bound) or ("constant", value).

    Matrices: the configuration's deviation, over sqrt(2 layers) for the two of GPT-2 that write to the residual stream
    (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3). Adapters: Hu et al.,
    "LoRA", 2021, section 4.1, with PEFT's bound. Gains: 1, which Gemma stores as 0.
    """
    if ".lora_A." in name:
        return "uniform", 1 / math.sqrt(shape[1])
    if ".lora_B." in name or name.endswith(".bias"):
        return "constant", 0.0
    if len(shape) > 1:
        residual = config.model_type == "gpt2" and name.endswith("c_proj.weight")
        return "normal", config.initializer_range / (math.sqrt(2 * config.num_hidden_layers) if residual else 1)
    return "constant", 0.0 if config.model_type.startswith("gemma") else 1.0


def _draw(part: Tensor, box: Box, name: str, shape: tuple[int, ...], how: tuple[str, float], seed: int) -> None:
    """Fill `part`, the `box` of a tensor of this shape; the matrices of experts one by one."""
    kind, size = how
    if len(shape) > 2:
        for one, matrix in zip(range(box[0].start, box[0].stop), part, strict=True):
            _draw(matrix, box[1:], f"{name}[{one}]", shape[1:], how, seed)
        return
    if kind == "constant":
        part.fill_(size)
        return
    rows, columns = box[0], box[1:]
    step = max(1, AT_ONCE // math.prod(shape[1:]))
    generator = torch.Generator("cpu")
    for start in range(rows.start - rows.start % step, rows.stop, step):
        stop = min(start + step, shape[0])
        block = torch.empty((stop - start, *shape[1:]), device="cpu")
        generator.manual_seed(_state(seed, name, start // step))
        if kind == "normal":
            block.normal_(0.0, size, generator=generator)
        else:
            block.uniform_(-size, size, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        part[first - rows.start : last - rows.start] = block[(slice(first - start, last - start), *columns)].to(
            part.dtype
        )


def _state(*what: Any) -> int:
    """Return 62 bits that depend on everything given."""
    digest = hashlib.sha256("\0".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def weights_sha256(module: nn.Module) -> str:
    """Return the SHA-256 over name, type, shape and bytes of every parameter, by name; a tied one counts once."""
    digest = hashlib.sha256()
    for name, weight in sorted(module.named_parameters()):
        whole = weight.detach().cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
