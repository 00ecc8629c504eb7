"""Curves of NVLink and EFA: what they say of measured points, laws that hold of every curve, tables that are wrong."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import BadTable, NoProfile
from planner.links import Curve, Links, fit, generation_of, read, traffic

ROOT = Path(__file__).parents[2]
HEADER = "hw,nodes,gpus,op,bytes,time_us"
SIZES = [2**power for power in range(3, 33)]
FULL = ("H100", "p5.48xlarge", "V100-32", "T4", "p6-b300.48xlarge", "A10G", "Ampere", "Blackwell")
FAR = ("p4de.24xlarge", "p5.48xlarge", "p6-b200.48xlarge")


def table(tmp_path: Path, lines: list[str], header: str = HEADER) -> Path:
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def synthetic(name: str, curve: Curve, nodes: int, gpus: int) -> list[str]:
    """What nccl-tests would print of links that follow a curve."""
    members = nodes if nodes > 1 else gpus
    times = curve.seconds(np.array(SIZES, dtype=np.float64), float(members), 2.0, float(gpus)) * 1e6
    pairs = zip(SIZES, times, strict=True)
    return [f"{name},{nodes},{gpus},all_reduce,{size},{time:.4f}" for size, time in pairs]


def line(rate: float, latency: float = 20e-6, hop: float = 0.0, fill: float = 0.0, members: int = 8) -> Curve:
    return Curve(latency, hop, rate, fill, 1e8, None, None, ((members, rate),), 0, 0.0)


@pytest.mark.parametrize(
    ("where", "name", "size", "members", "microseconds", "within"),
    [
        ("between", "p4de.24xlarge", 2**31, 2, 51406, 0.04),
        ("between", "p4de.24xlarge", 1024, 2, 165, 0.04),
        ("between", "p5.48xlarge", 2**34, 2, 66132, 0.03),
        ("between", "p5.48xlarge", 8, 2, 69.12, 0.10),
        ("between", "p6-b200.48xlarge", 2**34, 4, 87181.76, 0.03),
        ("inside", "H100-80", 2**34, 8, 62239, 0.04),
        ("inside", "A100-80", 2**30, 8, 8196.4, 0.03),
        ("inside", "A100-80", 2**30, 2, 5453.4, 0.03),
        ("inside", "V100-32", 2**30, 2, 47617, 0.02),
        ("inside", "V100-32", 2**30, 8, 13983, 0.03),
        ("inside", "B200", 2**34, 8, 35551.44, 0.07),
    ],
)
def test_shipped_curves_say_what_was_measured(
    where: str, name: str, size: int, members: int, microseconds: float, within: float
) -> None:
    curve = getattr(Links.shipped(), where)(name)
    assert float(curve.seconds(size, members)) == pytest.approx(microseconds * 1e-6, rel=within)


def test_shipped_curves_miss_the_median_point_by_less_than_eight_percent() -> None:
    links = Links.shipped()
    for curve in (*links.nvlink.values(), *links.efa.values()):
        assert curve.median_error < 0.08
        assert curve.points >= 20


def test_shares_of_the_nodes_network_are_those_the_sums_of_whole_nodes_need() -> None:
    shares = [Links.shipped().between(name).share for name in FAR]
    assert shares == [pytest.approx(seen, rel=0.07) for seen in (0.84, 0.65, 0.74)]


def test_two_p5_are_held_up_by_the_links_inside_and_two_p4de_are_not() -> None:
    slow, fast = (Links.shipped().between(name).links_busy for name in ("p4de.24xlarge", "p5.48xlarge"))
    assert slow is not None
    assert fast is not None
    assert slow < 0.5
    assert fast > 0.9


@given(
    far=st.booleans(),
    name=st.sampled_from(FULL),
    members=st.integers(1, 64),
    factor=st.sampled_from([1.0, 2.0]),
    sizes=st.lists(st.floats(0, 1e12), min_size=2, max_size=8),
)
def test_more_bytes_never_take_less_time(far: bool, name: str, members: int, factor: float, sizes: list[float]) -> None:
    links = Links.shipped()
    curve = links.between(name) if far else links.inside(name)
    times = curve.seconds(np.sort(np.array(sizes)), members, factor)
    assert (np.diff(times) >= 0).all()
    assert (times == 0).all() if members == 1 else (times > 0).all()


@given(name=st.sampled_from(FAR), size=st.floats(1, 1e11), nodes=st.integers(2, 512), better=st.floats(1, 10))
def test_a_faster_line_never_takes_longer(name: str, size: float, nodes: int, better: float) -> None:
    curve = Links.shipped().between(name)
    line_rate = 100e9
    slow, fast = curve.over(line_rate), curve.over(line_rate * better)
    assert slow.rate == pytest.approx(line_rate * (curve.share or 0))
    assert float(fast.seconds(size, nodes)) <= float(slow.seconds(size, nodes)) * (1 + 1e-12)


def test_a_line_as_it_was_measured_leaves_the_curve_as_it_was() -> None:
    curve = Links.shipped().between("p5.48xlarge")
    assert float(curve.over(400e9).seconds(1e8, 2)) == pytest.approx(float(curve.seconds(1e8, 2)), rel=1e-4)


def test_whole_nodes_send_their_sums_once_but_gathers_go_round_all_gpus() -> None:
    assert float(traffic(1.0, 2, 2.0, ranks=16)) == 1.0
    assert float(traffic(1.0, 2, 1.0, ranks=16)) == 15 / 16
    assert float(traffic(1.0, 8, 2.0)) == 14 / 8
    assert float(traffic(1.0, 1, 2.0)) == 0.0


def test_a_known_curve_is_found_again(tmp_path: Path) -> None:
    truth = {
        "a": line(200e9, latency=30e-6, hop=4e-6, members=2),
        "b": line(50e9, latency=150e-6, fill=1e-3, members=2),
    }
    lines = [text for gpus in (2, 4, 8) for text in synthetic("a", truth["a"], 1, gpus)]
    lines += synthetic("b", truth["b"], 2, 16)
    links = fit(read(table(tmp_path, lines)))
    found = links.inside("a")
    assert (found.latency_s, found.hop_s, found.rate) == pytest.approx((30e-6, 4e-6, 200e9), rel=0.01)
    assert links.between("b").rate == pytest.approx(50e9, rel=0.01)
    sizes = np.geomspace(1e3, 4e9, 40)
    assert links.between("b").seconds(sizes, 2) == pytest.approx(truth["b"].seconds(sizes, 2), rel=0.01)


def test_rates_of_small_groups_are_kept(tmp_path: Path) -> None:
    lines = synthetic("mesh", line(20e9, members=2), 1, 2) + synthetic("mesh", line(130e9, members=8), 1, 8)
    found = fit(read(table(tmp_path, lines))).inside("mesh")
    assert dict(found.groups) == pytest.approx({2: 20e9, 8: 130e9}, rel=0.01)
    assert found.rate == dict(found.groups)[8]


def test_a_few_wild_points_change_little(tmp_path: Path) -> None:
    lines = synthetic("a", line(200e9), 1, 8)
    wild = [*lines, "a,1,8,all_reduce,32768,6000", "a,1,8,all_reduce,65536,3000"]
    calm, shaken = (fit(read(table(tmp_path, some))).inside("a") for some in (lines, wild))
    assert shaken.rate == pytest.approx(calm.rate, rel=0.02)
    assert shaken.latency_s == pytest.approx(calm.latency_s, rel=0.05)


def test_order_sources_and_further_columns_change_nothing(tmp_path: Path) -> None:
    lines = synthetic("H100 box", line(400e9, fill=1e-4), 1, 8) + synthetic("p5.48xlarge", line(250e9), 2, 16)
    straight = fit(read(table(tmp_path, lines)))
    mixed = [f"{text},9.9,somebody's log" for text in np.random.default_rng(1).permutation(lines)]
    assert fit(read(table(tmp_path, mixed, f"{HEADER},busbw_GBps,source"))).to_json() == straight.to_json()


def test_times_scale_with_what_was_measured(tmp_path: Path) -> None:
    lines = synthetic("a", line(400e9, fill=1e-4), 1, 8)
    slower = [",".join([*text.split(",")[:5], str(1.37 * float(text.split(",")[5]))]) for text in lines]
    before, after = (fit(read(table(tmp_path, some))).inside("a") for some in (lines, slower))
    sizes = np.geomspace(8, 1e10, 30)
    assert after.seconds(sizes, 8) == pytest.approx(1.37 * before.seconds(sizes, 8), rel=1e-3)


def test_an_unknown_name_is_a_curve_of_its_own_and_serves_nobody_else(tmp_path: Path) -> None:
    lines = synthetic("our rack", line(90e9), 1, 8) + synthetic("our rack", line(9e9), 4, 32)
    links = fit(read(table(tmp_path, lines)))
    assert links.inside("our rack").share is None
    assert links.between("our rack").links_busy is not None
    with pytest.raises(NoProfile, match="measure some, or name one of our rack"):
        links.inside("H100")
    with pytest.raises(NoProfile, match="no line that is known"):
        links.inside("our rack").over(1e9)


def test_even_one_point_makes_a_curve(tmp_path: Path) -> None:
    found = fit(read(table(tmp_path, ["a,1,2,all_gather,1000000,50", "a,1,2,all_reduce,0,9"]))).inside("a")
    assert np.isfinite(found.rate)
    assert found.rate > 0
    assert float(found.seconds(1e6, 2, 1.0)) == pytest.approx(50e-6, rel=0.05)


def test_a_table_of_nothing_but_zeros_has_no_curve(tmp_path: Path) -> None:
    with pytest.raises(NoProfile):
        fit(read(table(tmp_path, ["p5.48xlarge,2,16,all_reduce,0,15.5"]))).between("p5.48xlarge")


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("Hopper", "Hopper"),
        ("H100-80", "Hopper"),
        ("p5en.48xlarge", "Hopper"),
        ("p6e-gb200.36xlarge", "Blackwell"),
        ("AWS Batch example (single node, H100-class)", "Hopper"),
        ("a 100 nodes", None),
        ("trn2.48xlarge", None),
    ],
)
def test_generations_by_name(name: str, generation: str | None) -> None:
    assert generation_of(name) == generation


@pytest.mark.parametrize(
    ("asked", "served"),
    [("H200", "H100"), ("p4d.24xlarge", "A100"), ("T4", "V100"), ("GB300", "p6-b200.48xlarge"), ("L40S", "H100")],
)
def test_what_was_not_measured_is_served_by_the_nearest_generation(asked: str, served: str) -> None:
    assert Links.shipped().inside(asked) == Links.shipped().inside(served)


@pytest.mark.parametrize("name", ["CPU-core", "trn1.32xlarge", "banana"])
def test_what_is_no_gpu_has_no_curve(name: str) -> None:
    with pytest.raises(NoProfile, match="No collectives between nodes"):
        Links.shipped().between(name)


def test_json_and_back() -> None:
    links = Links.shipped()
    assert Links.from_json(json.loads(json.dumps(links.to_json()))) == links


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        ("a,1,8,all_reduce,1e6,fast", "line 3, column time_us: 'fast' is not a number"),
        ("a,1,8,all_reduce,1e6,0", "line 3, column time_us: 0 is not a possible value"),
        ("a,1,8,all_reduce,nan,5", "line 3, column bytes: nan is not a possible value"),
        ("a,0,8,all_reduce,1e6,5", "line 3, column nodes: 0 is not a possible value"),
        ("a,1,2.5,all_reduce,1e6,5", "line 3, column gpus: 2.5 is no whole number"),
        ("a,4,2,all_reduce,1e6,5", "line 3, column gpus: 2 are too few for 4 nodes"),
        ("a,1,8,gossip,1e6,5", "line 3, column op: 'gossip' is none of all_reduce"),
        (" ,1,8,all_reduce,1e6,5", "line 3, column hw: it is empty"),
        ("a,1,8,all_reduce,1e6", "line 3: it has another number of cells"),
        ("a,1,8,all_reduce,1e6,5,6", "line 3: it has another number of cells"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, cells: str, sentence: str) -> None:
    path = table(tmp_path, ["a,1,8,all_reduce,8,12", cells])
    with pytest.raises(BadTable) as caught:
        read(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_column_an_empty_table_and_no_table_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadTable, match="lacks the column time_us"):
        read(table(tmp_path, ["a,1,8,all_reduce,8"], "hw,nodes,gpus,op,bytes"))
    with pytest.raises(BadTable, match="holds no row"):
        read(table(tmp_path, []))
    with pytest.raises(BadTable, match="cannot be read"):
        read(tmp_path / "nowhere.csv")


def test_the_command_prints_what_is_shipped_or_one_sentence(tmp_path: Path) -> None:
    lines = synthetic("p5.48xlarge", line(250e9), 2, 16)
    command = [sys.executable, "-W", "ignore", "-m", "planner.links"]
    good = subprocess.run([*command, table(tmp_path, lines)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Links.from_json(json.loads(good.stdout)) == fit(read(tmp_path / "collectives.csv"))
    bad = subprocess.run([*command, tmp_path / "no.csv"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "cannot be read as a table" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_groups_are_ordered_and_hops_cost_something() -> None:
    curve = Links.shipped().inside("A100-80")
    assert all(small < large for (small, _), (large, _) in pairwise(curve.groups))
    assert curve.hop_s > 0
