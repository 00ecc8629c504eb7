"""The proof of an export: loaded as a stranger would, it has the trained weights and computes what they compute."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from training.export.dtypes import NUMPY, Array, converter, values
from training.export.source import Source, safetensors, tensor
from training.process import JobError
from training.score.text import Tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ROWS: Final = 8
COLUMNS: Final = 256
"""Held-out rows and tokens per row whose logits are compared: a few seconds even for a model of 8e9 weights."""
LOGITS: Final = 2**28
"""Logits kept for the comparison: 1 GB; of a large vocabulary fewer rows are compared."""
MERGED: Final = 1e-5
"""How far a weight may be from torch's own sum with its adapter, relative: another order of additions in fp32."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared: the largest difference of a logit, on how many tokens, of how many tensors."""

    difference: float
    tokens: int
    tensors: int


def rows_of(tokens: Array, length: int, vocab_size: int) -> Tokens:
    """Return the first held-out tokens as rows to compare logits on: int64 [at most 8, at most 256]."""
    columns = min(COLUMNS, length, len(tokens))
    count = min(ROWS, len(tokens) // columns, max(1, LOGITS // (columns * vocab_size)))
    rows: Tokens = tokens[: count * columns].astype(np.int64).reshape(count, columns)
    return rows


def prove(model: "PreTrainedModel", source: Source, folder: Path, rows: Tokens, dtype: str) -> Proof:
    """Compare an exported folder with the trained model, fp32, adapters beside its weights; `model` is used up.

    Its weights are rounded to `dtype` and each is compared, bit by bit, with what the safetensors library finds in the
    folder; then the logits of both. Adapters, which the folder has added to the weights, are tried unadded first.
    `source` is where the folder's weights came from. Raises JobError when the folder lacks a weight or has another.
    """
    adapted, difference = _adapters(model), 0.0
    if adapted:
        apart = logits(model, rows)
        _add(source, adapted)
        difference = largest(apart, logits(model, rows))
    _round(model, dtype)
    compared = _compare(model, folder)
    ours = logits(model, rows)
    model.to("meta")
    return Proof(max(difference, largest(ours, logits(stranger(folder), rows))), rows.size, compared)


def stranger(folder: Path) -> "PreTrainedModel":
    """Load a folder as any user of transformers would. Raises JobError when something is missing or left over."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[kind]:
            raise JobError(f"{folder} does not load: {kind.replace('_', ' ')} {sorted(map(str, told[kind]))[:3]}")
    found: PreTrainedModel = loaded.eval()
    return found


def logits(model: "PreTrainedModel", rows: Tokens) -> "Tensor":
    """Return a model's logits for int64 [rows, columns] as fp32 on the CPU."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    with torch.inference_mode():
        parts = [
            model(input_ids=torch.from_numpy(row[None]).to(device), use_cache=False).logits.float().cpu()
            for row in rows
        ]
    return torch.cat(parts)


def largest(ours: "Tensor", theirs: "Tensor") -> float:
    """Return the largest absolute difference; not a number where one of them is none."""
    return float((ours - theirs).abs().max())


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of a folder's weights as training.model.weights_sha256 computes it of a model's.

    Over name, torch's type, shape and bytes of every tensor, by name: of an fp32 export it equals the training run's,
    but where there are routed experts, whose matrices the folder has apart.
    """
    source, digest = safetensors(folder), hashlib.sha256()
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64"}
    for name in sorted(source.tensors):
        stored = source.tensors[name]
        digest.update(f"{name} torch.{names.get(stored.dtype, stored.dtype)} {list(stored.shape)}\n".encode())
        for block in _blocks(source, name):
            digest.update(block)
    source.close()
    return digest.hexdigest()


def _blocks(source: Source, name: str) -> Iterator[Any]:
    stored = source.tensors[name]
    count, step = values(stored.shape), 2**20
    for first in range(0, count, step):
        out = np.empty(min(step, count - first), NUMPY[stored.dtype])
        source.read(name, first, out)
        yield out.data


def _adapters(model: "PreTrainedModel") -> dict[str, Any]:
    """Return the layers that have an adapter, by their names."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _add(source: Source, adapted: dict[str, Any]) -> None:
    """Give adapted layers the weights that were exported, once they are seen to be what torch adds up itself."""
    import torch

    from training.adapters import merged

    with torch.no_grad():
        for name, layer in adapted.items():
            weight = f"{name}.weight"
            stored = source.tensors[weight]
            theirs = torch.from_numpy(np.array(converter(weight, stored.dtype, "F32")(tensor(source, weight))))
            ours = merged(
                layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scale, transposed=layer.transposed
            )
            if not torch.allclose(ours, theirs, rtol=MERGED, atol=MERGED * float(ours.abs().max())):
                raise JobError(f"{weight} was not exported as the sum with its adapter; this is a defect, report it")
            layer.weight.copy_(theirs)
            layer.lora_B.weight.zero_()


def _round(model: "PreTrainedModel", dtype: str) -> None:
    """Round the weights; buffers, such as the rotary embedding's frequencies, stay fp32, as from_pretrained has it."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for weight in model.parameters():
        weight.data = weight.data.to(kind)


def _compare(model: "PreTrainedModel", folder: Path) -> int:
    """Compare every weight with the folder's, by the safetensors library; return how many there are."""
    import torch
    from safetensors import safe_open

    wanted = dict(_weights(model))
    count = len(wanted)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is not a dictionary
                theirs, ours = file.get_tensor(name), wanted.pop(name, None)
                if ours is None or theirs.dtype != ours.dtype or not torch.equal(theirs, ours.detach().cpu()):
                    raise JobError(f"{name} in {path.name} is not the trained weight; this is a defect, report it")
    if wanted:
        raise JobError(f"the exported files lack {min(wanted)}; this is a defect, report it")
    return count


def prove_adapter(model: "PreTrainedModel", file: Path, dtype: str) -> None:
    """Compare the adapters in PEFT's file with a model's, rounded to `dtype`. Raises JobError when one differs."""
    import torch
    from safetensors.torch import load_file

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    theirs = load_file(file)
    ours = {f"base_model.model.{name}": weight for name, weight in model.named_parameters() if ".lora_" in name}
    if theirs.keys() != ours.keys() or not all(torch.equal(theirs[name], ours[name].to(kind)) for name in ours):
        raise JobError(f"{file.name} has not the trained adapters; this is a defect, report it")


def _weights(model: "PreTrainedModel") -> Iterator[tuple[str, "Tensor"]]:
    from training.model.experts import stored_weights

    for name, weight in stored_weights(model):
        if ".lora_" not in name:
            yield name, weight
