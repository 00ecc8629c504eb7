"""How many parameters a rank holds."""

import numpy as np

from planner.schema import Configs, Floats

DEEPSEEK: tuple[int, ...] = (2112, 1536, 192, 512, 256, 128)
"""Of multi-head latent attention (DeepSeek-V3, arXiv:2412.19437): width of what is projected down, of the queries'
latent and a query head, of the keys' latent and a head's key with its value, and of a head's output."""


def stage_layers(configs: Configs) -> Floats:
    """Layers of the fullest pipeline stage; where the ends are balanced, each takes the place of one layer."""
    layers, pp = configs.shape.layers, configs.layout.pp
    if not np.any(pp > 1):
        return layers
    ends = configs.software.balanced_ends
    if not np.any(ends > 0):
        return np.ceil(layers / pp)
    return np.where(pp > 1, np.ceil((layers + 2 * ends) / pp) - ends, layers)


def layer_parameters(configs: Configs) -> Floats:
    """Weights of an average layer on one rank before any sharding over data-parallel ranks."""
    shape, tp = configs.shape, configs.layout.tp
    attention = attention_parameters(configs)
    dense = (attention + (2 + shape.gated) * shape.hidden * shape.ffn) / tp
    if not np.any(shape.experts > 0):
        return dense
    shared = 3 * shape.hidden * shape.expert_ffn * shape.shared_experts
    routed = (attention + shared) / tp + shape.hidden * shape.experts
    share = dense_share(configs)
    return share * dense + (1 - share) * routed + expert_parameters(configs)


def attention_parameters(configs: Configs) -> Floats:
    """Weights of one layer's attention, of all ranks together."""
    shape = configs.shape
    plain = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    if not np.any(shape.mla > 0):
        return plain
    down, query, head, latent, key_value, out = DEEPSEEK
    latents = shape.hidden * (down + shape.heads * out) + shape.heads * (query * head + latent * key_value)
    return np.where(shape.mla > 0, latents, plain)


def expert_parameters(configs: Configs) -> Floats:
    """Weights of the routed experts in an average layer on one rank, before any sharding over data-parallel ranks."""
    shape, layout = configs.shape, configs.layout
    local = np.maximum(shape.experts / layout.ep, 1) / np.where(layout.ep > 1, 1, layout.tp)
    return (1 - dense_share(configs)) * 3 * shape.hidden * shape.expert_ffn * local


def dense_share(configs: Configs) -> Floats:
    """Share of the layers whose MLP is dense."""
    shape = configs.shape
    return np.where(shape.experts > 0, shape.dense_layers / shape.layers, 1)


def end_parameters(configs: Configs) -> Floats:
    """Weights of the embeddings on the rank that has most of them."""
    shape, layout = configs.shape, configs.layout
    matrix = shape.vocab * shape.hidden / layout.tp
    return (1 + (1 - shape.tied) * (layout.pp <= 1)) * matrix


def parameters_per_rank(configs: Configs) -> Floats:
    """Weights of the fullest rank's layers and embeddings before any sharding over data-parallel ranks."""
    return stage_layers(configs) * layer_parameters(configs) + end_parameters(configs)
