"""A recipe as --rehearse shrinks it, with fewer and shorter steps still."""

from pathlib import Path
from typing import Any

from planner import local_machine, plan
from planner.arguments import settled
from recipes.cluster import LocalCluster
from recipes.load import load
from recipes.rehearse import rehearse
from tests.training.nursery import LENGTH, VOCABULARY

STEPS = 3


def miniature(file: Path) -> tuple[dict[str, Any], int]:
    """Return a resolved miniature of few and short steps, and its ranks, which are on two nodes."""
    recipe, _ = rehearse(load(file))
    assert isinstance(recipe.cluster, LocalCluster)
    nodes, each = recipe.cluster.nodes, recipe.cluster.processes_per_node
    layout = plan(recipe, local_machine(cores=nodes * each, ram_gib=16.0), nodes, each).best.layout
    spec = recipe.model_dump(mode="json")
    spec["parallel"] |= settled(layout)
    spec["train"] |= {"steps": STEPS, "warmup_steps": 1, "checkpoint_every": STEPS, "rehearse_failure_at": None}
    spec["model"]["vocab_size"], spec["data"]["sequence_length"] = VOCABULARY, LENGTH
    return spec, nodes * each
