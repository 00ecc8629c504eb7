"""What a decoder is made of: exact parameter counts and floating-point operations per token.

Everything is an array (or a scalar, as an array without axes), so that thousands of configurations cost one pass.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recipes.spec import Model

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Decoders, one per element: widths in elements, `sequence` in tokens, `gated` and `tied` 0 or 1."""

    hidden: Floats
    layers: Floats
    heads: Floats
    kv_heads: Floats
    head_dim: Floats
    ffn: Floats
    vocab: Floats
    sequence: Floats
    gated: Floats
    """The MLP has three matrices (Llama) and not two (GPT)."""
    tied: Floats
    """Input and output embedding are one matrix."""

    @classmethod
    def of(cls, model: Model, sequence_length: int) -> Self:
        """The shape of a recipe's model."""
        sizes = (
            model.hidden_size,
            model.layers,
            model.heads,
            model.kv_heads,
            model.hidden_size // model.heads,
            model.ffn_size,
            model.vocab_size,
            sequence_length,
            1,
            model.tie_embeddings,
        )
        return cls(*(np.asarray(size, dtype=np.float64) for size in sizes))

    @property
    def kv_width(self) -> Floats:
        """Width of the keys (and of the values) of one token in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> Floats:
        """Weights in the matrices of one block: query, output, key, value, and the two or three of the MLP."""
        attention = 2 * self.hidden * (self.heads * self.head_dim + self.kv_width)
        return attention + (2 + self.gated) * self.hidden * self.ffn

    @property
    def head_matrix(self) -> Floats:
        """Weights of one embedding matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> Floats:
        """All weights, the two norms of each block and the last norm included; no biases."""
        blocks = self.layers * (self.layer_matrices + 2 * self.hidden)
        return blocks + (2 - self.tied) * self.head_matrix + self.hidden

    @property
    def flops_per_token(self) -> Floats:
        """Forward and backward of one token, see `flops_per_token`."""
        used = self.parameters - (1 - self.tied) * self.head_matrix
        attention = 12 * self.layers * self.heads * self.head_dim * self.sequence
        return 6 * used + attention


def parameters(model: Model) -> int:
    """Exact number of weights of a recipe's Llama (grouped-query attention, gated MLP, norms, tied embeddings)."""
    return int(Shape.of(model, 1).parameters)


def flops_per_token(model: Model, sequence_length: int) -> float:
    """Model FLOPs one token costs in training: 6 N + 12 L H Q T.

    N counts all weights but a separate input embedding, which is a look-up: 2 FLOPs forward and 4 backward each
    (Kaplan et al. 2020, arXiv:2001.08361). The second term is attention over T tokens by L layers of H heads of width
    Q, without the causal half, as everybody counts who reports MFU (Chowdhery et al. 2022, PaLM, arXiv:2204.02311,
    appendix B). Recomputation is work but not model FLOPs, so it is not in here.
    """
    return float(Shape.of(model, sequence_length).flops_per_token)
