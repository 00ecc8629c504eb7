"""NCCL's own lines: which network each host uses, with how many interfaces, through which plugin."""

from pathlib import Path

import pytest

from training.checks.fabric import Fabric, common, fabrics, telling

LOGS = Path(__file__).parent / "logs"
NOW = "node-a:31:31 [0] NCCL INFO "
NEWEST = """
node-a:31:31 [0] NCCL INFO NCCL version 2.29.2+cuda12.8
node-a:31:31 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.18.0
node-a:31:31 [0] NCCL INFO NET/OFI Using Libfabric version 2.3
node-a:31:31 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
node-a:31:31 [0] NCCL INFO Using network Libfabric
"""
"""As aws-ofi-nccl 1.18 and NCCL 2.29 write it."""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("debug_p5en_efa", {"8h200-2": ("libfabric", None), "8h200-3": ("efa", 16)}),
        ("debug_socket_fallback", {"ip-172-31-0-112": ("tcp", None)}),
        ("debug_libfabric_over_tcp", {"ip-192-168-16-255": ("tcp", None), "ip-192-168-29-243": ("tcp", None)}),
        ("p4d_eks_16_ranks", {"nccl-tests-efa-worker-0": ("efa", None), "nccl-tests-efa-worker-1": ("efa", None)}),
        ("p5_2nodes_slurm", {}),
    ],
)
def test_a_recorded_choice(name: str, found: dict[str, tuple[str, int | None]]) -> None:
    told = fabrics((LOGS / f"{name}.txt").read_text())
    assert {host: (fabric.provider, fabric.nics) for host, fabric in told.items()} == found


def test_versions_are_read() -> None:
    assert fabrics(NEWEST) == {"node-a": Fabric("efa", 32, (), "1.18.0", "2.3", "2.29.2+cuda12.8")}
    p4d = fabrics((LOGS / "p4d_eks_16_ranks.txt").read_text())
    assert {fabric.nccl for fabric in p4d.values()} == {"2.8.3+cuda11.2"}


def test_the_interfaces_are_listed() -> None:
    told = fabrics((LOGS / "debug_p5en_efa.txt").read_text())
    assert told["8h200-2"].devices == ("0000:a2:00.0", "0000:a3:00.0")


def test_warnings_are_kept_once() -> None:
    (host,) = fabrics((LOGS / "debug_socket_fallback.txt").read_text()).values()
    assert host.warnings == ("NET/OFI Only EFA provider is supported",)


def test_a_warning_with_its_place_in_the_source_and_a_time() -> None:
    line = (
        "[2026-09-17 04:02:30] x3002:333:333 [0] int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):334 "
        "NCCL WARN NET/OFI Unable to find a protocol that worked.  Failing initialization."
    )
    assert fabrics(line)["x3002"].warnings == (
        "NET/OFI Unable to find a protocol that worked.  Failing initialization.",
    )


def test_processes_of_one_host_that_disagree_are_both_told() -> None:
    told = fabrics(NEWEST + f"{NOW.replace('31', '32')}Using network Socket\n")
    assert told["node-a"].provider == "efa+tcp"
    assert common(told.values()) == "efa+tcp"


def test_the_fewest_interfaces_of_any_process_count() -> None:
    other = f"{NOW}NET/OFI Selected Provider is efa (found 31 nics)\n"
    assert fabrics(NEWEST + other)["node-a"].nics == 31


def test_what_one_process_sends_to_the_others_says_as_much_as_all_it_wrote() -> None:
    text = (LOGS / "p4d_eks_16_ranks.txt").read_text()
    assert fabrics(telling(text)) == fabrics(text)
    assert len(telling(text)) < len(text) / 5
    assert telling("training\nloss 3.2\n") == ""


def test_nobody_said_anything() -> None:
    assert common([Fabric(), Fabric()]) is None
    assert common([Fabric("efa"), Fabric()]) == "efa"
