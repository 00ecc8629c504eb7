"""Shrinks any recipe to this machine, so that it can be run end to end for nothing before it is paid for.

What makes a recipe itself is kept: the family and the ratios of the network, the strategy and two of each parallel
size, offloading, precision and recomputation, adapters, conversations, the steps of its life. What makes it large is
not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.cluster import LocalCluster
from recipes.miniature import MAX_RANKS, SEQUENCE_LENGTH, VOCAB_SIZE, is_small, small_model, small_sizes
from recipes.planned import ARITHMETIC
from recipes.spec import Case, Data, Parallel, Recipe, Train
from recipes.weights import parameters

MAX_DOCUMENTS = 2_000
CHAT = Path(__file__).with_name("conversations.jsonl")
"""Made-up conversations about sums and words, for rehearsing a chat recipe whose data is elsewhere."""
# Measured with the shapes of Llama 3 8B and 70B, two ranks on two cores: 160 steps of 8 by 128 tokens take 50 s of CPU
# with the start, and 2.29 (2.16) bits per byte stand against 2.63 (2.49) of the unigram baseline; gzip has 1.50 (1.35).
STEPS, SEQUENCES = 160, 8

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


def work(recipe: Recipe) -> float:
    """Floating-point operations of the training: 6 per parameter and token (Kaplan et al. 2020, section 2.1)."""
    tokens = recipe.train.steps * recipe.train.global_batch_size * recipe.data.sequence_length
    return 6.0 * parameters(recipe.model) * tokens


def _small(recipe: Recipe) -> bool:
    """Whether the training is no more than the miniature's."""
    return is_small(recipe.model) and work(recipe) <= work(Recipe())


def _ranks(recipe: Recipe) -> int:
    """Training processes, where the cluster is this machine; 0 elsewhere."""
    cluster = recipe.cluster
    return cluster.nodes * cluster.processes_per_node if isinstance(cluster, LocalCluster) else 0


