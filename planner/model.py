"""What a decoder is made of: its shape from a recipe, a Hugging Face config or a name; weights and FLOPs per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.errors import PlanError
from planner.schema import Floats, Shape
from recipes.weights import extras, width

if TYPE_CHECKING:
    from recipes.spec import Model

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "hidden": ("hidden", "hidden_size", "d_model", "n_embd", "dim"),
    "layers": ("layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "heads": ("heads", "num_attention_heads", "n_heads", "n_head"),
    "kv_heads": ("kv_heads", "num_key_value_heads", "n_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "kv_channels"),
    "ffn": ("ffn", "ffn_size", "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab", "vocab_size", "padded_vocab_size"),
    "sequence": ("seq", "sequence", "sequence_length", "seq_len", "seq_length", "max_sequence_length"),
    "gated": ("gated", "gated_mlp"),
    "tied": ("tied", "tied_emb", "tie_embeddings", "tie_word_embeddings"),
    "experts": ("n_experts", "experts", "num_experts", "num_local_experts", "n_routed_experts"),
    "topk": ("topk", "top_k", "num_experts_per_tok", "moe_router_topk"),
    "expert_ffn": ("moe_ffn", "expert_ffn", "expert_ffn_size", "moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared_experts": ("shared_experts", "n_shared_experts"),
    "dense_layers": ("dense_layers", "first_k_dense_replace"),
    "mla": ("mla",),
}
"""What a field of `Shape` is called: in tables of measured steps, recipes, Hugging Face's and Megatron's files."""
_LIKE_LLAMA: Final = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "granite", "smollm3", "stablelm")
_EXPERTS: Final = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
HUGGING_FACE: Final[dict[str, dict[str, Any]]] = {
    **{name: {} for name in (*_LIKE_LLAMA, *_EXPERTS)},
    **{name: {"tied": 1} for name in ("gemma", "gemma2", "gemma3_text", "cohere", "cohere2")},
    **{name: {"gated": 0, "tied": 1} for name in ("gpt2", "opt", "bloom", "starcoder2")},
    "gpt_neox": {"gated": 0},
    **{name: {"mla": 1} for name in ("deepseek_v2", "deepseek_v3")},
}
"""What a `model_type` leaves unsaid: by default the MLP is gated and the embeddings are two matrices."""
_TABLE: Final = """
gpt3-175b    hidden 12288 layers 96 heads 96 vocab 51200 seq 2048 gated 0 tied 1 gbs 1536
mt-nlg-530b  hidden 20480 layers 105 heads 128 vocab 51200 seq 2048 gated 0 tied 1 gbs 1920
llama2-7b    hidden 4096 layers 32 heads 32 ffn 11008 vocab 32000 seq 4096
llama2-70b   hidden 8192 layers 80 heads 64 kv_heads 8 ffn 28672 vocab 32000 seq 4096
llama3-8b    hidden 4096 layers 32 heads 32 kv_heads 8 ffn 14336 vocab 128256 seq 8192
llama3-70b   hidden 8192 layers 80 heads 64 kv_heads 8 ffn 28672 vocab 128256 seq 8192
llama3-405b  hidden 16384 layers 126 heads 128 kv_heads 8 ffn 53248 vocab 128256 seq 8192
mixtral-8x7b hidden 4096 layers 32 heads 32 kv_heads 8 ffn 14336 vocab 32000 seq 4096 n_experts 8 topk 2
qwen3-30b    hidden 2048 layers 48 heads 32 kv_heads 4 head_dim 128 ffn 6144 vocab 151936 seq 4096 n_experts 128 topk 8 moe_ffn 768
deepseek-v3  hidden 7168 layers 61 heads 128 head_dim 128 ffn 18432 vocab 129280 seq 4096 n_experts 256 topk 8 moe_ffn 2048 shared_experts 1 dense_layers 3 mla 1
"""  # noqa: E501 - a table
KNOWN: Final[dict[str, dict[str, int]]] = {
    name: dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for name, *words in (line.split() for line in _TABLE.strip().splitlines())
}
"""Published models, by name: the figures of their public configurations; `gbs` is the published global batch."""


def shape_of(model: Model, sequence_length: int) -> Shape:
    """The shape of a recipe's model, as columns without axes."""
    return from_mapping(model.model_dump(), sequence_length, "the recipe's model")


