"""The commands of the case gallery, as each kind of cluster would start them."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from clusters import render, validators
from planner import NoProfile, plan
from planner.arguments import settled
from planner.machine import instance
from recipes import Recipe
from recipes.cluster import AwsCluster, LocalCluster
from recipes.load import load
from training import cases
from training.cases.base import Command, Paths

GALLERY = Path(__file__).parents[3] / "recipes" / "cases"
PATHS = Paths("/fsx/out", "/opt/theirs", "/fsx/dataset")


def of(framework: str) -> list[str]:
    """Names of the gallery's recipes whose program is the framework's."""
    told = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(GALLERY.glob("*.yaml"))}
    return [name for name, recipe in told.items() if recipe.get("case", {}).get("framework") == framework]


@cache
def planned(name: str, *sets: str) -> Recipe:
    """A recipe of the gallery, with assignments laid over it, and the planner's choices in place of `auto`.

    Where nobody has a profile of the machine, the recipe must have settled everything itself.
    """
    recipe = load(GALLERY / f"{name}.yaml", list(sets))
    assert isinstance(recipe.cluster, AwsCluster)
    machine = instance(recipe.cluster.instance_type)
    try:
        best = plan(recipe, machine, recipe.cluster.nodes, machine.accelerators).best
    except NoProfile:
        return recipe
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=settled(best.layout))})


def spec(name: str, *sets: str) -> dict[str, Any]:
    """Its recipe as job.json has it."""
    return planned(name, *sets).model_dump(mode="json")


def command(name: str, *sets: str, kind: str = "slurm", paths: Paths = PATHS) -> Command:
    """What starts a recipe's program on a kind of cluster, whose requests must all render and break no rule.

    This machine stands in with as many nodes and ranks as the recipe's own cluster has.
    """
    # AWS names no image for Trainium on Batch: the recipe must
    sets += ("image.ami=ami-0123456789abcdef0",) if kind == "batch" and name.startswith("neuronx") else ()
    recipe = planned(name, *sets)
    assert isinstance(recipe.cluster, AwsCluster)
    nodes, ranks = recipe.cluster.nodes, instance(recipe.cluster.instance_type).accelerators
    shown = render.as_kind(recipe, kind)
    if isinstance(shown.cluster, LocalCluster):
        shown = render.stand_in(recipe)
    assert validators.problems(shown) == []
    assert {"README.md", "job.json"} < set(render.requests(shown))
    return cases.command(shown.model_dump(mode="json"), nodes, ranks, paths)


def lines(framework: str) -> list[str]:
    """A framework's recorded log, without the lines that say where it is from."""
    text = (Path(__file__).parent / "recorded" / f"{framework}.log").read_text()
    return [line for line in text.splitlines() if not line.startswith("# ")]
