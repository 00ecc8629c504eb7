"""Drift names the phase that is off, and keeps quiet where nothing is."""

import numpy as np
import pytest

from planner.constants import start
from planner.drift import EVERYTHING, Drift, explain, suspects
from planner.rows import Row, Steps, steps
from planner.speed import step_seconds
from tests.planner.steps_table import as_measured, measured_steps, row

GIB = {"weights": 20.0, "activations": 30.0, "buffers": 5.0}


def various() -> list[Row]:
    """Steps that depend on everything: one node and many, short sequences and long, small and large batches."""
    return [
        row("one-node", 8, micro=2),
        row("many", 256),
        row("more", 1024),
        row("long", 64, seq="32768"),
        row("narrow", 8, hidden="1024", ffn="2816", heads="8", kv_heads="8", seq="512"),
        row("accumulates", 16, micro=1, accumulation=8),
    ]


@pytest.mark.parametrize(
    ("constant", "value", "phase"),
    [
        ("network", 0.3, "data parallel"),
        ("gemm", 0.5, "gemm"),
        ("attention", 0.2, "attention"),
        ("launch_us", 700.0, "launch"),
        ("scale", 1.6, EVERYTHING),
    ],
)
def test_what_changed_is_what_is_named(constant: str, value: float, phase: str) -> None:
    found = suspects(measured_steps(various(), **{constant: value}), start())
    assert (found[0].constant, found[0].phase) == (constant, phase)
    assert found[0].needed == pytest.approx(value, rel=0.25)
    assert found[0].left < 0.05
    assert [one.strain for one in found] == sorted(one.strain for one in found)


def test_a_constant_on_which_nothing_depends_is_no_suspect() -> None:
    found = suspects(measured_steps(various(), gemm=0.5), start())
    assert not {"fp8", "fp4", "routing", "expert_us"} & {one.constant for one in found}


def told(rows: Steps, gib: dict[str, float], spread: float = 0.1) -> Drift:
    seconds = float(step_seconds(rows.configs, start())[0])
    return explain(rows, (seconds, seconds * (1 - spread), seconds * (1 + spread)), gib, start())


def test_within_the_interval_nothing_is_said() -> None:
    rows = as_measured([row("a", 8)], scale=1.1)
    found = told(steps([dict(rows[0], mem_gib="56.5")]), GIB)
    assert found.off == pytest.approx(1.1 / 1.03 - 1, abs=1e-3)
    assert (found.time_drifts, found.memory_drifts, found.suspects, found.sentences()) == (False, False, (), [])


def test_beyond_the_interval_a_sentence_names_the_phase() -> None:
    rows = measured_steps(various(), network=0.3)
    found = told(rows.of(np.arange(6) > 0), GIB)
    assert found.time_drifts
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    (sentence,) = found.sentences()
    assert "slower than planned" in sentence
    assert "most likely data parallel (network 0.3" in sentence


def test_a_faster_step_drifts_too() -> None:
    found = told(measured_steps([row("a", 8)], scale=0.6), GIB)
    assert "faster than planned" in found.sentences()[0]


def test_memory_that_is_off_names_the_part_that_explains_it_with_least() -> None:
    rows = as_measured([row("a", 8)])
    found = told(steps([dict(rows[0], mem_gib="70")]), GIB)
    assert found.memory_drifts
    assert found.sentences() == [
        "A rank held 70 GiB, 55 were planned: most likely activations, planned at 30 GiB.",
    ]


def test_memory_that_was_not_measured_does_not_drift() -> None:
    assert not told(measured_steps([row("a", 8)]), GIB).memory_drifts
