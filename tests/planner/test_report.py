"""What a plan says as data: plain JSON with keys that are documented, and sentences that fit the figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import Estimate, Plan, report
from planner.machine import instance
from recipes.load import load
from recipes.spec import Recipe

ROOT = Path(__file__).parents[2]
P5 = instance("p5.48xlarge")


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load(ROOT / "recipes" / "llama3-70b-p5.yaml")


@pytest.fixture(scope="module")
def plan(recipe: Recipe) -> Plan:
    return planner.plan(recipe, P5, nodes=32, processes_per_node=8)


def slower(one: Estimate, times: float, **phases: float) -> Estimate:
    """Another layout that takes longer."""
    layout = replace(one.layout, micro_batch_size=one.layout.micro_batch_size + 1)
    return replace(one, layout=layout, step_seconds=one.step_seconds * times, phases=one.phases | phases)


def keys(told: Any) -> set[str]:
    """All keys of a JSON document, but those that are names of phases, reasons or fields of DeepSpeed's own."""
    if isinstance(told, list):
        return {key for item in told for key in keys(item)}
    if not isinstance(told, dict):
        return set()
    inside = (value for key, value in told.items() if key not in ("phases", "refused_by", "bill", "deepspeed"))
    return {*told} | {key for value in inside for key in keys(value)}


def test_json_is_plain_and_says_the_plan(plan: Plan, recipe: Recipe) -> None:
    told = json.loads(json.dumps(report.as_json(plan, recipe, P5, 32, top=2), allow_nan=False))
    assert told["version"] == report.VERSION
    assert told["parameters"] == 70_553_706_496
    assert told["best"]["layout"]["world_size"] == 256
    assert len(told["ranked"]) == min(2, len(plan.ranked))
    for one in (told["best"], *told["ranked"], *told["alternatives"]):
        parts = {name: gib for name, gib in one["memory_gib"].items() if name != "total"}
        assert sum(parts.values()) == pytest.approx(one["memory_gib"]["total"])
        assert sum(one["phases"].values()) == pytest.approx(one["step_seconds"], rel=1e-6)
        assert one["days"] == pytest.approx(one["step_seconds"] * recipe.train.steps / 86400)
        assert one["low"] < one["step_seconds"] < one["high"]
        assert sum(one["bill"].values()) == pytest.approx(one["usd"])


def test_every_key_is_documented(plan: Plan, recipe: Recipe) -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    missing = {key for key in keys(report.as_json(plan, recipe, P5, 32, top=2)) if f"`{key}`" not in text}
    assert not missing


def test_the_refused_are_counted_and_the_nearest_are_shown(plan: Plan) -> None:
    counts = [row["layouts"] for row in report.refusal_rows(plan)]
    assert counts == sorted(counts, reverse=True)
    assert len(report.example_rows(plan)) <= report.EXAMPLES
    assert all(row["why"] for row in report.example_rows(plan))


def test_the_bill_adds_up(plan: Plan) -> None:
    *parts, whole = report.bill_rows(plan.best)
    assert sum(row["USD"] for row in parts) == pytest.approx(whole["USD"])
    assert report.bill_rows(replace(plan.best, bill={})) == []


def test_phases_are_told_longest_first_and_make_the_step(plan: Plan) -> None:
    rows = report.phase_rows(plan.best)
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)
    assert sum(row["seconds"] for row in rows) == pytest.approx(plan.best.step_seconds, rel=1e-6)


def test_why_names_the_phase_that_makes_the_difference(plan: Plan) -> None:
    best = plan.best
    other = slower(best, 1.3, gemm=best.phases["gemm"] + best.step_seconds * 0.3)
    told = report.why(replace(plan, ranked=[best, other]))
    assert "30% faster than the next" in told
    assert "more on gemm" in told


def test_why_admits_a_draw_a_prescription_and_a_safer_choice(plan: Plan) -> None:
    best = plan.best
    assert "within 2 %" in report.why(replace(plan, ranked=[best, slower(best, 1.01)]))
    assert "prescribes" in report.why(replace(plan, ranked=[slower(best, 0.5), best]))
    assert "only one that fits" in report.why(replace(plan, ranked=[best]))
    assert "safer" in report.why(replace(plan, ranked=[best, slower(best, 0.95)]))


@pytest.mark.parametrize(
    ("seconds", "told"), [(3.2, "3.2 s"), (600, "10 min"), (9000, "2.5 h"), (86400 * 3.4, "3.4 days")]
)
def test_durations(seconds: float, told: str) -> None:
    assert report.duration(seconds) == told


def test_sums_of_money() -> None:
    assert [report.dollars(usd) for usd in (None, 0.5, 99.999, 1234.5)] == ["", "0.50", "100.00", "1,234"]