def from_mapping(told: Mapping[str, Any], sequence_length: int | None, where: str) -> Shape:
    """A shape from whatever its fields are called (`NAMES`); raises `PlanError` for what is missing or impossible."""
    found = {name: _number(told, name, where) for name in NAMES}
    found["sequence"] = sequence_length or found["sequence"] or 2048
    missing = [name for name in ("hidden", "layers", "heads", "vocab") if found[name] is None]
    if missing:
        raise PlanError(
            f"{where} does not say {NAMES[missing[0]][1]}: add it (or one of {', '.join(NAMES[missing[0]])})."
        )
    hidden, heads = found["hidden"], found["heads"]
    assert hidden is not None
    assert heads is not None
    if not heads or (found["head_dim"] is None and hidden % heads):
        raise PlanError(f"{where}: heads {heads:g} must divide the width {hidden:g}, or head_dim must be told.")
    gated = 1 if found["gated"] is None else found["gated"]
    defaults = {"kv_heads": heads, "head_dim": hidden // heads, "gated": gated, "ffn": _default_ffn(hidden, gated)}
    filled = {name: value if value is not None else defaults.get(name, 0) for name, value in found.items()}
    if filled["experts"]:
        filled["expert_ffn"] = filled["expert_ffn"] or filled["ffn"]
        filled["topk"] = filled["topk"] or 1
    _check(filled, where)
    return Shape(**{name: np.asarray(value, dtype=np.float64) for name, value in filled.items()})


def from_hugging_face(config: Mapping[str, Any], sequence_length: int | None, where: str = "config.json") -> Shape:
    """A shape from a Hugging Face config.json; raises `PlanError` for a `model_type` or a field it does not know."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {"model_type": f"{config.get('model_type')}_text", **inner}
    kind = str(config.get("model_type", ""))
    if kind not in HUGGING_FACE:
        raise PlanError(f"{where} is of model_type {kind!r}, which is none of {', '.join(sorted(HUGGING_FACE))}.")
    told = {name: value for name, value in (HUGGING_FACE[kind] | dict(config)).items() if value is not None}
    if kind.startswith("qwen2_moe") and "shared_expert_intermediate_size" in told:
        told["shared_experts"] = told["shared_expert_intermediate_size"] / told["moe_intermediate_size"]
    if "mlp_only_layers" in told:
        told["dense_layers"] = len(told["mlp_only_layers"])
    return from_mapping(told, sequence_length or told.get("max_position_embeddings"), where)


def from_file(asked: str, sequence_length: int | None = None, depth: int = 0) -> tuple[Shape, dict[str, Any]]:
    """A model by the name of `KNOWN`, a config.json, or a YAML file; and all that the file says besides.

    A YAML file is a recipe, a mapping of `NAMES`, or a mapping whose `model` is one of these, or a path, or a name;
    `depth` is how many such were followed. Raises `PlanError` with one sentence.
    """
    if asked in KNOWN:
        return from_mapping(KNOWN[asked], sequence_length, asked), dict(KNOWN[asked])
    told = _read(Path(asked))
    model = told.get("model", told)
    if isinstance(model, str) and not NAMES.keys() & told.keys():
        if depth:
            raise PlanError(f"{asked} names another model, {model}: name that one.")
        beside = Path(asked).parent / model
        shape, more = from_file(str(beside) if beside.exists() else model, sequence_length, depth + 1)
        return shape, more | told
    if not isinstance(model, Mapping):
        model = told
    data = told.get("data")
    stated = data.get("sequence_length") if isinstance(data, Mapping) else None
    stated = sequence_length or stated or next((told[name] for name in NAMES["sequence"] if name in told), None)
    reads = from_hugging_face if "model_type" in model or "text_config" in model else from_mapping
    return reads(model, _whole(stated, "sequence_length", asked), asked), told


def parameters(model: Model, sequence_length: int = 0) -> int:
    """Exact number of weights of a recipe's decoder; GPT-2 has vectors for the places of a sequence, too."""
    return int(weights(shape_of(model, 1))) + extras(model, sequence_length)


def flops_per_token(model: Model, sequence_length: int) -> float:
    """Model FLOPs one token costs in training: 6 N + 12 L H Q T.

    N counts all weights that a token meets but a separate input embedding, which is a look-up: 2 FLOPs forward and 4
    backward each (Kaplan et al. 2020, arXiv:2001.08361). The second term is attention over T tokens by L layers of H
    heads of width Q, without the causal half, as everybody counts who reports MFU (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B). Recomputation is work but not model FLOPs, so it is not in here.
    """
    return float(model_flops(shape_of(model, sequence_length))) + flops_beside(model, sequence_length)


def flops_beside(model: Model, sequence_length: int) -> float:
    """Model FLOPs of one token that a shape does not tell: a family's biases, less what its windows do not look at."""
    windows = {"mistral": model.layers, "gemma2": -(-model.layers // 2)}.get(model.family, 0)
    unseen = max(sequence_length - (model.sliding_window or sequence_length), 0)
    return 6.0 * extras(model) - 12.0 * windows * unseen * model.heads * width(model)


def weights(shape: Shape) -> Floats:
    """All weights, the two norms of each block, the last norm and the routers included; no biases."""
    return _blocks(shape, shape.experts) + (2 - shape.tied) * shape.vocab * shape.hidden + shape.hidden


def model_flops(shape: Shape, trained: float = 1.0) -> Floats:
    """Model FLOPs of one token in training, see `flops_per_token`; of the experts those count that it visits.

    Where a share of the weights learns, the others have no gradient of their own: 4 FLOPs each and not 6.
    """
    used = _blocks(shape, shape.topk) + shape.vocab * shape.hidden + shape.hidden
    width = np.where(shape.mla > 0, 160.0, shape.head_dim)  # DeepSeek's scores take 192, its values 128
    return (4 + 2 * trained) * used + 12 * shape.layers * shape.heads * width * shape.sequence


def _blocks(shape: Shape, experts: Floats) -> Floats:
    """Weights of all blocks, with that many routed experts in each that has any."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    low_rank = shape.hidden * 2112 + shape.heads * (1536 * 192 + 512 * 256 + 128 * shape.hidden) + 1536 + 512
    attention = np.where(shape.mla > 0, low_rank, attention) + 2 * shape.hidden
    dense = np.where(shape.experts > 0, shape.dense_layers, shape.layers)
    routed = 3 * shape.hidden * shape.expert_ffn * (experts + shape.shared_experts) + shape.hidden * shape.experts
    mlp = dense * (2 + shape.gated) * shape.hidden * shape.ffn + (shape.layers - dense) * routed
    return np.asarray(shape.layers * attention + mlp)


def _default_ffn(hidden: float, gated: float) -> float:
    """Four times the width; two thirds of it, in multiples of 256, where a third matrix is to be paid for (Llama)."""
    return -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden


def _number(told: Mapping[str, Any], name: str, where: str) -> float | None:
    given = next((alias for alias in NAMES[name] if told.get(alias) is not None), None)
    if given is None:
        return None
    value = told[given]
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise PlanError(f"{where}: {given} is {value!r}, it must be a number that is not negative.")
    return value


def _whole(value: Any, name: str, where: str) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise PlanError(f"{where}: {name} is {value!r}, it must be a positive whole number.")
    return value


def _check(shape: Mapping[str, float], where: str) -> None:
    """Raise `PlanError` for sizes that no decoder has."""
    for name in ("hidden", "layers", "heads", "kv_heads", "vocab", "sequence"):
        if shape[name] < 1 or shape[name] != int(shape[name]):
            raise PlanError(f"{where}: {name} is {shape[name]:g}, it must be a positive whole number.")
    if shape["heads"] % shape["kv_heads"]:
        raise PlanError(f"{where}: kv_heads {shape['kv_heads']:g} must divide heads {shape['heads']:g}.")
    if shape["topk"] > shape["experts"]:
        raise PlanError(f"{where}: topk {shape['topk']:g} is above the {shape['experts']:g} experts there are.")


def _read(path: Path) -> dict[str, Any]:
    """A JSON or YAML file's mapping; raises `PlanError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        known = ", ".join(KNOWN)
        raise PlanError(
            f"there is no model file {path} that can be read, and {path} is no known model ({known})."
        ) from None
    if path.suffix == ".json":
        try:
            told = json.loads(text)
        except ValueError as problem:
            raise PlanError(f"{path} is not JSON: {problem}.") from None
    else:
        told = _yaml(text, path)
    if not isinstance(told, dict):
        raise PlanError(f"{path} holds no mapping: write a recipe, or hidden, layers, heads, vocab and so on.")
    return told


def _yaml(text: str, path: Path) -> Any:
    import yaml  # a sweep of a known model does without

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    except yaml.YAMLError as problem:
        raise PlanError(f"{path} is not YAML: {' '.join(str(problem).split())}.") from None
