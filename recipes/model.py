"""The network a recipe trains."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from recipes.part import Part, agreed

Family = Literal["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gpt2"]


class Model(Part):
    """The network: a decoder of one of transformers' families; latent attention is planned, not run."""

    family: Family = Field("llama", description="Architecture, by its transformers name.", examples=["gemma2"])
    pretrained: str = Field(
        "",
        description="Start from the weights of this Hugging Face folder, whose config.json also decides what is not "
        "said here (rope scaling, soft caps, norms); empty starts from random weights.",
        examples=["/fsx/models/Llama-3.1-8B", "s3://my-models/base/Llama-3.1-8B"],
    )
    hidden_size: PositiveInt = Field(192, description="Width of the residual stream.", examples=[4096])
    layers: PositiveInt = Field(2, description="Number of decoder blocks.", examples=[32])
    heads: PositiveInt = Field(6, description="Attention heads per block; must divide hidden_size.", examples=[32])
    kv_heads: PositiveInt = Field(
        6, description="Key/value heads (grouped-query attention); must divide heads.", examples=[8]
    )
    ffn_size: PositiveInt = Field(512, description="Width of the gated MLP.", examples=[14336])
    vocab_size: PositiveInt = Field(
        4096,
        ge=300,
        description="Tokens the tokenizer may have; the miniature trains one of this size.",
        examples=[128256],
    )
    tie_embeddings: bool = Field(True, description="Share the input and the output embedding.")
    rope_theta: PositiveFloat = Field(
        10000.0, description="Base of the rotary position embedding.", examples=[500000.0]
    )
    head_dim: PositiveInt | None = Field(
        None, description="Width of one attention head; empty is hidden_size / heads.", examples=[256]
    )
    gated: bool = Field(True, description="The MLP has three matrices (Llama), not two (GPT); of gpt2 always two.")
    sliding_window: PositiveInt | None = Field(
        None,
        description="Tokens that attention looks back, in every layer (mistral) or every second (gemma2); empty is "
        "all. Unit: tokens.",
        examples=[4096],
    )
    mla: bool = Field(False, description="Multi-head latent attention (DeepSeek).")
    experts: int = Field(
        0,
        ge=0,
        description="Routed experts of each block (mixture of experts); 0 is dense. Those of mixtral can be trained.",
        examples=[8],
    )
    topk: int = Field(0, ge=0, description="Experts that each token visits; 0 where there are none.", examples=[8])
    expert_ffn: int = Field(0, ge=0, description="Width of one expert; 0 is ffn_size.", examples=[1408])
    shared_experts: int = Field(0, ge=0, description="Experts that every token visits besides.", examples=[2])
    dense_layers: int = Field(0, ge=0, description="Leading blocks without experts.", examples=[3])

    @model_validator(mode="before")
    @classmethod
    def _two_matrices(cls, value: Any) -> Any:
        """GPT-2's MLP is not gated: there is no choice, so nobody need say it."""
        if isinstance(value, dict) and value.get("family") == "gpt2":
            return value | {"gated": False}
        return value

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        wrong = []
        if self.hidden_size % self.heads and not self.head_dim:
            wrong.append(f"heads ({self.heads}) must divide hidden_size ({self.hidden_size})")
        elif (width := self.head_dim or self.hidden_size // self.heads) % 2:
            wrong.append(f"hidden_size / heads is {width}, rotary embedding needs it even")
        if self.heads % self.kv_heads:
            wrong.append(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.family == "gpt2" and (self.kv_heads != self.heads or not self.tie_embeddings or self.head_dim):
            wrong.append("gpt2 has kv_heads equal to heads, tied embeddings and no head_dim")
        if self.sliding_window and self.family not in ("mistral", "gemma2"):
            wrong.append(f"sliding_window is of mistral and gemma2, not of {self.family}")
        return agreed(self, wrong + self._experts_agree())

    def _experts_agree(self) -> list[str]:
        wrong = []
        if self.family == "mixtral" and not self.experts:
            wrong.append("a mixtral has experts: write experts and topk (Mixtral 8x7B has 8 and 2), or family: mistral")
        if self.experts and not 1 <= self.topk <= self.experts:
            wrong.append(f"topk ({self.topk}) must be at least 1 and at most experts ({self.experts})")
        if not self.experts and (self.topk or self.expert_ffn or self.shared_experts or self.dense_layers):
            wrong.append("topk, expert_ffn, shared_experts and dense_layers need experts above 0")
        if self.dense_layers > self.layers:
            wrong.append(f"dense_layers ({self.dense_layers}) is above layers ({self.layers})")
        return wrong
