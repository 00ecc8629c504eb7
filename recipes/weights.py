"""How many numbers a decoder has, and how many of them low-rank adapters add."""

from recipes.model import Model


def parameters(model: Model, positions: int = 0) -> int:
    """All weights of a decoder, as transformers builds its family; `positions` are those GPT-2 has vectors for.

    Embeddings, and per block attention, MLP (with experts so many, and their router) and norms; a last norm; and what
    `extras` adds.
    """
    head = width(model)
    attention = 2 * model.hidden_size * head * (model.heads + model.kv_heads)
    mlp = (2 + model.gated) * model.hidden_size * (model.expert_ffn or model.ffn_size)
    block = attention + mlp * (model.experts or 1) + model.experts * model.hidden_size + 2 * model.hidden_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.layers * block + model.hidden_size + extras(model, positions)


def extras(model: Model, positions: int = 0) -> int:
    """What a family has beside Llama's matrices and norms: biases, norms of its own, vectors for positions."""
    hidden, head = model.hidden_size, width(model)
    if model.family == "gpt2":  # every matrix and norm has a bias
        return model.layers * (7 * hidden + model.ffn_size) + hidden * (1 + positions)
    each = {
        "qwen2": (model.heads + 2 * model.kv_heads) * head,
        "qwen3": 2 * head,
        "gemma2": 2 * hidden,
    }
    return model.layers * each.get(model.family, 0)


def adapters(model: Model, rank: int, targets: tuple[str, ...]) -> int:
    """Weights of low-rank adapters beside a decoder's linear layers, named by the last part of their name.

    Two matrices each, of (in, rank) and (rank, out): Hu et al. 2021 (LoRA, arXiv:2106.09685), section 4.1.
    """
    return rank * model.layers * sum(size for name, size in linear_layers(model).items() if name in targets)


def linear_layers(model: Model) -> dict[str, int]:
    """Columns and rows, added up, of a block's linear layers, by the last part of their name."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries, keys = model.heads * width(model), model.kv_heads * width(model)
    if model.family == "gpt2":  # two layers are called c_proj
        return {"c_attn": 4 * hidden, "c_proj": 3 * hidden + ffn, "c_fc": hidden + ffn}
    attention = {"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys}
    attention |= {"o_proj": queries + hidden}
    if model.family == "mixtral":  # the matrices of all experts are one tensor, and no layer
        return attention
    return attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + ffn)


def matrices(model: Model, targets: tuple[str, ...]) -> int:
    """Weights of all linear layers of a decoder that are named so by the last part of their name."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries, keys = model.heads * width(model), model.kv_heads * width(model)
    each = {"c_attn": 3 * hidden * hidden, "c_proj": hidden * (hidden + ffn), "c_fc": hidden * ffn}
    each |= dict.fromkeys(("q_proj", "o_proj"), hidden * queries) | dict.fromkeys(("k_proj", "v_proj"), hidden * keys)
    each |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden * ffn)
    return model.layers * sum(each[name] for name in linear_layers(model) if name in targets)


def width(model: Model) -> int:
    """Of one attention head."""
    return model.head_dim or model.hidden_size // model.heads
