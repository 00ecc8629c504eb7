"""Published logs, read: what they hold, how many ranks they give away, what NCCL used."""

import math
from pathlib import Path

import pytest

from training.checks.bandwidth import ranks_range
from training.checks.nccl_log import Run, main, read

LOGS = Path(__file__).parent / "logs"


def log(name: str) -> str:
    """A recorded log."""
    return (LOGS / f"{name}.txt").read_text()


def only(name: str) -> Run:
    """The one run of a log."""
    (run,) = read(log(name)).runs
    return run


@pytest.mark.parametrize(
    ("name", "collective", "rows", "largest", "best", "ranks"),
    [
        ("p4de_2nodes_slurm", "all_reduce", 58, 2 << 30, 78.33, (16, 16)),
        ("p5_2nodes_slurm", "all_reduce", 64, 16 << 30, 487.26, (16, 16)),
        ("batch_p5_published_as_two_nodes", "all_reduce", 64, 16 << 30, 483.35, (8, 8)),
        ("eks_p5_excerpt", "all_reduce", 14, 2 << 30, 437.89, (16, 16)),
        ("topology_aware_excerpt", "all_reduce", 6, 16 << 30, 369.86, (128, 128)),
        ("p4d_eks_16_ranks", "all_reduce", 56, 1 << 30, 32.84, (16, 16)),
        ("allreduce_256_gpus_2021", "all_reduce", 12, 1 << 30, 74.36, (241, 261)),
        ("h100_every_process_alone", "all_reduce", 10, 512 << 20, 0.0, (1, 1)),
        ("sendrecv_a40_2_nodes", "send_recv", 10, 4096, 0.13, (1, math.inf)),
        ("allgather_out_of_bounds", "all_gather", 2, 4 << 30, 129.05, (1, math.inf)),
        ("gb10_2_nodes_nccl_tests_2_20", "all_reduce", 8, 64 << 10, 1.01, (2, 2)),
    ],
)
def test_a_published_log(
    name: str, collective: str, rows: int, largest: int, best: float, ranks: tuple[int, float]
) -> None:
    run = only(name)
    assert (run.collective, len(run.rows)) == (collective, rows)
    assert max(row["bytes"] for row in run.rows) == largest
    assert max(row["busbw_gbps"] for row in run.rows) == best
    assert ranks_range(run.rows) == ranks


def test_both_halves_of_a_line_are_read() -> None:
    out_of_place, in_place = only("p5_2nodes_slurm").rows[-2:]
    assert (out_of_place["seconds"], in_place["seconds"]) == (0.066132, 0.066109)
    assert (out_of_place["algbw_gbps"], in_place["busbw_gbps"]) == (259.78, 487.26)
    assert [out_of_place.get("in_place"), in_place.get("in_place")] == [False, True]
    assert out_of_place.get("wrong") == 0


def test_two_tables_in_one_log_are_two_runs_of_64_ranks() -> None:
    reduced, exchanged = read(log("v100_8_nodes_2021")).runs
    low, high = ranks_range(reduced.rows)
    assert low <= 64 <= high
    assert (reduced.collective, exchanged.rows[0]["busbw_gbps"]) == ("all_reduce", 0.51)
    assert exchanged.rows[1].get("wrong") is None  # an `error` of 1e+00 in place, which older versions always print


def test_versions_members_and_devices() -> None:
    run = only("gb10_2_nodes_nccl_tests_2_20")
    assert run.version == "2.20.0"
    assert run.members == [(0, "spark-d708", 0), (1, "spark-dbf4", 0)]
    p4d = only("p4d_eks_16_ranks")
    assert [rank for rank, _, _ in p4d.members] == list(range(16))
    assert p4d.members[15] == (15, "nccl-tests-efa-worker-1", 7)
    assert p4d.seen({}).hosts == ("nccl-tests-efa-worker-0", "nccl-tests-efa-worker-1")


def test_an_abridged_list_of_ranks_is_not_counted() -> None:
    assert only("alltoall_h800_8_nodes").seen({}).ranks is None


