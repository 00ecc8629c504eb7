"""Every recipe of the gallery, shrunk to this machine by --rehearse, trains for real in the layout that is planned."""

import math
from pathlib import Path
from typing import Any

import pytest

from planner import local_machine, plan
from planner.arguments import settled
from recipes.cluster import LocalCluster
from recipes.load import load
from recipes.rehearse import rehearse
from tests.training.nursery import LENGTH, VOCABULARY, Nursery, losses, write_dataset, write_job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

FILES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
STEPS = 3


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training set of text, and one with masks as conversations have."""
    folder = tmp_path_factory.mktemp("sets")
    return {kind: write_dataset(folder / kind, marked=kind == "chat") for kind in ("text", "chat")}


def miniature(file: Path) -> tuple[dict[str, Any], int]:
    """Return a resolved miniature of few and short steps, and its ranks."""
    recipe, _ = rehearse(load(file))
    assert isinstance(recipe.cluster, LocalCluster)
    nodes, each = recipe.cluster.nodes, recipe.cluster.processes_per_node
    layout = plan(recipe, local_machine(cores=nodes * each, ram_gib=16.0), nodes, each).best.layout
    spec = recipe.model_dump(mode="json")
    spec["parallel"] |= settled(layout)
    spec["train"] |= {"steps": STEPS, "warmup_steps": 1, "checkpoint_every": STEPS, "rehearse_failure_at": None}
    spec["model"]["vocab_size"], spec["data"]["sequence_length"] = VOCABULARY, LENGTH
    return spec, nodes * each


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_trains(file: Path, datasets: dict[str, Path], nursery: Nursery, tmp_path: Path) -> None:
    spec, ranks = miniature(file)
    codes, run = nursery.run(write_job(tmp_path, spec, dataset=datasets[spec["data"]["kind"]]), ranks)
    assert set(codes) == {0}, run.log.read_text()[-3000:]
    told = losses(tmp_path / "out")
    assert len(told) == STEPS
    assert all(map(math.isfinite, told))
    assert told[0] == pytest.approx(math.log(VOCABULARY), rel=0.2)
