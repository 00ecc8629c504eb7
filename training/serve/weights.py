"""Load an exported model for serving, whole or this rank's part of every layer (tensor parallelism).

Attention heads and the MLP's columns are cut up among the ranks, as in Megatron-LM (Shoeybi et al. 2019): what a block
computes is summed over the ranks twice. Embeddings and norms are on every rank. A rank reads its part of the files.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed, nn

from training.process import JobError
from training.ranks import World

COLUMNS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers of which each rank has a part of the outputs."""
ROWS: Final = ("o_proj", "down_proj")
"""Layers of which each rank has a part of the inputs; their outputs are summed."""


class Summed(nn.Module):
    """A rank's part of a linear layer that is cut along its inputs."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the whole layer's output [..., outputs] for this rank's inputs."""
        out = nn.functional.linear(hidden, self.weight)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


def load(folder: Path, world: World) -> Any:
    """Return a transformers causal language model of a Hugging Face folder, ready to answer on this rank's device.

    Raises JobError when there is no model, or when it cannot be cut up among so many ranks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise JobError(f"there is no exported model in {folder} (no config.json); run export first")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as problem:
        raise JobError(f"{folder}/config.json is no model that transformers knows: {problem}".splitlines()[0]) from None
    # only "eager" has Gemma 2's soft cap
    kernel = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    if world.size > 1:
        return _part(folder, config, kernel, world)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype="auto", local_files_only=True, attn_implementation=kernel
    )
    return model.to(world.device).eval()


def _part(folder: Path, config: Any, kernel: str, world: World) -> Any:
    """Build the model with this rank's part of each layer, its parameters read one after the other."""
    from transformers import AutoModelForCausalLM

    uneven = [name for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
              if getattr(config, name, 0) % world.size]  # fmt: skip
    if uneven:
        raise JobError(f"serve.tp: {world.size} ranks do not divide the model's {', '.join(uneven)}; use fewer")
    dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        cut = _cut(model, world.size, dtype)
    if not cut:
        raise JobError(f"serve.tp: {config.model_type} has no layers that we know how to cut; serve it with tp: 1")
    _read(model, folder, cut, world)
    model.tie_weights()
    _compute(model, config)
    absent = [name for name, one in model.named_parameters() if one.is_meta]
    if absent:
        raise JobError(f"{folder} has no weights for {absent[0]} (and {len(absent) - 1} more); export the model again")
    return model.to(world.device).eval()


def _compute(model: nn.Module, config: Any) -> None:
    """Fill what is computed rather than stored (rotary frequencies, Gemma's scale), as a model of one layer has it."""
    from transformers import AutoModelForCausalLM

    small = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "pad_token_id": None}
    if getattr(config, "layer_types", None):
        small["layer_types"] = config.layer_types[:1]
    twin = type(config).from_dict(config.to_dict() | small)
    found = dict(AutoModelForCausalLM.from_config(twin).named_buffers())
    for name, value in list(model.named_buffers()):
        if value.is_meta:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_buffer(last, found[name], persistent=False)


def _cut(model: nn.Module, parts: int, dtype: torch.dtype) -> dict[str, int]:
    """Make the layers that are cut up smaller; return the dimension along which each parameter of theirs is cut."""
    cut: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        kind = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear) or kind not in COLUMNS + ROWS:
            continue
        inputs, outputs, bias = module.in_features, module.out_features, module.bias is not None
        mine: nn.Module
        if kind in COLUMNS:
            mine = nn.Linear(inputs, outputs // parts, bias)
            cut |= {f"{name}.weight": 0, f"{name}.bias": 0}
        else:
            mine = Summed(inputs // parts, outputs, bias)
            cut[f"{name}.weight"] = 1
        model.set_submodule(name, mine.to(dtype))
    return cut


def _read(model: nn.Module, folder: Path, cut: dict[str, int], world: World) -> None:
    """Fill the parameters from the folder's safetensors files."""
    from safetensors import safe_open

    wanted = dict(model.named_parameters())
    for file in _files(folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no dictionary
                if name not in wanted:
                    continue
                stored = tensors.get_slice(name)
                place = [slice(None)] * len(stored.get_shape())
                if (axis := cut.get(name)) is not None:
                    size = stored.get_shape()[axis] // world.size
                    place[axis] = slice(world.rank * size, (world.rank + 1) * size)
                value = stored[tuple(place)].to(wanted[name].dtype)
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, nn.Parameter(value.to(world.device), requires_grad=False))


def _files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files. Raises JobError when there are none."""
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
    files = [folder / name for name in sorted(set(names))]
    if missing := [file for file in files if not file.is_file()]:
        raise JobError(f"{missing[0]} is absent; export the model again")
    return files
