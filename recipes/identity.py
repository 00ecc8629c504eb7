"""What each step's fingerprint covers: all that changes the step's result, and nothing that only changes the run.

Which fields are execution is said once, by the descriptions in `recipes.spec`, see `recipes.fields.EXECUTION`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

from recipes.fields import fields
from recipes.parallel import Parallel
from recipes.spec import Recipe
from training.cases import measures, reads_dataset


@dataclass(frozen=True, slots=True)
class Step:
    """What one step's result depends on."""

    version: int
    """Raise it when the step's result changes for equal input."""
    covers: tuple[str, ...]
    """Sections and fields of the recipe; of a section, the fields that are not execution."""
    inputs: tuple[str, ...] = ()
    """The results it reads, by the names of `NodeJob.inputs`."""
    facts: tuple[str, ...] = ()
    """What the caller knows and the recipe does not."""
    optional: tuple[str, ...] = ()
    """Inputs and facts that may be left out."""


STEPS: dict[str, Step] = {
    "image": Step(version=1, covers=("image",), facts=("template",), optional=("template",)),
    "preprocess": Step(
        version=2,
        covers=("data",),
        inputs=("tokenizer",),
        facts=("source", "tokenizer_digest"),
        optional=("tokenizer", "tokenizer_digest"),
    ),
    # The number of ranks is here, and the kind of machine is not: splitting a sum differently changes its last bits.
    "train": Step(
        version=2,
        covers=("model", "case", "parallel", "train"),
        inputs=("dataset", "initial"),
        facts=("world_size",),
        optional=("initial",),
    ),
    "score": Step(version=2, covers=("score",), inputs=("dataset", "model", "initial"), optional=("initial",)),
    # The model card says the name, the description, the source and the score.
    "export": Step(
        version=1,
        covers=("export", "name", "description", "data.source"),
        inputs=("dataset", "model", "score", "initial"),
        optional=("score", "initial"),
    ),
    "serve": Step(version=1, covers=("serve",), inputs=("export",)),
}

LATER: Mapping[str, object] = {
    "case.framework": "castra",
    "case.program": "",
    "case.arguments": [],
    "model.pretrained": "",
    "model.sliding_window": None,
    "model.head_dim": None,
    "model.gated": True,
    "model.mla": False,
    "model.experts": 0,
    "model.topk": 0,
    "model.expert_ffn": 0,
    "model.shared_experts": 0,
    "model.dense_layers": 0,
    "parallel.software": "castra",
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.vpp": 1,
    "parallel.cp": 1,
    "parallel.ep": 1,
    "parallel.recompute": "auto",
    "parallel.offload": "none",
    "parallel.offload_to": "cpu",
    "data.kind": "text",
    "data.text_field": "text",
    "data.messages_field": "messages",
    "data.chat_template": "tokenizer",
    "data.packing": "concat",
    "data.documents_apart": False,
    "data.megatron": False,
    "train.schedule": "cosine",
    "train.decay_ratio": 0.2,
    "train.compile": False,
    "train.lora_rank": 0,
    "train.lora_alpha": 32.0,
    "train.lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "train.lora_base": "full",
    "train.on_bad_step": "stop",
    "train.max_bad_steps": 10,
    "train.loss_spike": None,
    "train.eval_every": 0,
    "train.eval_sequences": 64,
    "score.max_perplexity": None,
    "score.baseline": "",
    "score.tasks": [],
    "export.quantize": "none",
    "export.merge_lora": True,
    "export.push_to": "",
}
"""Fields that came later, with what held before there was a choice: left out where it still does, so that what was
made then is found. So is `parallel.shard` where it is the old choice, all data parallel ranks."""


def identity(recipe: Recipe, step: str, inputs: Mapping[str, str], **facts: str | int) -> dict[str, Any]:
    """What `store.manifest.fingerprint` hashes for one step of a recipe whose `parallel` is resolved.

    `inputs` are the store keys of the results the step reads. `facts` by step: preprocess takes `source` (the digest
    of the source's inventory) and, where `data.tokenizer` is a path, `tokenizer_digest` (of its content); train takes
    `world_size` (ranks over all nodes); image takes `template` (a digest of what the image is built from).
    Raises ValueError where an input or a fact is missing or unknown, or where train's `parallel` is still auto.
    """
    told = STEPS[step]
    if step == "train" and not reads_dataset(recipe.case.framework, recipe.case.program):
        reads = () if measures(recipe.case.framework, recipe.case.program) else ("data",)  # by itself
        told = replace(told, optional=(*told.optional, "dataset"), covers=(*told.covers, *reads))
    _complete(step, told, inputs, facts)
    covered = _covered(recipe, told)
    if step == "preprocess":
        covered = _dataset(recipe, covered, {**inputs, **facts})
    if step == "train" and "auto" in recipe.parallel.model_dump(exclude={"recompute"}).values():
        raise ValueError("train has no identity while parallel is auto: resolve it with the planner first")
    if step == "train" and _shards_as_ever(recipe.parallel, int(facts["world_size"])):
        del covered["parallel.shard"]
    return {"step": step, "version": told.version, "recipe": covered, "inputs": dict(inputs), "facts": facts}


def _shards_as_ever(parallel: Parallel, ranks: int) -> bool:
    """Whether the states are cut up among as many ranks as they were before there was a choice."""
    copies = ranks // (int(parallel.tp) * int(parallel.pp) * int(parallel.cp))
    return parallel.shard == (copies if parallel.strategy == "fsdp2" else 1)


def _complete(step: str, told: Step, inputs: Mapping[str, str], facts: Mapping[str, object]) -> None:
    for given, known in ((inputs.keys(), {*told.inputs}), (facts.keys(), {*told.facts})):
        if missing := known - {*told.optional} - given:
            raise ValueError(f"the identity of {step} needs {', '.join(sorted(missing))}")
        if unknown := given - known:
            raise ValueError(f"the identity of {step} does not know {', '.join(sorted(unknown))}")


def _covered(recipe: Recipe, step: Step) -> dict[str, Any]:
    """The values of the fields a step covers, by their dotted names."""
    dump = recipe.model_dump(mode="json")
    wanted = [field for field in fields() if not field.execution and {field.path[0], field.name} & {*step.covers}]
    values = {field.name: reduce(getitem, field.path, dump) for field in wanted}
    return {name: value for name, value in values.items() if name not in LATER or value != LATER[name]}


def _dataset(recipe: Recipe, covered: dict[str, Any], given: Mapping[str, object]) -> dict[str, Any]:
    """Digests in place of paths, since the same documents elsewhere are the same dataset; a new tokenizer's size."""
    content = {name: value for name, value in covered.items() if name not in ("data.source", "data.tokenizer")}
    learns = recipe.data.tokenizer == "train"
    if "tokenizer" in given:  # that of an earlier dataset, whatever the recipe says
        return content
    if learns == ("tokenizer_digest" in given):
        raise ValueError("preprocess needs tokenizer_digest when, and only when, data.tokenizer is a path")
    return content | {"model.vocab_size": recipe.model.vocab_size} if learns else content
