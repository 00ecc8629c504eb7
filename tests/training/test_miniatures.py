"""Every recipe of the gallery, shrunk to this machine by --rehearse, trains for real in the layout that is planned."""

import math
from pathlib import Path

import pytest

from tests.training.miniatures import STEPS, miniature
from tests.training.nursery import VOCABULARY, Nursery, losses, write_dataset, write_job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

FILES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training set of text, and one with masks as conversations have."""
    folder = tmp_path_factory.mktemp("sets")
    return {kind: write_dataset(folder / kind, marked=kind == "chat") for kind in ("text", "chat")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_trains(file: Path, datasets: dict[str, Path], nursery: Nursery, tmp_path: Path) -> None:
    spec, ranks = miniature(file)
    codes, run = nursery.run(write_job(tmp_path, spec, dataset=datasets[spec["data"]["kind"]]), ranks)
    assert set(codes) == {0}, run.log.read_text()[-3000:]
    told = losses(tmp_path / "out")
    assert len(told) == STEPS
    assert all(map(math.isfinite, told))
    assert told[0] == pytest.approx(math.log(VOCABULARY), rel=0.2)
