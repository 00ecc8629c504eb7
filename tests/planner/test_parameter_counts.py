"""Weights and operations per token, against real models and a published utilisation."""

from collections.abc import Callable

import pytest

from planner import flops_per_token, parameters
from recipes import Recipe
from recipes.spec import Model

MODELS = {
    "miniature": Model(),
    "untied": Model(tie_embeddings=False),
    "grouped queries": Model(hidden_size=256, heads=8, kv_heads=2, ffn_size=700, vocab_size=1000),
    "one key head": Model(hidden_size=64, layers=1, heads=4, kv_heads=1, ffn_size=33, vocab_size=301),
    "llama 3 8b": Model(hidden_size=4096, layers=32, heads=32, kv_heads=8, ffn_size=14336, vocab_size=128256),
}


def test_llama_3_8b_has_as_many_weights_as_meta_says(llama3_8b: Callable[..., Recipe]) -> None:
    assert parameters(llama3_8b().model) == 8_030_261_248


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_counts_equal_a_real_model(name: str) -> None:
    torch = pytest.importorskip("torch")
    from training.model import build
    from training.model import flops_per_token as flops_of_network

    spec = MODELS[name]
    with torch.device("meta"):
        network = build(spec.model_dump(mode="json"), 128)
    assert parameters(spec) == sum(weight.numel() for weight in network.parameters())
    assert flops_per_token(spec, 128) == flops_of_network(network, 128)


def test_utilisation_equals_the_one_torchtitan_published(llama3_8b: Callable[..., Recipe]) -> None:
    """6,785 tokens/s per H100 at 8,192 tokens were reported as 39.73 % MFU."""
    model = llama3_8b().model
    assert flops_per_token(model, 8192) * 6785 / 989e12 == pytest.approx(0.3973, abs=5e-5)


def test_attention_is_the_part_that_grows_with_the_sequence() -> None:
    model = Model()
    short, long = flops_per_token(model, 128), flops_per_token(model, 256)
    assert long - short == 12 * model.layers * model.hidden_size * 128
