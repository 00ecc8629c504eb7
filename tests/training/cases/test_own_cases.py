"""Each case of Castra's own program fits where it says, renders for every scheduler, and trains here as a miniature."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clusters.render import as_kind, requests
from planner import plan
from planner.arguments import settled
from planner.machine import instance
from recipes import Recipe
from recipes.cluster import AwsCluster
from recipes.load import load
from recipes.weights import parameters
from tests.training.cases.matrix import record
from tests.training.miniatures import STEPS, miniature
from tests.training.nursery import VOCABULARY, Nursery, losses, result, write_dataset, write_job
from training.checks.calibrate import PROGRAMS
from training.job import NodeJob
from training.model import named_weights
from training.parallel import Layout, Share, check, objective_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

OWN = [
    file
    for file in sorted((Path(__file__).parents[3] / "recipes/cases").glob("*.yaml"))
    if load(file).case.framework == "castra"
]
FILES = [file for file in OWN if not load(file).case.program]
MEASURED = [file for file in OWN if load(file).case.program]
CLOUDS = ("slurm", "batch", "eks", "sagemaker")
PUBLISHED = {
    "ddp": 124_439_808,
    "fsdp-llama2-7b": 6_738_415_616,
    "fsdp-llama2-13b": 13_015_864_320,
    "fsdp-llama2-70b": 68_976_648_192,
    "fsdp-llama3-1b": 1_235_814_400,
    "fsdp-llama3-3b": 3_212_749_824,
    "fsdp-llama3-8b": 8_030_261_248,
    "fsdp-llama3-70b": 70_553_706_496,
    "fsdp-mathstral-7b": 7_248_023_552,
    "fsdp-mixtral-8x7b": 46_702_792_704,
    "deepspeed-zero-finetune": 8_030_261_248,
    "deepspeed-qlora": 8_190_735_360,
    "lab1": 124_439_808,
    "lab2": 1_557_611_200,
}
"""Weights of the published models, as the Hugging Face hub counts them."""


def proof(test: str) -> str:
    return f"test_own_cases.py: {test}"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training set of text, and one with masks as conversations have."""
    folder = tmp_path_factory.mktemp("sets")
    return {kind: write_dataset(folder / kind, marked=kind == "chat") for kind in ("text", "chat")}


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with its plan, which must fit, and be paid for by its budget."""
    assert isinstance(recipe.cluster, AwsCluster)
    machine = instance(recipe.cluster.instance_type)
    best = plan(recipe, machine, recipe.cluster.nodes, machine.accelerators).best
    assert best.memory.total < 0.98 * machine.memory_gib
    assert best.usd is not None
    assert recipe.budget.max_usd is not None
    assert 0.3 * recipe.budget.max_usd < best.usd < 0.9 * recipe.budget.max_usd
    assert best.total_seconds < 0.8 * 3600 * recipe.train.timeout_hours
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=settled(best.layout))})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_fits_and_every_scheduler_is_told_what_its_program_takes(file: Path, tmp_path: Path) -> None:
    """The rendered job.json is read as a node reads it, and goes through the checks of the program's own start."""
    recipe = resolved(load(file))
    for kind in CLOUDS:
        files = requests(as_kind(recipe, kind))
        assert any(name.startswith(f"{kind}/") for name in files)
        told = json.loads(files["job.json"])
        assert told["module"] == "training.run"
        (tmp_path / "job.json").write_text(files["job.json"])
        accepted(NodeJob.read(tmp_path / "job.json").spec, told["nodes"] * told["processes_per_node"])
        record(file.stem, kind, "rendered", proof("test_it_fits_and_every_scheduler_is_told_what_its_program_takes"))


