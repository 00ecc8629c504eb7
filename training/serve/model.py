"""Everything that a model needs to answer: its weights in their slots, its tokenizer, its template, where it ends."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from training.data import tokens
from training.data.chat import TEMPLATES, Chat, chat_of
from training.data.sources import SourceError
from training.job import NodeJob
from training.process import JobError
from training.ranks import World
from training.serve.body import Reader
from training.serve.settings import Settings
from training.serve.slots import Slots, Step
from training.serve.weights import load


@dataclass(frozen=True, slots=True)
class Served:
    """An opened model: the slots, how requests are read, and the ids that end an answer."""

    slots: Slots
    reader: Reader
    ends: frozenset[int]


def open_model(job: NodeJob, settings: Settings, world: World) -> Served:
    """Load inputs["export"], an output of training.export.hf or a Hugging Face folder. Raises JobError, SourceError."""
    folder = job.inputs["export"]
    folder = folder if (folder / "config.json").is_file() else folder / "hf"
    model = load(folder, world)
    if not (folder / "tokenizer.json").is_file():
        raise JobError(f"{folder} has no tokenizer.json; export the model again, or put its tokenizer there")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokens.size(tokenizer) > model.config.vocab_size:
        raise JobError(
            f"{folder}: its tokenizer has {tokens.size(tokenizer)} tokens and its model {model.config.vocab_size}; "
            "put the tokenizer there that the model was trained with"
        )
    context = min(settings.context, int(getattr(model.config, "max_position_embeddings", settings.context)))
    data = job.spec.get("data", {})
    named = str(data.get("chat_template", "tokenizer")) if data.get("kind") == "chat" else "tokenizer"
    reader = Reader(tokenizer, _chat(named, tokenizer, folder), context, int(job.spec["serve"]["max_new_tokens"]))
    return Served(_slots(model, settings.slots, context), reader, _ends(folder, tokenizer, named))


def _slots(model: Any, count: int, context: int) -> Slots:
    """Take the memory of every slot now, while a sentence can still be said. Raises JobError if it is too little."""
    slots = Slots(model, count, context)
    try:
        slots.run(Step(ids=[0]))
    except torch.OutOfMemoryError as problem:
        raise JobError(
            f"{count} answers of {context} tokens at once do not fit beside the model; "
            "lower CASTRA_SLOTS or CASTRA_CONTEXT, or serve with more ranks"
        ) from problem
    return slots


def _chat(named: str, tokenizer: Tokenizer, folder: Path) -> Chat | str:
    """Return the template, or the sentence why there is none: the model completes texts all the same."""
    try:
        return chat_of(named, tokenizer, folder)
    except SourceError as problem:
        return str(problem)


def _ends(folder: Path, tokenizer: Tokenizer, named: str) -> frozenset[int]:
    """Return the ids after which an answer is over: those of the model's configuration, and the end of a turn."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        told: Any = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found |= {told} if isinstance(told, int) else set(told or ())
    if named in TEMPLATES and (end := tokenizer.token_to_id(TEMPLATES[named].end)) is not None:
        found.add(end)
    return frozenset(found)
