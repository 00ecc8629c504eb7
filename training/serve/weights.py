"""Load an exported model for serving, whole or this rank's part of every layer (tensor parallelism).

Attention heads and the MLP's columns are cut up among the ranks, as in Megatron-LM (Shoeybi et al. 2019): what a block
computes is summed over the ranks twice. Embeddings and norms are on every rank. A rank reads its part of the files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed, nn
from transformers.pytorch_utils import Conv1D

from training.experts import Part, on_disk
from training.process import JobError
from training.ranks import World

COLUMNS: Final = {
    "q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1, "c_attn": 3, "c_fc": 1,
}  # fmt: skip
"""Layers of which each rank has a part of the outputs: of each of so many equal groups of them."""
ROWS: Final = ("o_proj", "down_proj", "c_proj")
"""Layers of which each rank has a part of the inputs; their outputs are summed."""
EXPERTS: Final = {".w1.weight": 0, ".w3.weight": 0, ".w2.weight": 1}
"""Along what the matrices of an expert are cut up, by the end of their names in the files."""


class Summed(nn.Module):
    """A rank's part of a linear layer that is cut along its inputs; `transposed`, its weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *, transposed: bool = False) -> None:
        super().__init__()
        self._transposed = transposed
        self.weight = nn.Parameter(torch.empty((inputs, outputs) if transposed else (outputs, inputs)))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the whole layer's output [..., outputs] for this rank's inputs."""
        out = nn.functional.linear(hidden, self.weight.T if self._transposed else self.weight)
        distributed.all_reduce(out)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor of the files is cut up: along which dimension, in each of how many equal groups."""

    axis: int
    groups: int = 1

    def mine(self, stored: Any, rank: int, ranks: int) -> torch.Tensor:
        """Read a rank's part of a tensor, a slice of a safetensors file."""
        whole = stored.get_shape()[self.axis] // self.groups
        size, parts = whole // ranks, []
        for group in range(self.groups):
            begin = group * whole + rank * size
            parts.append(stored[(slice(None),) * self.axis + (slice(begin, begin + size),)])
        return torch.cat(parts, self.axis)


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
              if (getattr(config, name, 0) or 0) % world.size]  # fmt: skip
    if uneven:
        raise JobError(f"serve.tp: {world.size} ranks do not divide the model's {', '.join(uneven)}; use fewer")
    dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        cut = _cut(model, world.size, dtype) | _cut_experts(model, world.size, dtype)
    if not cut:
        raise JobError(f"serve.tp: {config.model_type} has no layers that we know how to cut; serve it with tp: 1")
    read = _read(model, folder, cut, world)
    model.tie_weights()
    _compute(model, config)
    absent = [name for name, one in model.named_parameters() if not read.issuperset(on_disk(name, one.shape))]
    if absent:
        raise JobError(f"{folder} has no weights for {absent[0]} (and {len(absent) - 1} more); export the model again")
    return model.to(world.device).eval()


def _compute(model: nn.Module, config: Any) -> None:
    """Fill what is computed rather than stored (rotary frequencies, Gemma's scale), as a model of one layer has it."""
    from transformers import AutoModelForCausalLM

    if not (absent := [name for name, value in model.named_buffers() if value.is_meta]):
        return
    small = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "pad_token_id": None}
    if getattr(config, "layer_types", None):
        small["layer_types"] = config.layer_types[:1]
    twin = type(config).from_dict(config.to_dict() | small)
    found = dict(AutoModelForCausalLM.from_config(twin).named_buffers())
    for name in absent:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_buffer(last, found[name], persistent=False)


def _cut(model: nn.Module, parts: int, dtype: torch.dtype) -> dict[str, Cut]:
    """Make the layers that are cut up smaller; return how each parameter of theirs is cut, by its name."""
    cut: dict[str, Cut] = {}
    for name, module in list(model.named_modules()):
        kind, transposed = name.rpartition(".")[2], isinstance(module, Conv1D)
        if not isinstance(module, nn.Linear | Conv1D) or kind not in (*COLUMNS, *ROWS):
            continue
        inputs, outputs = module.weight.shape if transposed else module.weight.shape[::-1]
        bias = module.bias is not None
        mine: nn.Module
        if kind in COLUMNS:
            mine = Conv1D(outputs // parts, inputs) if transposed else nn.Linear(inputs, outputs // parts, bias)
            cut |= {f"{name}.weight": Cut(int(transposed), COLUMNS[kind]), f"{name}.bias": Cut(0, COLUMNS[kind])}
        else:
            mine = Summed(inputs // parts, outputs, bias, transposed=transposed)
            cut[f"{name}.weight"] = Cut(int(not transposed))
        model.set_submodule(name, mine.to(dtype))
        if kind == "c_attn":  # where GPT-2 tells queries, keys and values apart
            attention: Any = model.get_submodule(name.rpartition(".")[0])
            attention.split_size = outputs // 3 // parts
    return cut


def _cut_experts(model: nn.Module, parts: int, dtype: torch.dtype) -> dict[str, Cut]:
    """Make every expert narrower, and sum what the ranks' parts of all give; returns the cuts of their matrices."""
    cut: dict[str, Cut] = {}
    for name, module in list(model.named_modules()):
        if not name.endswith(".mlp.experts"):
            continue
        experts, double, hidden = module.gate_up_proj.shape
        module.gate_up_proj = nn.Parameter(torch.empty(experts, double // parts, hidden, dtype=dtype))
        module.down_proj = nn.Parameter(torch.empty(experts, hidden, double // 2 // parts, dtype=dtype))
        module.register_forward_hook(_summed)
        for own in ("gate_up_proj", "down_proj"):
            for theirs in on_disk(f"{name}.{own}", getattr(module, own).shape):
                cut[theirs] = Cut(next(axis for end, axis in EXPERTS.items() if theirs.endswith(end)))
    return cut


def _summed(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    del module, given
    distributed.all_reduce(out)
    return out


def _read(model: nn.Module, folder: Path, cut: dict[str, Cut], world: World) -> set[str]:
    """Fill the parameters from the folder's safetensors files; returns the tensors of these that were read."""
    from safetensors import safe_open

    wanted = {theirs: (name, part) for name, one in model.named_parameters()
              for theirs, part in on_disk(name, one.shape).items()}  # fmt: skip
    read = set()
    for file in _files(folder):
        with safe_open(file, "pt") as tensors:
            for theirs in tensors.keys():  # noqa: SIM118  # it is no dictionary
                if theirs not in wanted:
                    continue
                stored, (name, part) = tensors.get_slice(theirs), wanted[theirs]
                value = cut[theirs].mine(stored, world.rank, world.size) if theirs in cut else stored[:]
                _put(model, name, part, value.to(world.device))
                read.add(theirs)
    return read


def _put(model: nn.Module, name: str, part: Part | None, value: torch.Tensor) -> None:
    """Give a parameter its value, or of a tensor of all experts the value of a part."""
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    now = getattr(owner, own)
    if part is None:
        setattr(owner, own, nn.Parameter(value.to(now.dtype), requires_grad=False))
        return
    if now.is_meta:
        now = nn.Parameter(torch.empty_like(now, device=value.device), requires_grad=False)
        setattr(owner, own, now)
    now[part[0], part[1] : part[2]] = value


def _files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files. Raises JobError when there are none."""
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ["model.safetensors"]
    files = [folder / name for name in sorted(set(names))]
    if missing := [file for file in files if not file.is_file()]:
        raise JobError(f"{missing[0]} is absent; export the model again")
    return files
