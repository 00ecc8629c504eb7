"""Networks of every family, small enough for a test."""

from typing import Any

LENGTH, VOCABULARY = 24, 301
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gpt2")


def small(family: str = "llama", **other: Any) -> dict[str, Any]:
    """Return the `model` part of a recipe: grouped heads of an own width, windows where the family has them."""
    shape = {
        "family": family,
        "hidden_size": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "ffn_size": 48,
        "vocab_size": VOCABULARY,
        "tie_embeddings": family in ("gemma", "gemma2", "gpt2"),
        "rope_theta": 10000.0,
        "head_dim": 16,
        "sliding_window": 7 if family in ("mistral", "gemma2") else None,
    }
    if family == "gpt2":
        shape |= {"kv_heads": 4, "head_dim": None}
    if family == "mixtral":
        shape |= {"experts": 4, "topk": 2}
    return shape | other
