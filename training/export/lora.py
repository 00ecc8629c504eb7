"""Low-rank adapters at the end of training: added to the weights they belong to, or written apart as PEFT reads them.

An adapter of "x.weight" is "x.lora_A.weight" [rank, in] and "x.lora_B.weight" [out, rank]; it adds
(alpha / rank) B A to a weight [out, in], its transpose to GPT-2's [in, out] (Hu et al., "LoRA", 2021, section 4.1).
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from training.adapters import merged
from training.export import stream
from training.export.dtypes import FLOATS, NUMPY, Array, converter, values
from training.export.source import Source, Stored, tensor
from training.job import write_json
from training.process import JobError

A: Final = ".lora_A.weight"
B: Final = ".lora_B.weight"
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"


def adapted(source: Source) -> list[str]:
    """Return what the adapters of a source belong to: names without ".weight"."""
    return sorted(name.removesuffix(A) for name in source.tensors if name.endswith(A))


class Merged:
    """A source whose adapters are added to their weights, in fp32, as these are read."""

    def __init__(self, source: Source, alpha: float, *, transposed: bool = False) -> None:
        """Read all adapters; `transposed` says that weights are [in, out], as GPT-2's.

        Raises JobError when an adapter has no weight, or its shapes do not fit.
        """
        self._source, self._transposed = source, transposed
        self.tied = source.tied
        self._parts = {f"{stem}.weight": self._pair(stem, alpha) for stem in adapted(source)}
        self.tensors = {name: found for name, found in source.tensors.items() if not name.endswith((A, B))}
        for name in self._parts:
            self.tensors[name] = Stored("F32", self.tensors[name].shape, ())

    def read(self, name: str, first: int, out: Array) -> None:
        if name not in self._parts:
            self._source.read(name, first, out)
            return
        stored = self._source.tensors[name]
        plain = np.empty(len(out), NUMPY[stored.dtype])
        self._source.read(name, first, plain)
        out[:] = converter(name, stored.dtype, "F32")(plain)
        row = values(stored.shape[1:])
        here, whole = slice(first // row, (first + len(out)) // row), out.reshape(-1, row)
        down, up, scale = self._parts[name]
        if self._transposed:
            whole[...] = merged(whole, down[:, here], up, scale, transposed=True)
        else:
            whole[...] = merged(whole, down, up[here], scale)

    def files(self) -> Sequence[Path]:
        return self._source.files()

    def _pair(self, stem: str, alpha: float) -> tuple[Array, Array, float]:
        """Return lora_A, lora_B and their scale."""
        weight = self._source.tensors.get(f"{stem}.weight")
        if weight is None or f"{stem}{B}" not in self._source.tensors or weight.dtype not in FLOATS:
            raise JobError(f"the adapter of {stem} has no weight to be added to; the checkpoint is incomplete")
        down, up = (_fp32(self._source, f"{stem}{part}") for part in (A, B))
        shape = (down.shape[1], len(up)) if self._transposed else (len(up), down.shape[1])
        if weight.shape != shape or up.shape[1] != len(down):
            raise JobError(
                f"the adapter of {stem}, {list(up.shape)} times {list(down.shape)}, does not fit its weight, "
                f"{list(weight.shape)}; it is another model's"
            )
        return down, up, alpha / len(down)


class Rounded:
    """A source some of whose weights were kept in 4 bits: they are read as training had them, in fp32.

    What is exported beside or with the adapters is so what they learned beside; added to the unrounded weights they
    would make another model, which nobody scored.
    """

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        """Round the named weights when they are read, each as a whole."""
        self._source, self._names = source, set(names)
        self.tied = source.tied
        self.tensors = {
            name: Stored("F32", stored.shape, ()) if name in self._names else stored
            for name, stored in source.tensors.items()
        }
        self._lock = threading.Lock()
        self._whole = lru_cache(maxsize=2)(self._rounded)  # threads read one tensor, or two neighbours

    def read(self, name: str, first: int, out: Array) -> None:
        if name not in self._names:
            self._source.read(name, first, out)
            return
        with self._lock:
            whole = self._whole(name)
        out[:] = whole[first : first + len(out)]

    def files(self) -> Sequence[Path]:
        return self._source.files()

    def _rounded(self, name: str) -> Array:
        import torch

        from training.model.nf4 import rounded

        return rounded(torch.from_numpy(_fp32(self._source, name))).reshape(-1).numpy()


def write_adapter(source: Source, train: dict[str, Any], dtype: str, base: str, folder: Path) -> int:
    """Write adapter_config.json and adapter_model.safetensors as PEFT reads them, and return the bytes of the latter.

    `train` is the recipe's part of that name, `base` what the adapters are to be added to: a folder or a Hub name.
    The names of the files, their keys and "base_model.model." are PEFT's (huggingface.co/docs/peft, "Checkpoint
    format").
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{stem}{part}" for stem in adapted(source) for part in (A, B)]
    plain = stream.targets(source, names, dtype)
    targets = {f"base_model.model.{name}": plain[name] for name in names}
    files = stream.shards(targets, 10**9, "adapter_model")
    stream.write(source, targets, files, folder)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": train["lora_rank"],
        "lora_alpha": train["lora_alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({stem.rpartition(".")[2] for stem in adapted(source)}),
    }
    write_json(folder / CONFIG, told)
    return (folder / files[0].name).stat().st_size


def _fp32(source: Source, name: str) -> Array:
    return converter(name, source.tensors[name].dtype, "F32")(tensor(source, name)).astype(np.float32)
