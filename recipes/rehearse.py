"""Shrinks any recipe to this machine, so that it can be run end to end for nothing before it is paid for.

What makes a recipe itself is kept: the shape of the network (grouped-query ratio, width of the MLP, tied embeddings),
the strategy, precision and recomputation, the steps of its life. What makes it large is not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.cluster import LocalCluster
from recipes.planned import ARITHMETIC, LLAMA
from recipes.spec import Data, Model, Parallel, Recipe, Train

MAX_PARAMETERS = 5_000_000
MAX_RANKS = 4
MAX_DOCUMENTS = 2_000
VOCAB_SIZE = 4096
# Measured with the shapes of Llama 3 8B and 70B, two ranks on two cores: 160 steps of 8 by 128 tokens take 50 s of CPU
# with the start, and 2.29 (2.16) bits per byte stand against 2.63 (2.49) of the unigram baseline; gzip has 1.50 (1.35).
STEPS, SEQUENCES, SEQUENCE_LENGTH = 160, 8, 128
WIDTH, LAYERS, HEADS = 128, 4, 4

Change = tuple[dict[str, Any], str]
"""Fields by section, as in a recipe file, and the sentence that tells of it."""


def rehearse(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe at this machine's size, and one sentence for each thing that was changed.

    A recipe that is small already comes back as it is, with no sentence.
    """
    notes = []
    if change := _cluster(recipe):
        recipe = _changed(recipe, change[0])
        notes.append(change[1])
    changes = [change for shrink in _SHRINKS if (change := shrink(recipe))]
    if not notes and not changes:
        return recipe, []
    for fields, note in changes:
        recipe = _changed(recipe, fields)
        notes.append(note)
    return _changed(recipe, {"name": f"{recipe.name.removesuffix('-rehearsal')[:30].rstrip('-')}-rehearsal"}), notes


def parameters(model: Model) -> int:
    """Trained numbers of a Llama decoder: embeddings, and per block attention, gated MLP and two norms; a last norm."""
    attention = 2 * model.hidden_size**2 + 2 * model.hidden_size**2 * model.kv_heads // model.heads
    block = attention + 3 * model.hidden_size * model.ffn_size + 2 * model.hidden_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.layers * block + model.hidden_size


def work(recipe: Recipe) -> float:
    """Floating-point operations of the training: 6 per parameter and token (Kaplan et al. 2020, section 2.1)."""
    tokens = recipe.train.steps * recipe.train.global_batch_size * recipe.data.sequence_length
    return 6.0 * parameters(recipe.model) * tokens


def _small_model(model: Model) -> bool:
    return _llama(model) and parameters(model) <= MAX_PARAMETERS and model.vocab_size <= VOCAB_SIZE


def _llama(model: Model) -> bool:
    return model == model.model_copy(update=LLAMA)


def _small(recipe: Recipe) -> bool:
    """Whether the training is no more than the miniature's."""
    return _small_model(recipe.model) and work(recipe) <= work(Recipe())


def _ranks(recipe: Recipe) -> int:
    """Training processes, where the cluster is this machine; 0 elsewhere."""
    cluster = recipe.cluster
    return cluster.nodes * cluster.processes_per_node if isinstance(cluster, LocalCluster) else 0


def _cluster(recipe: Recipe) -> Change | None:
    """Two ranks on this machine, with a batch they can share."""
    if 1 <= _ranks(recipe) <= MAX_RANKS:
        return None
    old = recipe.cluster
    what = "processes" if isinstance(old, LocalCluster) else old.instance_type
    told = f"cluster: 2 nodes of 1 process on this machine, in place of {old.nodes} x {what} ({old.kind})"
    batch = recipe.train.global_batch_size
    shared = {"train": {"global_batch_size": batch + batch % 2}, "parallel": {"micro_batch_size": "auto"}}
    return {"cluster": LocalCluster(nodes=2, processes_per_node=1).model_dump(), **shared}, told


def _image(recipe: Recipe) -> Change | None:
    if recipe.image.flavour == "local":
        return None
    return {"image": {"flavour": "local"}}, f"image: this machine as it is, in place of {recipe.image.flavour}"


def _store(recipe: Recipe) -> Change | None:
    if not recipe.store.startswith("s3://"):
        return None
    local = Recipe().store
    return {
        "store": local
    }, f"store: the folder {local}, in place of {recipe.store}, so that nothing leaves this machine"


def _model(recipe: Recipe) -> Change | None:
    if _small_model(recipe.model):
        return None
    shape = recipe.model.model_copy(update=LLAMA | _shape(recipe.model))
    told = (
        f"model: {parameters(shape) / 1e6:.1f} million parameters in place of {parameters(recipe.model) / 1e6:,.0f} "
        f"million ({shape.layers} layers, width {shape.hidden_size}, {shape.heads} heads of which {shape.kv_heads} for "
        f"keys and values, vocabulary {shape.vocab_size})"
    )
    return {"model": shape.model_dump()}, told


