"""Low-rank adapters beside frozen weights, or weights in 4 bits (Hu et al., "LoRA", 2021), by PEFT's names."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from training.model.initial import allocate, box_of, fill, materialise
from training.model.nf4 import Nf4, rounded
from training.model.pretrained import Pretrained
from training.process import JobError


class Adapted(nn.Module):
    """A linear layer whose frozen weight is joined by lora_B lora_A, scaled by alpha / rank."""

    def __init__(self, layer: nn.Linear | Conv1D, rank: int, scale: float) -> None:
        """Take over weight and bias of a layer; a Conv1D (GPT-2) stores its weight [columns, rows]."""
        super().__init__()
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        self.base: Nf4 | None = None
        """What is there in place of a weight that is kept in 4 bits."""
        self.transposed = isinstance(layer, Conv1D)
        columns, rows = layer.weight.shape if self.transposed else layer.weight.shape[::-1]
        self.lora_A = nn.Linear(columns, rank, bias=False, device=layer.weight.device)
        self.lora_B = nn.Linear(rank, rows, bias=False, device=layer.weight.device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., columns] to [..., rows]."""
        straight: Tensor
        if self.base is not None:
            straight = self.base(inputs, self.bias, transposed=self.transposed)
        else:
            straight = functional.linear(inputs, self.weight.T if self.transposed else self.weight, self.bias)
        detour: Tensor = self.lora_B(self.lora_A(inputs))
        return straight + self.scale * detour


def add_adapters(
    model: PreTrainedModel, rank: int, alpha: float, targets: Sequence[str], frozen: torch.dtype | None = None
) -> None:
    """Put adapters beside the linear layers whose name ends with one of `targets`, and freeze all other weights.

    `frozen` is the type the frozen weights are kept in (as they are without it). A new adapter's weights are not drawn
    here: `materialise` draws them. Raises JobError for a target that matches nothing.
    """
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    linear.pop("lm_head", None)
    found = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in targets}
    idle = set(targets) - {name.rpartition(".")[2] for name in found}
    if idle:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise JobError(
            f"train.lora_targets {', '.join(sorted(idle))} match no linear layer of {model.config.model_type}; it has "
            f"{', '.join(known)}"
        )
    model.requires_grad_(False)
    if frozen is not None:
        for weight in model.parameters():
            weight.data = weight.data.to(frozen)
    for name, layer in found.items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, Adapted(layer, rank, alpha / rank))


def materialise_in_4_bits(
    module: nn.Module, network: PreTrainedModel, seed: int, folder: Path | None, device: torch.device
) -> None:
    """Give a `network` with adapters, part of a `module`, memory on `device` and its first values.

    As `allocate` and `materialise`, but the weights beside adapters are kept in 4 bits (Dettmers et al., "QLoRA",
    2023); of these only one is whole at a time, on the CPU.
    """
    shapes = {}
    for name, layer in _adapted(network):
        shapes[name] = tuple(layer.weight.shape)
        layer.register_parameter("weight", None)
    allocate(module, device)
    materialise(network, seed, folder)
    pretrained = None if folder is None else Pretrained(folder)
    for name, layer in _adapted(network):
        whole = torch.empty(shapes[name])
        fill(box_of(whole), f"{name}.weight", shapes[name], network.config, seed, pretrained)
        base = Nf4(shapes[name])
        base.keep(whole)
        layer.base = base.to(device)


@torch.no_grad()
def round_to_4_bits(network: PreTrainedModel) -> None:
    """Round the weights beside adapters, in full precision, to what they are in 4 bits."""
    for _, layer in _adapted(network):
        layer.weight.copy_(rounded(layer.weight))


def _adapted(network: PreTrainedModel) -> Iterator[tuple[str, Adapted]]:
    yield from ((name, layer) for name, layer in network.named_modules() if isinstance(layer, Adapted))
