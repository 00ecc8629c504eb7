"""From a recipe to the places of its results: which steps there are, what each is made from, which are done.

Places are known before anything runs, because a fingerprint is the hash of a step's identity and of the fingerprints
it is made from. So a run begins by looking, and does only what is missing.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusters.base import Refused
from recipes import Recipe
from recipes.identity import identity
from recipes.spec import Data, Parallel
from store import Store, open_store
from store.manifest import Manifest, Place, fingerprint, read_manifest
from store.objects import state_folder
from tasks.machines import check_launchable, processes_per_node, resolve
from training.cases import reads_dataset
from training.data.sources import SourceError, documents, inventory

STEPS = ("preprocess", "train", "score", "export", "serve")
MADE_FROM: Mapping[str, Mapping[str, str]] = {
    "preprocess": {},
    "train": {"dataset": "preprocess"},
    "score": {"dataset": "preprocess", "model": "train"},
    "export": {"dataset": "preprocess", "model": "train", "score": "score"},
    "serve": {"export": "export"},
}


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files of a folder that decide how text becomes tokens; only the first must be there."""


class NotDone(Exception):
    """A step was asked for whose inputs do not exist; the text says which command makes them."""


@dataclass(frozen=True)
class Ancestor:
    """A promoted model that a new one starts from: its tokenizer, and its weights."""

    dataset: Place
    export: Place


@dataclass(frozen=True)
class Lineage:
    """One recipe, resolved: what the planner chose, and where every step's result is or will be."""

    recipe: Recipe
    """With the planner's choices in place of `auto`."""
    store: Store
    identities: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, Place]
    ancestor: Ancestor | None = None
    asked: Parallel = field(default_factory=Parallel)
    """The layout as the recipe told it, before the planner chose."""

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of this recipe's life: another framework's ends with its training, a benchmark is only that."""
        return steps_of(self.recipe)

    def made_from(self, step: str) -> Mapping[str, str]:
        """The steps whose results a step reads, by the names of its inputs."""
        return {name: source for name, source in MADE_FROM[step].items() if source in self.steps}

    def inputs(self, step: str) -> dict[str, Place]:
        """The places that a step reads."""
        read = {name: self.places[source] for name, source in self.made_from(step).items()}
        if self.ancestor and step == "preprocess":
            read["tokenizer"] = self.ancestor.dataset
        if self.ancestor and (step == "train" or (step in ("score", "export") and self.recipe.train.lora_rank)):
            read["initial"] = self.ancestor.export  # adapters alone are no model
        return read

    def manifest(self, step: str) -> Manifest | None:
        """The manifest of a step's result, None if it is not done; raises `Refused` if the recipe has no such step."""
        if step not in self.places:
            raise Refused(not_ours(self.recipe, step))
        return read_manifest(self.store, self.places[step])

    def done(self, step: str) -> Manifest:
        """The manifest of a step's result; raises `NotDone` with the command that makes it."""
        if (found := self.manifest(step)) is None:
            raise NotDone(f"there is no result of {step} for {self.recipe.name}: run `python -m flows.{step}` first")
        return found

    def source_of(self, dataset: Place) -> object:
        """What the identity of a dataset says of the text it was made from; None if there is no such dataset."""
        if dataset == self.places["preprocess"]:
            return self.identities["preprocess"]["facts"]["source"]
        found = read_manifest(self.store, dataset)
        return found.identity["facts"]["source"] if found else None

    def with_model(self, training: Place) -> "Lineage":
        """The same lineage with another training's model in place of its own: to score that on the same text."""
        other = replace(self, places={**self.places, "train": training}, identities=dict(self.identities))
        return _named(other, ("score",), {})

    def unfinished(self) -> list[str]:
        """The steps without a result, in order."""
        return [step for step in self.steps if self.manifest(step) is None]


def steps_of(recipe: Recipe) -> tuple[str, ...]:
    """The steps of a recipe's life, in order."""
    if not reads_dataset(recipe.case.framework, recipe.case.program):
        return ("train",)
    return STEPS if recipe.case.framework == "castra" else ("preprocess", "train")


def not_ours(recipe: Recipe, step: str) -> str:
    """Why there is no such step in the life of another framework's recipe."""
    if step == "preprocess":
        what = " ".join(filter(None, (recipe.case.framework, recipe.case.program)))
        return f"{recipe.name} runs {what}, which reads no dataset of ours: there is nothing to preprocess"
    return (
        f"{recipe.name} is trained by {recipe.case.framework}, and score, export and serve are of Castra's own "
        "checkpoints: use the framework's own tools on what it saved"
    )


@functools.lru_cache(maxsize=8)
def trace(recipe: Recipe, ancestor: Ancestor | None = None) -> Lineage:
    """Resolve a recipe: plan it, look at its data, name the places of its results.

    Raises `Refused` if it cannot run as asked, `StoreError` if the store cannot be used, planner errors if it does not
    fit: each one sentence.
    """
    check_launchable(recipe)
    store = open_store(recipe.store)
    resolved = resolve(recipe)
    steps = steps_of(recipe)
    facts: dict[str, dict[str, Any]] = {"train": {"world_size": recipe.cluster.nodes * processes_per_node(recipe)}}
    if "preprocess" in steps:
        facts["preprocess"] = _source(recipe.data, inherits=ancestor is not None)
    return _named(Lineage(resolved, store, {}, {}, ancestor, recipe.parallel), steps, facts)


def _named(lineage: Lineage, steps: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> Lineage:
    for step in steps:
        made_from = {name: place.key for name, place in lineage.inputs(step).items()}
        told = identity(lineage.recipe, step, made_from, **facts.get(step, {}))
        place = Place(step, lineage.recipe.name, fingerprint(told))
        lineage = replace(
            lineage, identities={**lineage.identities, step: told}, places={**lineage.places, step: place}
        )
    return lineage


@functools.lru_cache(maxsize=8)
def _source(data: Data, *, inherits: bool) -> dict[str, str]:
    """What a dataset is made from, by digests, so that the same text elsewhere is the same dataset.

    Every rung of a capacity ladder is a recipe of its own with the same data: it is read once.
    """
    try:
        found = documents(data.source, data.include, data.max_documents)
        facts = {"source": str(inventory(found, state_folder() / "digests.sqlite")["digest"])}
    except SourceError as error:
        raise Refused(str(error)) from None
    if data.tokenizer == "train" or inherits:
        return facts
    return facts | {"tokenizer_digest": _digest(Path(data.tokenizer).expanduser())}


def _digest(tokenizer: Path) -> str:
    """The SHA-256 of a tokenizer.json or, of a folder, of all files there that a tokenizer is made of."""
    first, *beside = [tokenizer] if tokenizer.is_file() else [tokenizer / name for name in TOKENIZER]
    if not first.is_file():
        raise Refused(
            f"data.tokenizer {str(tokenizer)!r} is not there: give a tokenizer.json, a folder that has one, or 'train'"
        )
    return hashlib.sha256(b"".join(file.read_bytes() for file in [first, *beside] if file.is_file())).hexdigest()
