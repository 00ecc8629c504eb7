"""A Hugging Face config.json in a recipe's place: the model is told by it, the rest is assumed and said."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusters.base import Refused
from planner.model import from_file
from planner.schema import Shape
from recipes import Recipe
from recipes.load import load
from tasks.phrases import CONSOLE
from tasks.plan_question import Question

LONGEST = 8192
"""Tokens of a sequence at most where nobody says how many: few models are trained on what they can read at most."""
TOKENS = 2**22
"""Tokens per optimizer step where nobody says how many: 4 million, as large models are trained."""


def recipe_of(path: Path, sets: Sequence[str], question: Question) -> Recipe:
    """The recipe to plan a config.json with, on the machines that were asked for; raises `Refused` and planner errors.

    Raises `RecipeError` where an assignment of `sets` is wrong.
    """
    if not question.instances:
        raise Refused(f"{path} says nothing of machines: add --instances, as in --instances p5.48xlarge --nodes 4..16")
    shape, _ = from_file(str(path))
    length = min(int(shape.sequence), LONGEST)
    batch = max(TOKENS // length, 1)
    told = {
        "name": _name(path),
        "model": _model(shape),
        "data": {"sequence_length": length},
        "train": {
            "precision": "bf16",
            "global_batch_size": batch,
            "steps": 10_000,
            "activation_checkpointing": True,  # what Castra's own program would need, if it is asked for
        },
        "parallel": {"software": "megatron"},
        "cluster": {"kind": "slurm", "instance_type": question.instances[0], "nodes": (question.nodes or (1,))[0]},
    }
    recipe = load(told, sets)
    _say(recipe)
    return recipe


def _model(shape: Shape) -> dict[str, Any]:
    """The shape as fields of a recipe's model."""
    whole = {
        "hidden_size": shape.hidden,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "ffn_size": shape.ffn,
        "vocab_size": shape.vocab,
    }
    whole |= {name: getattr(shape, name) for name in ("experts", "topk", "expert_ffn", "dense_layers")}
    flags = {"tie_embeddings": shape.tied, "gated": shape.gated, "mla": shape.mla}
    told: dict[str, Any] = {name: int(value) for name, value in whole.items()}
    told |= {name: bool(value) for name, value in flags.items()}
    if told["head_dim"] * told["heads"] == told["hidden_size"]:
        told["head_dim"] = None
    return told | {"shared_experts": round(float(shape.shared_experts))}


def _name(path: Path) -> str:
    """The folder's name, or the file's, as a recipe is called."""
    words = path.resolve().parent.name if path.stem == "config" else path.stem
    plain = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:40].rstrip("-")
    return plain if re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", plain) else "model"


def _say(recipe: Recipe) -> None:
    train, length = recipe.train, recipe.data.sequence_length
    CONSOLE.print(
        f"assumed: {train.steps:,} steps of {train.global_batch_size} sequences of {length:,} tokens in "
        f"{train.precision} by {recipe.parallel.software}; change it by --set train.steps=…, "
        "train.global_batch_size=…, data.sequence_length=…, train.precision=… or parallel.software=castra",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
