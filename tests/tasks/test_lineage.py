"""Places are known before anything runs, and move exactly when what they are made from moves."""

from pathlib import Path
from typing import Any

import pytest

from clusters.base import Refused
from recipes import Recipe
from recipes.cluster import LocalCluster
from recipes.spec import Case
from tasks import lineage
from tasks.lineage import STEPS, Ancestor, NotDone, trace
from tasks.machines import cheapest_on_aws, check_launchable, command, machine, processes_per_node


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text("import os\n" * 50)
    return folder


def recipe(text: Path, **changes: Any) -> Recipe:
    told = {"name": "tiny", "store": str(text.parent / "store"), "data": {"source": str(text)}}
    return Recipe.model_validate(told | changes)


def test_the_same_recipe_has_the_same_places(text: Path) -> None:
    assert trace(recipe(text)).places == trace(recipe(text, description="")).places


def test_where_and_how_often_it_runs_does_not_move_a_result(text: Path) -> None:
    here, there = trace(recipe(text)), trace(recipe(text, train={"attempts": 7, "checkpoint_every": 3}, keep=True))
    assert here.places == there.places


def test_a_changed_learning_rate_moves_training_and_what_follows_it(text: Path) -> None:
    before, after = trace(recipe(text)).places, trace(recipe(text, train={"learning_rate": 1e-3})).places
    assert [step for step in STEPS if before[step] != after[step]] == ["train", "score", "export", "serve"]


def test_changed_text_moves_everything(text: Path) -> None:
    before = trace(recipe(text)).places
    (text / "b.py").write_text("import sys\n" * 50)
    trace.cache_clear()
    lineage._source.cache_clear()
    after = trace(recipe(text)).places
    assert all(before[step] != after[step] for step in STEPS)


def test_the_number_of_ranks_moves_training_because_sums_are_split_otherwise(text: Path) -> None:
    before = trace(recipe(text)).places
    after = trace(recipe(text, cluster=LocalCluster(nodes=1))).places
    assert before["preprocess"] == after["preprocess"]
    assert before["train"] != after["train"]


def test_an_ancestor_gives_its_tokenizer_and_its_weights(text: Path) -> None:
    first = trace(recipe(text))
    next_one = trace(recipe(text), Ancestor(first.places["preprocess"], first.places["export"]))
    assert next_one.inputs("preprocess") == {"tokenizer": first.places["preprocess"]}
    assert next_one.inputs("train")["initial"] == first.places["export"]
    assert next_one.places["train"] != first.places["train"]


def test_what_is_not_done_names_the_command_that_does_it(text: Path) -> None:
    with pytest.raises(NotDone, match=r"run `python -m flows\.train` first"):
        trace(recipe(text)).done("train")


def test_a_missing_source_and_a_missing_tokenizer_are_one_sentence(text: Path) -> None:
    with pytest.raises(Refused, match="nowhere"):
        trace(recipe(text, data={"source": str(text / "nowhere")}))
    with pytest.raises(Refused, match=r"give a tokenizer\.json"):
        trace(recipe(text, data={"source": str(text), "tokenizer": "no/such.json"}))


def test_machines_are_this_one_or_the_catalogues(text: Path) -> None:
    cloud = recipe(text, cluster={"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 2})
    assert machine(recipe(text)).local
    assert machine(cloud).accelerators == processes_per_node(cloud) == 8
    with pytest.raises(Refused, match=r"p5\.48xlarge"):
        machine(recipe(text, cluster={"kind": "slurm", "instance_type": "p5.48xlarg"}))


def test_the_miniature_has_a_price_on_aws() -> None:
    found = cheapest_on_aws(Recipe())
    assert found is not None
    name, estimate = found
    assert estimate.usd is not None
    assert 0 < estimate.usd < 10, name


def theirs(text: Path, framework: str, **changes: Any) -> Recipe:
    settled = {"strategy": "ddp", "micro_batch_size": 1, "tp": 1, "pp": 1, "vpp": 1, "cp": 1}
    return recipe(text, case={"framework": framework}, parallel=settled, **changes)


def test_another_framework_s_life_ends_with_its_training(text: Path) -> None:
    trained = trace(theirs(text, "megatron-lm"))
    assert trained.steps == tuple(trained.places) == ("preprocess", "train")
    assert trained.inputs("train") == {"dataset": trained.places["preprocess"]}
    assert trained.unfinished() == ["preprocess", "train"]
    with pytest.raises(Refused, match="trained by megatron-lm, and score, export and serve are of Castra's own"):
        trained.done("score")


def test_a_benchmark_reads_no_data(text: Path) -> None:
    measured = trace(theirs(text, "nccl-tests", data={"source": "/nowhere"}))
    assert measured.steps == ("train",)
    assert measured.inputs("train") == {}
    with pytest.raises(Refused, match="reads no data"):
        measured.done("preprocess")


def test_whose_program_trains_moves_the_result(text: Path) -> None:
    ours = trace(recipe(text, parallel={"strategy": "ddp", "micro_batch_size": 1})).places
    one, other = (trace(theirs(text, name)).places for name in ("megatron-lm", "nemo"))
    assert one["preprocess"] == other["preprocess"]
    assert len({ours["train"], one["train"], other["train"]}) == 3
    more = {"framework": "nemo", "arguments": ["train.global_batch_size=1"]}
    assert trace(theirs(text, "nemo").model_copy(update={"case": Case(**more)})).places["train"] != other["train"]


def test_a_framework_that_reads_the_source_itself_is_trained_anew_when_that_is_another(text: Path) -> None:
    one, other = (trace(theirs(text, "torchtitan", data={"source": source})) for source in ("/c4", "/other"))
    assert one.steps == ("train",)
    assert one.inputs("train") == {}
    assert one.places["train"] != other.places["train"]


def test_megatron_s_plan_is_not_run_by_castra_s_own_program(text: Path) -> None:
    with pytest.raises(Refused, match=r"write case\.framework: megatron-lm, megatron-deepspeed or nemo"):
        check_launchable(recipe(text, parallel={"software": "megatron"}))
    check_launchable(theirs(text, "megatron-lm"))


def test_what_starts_the_program_is_known_before_anything_is_paid(text: Path) -> None:
    shown = command(trace(theirs(text, "megatron-lm")).recipe)
    assert shown is not None
    assert shown.argv[0] == "pretrain_gpt.py"
    assert command(trace(recipe(text)).recipe) is None
    with pytest.raises(Refused, match=r"tiny: model\.family gemma"):
        command(trace(theirs(text, "megatron-lm", model={"family": "gemma"})).recipe)
