"""Routed experts in training: a decoder block that also tells how evenly its router spread the tokens.

The load-balancing loss of Fedus et al., "Switch Transformers" (2022), equations 4 to 6, taken over each sequence by
itself (DeepSeek-AI, "DeepSeek-V2", 2024, equations 23 to 25): so it is the same however a batch is cut into
micro-batches and ranks. Its weight is the configuration's router_aux_loss_coef.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from training.experts import is_experts, on_disk
from training.model.anatomy import named_weights

BALANCE: Final = 0.02
"""What a new network's balance weighs: the router_aux_loss_coef of Mixtral 8x7B's published config.json."""


class RoutedBlock(MixtralDecoderLayer):  # type: ignore[misc]  # transformers has no types here
    """A decoder block with routed experts, which returns hidden states and their balance when training calls it."""

    def forward(self, hidden_states: Tensor, context: Any = None, **told: Any) -> Any:
        """Map hidden states [rows, tokens, width]; with a `context` also return the balance, fp32 [rows]."""
        if context is None:  # transformers' own forward pass and generation
            return super().forward(hidden_states, **told)
        told |= {"context": context, "attention_mask": None}
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **told)
        hidden = hidden_states + attended
        normed = self.post_attention_layernorm(hidden)
        logits, shares, chosen = self.mlp.gate(normed)
        told_apart = self.mlp.experts(normed.flatten(0, 1), chosen, shares).view_as(normed)
        rows = len(normed)
        return hidden + told_apart, balance(logits.unflatten(0, (rows, -1)), chosen.unflatten(0, (rows, -1)))


def balance(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return experts x sum over experts of (share of choices) x (mean probability), of each row: fp32 [rows].

    logits [rows, tokens, experts], chosen int64 [rows, tokens, topk]. Even routing gives topk, the least there is.
    """
    probabilities = logits.float().softmax(-1).mean(1)
    visits = torch.zeros_like(logits, dtype=torch.float32).scatter(-1, chosen, 1.0).mean(1)
    return logits.shape[-1] * (visits * probabilities).sum(-1)


def route(network: PreTrainedModel) -> None:
    """Make the blocks of a network with experts ones that tell their balance, in place."""
    for block in network.model.layers:
        block.__class__ = RoutedBlock


def stored_weights(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a network as the files of a Hugging Face folder have it, the matrices of experts apart."""
    for name, weight in named_weights(network):
        for theirs, part in on_disk(name, weight.shape).items():
            yield theirs, weight if part is None else weight[part[0], part[1] : part[2]]


def active_share(config: Any, name: str) -> float:
    """Return the share of a weight that a token meets: of routed experts, those it visits."""
    return float(config.num_experts_per_tok / config.num_local_experts) if is_experts(name) else 1.0
