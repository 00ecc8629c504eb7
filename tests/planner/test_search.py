"""The space of layouts and the search through it, held against brute force and against laws."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.constants import start
from planner.machine import instance
from planner.memory import breakdown
from planner.model import KNOWN, from_mapping
from planner.schema import Shape
from planner.search import Setting, search
from planner.software import megatron
from planner.space import Axes, Space, columns_of, enumerate_layouts
from planner.speed import phases

P5 = instance("p5.48xlarge")
MIXTURE = {"hidden": 2048, "layers": 24, "heads": 16, "kv_heads": 8, "ffn": 8192, "vocab": 32000, "seq": 8192} | {
    "n_experts": 16,
    "topk": 2,
    "moe_ffn": 2048,
}
MODELS = {
    "dense": from_mapping(KNOWN["llama3-8b"], None, "llama3-8b"),
    "experts": from_mapping(MIXTURE, None, "a mixture"),
    "odd": from_mapping({"hidden": 1536, "layers": 30, "heads": 12, "kv_heads": 3, "vocab": 50000}, 4096, "odd"),
}
MODEL = st.sampled_from(sorted(MODELS))
RANKS = st.lists(st.sampled_from([1, 2, 4, 8, 16, 24, 32, 64, 96]), min_size=1, max_size=3, unique=True)
BATCH = st.sampled_from([8, 12, 48, 96, 128])


def space_of(shape: Shape, ranks: list[int], batch: int) -> Space:
    return enumerate_layouts(shape, 8, sorted(ranks), batch, Axes.of(shape, 8))


def setting_of(shape: Shape, **faster: float) -> Setting:
    hardware = P5.hardware("bf16")
    hardware = replace(hardware, **{name: getattr(hardware, name) * factor for name, factor in faster.items()})
    room = hardware.capacity * 0.97 / 2**30
    return Setting(shape=shape, software=megatron("bf16"), hardware=hardware, constants=start(), room=room)


def measured_one_by_one(space: Space, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every layout in double precision, and whether it fits, without the search's short cuts."""
    configs = setting.configs(columns_of(space.rows(np.arange(len(space)))))
    seconds = sum(phases(configs, setting.constants).values(), start=np.zeros(len(space)))
    needed = sum(breakdown(configs).values(), start=np.zeros(len(space)))
    return seconds, needed <= setting.room


@settings(max_examples=15, deadline=None)
@given(name=MODEL, ranks=RANKS, batch=BATCH)
def test_every_layout_of_a_space_divides(name: str, ranks: list[int], batch: int) -> None:
    shape, space = MODELS[name], space_of(MODELS[name], ranks, batch)
    rows = space.rows(np.arange(len(space)))
    at_work = rows["tp"] * rows["pp"] * rows["cp"] * rows["dp"]
    assert np.isin(at_work, ranks).all()
    assert (rows["mbs"] * rows["ga"] * rows["dp"] == batch).all()
    for size in ("heads", "kv_heads", "ffn"):
        assert (int(getattr(shape, size)) % rows["tp"] == 0).all()
    assert (int(shape.layers) % (rows["pp"] * rows["vpp"]) == 0).all()
    assert (rows["dp"] % rows["shard"] == 0).all()
    assert ((rows["pp"] == 1) | (rows["zero"] < 2)).all()
    assert (rows["tp"] <= 8).all()


@settings(max_examples=10, deadline=None)
@given(name=MODEL, ranks=RANKS, batch=BATCH)
def test_no_layout_is_listed_twice(name: str, ranks: list[int], batch: int) -> None:
    space = space_of(MODELS[name], ranks, batch)
    rows = np.stack(list(space.rows(np.arange(len(space))).values()), axis=1)
    assert len(np.unique(rows, axis=0)) == len(space)


