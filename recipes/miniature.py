"""The shape of a large model, and the sizes of its parallelism, at this machine's scale."""

from typing import Any

from recipes.model import Model
from recipes.parallel import Parallel
from recipes.planned import dense
from recipes.weights import parameters, width

MAX_PARAMETERS = 5_000_000
MAX_RANKS = 4
VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 128
WIDTH, LAYERS, HEADS, EXPERTS = 128, 4, 4, 4
CUTS = ("tp", "pp", "cp", "shard")
"""What a rehearsal keeps of a layout, as long as ranks are left: two of each."""


def is_small(model: Model) -> bool:
    """Whether a model can be trained here and is no larger than a rehearsal's."""
    return is_trainable(model) and parameters(model) <= MAX_PARAMETERS and model.vocab_size <= VOCAB_SIZE


def is_trainable(model: Model) -> bool:
    """Whether Castra's own program trains such a network."""
    return model == dense(model)


def small_model(model: Model, across: int, deep: int) -> Model:
    """The model's ratios at a small width; `across` divides its heads, `deep` its layers."""
    small: dict[str, Any] = {"vocab_size": min(model.vocab_size, VOCAB_SIZE), "pretrained": ""}
    if model.sliding_window:
        small["sliding_window"] = min(model.sliding_window, SEQUENCE_LENGTH // 2)
    plain = dense(model).model_copy(update=small)
    divides = model.kv_heads % across == 0 and model.layers % deep == 0 and plain.vocab_size % across == 0
    kept = divides and is_trainable(model) and is_small(plain)
    return plain if kept else plain.model_copy(update=_shape(plain, across, deep))


def _shape(model: Model, across: int, deep: int) -> dict[str, Any]:
    """Widths and depths; of query heads to a key/value head, 8 at most."""
    group = min(model.heads // model.kv_heads, 2 * HEADS)
    kv_heads = _multiple(min(model.kv_heads, -(-HEADS // group)), across)
    heads = group * kv_heads
    hidden = 2 * max(1, round(WIDTH / heads / 2)) * heads
    wide = width(model) * model.heads / model.hidden_size  # what the heads make of the model's width
    head = 2 * max(1, round(hidden / heads * wide / 2)) if model.head_dim else None
    ffn = _ffn(hidden, model.ffn_size / model.hidden_size)
    routed = {"experts": min(model.experts, EXPERTS), "topk": min(model.topk, EXPERTS // 2)}
    if model.expert_ffn:
        routed["expert_ffn"] = _ffn(hidden, model.expert_ffn / model.hidden_size)
    return {
        "vocab_size": model.vocab_size // across * across,
        "layers": _multiple(min(model.layers, LAYERS), deep),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": head,
        "ffn_size": ffn,
        **(routed if model.experts else {}),
    }


def small_sizes(parallel: Parallel) -> tuple[dict[str, int], int]:
    """Two of each size that was above one, as far as the ranks go; and the ranks these take, two at least."""
    told = {name: getattr(parallel, name) for name in CUTS}
    wanted = [name for name, size in told.items() if size not in ("auto", 1)]
    kept = dict.fromkeys(wanted[: MAX_RANKS.bit_length() - 1], 2)
    sizes: dict[str, int] = {name: kept.get(name, 1) for name, size in told.items() if size != "auto"}
    if parallel.vpp != "auto":
        sizes["vpp"] = 2 if parallel.vpp > 1 and kept.get("pp") else 1
    model = 2 ** len(kept)
    # one factor of two besides, so that there is data parallelism to rehearse too
    return sizes, min(2 * model, MAX_RANKS) if kept else 2


def _ffn(hidden: int, wide: float) -> int:
    """The width of an MLP or of an expert, `wide` times the model's."""
    return 16 * max(1, round(hidden * min(wide, 8) / 16))


def _multiple(size: int, of: int) -> int:
    """The nearest multiple that is not smaller."""
    return -(-size // of) * of
