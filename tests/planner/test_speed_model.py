"""How long a step takes: laws that hold whatever the constants are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import parameters
from planner.grid import Grid
from planner.machine import Hardware
from planner.model import Shape
from planner.prior import family_of, table
from planner.software import STRATEGIES, Software
from planner.speed import phases, traffic
from recipes.spec import Model

MODEL = Model(hidden_size=2048, layers=24, heads=16, kv_heads=8, ffn_size=5632, vocab_size=32000)
FIGURES = {"flops": 800e12, "memory": 3350e9, "intra": 450e9, "inter": 400e9}
strategies, priors = st.sampled_from(STRATEGIES), st.sampled_from(sorted(table()))


def grid(strategy: str = "ddp", **cut: float) -> Grid:
    layout = {"micro": 2.0, "accumulation": 1.0, "ranks": 32.0, "ranks_per_node": 8.0, "recompute": 0.0} | cut
    arrays = {name: np.asarray(value) for name, value in layout.items()}
    return Grid(Shape.of(MODEL, 4096), Software.of([strategy], "bf16"), **arrays)


def seconds(of: Grid, prior: str = "H100", **figures: float) -> float:
    hardware = Hardware(**{name: np.asarray(value) for name, value in (FIGURES | figures).items()})
    return sum(float(np.broadcast_to(part, 1)[0]) for part in phases(of, hardware, table()[prior]).values())


def test_one_rank_sends_nothing() -> None:
    for strategy in STRATEGIES:
        assert traffic(grid(strategy, ranks=1))[0] == 0


def test_traffic_is_what_the_zero_paper_counts() -> None:
    """Per parameter and full ring: twice the gradients for ddp; two gatherings and a reduction for stage 3."""
    share, weights = 31 / 32, parameters(MODEL)
    assert traffic(grid("ddp"))[0] == pytest.approx(2 * 4 * share * weights)
    assert traffic(grid("zero3"))[0] == pytest.approx((2 * 2 + 4) * share * weights)
    assert traffic(grid("zero3", accumulation=3))[0] == pytest.approx(3 * (2 * 2 + 4) * share * weights)
    assert traffic(grid("fsdp2", accumulation=3))[0] == pytest.approx((3 * 2 * 2 + 4) * share * weights)


@given(strategy=strategies, prior=priors, figure=st.sampled_from(sorted(FIGURES)), factor=st.floats(1, 100))
def test_a_better_figure_is_never_slower(strategy: str, prior: str, figure: str, factor: float) -> None:
    better = seconds(grid(strategy), prior, **{figure: FIGURES[figure] * factor})
    assert better <= seconds(grid(strategy), prior) * (1 + 1e-9)


@given(strategy=strategies, prior=priors, ranks=st.integers(1, 64))
def test_a_step_is_linear_in_accumulation_up_to_its_fixed_part(strategy: str, prior: str, ranks: int) -> None:
    one, two, three = (seconds(grid(strategy, ranks=8 * ranks, accumulation=count), prior) for count in (8, 9, 10))
    assert three - two == pytest.approx(two - one, rel=1e-6)


@given(strategy=strategies, prior=priors)
def test_recomputation_costs_at_most_a_third_more_work(strategy: str, prior: str) -> None:
    alone = grid(strategy, ranks=1)
    again = replace(alone, recompute=np.asarray(1.0))
    assert 1.0 < seconds(again, prior) / seconds(alone, prior) <= 4 / 3 + 1e-9


def test_phases_do_not_depend_on_their_neighbours() -> None:
    """Judged together or alone, a configuration takes the same time."""
    hardware = Hardware(**{name: np.asarray(value) for name, value in FIGURES.items()})
    both = Grid(
        Shape.of(MODEL, 4096),
        Software.of(["ddp", "zero3"], "bf16"),
        micro=np.array([1.0, 4.0]),
        accumulation=np.array([4.0, 1.0]),
        ranks=np.array([32.0, 32.0]),
        ranks_per_node=np.asarray(8.0),
        recompute=np.asarray(0.0),
    )
    together = np.sum([np.broadcast_to(part, 2) for part in phases(both, hardware, table()["gpu"]).values()], axis=0)
    alone = [seconds(grid("ddp", micro=1, accumulation=4), "gpu"), seconds(grid("zero3", micro=4), "gpu")]
    assert together == pytest.approx(alone)


def test_each_accelerator_finds_its_generation() -> None:
    assert family_of("NVIDIA A100 40GB") == "A100"
    assert family_of("NVIDIA H200") == family_of("H100-80") == "H100"
    assert family_of("NVIDIA B200") == "gpu"
