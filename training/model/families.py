"""The networks that can be trained: eight decoder families of transformers, from a recipe or a pretrained folder."""

import math
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from training.model.anatomy import Anatomy, ffn_size, head_dim, window_of
from training.model.attention import NAME
from training.model.experts import BALANCE, route
from training.model.initial import allocate, materialise
from training.model.pretrained import Pretrained
from training.process import JobError

DROPOUTS: Final = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
"""Training of large models uses none, and a random one would differ from layout to layout."""
NAMES: Final = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
"""What transformers calls the fields of a recipe's `model` part."""


def build(
    model: dict[str, Any], sequence_length: int, folder: Path | None = None, seed: int | None = None
) -> PreTrainedModel:
    """Make the whole network of a recipe's `model` part on torch's default device, in fp32.

    Its weights come from the Hugging Face `folder`, or are drawn for `seed`; without a seed torch's global generator
    gives one. Raises JobError when folder and recipe disagree.
    """
    network = skeleton(model, sequence_length, folder)
    device = torch.get_default_device()
    allocate(network, device)
    if device.type != "meta":
        materialise(network, int(torch.randint(2**62, ())) if seed is None else seed, folder)
    return network


def skeleton(model: dict[str, Any], sequence_length: int, folder: Path | None = None) -> PreTrainedModel:
    """Make the network with weights that have a shape and no memory (torch's meta device); its buffers are real.

    A Hugging Face `folder` decides by its config.json what the recipe does not say. Raises JobError when they disagree,
    and for a network that can only be planned.
    """
    _refuse_planned(model)
    pretrained = None if folder is None else Pretrained(folder)
    config = _from_recipe(model, sequence_length) if pretrained is None else _from_folder(model, pretrained)
    _fit(config, sequence_length)
    how = {"attn_implementation": NAME, "dtype": torch.float32}  # whatever type the folder's weights are stored in
    with torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, **how)
    _make_buffers(network)
    if network.config.model_type == "mixtral":
        route(network)
    if pretrained is not None:
        pretrained.compare(network)
    return network


def _from_recipe(model: dict[str, Any], sequence_length: int) -> PretrainedConfig:
    """Return the configuration of a new network.

    Standard deviation of the weights: sqrt(2 / (5 hidden_size)), SmallInit of Nguyen and Salazar 2019
    (arXiv:1910.05895), which fits narrow networks and wide ones.
    """
    family = model.get("family", "llama")
    settings: dict[str, Any] = {
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": sequence_length,
        "initializer_range": math.sqrt(2 / (5 * model["hidden_size"])),
        "tie_word_embeddings": model["tie_embeddings"],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "gpt2":
        sizes = {"n_embd": "hidden_size", "n_layer": "layers", "n_head": "heads", "n_inner": "ffn_size"}
        return CONFIG_MAPPING[family](**settings, **{theirs: model[ours] for theirs, ours in sizes.items()})
    settings |= {theirs: model[ours] for ours, theirs in NAMES.items()}
    settings["head_dim"] = model.get("head_dim") or model["hidden_size"] // model["heads"]
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": model["rope_theta"]}
    return CONFIG_MAPPING[family](**settings | _own_settings(family, model, settings["head_dim"]))


def _refuse_planned(model: dict[str, Any]) -> None:
    family = model.get("family", "llama")
    fields = ("mla", "shared_experts", "dense_layers", *(("experts",) if family != "mixtral" else ()))
    planned = [f"model.{name}" for name in fields if model.get(name)]
    if not model.get("gated", True) and family != "gpt2":
        planned.append("model.gated: false")
    if planned:
        raise JobError(f"{' and '.join(planned)} can be planned and not trained here; train a gated network without")


def _own_settings(family: str, model: dict[str, Any], width: int) -> dict[str, Any]:
    """Return what only this family has; a network without windows says so, as its class has one by default."""
    window = model.get("sliding_window")
    if family == "mistral":
        return {"sliding_window": window}
    if family == "mixtral":
        told = {"num_local_experts": model["experts"], "num_experts_per_tok": model["topk"]}
        ffn = model.get("expert_ffn") or model["ffn_size"]
        return told | {"intermediate_size": ffn, "router_aux_loss_coef": BALANCE, "sliding_window": None}
    if family == "gemma2":
        every_layer_sees_all = {"layer_types": ["full_attention"] * model["layers"]}
        return {"query_pre_attn_scalar": width} | ({"sliding_window": window} if window else every_layer_sees_all)
    return {}


def _from_folder(model: dict[str, Any], pretrained: Pretrained) -> PretrainedConfig:
    """Return the folder's configuration. Raises JobError when its shapes are not the recipe's."""
    config, family = pretrained.config(), model.get("family", "llama")
    if config.model_type != family:
        raise JobError(
            f"{pretrained.folder} holds a model of family {config.model_type} and model.family is {family}; "
            "make them equal"
        )
    theirs = _as_recipe(config)
    ours = {name: model.get(name, value) for name, value in theirs.items()}
    ours["head_dim"] = ours["head_dim"] or model["hidden_size"] // model["heads"]
    ours["ffn_size"] = model.get("expert_ffn") or model["ffn_size"]
    wrong = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in theirs if theirs[name] != ours[name]]
    if wrong:
        raise JobError(f"{pretrained.folder} is another model than the recipe's: {'; '.join(wrong)}")
    return config


def _as_recipe(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a recipe's `model` part that a configuration decides."""
    told = {ours: getattr(config, theirs, None) for ours, theirs in NAMES.items()}
    told |= {"head_dim": head_dim(config), "ffn_size": ffn_size(config)}
    if config.model_type == "gpt2":
        return told | {"kv_heads": config.num_attention_heads}
    told["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.model_type == "mixtral":
        told |= {"experts": config.num_local_experts, "topk": config.num_experts_per_tok}
    if config.model_type in ("mistral", "gemma2"):
        windows = [window_of(config, layer) for layer in range(config.num_hidden_layers)]
        told["sliding_window"] = next((window for window in windows if window), None)
    return told


def _fit(config: PretrainedConfig, sequence_length: int) -> None:
    """Let a configuration train on sequences so long. Raises JobError where its position table is shorter."""
    if config.max_position_embeddings < sequence_length:
        if config.model_type == "gpt2":
            raise JobError(
                f"the pretrained gpt2 has {config.max_position_embeddings} positions and data.sequence_length is "
                f"{sequence_length}; shorten it"
            )
        config.max_position_embeddings = sequence_length
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)


def _make_buffers(network: PreTrainedModel) -> None:
    """Make the buffers, which no checkpoint keeps, on the CPU: rotary frequencies and the scale of embeddings."""
    trunk = getattr(network, Anatomy.of(network.config).trunk)
    if hasattr(trunk, "rotary_emb"):
        trunk.rotary_emb = type(trunk.rotary_emb)(config=network.config)
    for module in network.modules():
        if isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
