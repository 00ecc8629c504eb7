"""Tensor parallel plans: how the layers of each family of models are cut up among the ranks of a tp group.

Matrices as in Shoeybi et al., "Megatron-LM" (arXiv:1909.08053): the first of a pair by columns, the second by rows.
Between the pairs activations are cut up along the sequence (Korthikanti et al., arXiv:2205.05198), norms included.
"""

from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from training.model import NextTokenLoss
from training.process import JobError

NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")


def check(model: dict[str, Any], length: int, tp: int, cp: int) -> None:
    """Raise JobError unless the recipe's `model` part, trained on `length` tokens, can be cut up so."""
    family = model.get("family", "llama")
    if tp > 1 and family not in FAMILIES:
        raise JobError(f"a {family} model has no tensor parallel plan; set parallel.tp to 1")
    for name in ("heads", "kv_heads", "vocab_size", "ffn_size"):
        if model[name] % tp:
            raise JobError(f"parallel.tp ({tp}) does not divide model.{name} ({model[name]}); change one of them")
    if cp > 1 and length % (2 * cp * tp):
        raise JobError(f"data.sequence_length ({length}) is no multiple of 2 x cp x tp ({2 * cp * tp}); change one")
    if length % tp:
        raise JobError(f"parallel.tp ({tp}) does not divide data.sequence_length ({length}); change one of them")


def cut_up(objective: NextTokenLoss, mesh: DeviceMesh) -> None:
    """Cut a model, or a pipeline stage of it, up along the tp axis, in place."""
    model: Any = objective.model
    trunk: Any = objective.trunk
    both = objective.first and objective.last and model.lm_head.weight is trunk.embed_tokens.weight
    whole = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(),
    }
    parallelize_module(model, mesh, {name: style for name, style in whole.items() if _has(model, name)})
    if both:  # the output embedding's rows are cut as the input's are
        model.lm_head.weight = trunk.embed_tokens.weight
    for block in objective.blocks:
        parallelize_module(block, mesh, {name: style for name, style in _block_plan().items() if _has(block, name)})


def _block_plan() -> dict[str, Any]:
    plan: dict[str, Any] = {name: SequenceParallel(use_local_output=True) for name in NORMS}
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"self_attn.{name}"] = ColwiseParallel()
    for name in ("q_norm", "k_norm"):  # each head is normed by itself: [rows, tokens, heads, width]
        plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    return plan | {
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def _has(module: nn.Module, name: str) -> bool:
    try:
        return module.get_submodule(name) is not None
    except AttributeError:
        return False
