"""A calibration is laid over the machine: known rates come back, plans follow, nonsense is refused, trainings win."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner import Machine, PlanError, local_machine, plan
from planner.achieved import Achieved
from planner.calibrate import adapt
from planner.layers import gemm
from planner.profiles import Profiles
from recipes import Recipe

SHAPES = ((8192, 12288, 4096), (8192, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192))


def result(machine: Machine, share: float = 1.0, ranks: int = 16, **told: Any) -> dict[str, Any]:
    """A result.json of a cluster whose products reach `share` of the usual 80.3 %, all else as it usually is."""
    hardware = machine.hardware("bf16", 1, machine.accelerators)
    rate = np.asarray(989e12 * 0.803 * share)
    rows = []
    for m, n, k in SHAPES:
        a, b, c = (np.asarray(float(side)) for side in (m, n, k))
        seconds = float(gemm(a, b, c, rate, np.asarray(np.inf), hardware.multiprocessors))
        rows += [{"what": "gemm", "shape": f"{m}x{n}x{k}", "seconds": seconds, "rank": rank} for rank in range(ranks)]
    rates = {"memory": 0.9 * 3350, "all_reduce inside": 450 * 1.05177, "all_reduce between": 262.784}
    rows += [
        {"what": what, "shape": "big", "seconds": 1.0, "gb_per_s": rate, "rank": rank}
        for what, rate in rates.items()
        for rank in range(ranks)
    ]
    facts = {"measured_at": "2026-11-20T10:00:00+00:00", "device": "cuda", "accelerator": "NVIDIA H100", "cores": 192}
    return {**facts, "precision": "bf16", "ranks": ranks, "nodes": ranks // 8, "torch": "2.13", "rows": rows, **told}


def test_a_usual_cluster_changes_nothing(p5: Machine) -> None:
    found = Achieved.of(result(p5), p5)
    assert found.factors.keys() == {"flops", "memory", "intra", "inter"}
    assert all(factor == pytest.approx(1, rel=0.01) for factor in found.factors.values())


def test_a_slower_cluster_is_planned_slower_and_says_so(llama3_8b: Callable[..., Recipe], p5: Machine) -> None:
    told, before = llama3_8b(), plan(llama3_8b(), p5, 2, 8)
    site = replace(Profiles.shipped(), achieved=Achieved.of(result(p5, 0.7), p5))
    after = plan(told, p5, 2, 8, site)
    assert site.achieved
    assert site.achieved.factors["flops"] == pytest.approx(0.7, rel=0.01)
    assert 1.15 < after.best.step_seconds / before.best.step_seconds < 1 / 0.7
    (note,) = (one for one in after.notes if "calibrated on 2026-11-20 (2 nodes, 16 ranks)" in one)
    assert f"{before.best.step_seconds:.3g} s/step before, {after.best.step_seconds:.3g} after." in note
    assert "matrix products 556 instead of 794 TFLOP/s (x 0.70)" in note
    assert not any("calibrated on" in one for one in before.notes)


def test_the_share_of_the_peak_is_of_the_datasheet_s(llama3_8b: Callable[..., Recipe], p5: Machine) -> None:
    slow = replace(Profiles.shipped(), achieved=Achieved.of(result(p5, 0.5), p5))
    best = plan(llama3_8b(), p5, 2, 8, slow).best
    same = next(one for one in plan(llama3_8b(), p5, 2, 8).ranked if one.layout == best.layout)
    assert best.mfu
    assert same.mfu
    assert best.mfu / same.mfu == pytest.approx(same.step_seconds / best.step_seconds)


def test_it_comes_back_from_json(p5: Machine) -> None:
    found = Achieved.of(result(p5, 0.9), p5)
    assert Achieved.from_json(json.loads(json.dumps(found.to_json())), "x.json") == found


@pytest.mark.parametrize(
    "spoilt",
    [
        {"version": 9},
        {"measured": {"flops": "fast"}},
        {"measured": {"warp": 1.0}, "usual": {"warp": 1.0}},
        {"measured": {"flops": 1.0}, "usual": {"flops": 0.0}},
        {"usual": {}},
        {"nodes": None},
    ],
)
def test_a_spoilt_file_is_named(spoilt: dict[str, Any], p5: Machine) -> None:
    told = Achieved.of(result(p5), p5).to_json() | spoilt
    with pytest.raises(PlanError, match=r"calibrated/x\.json is no calibration that can be read"):
        Achieved.from_json(told, "calibrated/x.json")
    with pytest.raises(PlanError, match="no calibration"):
        Achieved.from_json(["nothing"], "x.json")


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -1.0, 1e6])
def test_an_impossible_factor_in_a_file_is_refused(factor: float, p5: Machine) -> None:
    told = Achieved.of(result(p5), p5).to_json()
    told["measured"]["memory"] = told["usual"]["memory"] * factor
    with pytest.raises(PlanError, match=r"x\.json says that memory reach .* times the usual: delete it"):
        Achieved.from_json(told, "x.json")


@pytest.mark.parametrize("share", [0.05, 1.6])
def test_a_measurement_that_cannot_be_true_is_refused(share: float, p5: Machine) -> None:
    why = r"TFLOP/s were measured \(matrix products\), p5\.48xlarge usually reaches 794:"
    with pytest.raises(PlanError, match=why):
        Achieved.of(result(p5, share), p5)


def test_other_machines_and_nothing_at_all_are_refused(p5: Machine) -> None:
    with pytest.raises(PlanError, match=r"measured on CPUs, and is no calibration of p5\.48xlarge"):
        Achieved.of(result(p5, device="cpu"), p5)
    with pytest.raises(PlanError, match="nothing was measured that a plan rests on"):
        Achieved.of(result(p5, rows=[]), p5)


def test_products_that_the_memory_or_the_launch_bounds_do_not_count(p5: Machine) -> None:
    told = result(p5)
    told["rows"] += [{"what": "gemm", "shape": "64x64x64", "seconds": 1e-5, "rank": 0}]  # started, hardly computed
    thin = {"what": "gemm", "shape": "1x16384x16384", "seconds": 2 * 16384**2 / (0.9 * 3.35e12), "rank": 0}
    assert Achieved.of(told | {"rows": [*told["rows"], *[thin] * 9]}, p5).factors["flops"] == pytest.approx(1, rel=0.01)


def test_one_slow_rank_is_not_the_cluster(p5: Machine) -> None:
    told = result(p5)
    rows = [row | {"seconds": row["seconds"] * 3} if row["rank"] == 5 else row for row in told["rows"]]
    assert Achieved.of(told | {"rows": rows}, p5).factors == Achieved.of(told, p5).factors


def test_a_core_is_told_from_ranks_that_share_cores() -> None:
    machine = local_machine(cores=2, ram_gib=8)
    rows = [
        {"what": "memory", "shape": "3x64 MiB", "seconds": 1.0, "gb_per_s": 10.0, "rank": rank} for rank in range(4)
    ]
    told = {"measured_at": "2026-11-20T10:00:00", "device": "cpu", "accelerator": "", "cores": 2, "precision": "fp32"}
    found = Achieved.of({**told, "ranks": 4, "nodes": 2, "torch": "2.13", "rows": rows}, machine)
    assert found.measured == {"memory": 20e9}  # half a core each
    assert found.factors == {"memory": pytest.approx(0.5)}


def test_real_steps_of_the_cluster_win(llama3_8b: Callable[..., Recipe], p5: Machine) -> None:
    """However wrong a calibration is: three measured steps say how long that very step takes."""
    from tasks.learning import Measured, row

    parallel = {"strategy": "zero3", "micro_batch_size": 1, "shard": 1}
    told = llama3_8b(parallel=parallel | dict.fromkeys(("tp", "pp", "vpp", "cp", "ep"), 1))
    true = 2 * plan(told, p5, 2, 8).best.step_seconds
    rows = [
        row(told, p5, 16, Measured(f"run@{number}", true, 60.0, "2.13")) | {"framework_version": ""}
        for number in range(4)
    ]
    wrong = replace(Profiles.shipped(), achieved=Achieved.of(result(p5, 1.3), p5))
    learned, unlearned = (plan(told, p5, 2, 8, adapt(one, rows)).best for one in (wrong, Profiles.shipped()))
    assert learned.step_seconds == pytest.approx(true, rel=0.1)
    assert learned.step_seconds == pytest.approx(unlearned.step_seconds, rel=0.1)
    both = replace(adapt(wrong, rows), plain=adapt(Profiles.shipped(), rows))
    (note,) = (one for one in plan(told, p5, 2, 8, both).notes if "calibrated on" in one)
    times = f"{unlearned.step_seconds:.3g} s/step before, {learned.step_seconds:.3g} after"
    assert note.endswith(f"{times}; measured trainings count more.")
