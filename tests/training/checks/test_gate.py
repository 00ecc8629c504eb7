"""The gate: recorded runs that are healthy pass, the published faulty one and planted defects are refused."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from clusters import catalog
from training.checks.bandwidth import Row, row
from training.checks.fabric import Fabric
from training.checks.finding import Finding
from training.checks.gate import Expected, Seen, judge
from training.checks.nccl_log import read

LOGS = Path(__file__).parent / "logs"
EFA = {f"node{number}": Fabric("efa", 32) for number in range(2)}
P5 = Expected(16, 2, "efa", 400, 0.5, 32)


def verdict(name: str, expected: Expected) -> list[Finding]:
    """What the gate says of a recorded log."""
    log = read((LOGS / f"{name}.txt").read_text())
    return [finding for run in log.runs for finding in judge(run.rows, expected, run.seen(log.fabrics))]


def reduced(gb_per_s: float, ranks: int = 16, gib: float = 2) -> list[Row]:
    """All-reduces up to a size."""
    sizes = [size for size in (1 << power for power in range(12, 36)) if size <= gib * 2**30]
    return [row("all_reduce", size, size / gb_per_s / 1e9, ranks) for size in sizes]


@pytest.mark.parametrize(
    ("name", "ranks", "nodes", "instance"),
    [
        ("p4de_2nodes_slurm", 16, 2, "p4de.24xlarge"),
        ("p5_2nodes_slurm", 16, 2, "p5.48xlarge"),
        ("eks_p5_excerpt", 16, 2, "p5.48xlarge"),
    ],
)
def test_healthy_published_runs_pass(name: str, ranks: int, nodes: int, instance: str) -> None:
    item = catalog.find(instance)
    line, fraction = item.network_gbps / 8, item.healthy_line_fraction
    assert verdict(name, Expected(ranks, nodes, line_gb_per_s=line, min_fraction=fraction)) == []


@pytest.mark.parametrize(
    ("instance", "nodes", "gib", "algbw"),
    [
        ("p5en.48xlarge", 4, 4, 188.3),
        ("p6-b200.48xlarge", 4, 16, 194.6),
        ("p6-b200.48xlarge", 4, 16, 197.1),
        ("p6-b300.48xlarge", 2, 16, 348.8),
        ("p6-b300.48xlarge", 2, 64, 400.5),
    ],
)
def test_other_published_bandwidths_pass(instance: str, nodes: int, gib: int, algbw: float) -> None:
    """awslabs/awsome-distributed-ai 95b939cd and stas00/ml-engineering 744d01e; the figures alone, not the logs."""
    item = catalog.find(instance)
    expected = Expected(8 * nodes, nodes, None, item.network_gbps / 8, item.healthy_line_fraction)
    assert judge(reduced(algbw, 8 * nodes, gib), expected, Seen()) == []


def test_the_published_two_nodes_are_one() -> None:
    (finding,) = verdict("batch_p5_published_as_two_nodes", Expected(16, 2, line_gb_per_s=400))
    assert finding.severity == "refuse"
    assert "those of 8 ranks, not of 16" in finding.what
    assert "one node of 2 measured itself alone, and the network was not used" in finding.what
    assert "16 processes, 8 on each node" in finding.todo
    assert verdict("batch_p5_published_as_two_nodes", Expected(8, 1)) == []


def test_every_process_alone_is_told_as_that() -> None:
    ranks, order = verdict("h100_every_process_alone", Expected(16, 2))
    assert "those of 1 rank, not of 16" in ranks.what
    assert "MPI=1" in ranks.todo
    assert "out of order" in order.what


def test_two_processes_of_rank_0_are_told_as_that() -> None:
    assert "2 processes are all the same rank" in verdict("two_processes_of_rank_0", Expected(2, 2))[0].what


def test_a_recorded_fall_back_to_tcp_is_refused_by_host() -> None:
    findings = verdict("debug_libfabric_over_tcp", Expected(2, 2, "efa"))
    assert [finding.node for finding in findings][:2] == ["ip-192-168-16-255", "ip-192-168-29-243"]
    assert all("NCCL uses tcp and not efa" in finding.what for finding in findings[:2])


def test_a_recorded_efa_run_passes_and_its_bandwidth_is_said_to_be_unproven() -> None:
    (finding,) = verdict("p4d_eks_16_ranks", Expected(16, 2, "efa", 50))
    assert (finding.severity, finding.todo) == ("warn", "set checks.largest_mib to 2048 or more")


def test_recorded_wrong_results_are_refused() -> None:
    (finding,) = verdict("allgather_out_of_bounds", Expected(8, 1))
    assert finding.what == "2 results are out of bounds"


def test_256_gpus_pass_for_256_and_not_for_128() -> None:
    assert verdict("allreduce_256_gpus_2021", Expected(256, 16)) == []
    assert "241 to 261 ranks, not of 128" in verdict("allreduce_256_gpus_2021", Expected(128, 8))[0].what


@pytest.mark.parametrize("name", ["gb10_2_nodes_nccl_tests_2_20", "sendrecv_a40_2_nodes", "alltoall_h800_8_nodes"])
def test_a_log_that_was_cut_is_refused(name: str) -> None:
    assert any(finding.severity == "refuse" for finding in verdict(name, Expected(None, None)))


def test_a_healthy_cluster_has_no_findings() -> None:
    assert judge(reduced(260), P5, Seen(16, ("node0", "node1"), EFA)) == []


@pytest.mark.parametrize(
    ("seen", "node", "said"),
    [
        (Seen(15, ("node0", "node1"), EFA), "", "15 ranks reported and the job has 16"),
        (Seen(16, ("node0",), EFA), "", "the ranks are on 1 nodes (node0) and the job has 2"),
        (Seen(fabrics=EFA | {"node1": Fabric("efa", 31)}), "node1", "NCCL found 31 network interfaces of 32"),
        (Seen(fabrics=EFA | {"node1": Fabric("tcp", warnings=("no plugin",))}), "node1", "(NCCL warns: no plugin)"),
        (Seen(fabrics=EFA | {"node1": Fabric("efa+tcp", 32)}), "node1", "NCCL uses efa+tcp and not efa"),
        (Seen(), "", "nothing says that NCCL uses efa"),
        (Seen(fabrics=EFA, gaps=("all_to_all ends after 3 sizes",)), "", "all_to_all ends after 3 sizes"),
        (Seen(fabrics=EFA, given_up=("all_to_all was given up",)), "", "all_to_all was given up"),
        (Seen(fabrics=EFA, out_of_bounds=3), "", "3 results are out of bounds"),
    ],
)
def test_a_planted_defect_is_refused(seen: Seen, node: str, said: str) -> None:
    (finding,) = judge(reduced(260), P5, seen)
    assert (finding.severity, finding.node) == ("refuse", node)
    assert said in finding.what
    assert finding.todo


def test_one_node_with_fewer_interfaces_than_the_others_is_named_without_a_catalogue() -> None:
    seen = Seen(fabrics={"a": Fabric("efa", 8), "b": Fabric("efa", 7), "c": Fabric("efa", 8)})
    (finding,) = judge(reduced(260), replace(P5, nics=None), seen)
    assert (finding.node, finding.action) == ("b", "isolate")


def test_the_interface_that_is_missing_is_named_by_what_the_others_have() -> None:
    whole = Fabric("efa", 2, devices=("0000:55:00.0", "0000:56:00.0"))
    seen = Seen(fabrics={"a": whole, "b": Fabric("efa", 1, devices=("0000:55:00.0",))})
    (finding,) = judge(reduced(260), replace(P5, nics=2), seen)
    assert (finding.node, finding.device) == ("b", "0000:56:00.0")


@pytest.mark.parametrize(
    ("gb_per_s", "said"),
    [(190, "190 GB/s per node, 48% of the line's 400, and 50% are needed"), (480, "did not go through the network")],
)
def test_a_bandwidth_that_cannot_be_right_is_refused(gb_per_s: float, said: str) -> None:
    (finding,) = judge(reduced(gb_per_s), P5, Seen(fabrics=EFA))
    assert finding.severity == "refuse"
    assert said in finding.what


def test_the_recipe_may_ask_for_less() -> None:
    assert judge(reduced(190), replace(P5, min_fraction=0.4), Seen(fabrics=EFA)) == []


def test_a_wrong_sum_is_refused_by_its_size() -> None:
    rows = reduced(260)
    rows[3]["wrong"] = 7
    (finding,) = judge(rows, P5, Seen(fabrics=EFA))
    assert finding.what == "7 values of an all_reduce of 32,768 bytes are wrong"


def test_rows_of_two_runs_are_not_judged_as_one() -> None:
    (finding,) = judge([*reduced(260, 16), *reduced(260, 8)], P5, Seen(fabrics=EFA))
    assert "rows of different runs are mixed" in finding.what


def test_rows_too_small_to_tell_the_ranks_are_not_taken_for_a_proof() -> None:
    tiny = [Row(collective="all_reduce", bytes=8, seconds=1e-4, algbw_gbps=0.0, busbw_gbps=0.0, rounding=0.005)]
    (finding,) = judge(tiny, Expected(16, 2), Seen())
    assert (finding.severity, finding.what) == ("warn", "the bandwidths cannot tell 16 ranks from those of one node")


def test_one_node_needs_no_network() -> None:
    assert judge(reduced(450, 8), Expected(8, 1, "efa", 400), Seen()) == []


def test_a_result_of_the_sweep_is_read() -> None:
    result = {
        "ranks": 2, "nodes": 2, "hosts": ["a", "b"],
        "fabrics": {"a": asdict(Fabric("efa", 4)), "b": asdict(Fabric("tcp"))},
        "left_out": ["all_gather was given up"],
    }  # fmt: skip
    seen = Seen.of(result)
    assert (seen.ranks, seen.hosts, seen.given_up) == (2, ("a", "b"), ("all_gather was given up",))
    assert [finding.node for finding in judge([], Expected(2, 2, "efa"), seen)] == ["b", "", ""]
