"""Routed experts on the disk: what the files of a Hugging Face folder call the parts of the tensors that hold them.

A network of transformers keeps the experts of a block as two tensors, "mlp.experts.gate_up_proj" [experts, 2 ffn,
hidden], gates first, and "mlp.experts.down_proj" [experts, hidden, ffn]. The published files have three matrices for
each expert (Mixtral's, as github.com/mistralai/mistral-inference names them), and so has what we export.
"""

from collections.abc import Mapping, Sequence
from typing import Final

GATE_UP: Final = ".mlp.experts.gate_up_proj"
DOWN: Final = ".mlp.experts.down_proj"
ROUTER: Final = ".mlp.gate.weight"
FOLDER: Final = ".block_sparse_moe"

Part = tuple[int, int, int]
"""Of a tensor of all experts: which expert, and from which row to which of its matrix."""


def is_experts(name: str) -> bool:
    """Whether a tensor of a network holds the matrices of all experts of a block."""
    return name.endswith((GATE_UP, DOWN))


def on_disk(name: str, shape: Sequence[int]) -> Mapping[str, Part | None]:
    """Return what the files call a tensor of a network: the names of its parts, or its own (None: it is whole)."""
    if name.endswith(ROUTER):
        return {name.removesuffix(ROUTER) + f"{FOLDER}.gate.weight": None}
    if not is_experts(name):
        return {name: None}
    block, rows = name.partition(".mlp.experts.")[0], shape[1]
    if name.endswith(DOWN):
        return {f"{block}{FOLDER}.experts.{one}.w2.weight": (one, 0, rows) for one in range(shape[0])}
    gates = {f"{block}{FOLDER}.experts.{one}.w1.weight": (one, 0, rows // 2) for one in range(shape[0])}
    return gates | {f"{block}{FOLDER}.experts.{one}.w3.weight": (one, rows // 2, rows) for one in range(shape[0])}
