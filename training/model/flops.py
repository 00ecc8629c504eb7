"""What a trained token costs, and what a device can do."""

from typing import Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

from training.model.anatomy import Anatomy, head_dim, named_weights, window_of
from training.model.experts import active_share

PEAK_FLOPS: Final = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 operations per second by a part of the device's name (NVIDIA data sheets, without sparsity)."""


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the operations one trained token costs a whole network: 6 N + 12 heads head_dim look-back, over layers.

    Chowdhery et al., "PaLM" (2022), appendix B, which counts a causal layer's look back as the whole length; a sliding
    window counts as its own. N counts the output embedding but not an input table, which multiplies nothing. A frozen
    weight costs 4: forward, and backward to its input; its own gradient is not made (Hu et al., "LoRA", 2021). Of
    routed experts those count that a token visits. What activation checkpointing makes again does not.
    """
    config = model.config
    tables, layers = _tables(config), range(config.num_hidden_layers)
    costs = {
        name: (6 if weight.requires_grad else 4) * weight.numel() * active_share(config, name)
        for name, weight in named_weights(model)
    }
    weights = sum(cost for name, cost in costs.items() if name not in tables)
    seen = sum(min(window_of(config, layer) or sequence_length, sequence_length) for layer in layers)
    return float(weights + 12 * config.num_attention_heads * head_dim(config) * seen)


def _tables(config: PretrainedConfig) -> set[str]:
    """Return the weights that are looked up and multiply nothing."""
    anatomy = Anatomy.of(config)
    tables = {f"{anatomy.trunk}.{anatomy.places}.weight"} if anatomy.places else set()
    return tables if config.tie_word_embeddings else tables | {anatomy.embedding_weight}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's peak in operations per second where it is known: 16-bit on data-centre GPUs."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