def accepted(spec: dict[str, Any], ranks: int) -> None:
    """What `training.run` does before it needs memory: layout, batch, refusals, and the model without weights."""
    assert Recipe.model_validate(spec).model_dump(mode="json") == spec
    layout = Layout.of(spec["parallel"], 0, ranks)
    share = Share.of(spec["train"]["global_batch_size"], spec["parallel"]["micro_batch_size"], layout.data)
    check(spec, share, layout, torch.device("cuda"))
    one = spec["model"] | {"layers": 1, "pretrained": ""}
    objective_of(spec | {"model": one}, None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_the_published_ones(name: str) -> None:
    recipe = load(next(file for file in FILES if file.stem == name))
    assert parameters(recipe.model, recipe.data.sequence_length) == PUBLISHED[name]


@pytest.mark.parametrize("family", ["mixtral", "llama", "gpt2", "qwen3"])
def test_weights_are_counted_as_the_program_makes_them(family: str) -> None:
    recipe = next(one for one in map(load, FILES) if one.model.family == family)
    few = recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": 2, "pretrained": ""})})
    made = objective_of(few.model_dump(mode="json") | {"train": Recipe().train.model_dump()}, None).model
    weights = sum(weight.numel() for _, weight in named_weights(made))
    assert weights == parameters(few.model, recipe.data.sequence_length)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_miniature_trains_here(file: Path, datasets: dict[str, Path], nursery: Nursery, tmp_path: Path) -> None:
    spec, ranks = miniature(file)
    assert spec["model"]["family"] == load(file).model.family
    codes, run = nursery.run(write_job(tmp_path, spec, dataset=datasets[spec["data"]["kind"]]), ranks)
    assert set(codes) == {0}, run.log.read_text()[-3000:]
    told = losses(tmp_path / "out")
    assert len(told) == STEPS
    assert all(map(math.isfinite, told))
    assert told[0] == pytest.approx(math.log(VOCABULARY), rel=0.2)
    record(file.stem, "local", "ran", proof("test_its_miniature_trains_here"))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_every_scheduler_is_told_what_a_measurement_takes(file: Path, tmp_path: Path) -> None:
    recipe = load(file)
    for kind in CLOUDS:
        told = json.loads(requests(as_kind(recipe, kind))["job.json"])
        assert (told["module"], told["inputs"]) == ("training.checks.calibrate", {})
        assert told["spec"]["case"]["program"] in PROGRAMS
        assert told["processes_per_node"] == 8
        record(file.stem, kind, "rendered", proof("test_every_scheduler_is_told_what_a_measurement_takes"))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_a_measurement_is_made_here(file: Path, nursery: Nursery, tmp_path: Path) -> None:
    spec, ranks = miniature(file)
    codes, run = nursery.run(write_job(tmp_path, spec), ranks, "training.checks.calibrate")
    assert set(codes) == {0}, run.log.read_text()[-3000:]
    told = result(tmp_path / "out")
    assert told["program"] == load(file).case.program
    assert told["rows"]
    assert all(row["seconds"] > 0 for row in told["rows"])
    record(file.stem, "local", "ran", proof("test_a_measurement_is_made_here"))


def test_what_makes_a_case_itself_is_left_in_its_miniature() -> None:
    kept = {file.stem: miniature(file)[0] for file in FILES}
    assert {kept[name]["parallel"]["strategy"] for name in kept if name.startswith("fsdp")} == {"fsdp2"}
    assert kept["ddp"]["parallel"]["strategy"] == kept["lab1"]["parallel"]["strategy"] == "ddp"
    assert kept["deepspeed-zero-finetune"]["parallel"]["strategy"] == "zero3"
    assert (kept["deepspeed-qlora"]["train"]["lora_base"], kept["deepspeed-qlora"]["train"]["lora_rank"]) == ("nf4", 64)
    assert kept["lab2"]["parallel"]["shard"] == 2
    assert kept["lab3"]["serve"]["tp"] == 2
    assert kept["lab1"]["train"]["precision"] == "fp16"
    assert (kept["fsdp-mixtral-8x7b"]["model"]["experts"], kept["fsdp-mixtral-8x7b"]["model"]["topk"]) == (4, 2)