def _shape(model: Model) -> dict[str, int]:
    """The model's ratios at a small width; of query heads to a key/value head, 8 at most."""
    small = {"vocab_size": min(model.vocab_size, VOCAB_SIZE)}
    if _llama(model) and parameters(model.model_copy(update=small)) <= MAX_PARAMETERS:
        return small
    group = min(model.heads // model.kv_heads, 2 * HEADS)
    kv_heads = min(model.kv_heads, -(-HEADS // group))
    heads = group * kv_heads
    hidden = 2 * round(WIDTH / heads / 2) * heads
    ffn = 16 * max(1, round(hidden * min(model.ffn_size / model.hidden_size, 8) / 16))
    layers = min(model.layers, LAYERS)
    return small | {"layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden_size": hidden, "ffn_size": ffn}


def _program(recipe: Recipe) -> Change | None:
    """Castra's own training program, which is the one that is here."""
    if recipe.parallel.software == "castra" and recipe.train.precision in ARITHMETIC:
        return None
    arithmetic = recipe.train.precision if recipe.train.precision == "fp32" else "bf16"
    told = "parallel: Castra's own training program in place of what is only planned yet"
    return {"parallel": Parallel().model_dump(), "train": {"precision": arithmetic}}, told


def _source(recipe: Recipe) -> Change | None:
    """What is on this machine, not much of it, and enough held out of that to score on."""
    data = recipe.data
    less = {"max_documents": MAX_DOCUMENTS, "held_out": max(data.held_out, Data().held_out)}
    if data.source == "python-stdlib":
        return None
    if not Path(data.source).is_dir():
        told = f"data: the Python standard library, because {data.source} is not on this machine"
        return {"data": less | {"source": "python-stdlib", "include": ("*.py",)}}, told
    if data.max_documents is not None and data.max_documents <= MAX_DOCUMENTS:
        return None
    return {"data": less}, f"data: {MAX_DOCUMENTS:,} documents at most, taken evenly over {data.source}"


def _tokenizer(recipe: Recipe) -> Change | None:
    path = recipe.data.tokenizer
    if path == "train" or (Path(path).is_file() and recipe.model.vocab_size <= VOCAB_SIZE):
        return None
    why = f"{path} has too large a vocabulary" if Path(path).is_file() else f"{path} is not on this machine"
    return {"data": {"tokenizer": "train"}}, f"tokenizer: trained on the data, because {why}"


def _train(recipe: Recipe) -> Change | None:
    if _small(recipe):
        return None
    batch = _ranks(recipe) * max(1, SEQUENCES // _ranks(recipe))
    train: dict[str, Any] = {
        "steps": STEPS,
        "global_batch_size": batch,
        "learning_rate": max(recipe.train.learning_rate, Train().learning_rate),
        "warmup_steps": STEPS // 10,
        "checkpoint_every": STEPS // 4,
        "timeout_hours": min(recipe.train.timeout_hours, 1.0),
    }
    if recipe.train.rehearse_failure_at is not None:
        train["rehearse_failure_at"] = STEPS * 5 // 8
    length = min(recipe.data.sequence_length, SEQUENCE_LENGTH)
    told = (
        f"train: {STEPS} steps of {batch} sequences of {length} tokens in place of {recipe.train.steps:,} of "
        f"{recipe.train.global_batch_size:,} of {recipe.data.sequence_length:,}, at the learning rate of a small model"
    )
    return {"train": train, "data": {"sequence_length": length}, "parallel": {"micro_batch_size": "auto"}}, told


def _score(recipe: Recipe) -> Change | None:
    if _small(recipe):
        return None
    beat = tuple(baseline for baseline in recipe.score.must_beat if baseline == "unigram")
    gate = {"must_beat": beat, "max_bits_per_byte": None, "max_tokens": min(recipe.score.max_tokens, 20_000)}
    told = "score: the model must beat only the unigram baseline" if beat else "score: no baseline must be beaten"
    return {"score": gate}, f"{told}, so short a training can do no more"


def _serve(recipe: Recipe) -> Change | None:
    limit = 40
    if recipe.serve.max_new_tokens <= limit:
        return None
    return {"serve": {"max_new_tokens": limit}}, f"serve: {limit} tokens per prompt"


_SHRINKS: tuple[Callable[[Recipe], Change | None], ...] = (
    _cluster,
    _image,
    _store,
    _model,
    _program,
    _source,
    _tokenizer,
    _train,
    _score,
    _serve,
)


def _changed(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    values = recipe.model_dump()
    for name, value in change.items():
        within = isinstance(value, dict) and name != "cluster"
        values[name] = values[name] | value if within else value
    return Recipe.model_validate(values)
