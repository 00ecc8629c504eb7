"""Each training teaches the next plan, once, and never moves a training that has begun."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import PlanError
from planner.profiles import Profiles
from planner.rows import parse
from recipes import Recipe
from store import open_store
from store.manifest import Manifest
from tasks import learning, report
from tasks.learning import Lessons, Measured, begin, learn, lessons, measured, remembered, row
from tasks.lineage import Lineage, trace
from tasks.machines import machine, plan_of
from tests.camp import Camp


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be an artifact: here is no Prefect server, unlike in the last test."""
    found: dict[str, Any] = {}
    for kind in ("table", "page"):
        monkeypatch.setattr(report, kind, lambda key, content, _: found.update({key: content}))
    return found


def recipe(folder: Path, **changes: Any) -> Recipe:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    (text / "a.py").write_text("import os\n" * 50)
    told: dict[str, Any] = {"name": "tiny", "store": str(folder / "store"), "data": {"source": str(text)}}
    return Recipe.model_validate(told | changes)


PLAIN = dict.fromkeys(("shard", "tp", "pp", "vpp", "cp", "ep"), 1)
"""A layout whose model is not cut up, every auto settled."""


def journal(seconds: float, steps: int = 20, memory_gib: float = 0.5) -> list[dict[str, float]]:
    """A run whose first steps were slow, and one step because the machine was busy."""
    slow = {1: 9.0, 2: 2.0, 3: 1.5, 12: 30.0}
    return [
        {"step": step, "step_seconds": seconds * slow.get(step, 1.0), "memory_gib": memory_gib}
        for step in range(1, steps + 1)
    ]


def finished(lineage: Lineage, told: list[dict[str, float]], torch: str = "2.13.0+cpu") -> Manifest:
    """A training's manifest, and its journal in the store."""
    place = lineage.places["train"]
    lines = "".join(json.dumps(record) + "\n" for record in told)
    lineage.store.put(f"{place.key}/progress.jsonl", lines.encode() + b'{"step": 21, "step_sec')
    facts = {"torch": torch, "world_size": 2, "save_seconds": 0.5}
    return Manifest("train", place.name, place.fingerprint, identity={}, facts=facts)


def teach(told: Recipe, seconds: float, torch: str = "2.13.0+cpu") -> Lineage:
    lineage = trace(told)
    learn(lineage, finished(lineage, journal(seconds), torch), machine(told))
    return lineage


def test_the_first_steps_and_single_slow_ones_do_not_count() -> None:
    found = measured("x", journal(0.2), "2.13.0")
    assert found == Measured("x", 0.2, 0.5, "2.13.0")
    assert measured("x", journal(0.2, steps=7), "2.13.0") is None


def test_a_training_is_a_row_that_tables_of_steps_take(tmp_path: Path) -> None:
    told = recipe(tmp_path, parallel=PLAIN | {"strategy": "fsdp2", "micro_batch_size": 4, "shard": 2})
    found = row(told, machine(told), 2, Measured("tiny@1", 0.25, 0.5, "2.13.0"))
    back = parse(Path("x.csv"), learning._table(found).decode())
    layout, shape = back.configs.layout, back.configs.shape
    assert (back.seconds[0], back.memory_gib[0]) == (0.25, 0.5)
    assert [float(size[0]) for size in (layout.dp, layout.zero, layout.mbs, layout.ga)] == [2, 3, 4, 2]
    assert float(shape.hidden[0]) == told.model.hidden_size
    assert float(back.configs.software.fused_loss[0]) == 1
    wanted = machine(told).hardware("fp32", 1, 2)
    for name in ("flops", "memory", "intra", "per_node"):
        assert float(getattr(back.configs.hardware, name)[0]) == pytest.approx(float(getattr(wanted, name)))


