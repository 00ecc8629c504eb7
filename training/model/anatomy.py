"""What a family calls its parts, and the few sizes whose names in transformers differ from family to family."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a family keeps its parts: the trunk's attribute in the network, and the parts' in the trunk."""

    trunk: str = "model"
    embedding: str = "embed_tokens"
    places: str | None = None
    """The table of learned positions; None where positions are rotated into queries and keys."""
    blocks: str = "layers"
    norm: str = "norm"

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Anatomy":
        """Return the anatomy of a configuration's family."""
        return GPT2 if config.model_type == "gpt2" else cls()

    @property
    def embedding_weight(self) -> str:
        """The canonical name of the input embedding, and of the output embedding tied to it."""
        return f"{self.trunk}.{self.embedding}.weight"


GPT2: Final = Anatomy("transformer", "wte", "wpe", "h", "ln_f")


def named_weights(network: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every weight of a network, or of a stage of one, by its Hugging Face name; a tied one once."""
    for name, weight in network.named_parameters():
        tied = name == HEAD and network.config.tie_word_embeddings
        yield Anatomy.of(network.config).embedding_weight if tied else name, weight


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """Return how many tokens the attention of a layer looks back, itself included; None is all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def head_dim(config: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def ffn_size(config: PretrainedConfig) -> int:
    """Return the width of the MLP."""
    if config.model_type == "gpt2":
        return int(config.n_inner or 4 * config.hidden_size)
    return int(config.intermediate_size)