def test_processes_that_are_all_rank_0_do_not_know_of_each_other() -> None:
    assert only("two_processes_of_rank_0").seen({}).alone == 2


@pytest.mark.parametrize(
    ("name", "gap"),
    [
        ("gb10_2_nodes_nccl_tests_2_20", "ends after 4 of 21 sizes"),
        ("sendrecv_a40_2_nodes", "ends after 5 of 23 sizes"),
        ("h100_every_process_alone", "out of order"),
        ("alltoall_h800_8_nodes", "1 lines of the table of all_to_all are cut off"),
        ("two_processes_of_rank_0", "has no row"),
    ],
)
def test_what_is_missing_is_told(name: str, gap: str) -> None:
    assert gap in "; ".join(only(name).gaps)


def test_a_whole_log_lacks_nothing() -> None:
    assert not list(only("p4d_eks_16_ranks").gaps)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.995])
def test_a_log_cut_anywhere_in_its_table_is_known_to_be_cut(kept: float) -> None:
    whole = log("p4d_eks_16_ranks")
    begins, ends = whole.index("   8             2"), whole.index("[1,0]<stdout>:# Out")
    (run,) = read(whole[: begins + round((ends - begins) * kept) - 25]).runs
    assert list(run.gaps)


def test_the_program_is_told_by_its_command_or_its_first_line() -> None:
    table = log("p5_2nodes_slurm")
    for said, name in [
        ("mpirun -np 16 ./build/reduce_scatter_perf -b 8", "reduce_scatter"),
        ("# Collective test starting: alltoall_perf_mpi", "all_to_all"),
        ("srun sendrecv_perf", "send_recv"),
        ("# Collective test starting: broadcast_perf", "broadcast"),
    ]:
        (run,) = read(f"{said}\n{table}").runs
        assert run.collective == name
        assert run.rows[0]["collective"] == name


@pytest.mark.parametrize(
    ("line", "collective"),
    [
        ("1024 256 float none 0 10.0 100.00 100.00 0 10.0 100.00 100.00 0", "broadcast"),
        ("1024 256 float sum 0 10.0 100.00 100.00 0 10.0 100.00 100.00 0", "reduce"),
        ("1024 256 half sum -1 10.0 100.00 87.50 0 10.0 100.00 87.50 0", "reduce_scatter"),
        ("1024 256 bfloat16 sum -1 10.0 100.00 187.50 0 10.0 100.00 187.50 0", "all_reduce"),
        ("1024 256 int8 none -1 10.0 100.00 87.50 0 10.0 100.00 87.50 N/A", "all_gather"),
    ],
)
def test_a_table_without_a_name_is_told_by_its_columns(line: str, collective: str) -> None:
    (run,) = read(f"#  size  count  type  redop  root  time  algbw  busbw #wrong\n{line}").runs
    assert run.collective == collective


def test_the_command_line_refuses_the_published_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(LOGS / "batch_p5_published_as_two_nodes.txt")
    assert main([path, "--ranks", "16", "--nodes", "2", "--line", "400"]) == 1
    told = capsys.readouterr().out
    assert "busbw/algbw: 8 ranks" in told
    assert "one node of 2 measured itself alone" in told
    assert "as `mpirun -np 16 -N 8` does" in told
    assert main([path, "--ranks", "8", "--nodes", "1"]) == 0
    assert capsys.readouterr().out.endswith("nothing speaks against it\n")


def test_the_command_line_says_when_it_was_asked_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(LOGS / "p5_2nodes_slurm.txt")]) == 0
    assert "give --ranks and --nodes" in capsys.readouterr().out


def test_the_command_line_judges_the_network_of_a_log_without_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(LOGS / "debug_socket_fallback.txt"), "--provider", "efa"]) == 1
    told = capsys.readouterr().out
    assert "ip-172-31-0-112 uses tcp" in told
    assert "Only EFA provider is supported" in told


def test_the_command_line_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("none cannot be read: No such file or directory\n")
    (tmp_path / "empty").write_text("hello\n")
    assert main([str(tmp_path / "empty")]) == 2
    assert "holds nothing of nccl-tests or NCCL" in capsys.readouterr().err