def _cluster(recipe: Recipe) -> Change | None:
    """Two nodes of this machine, with ranks for two of each parallel size, and a batch they can share."""
    if 1 <= _ranks(recipe) <= MAX_RANKS:
        return None
    old, (sizes, ranks) = recipe.cluster, small_sizes(recipe.parallel)
    what = "processes" if isinstance(old, LocalCluster) else old.instance_type
    each = "1 process" if ranks == 2 else f"{ranks // 2} processes"
    told = f"cluster: 2 nodes of {each} on this machine, in place of {old.nodes} x {what} ({old.kind})"
    batch = -(-recipe.train.global_batch_size // ranks) * ranks
    shared = {"train": {"global_batch_size": batch}, "parallel": {"micro_batch_size": "auto"} | sizes}
    return {"cluster": LocalCluster(nodes=2, processes_per_node=ranks // 2).model_dump(), **shared}, told


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


def _pretrained(recipe: Recipe) -> Change | None:
    path = recipe.model.pretrained
    if not path or (Path(path).is_dir() and is_small(recipe.model)):
        return None
    why = "is of another size" if Path(path).is_dir() else "is not on this machine"
    return {"model": {"pretrained": ""}}, f"model: random weights, because {path} {why}"


def _model(recipe: Recipe) -> Change | None:
    if is_small(recipe.model):
        return None
    parallel = recipe.parallel
    tp, pp, vpp = (1 if size == "auto" else size for size in (parallel.tp, parallel.pp, parallel.vpp))
    shape = small_model(recipe.model, max(tp, min(recipe.serve.tp, 2)), pp * vpp)
    told = (
        f"model: {parameters(shape) / 1e6:.1f} million parameters in place of {parameters(recipe.model) / 1e6:,.0f} "
        f"million ({shape.layers} layers, width {shape.hidden_size}, {shape.heads} heads of which {shape.kv_heads} for "
        f"keys and values, vocabulary {shape.vocab_size})"
    )
    return {"model": shape.model_dump()}, told


def _program(recipe: Recipe) -> Change | None:
    """Castra's own training program, which is the one that is here."""
    framework = recipe.case.framework
    if framework == "castra" and recipe.parallel.software == "castra" and recipe.train.precision in ARITHMETIC:
        return None
    arithmetic = recipe.train.precision if recipe.train.precision in ARITHMETIC else "bf16"
    parallel = {} if recipe.parallel.software == "castra" else {"parallel": Parallel().model_dump()}
    what = "what is only planned yet" if framework == "castra" else f"{framework}, which is not on this machine"
    told = f"case: Castra's own training program in place of {what}"
    return parallel | {"case": Case().model_dump(), "train": {"precision": arithmetic}}, told


def _half(recipe: Recipe) -> Change | None:
    if recipe.train.precision != "fp16" or not recipe.parallel.strategy.startswith("zero"):
        return None
    return {"train": {"precision": "bf16"}}, "train: bf16 in place of fp16, which DeepSpeed does not have on CPUs"


def _disk(recipe: Recipe) -> Change | None:
    parallel = recipe.parallel
    if parallel.offload == "none" or parallel.offload_to == "cpu" or Path(parallel.nvme_path).is_dir():
        return None
    told = f"parallel: {parallel.offload} offloaded to memory, because {parallel.nvme_path} is not on this machine"
    return {"parallel": {"offload_to": "cpu"}}, told


def _source(recipe: Recipe) -> Change | None:
    """What is on this machine, not much of it, and enough held out of that to score on."""
    data = recipe.data
    sources = (data.source,) if isinstance(data.source, str) else data.source
    less = {"max_documents": MAX_DOCUMENTS, "held_out": max(data.held_out, Data().held_out)}
    if away := [one for one in sources if not _here(one, data)]:
        instead, told = _in_place_of_data(data)
        return {"data": less | instead}, f"data: {told}, because {away[0]} is not on this machine"
    if sources == ("python-stdlib",) or (data.max_documents is not None and data.max_documents <= MAX_DOCUMENTS):
        return None
    return {"data": less}, f"data: {MAX_DOCUMENTS:,} documents at most, taken evenly over {', '.join(sources)}"


def _here(source: str, data: Data) -> bool:
    return Path(source).exists() or (source == "python-stdlib" and data.kind == "text")


def _in_place_of_data(data: Data) -> tuple[dict[str, Any], str]:
    """What a rehearsal learns from where the recipe's own data is elsewhere."""
    if data.kind == "text":
        return {"source": "python-stdlib", "include": ("*.py",)}, "the Python standard library"
    # they are short and alike, as sums are
    short = {"min_chars": 1, "near_duplicate": 1.0, "messages_field": "messages"}
    return {"source": str(CHAT), "include": ("*.jsonl",), **short}, "made-up conversations"


def _tokenizer(recipe: Recipe) -> Change | None:
    path = recipe.data.tokenizer
    if path == "train" or (Path(path).exists() and recipe.model.vocab_size <= VOCAB_SIZE):
        return None
    why = f"{path} has too large a vocabulary" if Path(path).exists() else f"{path} is not on this machine"
    template = "chatml" if recipe.data.chat_template == "tokenizer" else recipe.data.chat_template
    return {"data": {"tokenizer": "train", "chat_template": template}}, f"tokenizer: trained on the data, because {why}"


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
        "compile": False,  # takes a C++ compiler, and minutes
        "timeout_hours": min(recipe.train.timeout_hours, 1.0),
    }
    if recipe.train.rehearse_failure_at is not None:
        train["rehearse_failure_at"] = STEPS * 5 // 8
    if recipe.train.eval_every:
        train["eval_every"] = STEPS // 2
    length = min(recipe.data.sequence_length, SEQUENCE_LENGTH)
    told = (
        f"train: {STEPS} steps of {batch} sequences of {length} tokens in place of {recipe.train.steps:,} of "
        f"{recipe.train.global_batch_size:,} of {recipe.data.sequence_length:,}, at the learning rate of a small model"
    )
    return {"train": train, "data": {"sequence_length": length}, "parallel": {"micro_batch_size": "auto"}}, told


def _score(recipe: Recipe) -> Change | None:
    if _small(recipe) and not (recipe.score.tasks or _lacks_baseline(recipe)):
        return None
    # adapters beside random weights learn next to nothing
    beaten = () if recipe.train.lora_rank else ("unigram",)
    beat = tuple(baseline for baseline in recipe.score.must_beat if baseline in beaten)
    limits = dict.fromkeys(("max_bits_per_byte", "max_perplexity"))
    gate = {"must_beat": beat, "max_tokens": min(recipe.score.max_tokens, 20_000), "baseline": "", "tasks": ()} | limits
    told = "score: the model must beat only the unigram baseline" if beat else "score: no baseline must be beaten"
    return {"score": gate}, f"{told}, so short a training can do no more"


def _lacks_baseline(recipe: Recipe) -> bool:
    return bool(recipe.score.baseline) and not Path(recipe.score.baseline).is_dir()


def _export(recipe: Recipe) -> Change | None:
    if not recipe.export.push_to:
        return None
    told = f"export: not uploaded to {recipe.export.push_to}, so that nothing leaves this machine"
    return {"export": {"push_to": ""}}, told


def _nodes(recipe: Recipe) -> Change | None:
    if recipe.data.nodes <= 2:
        return None
    return {"data": {"nodes": 2}}, f"data: prepared on 2 nodes in place of {recipe.data.nodes}"


def _serve(recipe: Recipe) -> Change | None:
    tokens, ranks = min(recipe.serve.max_new_tokens, 40), min(recipe.serve.tp, 2)
    if (tokens, ranks) == (recipe.serve.max_new_tokens, recipe.serve.tp):
        return None
    return {"serve": {"max_new_tokens": tokens, "tp": ranks}}, f"serve: {tokens} tokens per prompt, on {ranks} ranks"


_SHRINKS: tuple[Callable[[Recipe], Change | None], ...] = (
    _image,
    _store,
    _model,
    _pretrained,
    _program,
    _half,
    _disk,
    _source,
    _tokenizer,
    _train,
    _score,
    _export,
    _nodes,
    _serve,
)


def _changed(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    values = recipe.model_dump()
    for name, value in change.items():
        within = isinstance(value, dict) and name != "cluster"
        values[name] = values[name] | value if within else value
    return Recipe.model_validate(values)
