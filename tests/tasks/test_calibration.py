"""What a cluster reached is kept in the store, and the next plan of its machines goes by it, and by no other's."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner import PlanError
from recipes import Recipe
from store import open_store
from tasks import learning
from tasks.calibration import keep, nearest
from tasks.learning import calibrate, lessons
from tasks.machines import machine, plan_of


def recipe(folder: Path, **changes: Any) -> Recipe:
    return Recipe.model_validate({"name": "tiny", "store": str(folder / "store")} | changes)


def measured(gb_per_s: float = 20.0, **told: Any) -> dict[str, Any]:
    """A result.json of two ranks of this machine, whose memory alone was measured."""
    rows = [
        {"what": "memory", "shape": "3x64 MiB", "seconds": 0.01, "gb_per_s": gb_per_s, "rank": rank}
        for rank in range(2)
    ]
    facts = {"measured_at": "2026-11-20T10:00:00+00:00", "device": "cpu", "accelerator": "", "torch": "2.13"}
    where = {"precision": "fp32", "ranks": 2, "nodes": 2, "cores": machine(recipe(Path("/"))).accelerators}
    return {**facts, **where, "rows": rows, **told}


def test_the_next_plan_goes_by_it_and_says_so(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    before = plan_of(told).best
    assert calibrate(told, measured(4.0), machine(told)) is not None
    plan_of.cache_clear()
    after = next(one for one in plan_of(told).ranked if one.layout == before.layout)
    assert after.step_seconds > 1.05 * before.step_seconds
    (note,) = (note for note in plan_of(told).notes if "calibrated on 2026-11-20 (2 nodes, 2 ranks)" in note)
    assert "s/step before" in note


def test_it_is_of_these_machines_in_this_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = recipe(tmp_path)
    calibrate(told, measured(), machine(told))
    assert lessons(told).achieved is not None
    assert lessons(recipe(tmp_path, train={"precision": "bf16"})).achieved is None
    cloud = {"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 2}
    assert lessons(recipe(tmp_path, cluster=cloud)).achieved is None
    monkeypatch.setattr(learning, "PROCESSORS", tmp_path / "absent")
    assert lessons(told).achieved is None


def test_the_nearest_number_of_nodes_counts_and_the_newest_of_each(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    store = open_store(told.store)
    for nodes, rate in ((2, 10.0), (2, 11.0), (16, 12.0)):
        keep(store, "x", machine(told), measured(rate, nodes=nodes))
    found = {nodes: nearest(store, "x", "fp32", nodes) for nodes in (1, 2, 5, 7, 64)}
    assert {nodes: one and one.nodes for nodes, one in found.items()} == {1: 2, 2: 2, 5: 2, 7: 16, 64: 16}
    share = machine(told).accelerators / 2
    assert found[2] is not None
    assert found[2].measured["memory"] == pytest.approx(11e9 / share)
    assert nearest(store, "y", "fp32", 2) is None


def test_nonsense_is_told_and_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = recipe(tmp_path)
    assert calibrate(told, measured(float("nan")), machine(told)) is None
    assert calibrate(told, measured(1e6), machine(told)) is None
    told_of = "the calibration of tiny's cluster is not kept: 1e+06 GB/s were measured (memory), this machine usually"
    assert told_of in caplog.text
    assert open_store(told.store).keys("calibrated/") == []


def test_nothing_is_learned_of_an_emulated_cluster(tmp_path: Path) -> None:
    told = recipe(tmp_path, cluster={"kind": "slurm", "instance_type": "p5.48xlarge", "nodes": 2})
    assert calibrate(told, measured(), machine(told)) is None
    assert open_store(told.store).keys("calibrated/") == []


def test_a_spoilt_file_is_named(tmp_path: Path) -> None:
    told = recipe(tmp_path)
    calibrate(told, measured(), machine(told))
    store = open_store(told.store)
    (key,) = store.keys("calibrated/")
    for text, why in (("{torn", "is no JSON"), (json.dumps({"version": 1}), "is no calibration that can be read")):
        store.put(key, text.encode())
        with pytest.raises(PlanError, match=f"{key} {why}: delete it"):
            lessons(told)
