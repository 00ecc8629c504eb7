"""One step from its inputs to its manifest: skipped when done, run on the cluster when not, sealed at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from store.manifest import Manifest, seal
from tasks import phrases, report
from tasks.ground import Place, place_of
from tasks.job import Work, run
from tasks.lineage import Lineage
from tasks.machines import checkpoint_steps, processes_per_node
from tasks.policy import PATIENT
from tasks.watch import Follower
from training.data.sources import PYTHON_STDLIB

PART_OF = {"tokenizer": "tokenizer.json", "initial": "hf"}
"""Inputs that are a part of an earlier result, not the whole folder."""
BUILD_THE_MODEL = ("train", "score", "export")
"""Steps that make the network, for which the folder it began with decides what the recipe does not say."""


@dataclass(frozen=True)
class Program:
    """Which node program makes a step's result, and on what."""

    module: str
    everywhere: bool = False
    """On all nodes with all their ranks, or as one process on each of `nodes`."""
    each: int = 0
    """Ranks on each node, where these are not as many as its accelerators (everywhere), or not one."""
    nodes: int = 1
    timeout_s: int = 4 * 3600
    attempts: int = 2


def carry_out(
    lineage: Lineage, step: str, program: Program, follower: Follower, told: Mapping[str, Any] = MappingProxyType({})
) -> Manifest:
    """Make a step's result, or find it made. `told` is passed to the program beside the recipe.

    Raises `NotDone` if an input is missing, `Refused` if the program says its input is wrong.
    """
    if (found := lineage.manifest(step)) is not None:
        report.say(f"{step}: done already, {found.key}")
        return found
    place = place_of(lineage.recipe)
    for source in lineage.made_from(step).values():
        lineage.done(source)
    begun = datetime.now(UTC)
    result = run(place, _work(lineage, step, program, told, place), follower)
    place.publish(lineage.places[step].key)
    return seal_result(lineage, step, result, begun)


def _work(lineage: Lineage, step: str, program: Program, told: Mapping[str, Any], place: Place) -> Work:
    recipe, key = lineage.recipe, lineage.places[step].key
    inputs = {
        name: "/".join(filter(None, (place.input(source.key), PART_OF.get(name))))
        for name, source in lineage.inputs(step).items()
    }
    if recipe.model.pretrained and not lineage.ancestor and step in BUILD_THE_MODEL:
        inputs["initial"] = _in_full(recipe.model.pretrained)
    work = Work(
        step,
        key,
        program.module,
        _spec(lineage, step, place) | dict(told),
        place.output(key),
        inputs,
        timeout_s=program.timeout_s,
        attempts=program.attempts,
    )
    if program.everywhere:
        ranks = program.each or processes_per_node(recipe)
        return replace(work, nodes=recipe.cluster.nodes, processes_per_node=ranks)
    return replace(work, nodes=program.nodes, processes_per_node=program.each or int(program.nodes > 1))


def _spec(lineage: Lineage, step: str, place: Place) -> dict[str, Any]:
    """The recipe as a job reads it.

    Here it runs in a folder of its own, so paths that it opens are told in full; elsewhere the text must be what the
    dataset was named after.
    """
    spec = lineage.recipe.model_dump(mode="json")
    if step == "preprocess" and place.ground:
        spec["data"]["digest"] = lineage.identities[step]["facts"]["source"]
    elif step == "preprocess":
        data, told = spec["data"], lineage.recipe.data.source
        data["source"] = [_in_full(source) for source in ((told,) if isinstance(told, str) else told)]
        data["tokenizer"] = _in_full(data["tokenizer"])
    if step == "train":
        asked = lineage.recipe.model_copy(update={"parallel": lineage.asked})
        spec["train"]["checkpoint_every"] = checkpoint_steps(asked)
    return spec


def _in_full(told: str) -> str:
    """A path as any folder can open it; words and addresses stay what they are."""
    return told if told in (PYTHON_STDLIB, "train") or "://" in told else str(Path(told).expanduser().absolute())


@task(name="seal", task_run_name="seal {step}", cache_policy=NO_CACHE, **PATIENT)
def seal_result(lineage: Lineage, step: str, result: dict[str, Any], begun: datetime) -> Manifest:
    """Publish a step's files and write its manifest, the sign that the step is done."""
    place = lineage.places[step]
    manifest = Manifest(
        step,
        place.name,
        place.fingerprint,
        identity=dict(lineage.identities[step]),
        inputs={name: source.key for name, source in lineage.inputs(step).items()},
        facts=result,
        started=begun.isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    sealed = seal(lineage.store, place, manifest)
    report.relay([f"sealed {sealed.key}: {len(sealed.files)} files, {phrases.size(sum(sealed.files.values()))}"])
    return sealed