def test_what_was_measured_moves_the_next_plan_towards_it(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    before = plan_of(told).best
    teach(told, 2 * before.step_seconds)
    plan_of.cache_clear()
    after = next(one for one in plan_of(told).ranked if one.layout == before.layout)
    assert after.step_seconds == pytest.approx(2 * before.step_seconds, rel=0.15)
    assert after.low < 2 * before.step_seconds < after.high


def test_the_same_training_is_one_row_however_often_it_is_told(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    lineage = teach(told, 0.2)
    once = lineage.store.keys("measured/")
    learn(lineage, finished(lineage, journal(0.3)), machine(told))
    assert lineage.store.keys("measured/") == once
    assert [float(found["iter_s"]) for found in remembered(lineage.store, told)] == [0.2]


def test_only_the_newest_software_the_same_machine_and_precision_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(recipe(tmp_path).store)
    for steps, torch in ((31, "2.9.1+cpu"), (32, "2.13.0+cpu"), (33, "2.10.0+cpu")):
        teach(recipe(tmp_path, train={"steps": steps, "warmup_steps": 1}), steps / 100, torch)
    told = recipe(tmp_path)
    assert [found["iter_s"] for found in remembered(store, told)] == ["0.32"]
    assert remembered(store, recipe(tmp_path, train={"precision": "bf16"})) == []
    cloud = {"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 2}
    assert remembered(store, recipe(tmp_path, cluster=cloud)) == []
    monkeypatch.setattr(learning, "PROCESSORS", tmp_path / "absent")
    assert remembered(store, told) == []


def test_planning_creates_no_store_and_waits_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = recipe(tmp_path)
    assert lessons(told) == Lessons(told, [])
    assert Lessons(told, []).profiles is Profiles.shipped()
    assert not (tmp_path / "store").exists()
    for name in learning.KEYS:
        monkeypatch.delenv(name, raising=False)
    away = told.model_copy(update={"store": "s3://nobody/has-this"})
    assert lessons(away) == Lessons(away, [])


def test_a_layout_holds_from_the_first_step_whatever_is_learned_later(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    lineage = trace(told)
    other = lineage.recipe.parallel.model_copy(update={"strategy": "zero3", "micro_batch_size": 1})
    begin(replace(lineage, recipe=lineage.recipe.model_copy(update={"parallel": other})))
    begin(lineage)  # too late: it has begun
    assert lessons(told).recipe.parallel == other
    changed = (
        recipe(tmp_path, parallel={"strategy": "ddp"}),
        recipe(tmp_path, train={"steps": 100}),
        recipe(tmp_path, cluster={"kind": "local", "nodes": 4}),
    )
    assert all(lessons(one).recipe == one for one in changed)
    only_how_it_runs = recipe(tmp_path, train={"checkpoint_every": 7})
    assert lessons(only_how_it_runs).recipe.parallel == other
    trace.cache_clear()
    plan_of.cache_clear()
    assert trace(told).recipe.parallel.strategy == "zero3"


def test_a_spoilt_table_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = recipe(tmp_path)
    lineage = teach(told, 0.2)
    other = trace(recipe(tmp_path, train={"steps": 100}))
    (key,) = lineage.store.keys("measured/")
    lineage.store.put(key.replace("tiny@", "spoilt@"), b"id,hw\n1,abacus\n")
    with pytest.raises(PlanError, match=r"spoilt@\w+\.csv lacks the column"):
        lessons(told)
    learn(other, finished(other, journal(0.2)), machine(told))
    assert f"nothing was learned from {other.places['train'].key}: measured/" in caplog.text


def test_a_short_training_and_an_emulated_one_teach_nothing(tmp_path: Path) -> None:
    lineage = trace(recipe(tmp_path))
    learn(lineage, finished(lineage, journal(0.2, steps=6)), machine(lineage.recipe))
    cloud = {"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 2}
    emulated = trace(recipe(tmp_path, cluster=cloud))
    told = finished(emulated, journal(0.2))
    learn(emulated, replace(told, facts=told.facts | {"device": "cpu"}), machine(emulated.recipe))
    assert lineage.store.keys("measured/") == []


def test_a_training_far_from_its_plan_is_told_with_the_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = recipe(tmp_path)
    teach(told, 20 * plan_of(told).best.step_seconds)
    assert "drift: A step took" in caplog.text
    assert "slower than planned" in caplog.text


def test_a_training_as_planned_is_learned_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: dict[str, Any]
) -> None:
    told = recipe(tmp_path)
    teach(told, plan_of(told).best.step_seconds)
    assert "took" not in caplog.text
    assert "A step took" not in shown["drift-phases"]


def test_saves_are_advised_on_what_was_measured_there(tmp_path: Path) -> None:
    cloud = {"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 2}
    told = recipe(tmp_path, cluster=cloud, train={"precision": "bf16"})
    assert lessons(recipe(tmp_path)).save_advice(1.0, 2) is None
    assert "at 1 GB/s per node (assumed)" in plan_of(told).advice[-1]
    shared = recipe(tmp_path, cluster=cloud | {"lustre_gib": 4800}, train={"precision": "bf16"})
    assert "at 0.586 GB/s per node (its share of FSx for Lustre)" in plan_of(shared).advice[-1]
    chosen = recipe(tmp_path, cluster=cloud, parallel=PLAIN | {"strategy": "ddp", "micro_batch_size": 1})
    found = row(chosen, machine(told), 16, Measured("tiny@1", 0.25, 0.5, "2.13.0", save_gb_per_s=2.5))
    key = "measured/p5.48xlarge/castra+torch-2.13.0/bf16/tiny@1.csv"
    open_store(told.store).put(key, learning._table(found | {"precision": "bf16"}))
    plan_of.cache_clear()
    assert "at 2.5 GB/s per node (measured)" in plan_of(told).advice[-1]


def test_a_real_training_teaches_the_plan_of_the_next(user_camp: Camp) -> None:
    path = user_camp.recipe()
    for verb in ("preprocess", "train"):
        code, told = user_camp.run(verb, path)
        assert code == 0, told
    assert "the planner learned from tiny@" in told
    (table,) = user_camp.folder.glob(".castra/store/measured/local-*/castra+torch-*/fp32/tiny@*.csv")
    (found,) = parse(table, table.read_text()).rows
    assert 0 < float(found["iter_s"]) < 10
    assert 0.1 < float(found["mem_gib"]) < 10
    assert len(list(user_camp.folder.glob(".castra/store/layouts/tiny@*.json"))) == 1
