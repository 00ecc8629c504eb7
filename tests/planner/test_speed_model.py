"""How long a step takes: laws that hold whatever the constants are."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.constants import BOUNDS, NAMES, start
from planner.rows import Steps, read, steps
from planner.schema import Configs
from planner.speed import phases, step_seconds
from tests.planner.steps_table import row

SHIPPED = Path(__file__).parents[2] / "planner" / "tables" / "measured.csv"
BANDWIDTHS = ("flops", "memory", "intra", "inter", "host")


@cache
def published() -> Steps:
    """Every layout anybody published: dense and with experts, all kinds of parallelism."""
    return read(SHIPPED)


@st.composite
def constants(draw: st.DrawFn) -> Any:
    """Any constants within their bounds."""
    return start(**{name: draw(st.floats(BOUNDS[name][1], BOUNDS[name][2])) for name in NAMES})


def faster(configs: Configs, figure: str, factor: float) -> Configs:
    better = getattr(configs.hardware, figure) * factor
    return replace(configs, hardware=replace(configs.hardware, **{figure: better}))


@settings(max_examples=40, deadline=None)
@given(constants=constants(), figure=st.sampled_from(BANDWIDTHS), factor=st.floats(1, 100))
def test_a_better_figure_is_never_slower(constants: Any, figure: str, factor: float) -> None:
    usual = step_seconds(published().configs, constants)
    better = step_seconds(faster(published().configs, figure, factor), constants)
    assert np.all(better <= usual * (1 + 1e-9))


@settings(max_examples=20, deadline=None)
@given(constants=constants(), count=st.integers(1, 200))
def test_a_step_is_linear_in_its_micro_batches_up_to_a_fixed_part(constants: Any, count: int) -> None:
    def seconds(micro_batches: int) -> Any:
        layout = replace(published().configs.layout, ga=np.asarray(float(micro_batches)))
        return step_seconds(replace(published().configs, layout=layout), constants)

    one, two, three = (seconds(count * times) for times in (1, 2, 3))
    np.testing.assert_allclose(three - two, two - one, rtol=1e-6, atol=1e-9)
    assert np.all(one > 0)


@settings(max_examples=20, deadline=None)
@given(constants=constants(), factor=st.floats(0.1, 10))
def test_the_scale_scales(constants: Any, factor: float) -> None:
    scaled = replace(constants, scale=constants.scale * factor)
    usual = step_seconds(published().configs, constants)
    np.testing.assert_allclose(step_seconds(published().configs, scaled), usual * factor, rtol=1e-9)


def test_no_phase_of_any_published_layout_is_negative() -> None:
    parts = phases(published().configs, start())
    assert all(np.all(np.isfinite(part)) and np.all(part > -1e-12) for part in parts.values())


def test_one_rank_sends_nothing() -> None:
    alone = phases(steps([row("a", 1, zero="0")]).configs, start())
    assert alone["data parallel"][0] == 0
    assert alone["tensor parallel"][0] == 0


def test_recomputing_a_forward_pass_costs_about_a_third() -> None:
    plain, again = step_seconds(steps([row("a", 8), row("b", 8, recompute="full")]).configs, start())
    assert 1.2 < again / plain < 1.4


def test_interleaving_shrinks_the_bubble() -> None:
    told = {"tp": "8", "pp": "8", "dp": "1", "zero": "1", "shard_size": "1", "framework": "Megatron-LM"}
    piped = steps([row("a", 64, 1, 16, **told), row("b", 64, 1, 16, **told, vpp="4")]).configs
    bubble = phases(piped, start())["pipeline bubble"]
    assert bubble[1] == pytest.approx(bubble[0] / 4)
