"""The weights of a Hugging Face folder: compared with the network by their headers, then read box by box."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from training.experts import Part, on_disk
from training.model.anatomy import Anatomy, named_weights
from training.process import JobError

Box = tuple[slice, ...]
"""A part of a tensor: its first index and the one past its last, in each dimension."""
BESIDES: Final = ("lm_head.weight", "rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""What a checkpoint may keep besides its weights, by the end of the name: a tied output embedding, old buffers."""


class Pretrained:
    """A folder with config.json and *.safetensors, one file or many."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises JobError when it holds no weights that can be read."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as problem:
                raise JobError(f"{path} cannot be read ({problem}); copy the folder again") from problem
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]  # a Rust extension
        index = folder / "model.safetensors.index.json"
        named = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
        if lost := sorted(name for name in set(named) if not (folder / name).exists()):
            raise JobError(f"{folder} lacks {', '.join(lost)}, which its index names; copy the folder again")
        if not self._files:
            raise JobError(f"{folder} holds no *.safetensors to start from; give a Hugging Face folder with weights")

    def config(self) -> PretrainedConfig:
        """Return the folder's configuration. Raises JobError when there is none that transformers knows."""
        try:
            return AutoConfig.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError, KeyError, json.JSONDecodeError) as problem:
            why = str(problem).partition("\n")[0]
            raise JobError(f"{self.folder}/config.json is no configuration of a model: {why}") from problem

    def has(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the folder holds this weight of a network, or of routed experts the matrices."""
        return all(self._stored(theirs) is not None for theirs in self._parts(name, shape))

    def read(self, name: str, box: Box, shape: Sequence[int]) -> Tensor:
        """Return a part of a weight of this shape, in the type it is stored in; only that part is in memory.

        KeyError without it.
        """
        parts = self._parts(name, shape)
        if list(parts.values()) == [None]:
            return self._cut(next(iter(parts)), box)
        experts: dict[int, list[Tensor]] = {one: [] for one in range(box[0].start, box[0].stop)}
        for theirs, part in parts.items():
            assert part is not None
            expert, first, last = part
            begin, end = max(first, box[1].start), min(last, box[1].stop)
            if expert in experts and begin < end:
                experts[expert].append(self._cut(theirs, (slice(begin - first, end - first), *box[2:])))
        return torch.stack([torch.cat(matrices) for matrices in experts.values()])

    def compare(self, network: PreTrainedModel) -> None:
        """Raise JobError when the folder lacks a weight of the whole network, has another one, or other shapes."""
        trunk = Anatomy.of(network.config).trunk
        left = {name.removeprefix(f"{trunk}.") for name in self._files if not name.endswith(BESIDES)}
        for name, weight in named_weights(network):
            if ".lora_" in name:
                continue
            for theirs, part in self._parts(name, weight.shape).items():
                shape = list(weight.shape) if part is None else [part[2] - part[1], *weight.shape[2:]]
                self._agree(theirs, shape)
                left.discard(theirs.removeprefix(f"{trunk}."))
        if left:
            raise JobError(
                f"the weights in {self.folder} have {min(left)}, which the recipe's {network.config.model_type} lacks; "
                "they are of another architecture"
            )

    def _agree(self, name: str, ours: list[int]) -> None:
        stored = self._stored(name)
        if stored is None:
            raise JobError(
                f"the weights in {self.folder} lack {name}; they are of another architecture than the recipe"
            )
        theirs = self._files[stored].get_slice(stored).get_shape()
        if theirs != ours:
            raise JobError(f"{name} is {theirs} in {self.folder} and {ours} in the recipe; make them equal")

    def _cut(self, name: str, box: Box) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            raise KeyError(name)
        return torch.as_tensor(self._files[stored].get_slice(stored)[box])

    def _parts(self, name: str, shape: Sequence[int]) -> Mapping[str, Part | None]:
        """Return what the folder calls a weight, or its parts: as the network does, or as published."""
        return {name: None} if self._stored(name) is not None else on_disk(name, shape)

    def _stored(self, name: str) -> str | None:
        """Return what the folder calls a weight: its name, or that without the trunk (a bare trunk was saved)."""
        return next((stored for stored in (name, name.partition(".")[2]) if stored in self._files), None)


def start_from(network: PreTrainedModel, folder: Path) -> None:
    """Replace all weights by those of a Hugging Face folder. Raises JobError when one is absent or misshapen."""
    pretrained = Pretrained(folder)
    pretrained.compare(network)
    with torch.no_grad():
        for name, weight in named_weights(network):
            weight.copy_(pretrained.read(name, tuple(slice(0, size) for size in weight.shape), weight.shape))