@settings(max_examples=15, deadline=None)
@given(name=MODEL, ranks=RANKS, batch=BATCH)
def test_the_winner_is_never_beaten_by_a_listed_layout(name: str, ranks: list[int], batch: int) -> None:
    space, setting = space_of(MODELS[name], ranks, batch), setting_of(MODELS[name])
    found = search(space, setting, keep=8)
    seconds, fits = measured_one_by_one(space, setting)
    assert found.considered == len(space)
    assert found.too_big == pytest.approx(np.count_nonzero(~fits), abs=1 + 1e-4 * len(space))
    if not fits.any():
        assert not len(found.best)
        return
    order = np.sort(seconds[fits])[: len(found.best)]
    np.testing.assert_allclose(seconds[found.best], order, rtol=1e-4)
    np.testing.assert_allclose(found.seconds, seconds[found.best], rtol=1e-4)
    at_work = space.rows(np.arange(len(space)))["ranks"]
    for count, place in found.fastest.items():
        assert seconds[place] == pytest.approx(seconds[fits & (at_work == count)].min(), rel=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    name=MODEL,
    ranks=RANKS,
    resource=st.sampled_from(["flops", "memory", "intra", "inter", "host", "capacity"]),
    factor=st.floats(1.0, 20.0),
)
def test_more_of_a_resource_is_never_slower(name: str, ranks: list[int], resource: str, factor: float) -> None:
    space = space_of(MODELS[name], ranks, 96)
    before = search(space, setting_of(MODELS[name]), keep=1)
    after = search(space, setting_of(MODELS[name], **{resource: factor}), keep=1)
    assert len(after.best) >= len(before.best)
    if len(before.best):
        assert after.seconds[0] <= before.seconds[0] * (1 + 1e-5)


def test_the_same_question_has_the_same_answer() -> None:
    space = space_of(MODELS["dense"], [16, 32, 64], 128)
    first, second = (search(space, setting_of(MODELS["dense"])) for _ in range(2))
    assert first.best.tolist() == second.best.tolist()
    assert first.fastest == second.fastest


def test_of_equally_fast_layouts_the_first_listed_comes_first() -> None:
    space = space_of(MODELS["dense"], [16], 128)
    found = search(space, setting_of(MODELS["dense"]), keep=50)
    pairs = list(zip(found.seconds.tolist(), found.best.tolist(), strict=True))
    assert pairs == sorted(pairs)


def test_refusals_are_counted_by_reason() -> None:
    space = space_of(MODELS["odd"], [16, 20], 96)
    reasons = " ".join(space.refused)
    for word in ("12 heads", "3 key/value heads", "30 layers", "the GPUs do not divide", "global batch", "a pipeline"):
        assert word in reasons
    assert "experts" not in reasons
    assert all(count > 0 for count in space.refused.values())


def test_a_pinned_size_is_the_only_one() -> None:
    shape = MODELS["dense"]
    space = enumerate_layouts(shape, 8, [32], 64, Axes.of(shape, 8, tp=2, pp=4, mbs=1))
    rows = space.rows(np.arange(len(space)))
    assert {(int(tp), int(pp), int(mbs)) for tp, pp, mbs in zip(rows["tp"], rows["pp"], rows["mbs"], strict=True)} == {
        (2, 4, 1)
    }


def test_what_does_not_fit_has_a_leanest() -> None:
    shape = from_mapping(KNOWN["mt-nlg-530b"], None, "mt-nlg-530b")
    found = search(space_of(shape, [8], 64), setting_of(shape))
    assert not len(found.best)
    assert found.leanest >= 0
    assert not found.fastest


@given(stage=st.sampled_from([0, 1, 2, 3]))
def test_a_pinned_zero_stage_is_the_only_one_where_there_is_anybody_to_split_with(stage: int) -> None:
    shape = MODELS["dense"]
    space = enumerate_layouts(shape, 8, [32], 64, Axes.of(shape, 8, zero=stage))
    rows = space.rows(np.arange(len(space)))
    assert set(rows["zero"][rows["dp"] > 1].tolist()) == {stage}
    assert (rows["pp"] > 1).any() == (stage < 2)
    assert (space.refused["ZeRO 2 and 3 do not go with a pipeline"] > 0) == (stage >= 2)
