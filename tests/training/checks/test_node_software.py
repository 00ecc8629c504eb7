"""Software: found, compared with the image's facts, and between 64 nodes, of which one is odd."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path

import pytest

from tests.training.checks.played import play
from training.checks import differences, software
from training.checks.differences import Difference
from training.checks.machine import Machine
from training.checks.node import ONE


def test_what_is_really_here_is_told() -> None:
    here = software.versions(Machine())
    assert here["python"] == platform.python_version()
    assert here["kernel"] == os.uname().release
    assert here["torch"] == metadata.version("torch")
    assert here["lustre_client"] == software.ABSENT
    assert all(here.values())


def test_what_vendors_install_is_found(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = {
        "etc/os-release": 'NAME="Amazon Linux"\nVERSION_ID="2023"\n',
        "sys/module/nvidia/version": "580.126.09\n",
        "sys/module/efa/version": "3.3.1g\n",
        "opt/amazon/efa_installed_packages": "# EFA installer version: 1.51.0\nlibnccl-ofi_1.22.0-1_x86_64.rpm\n",
        "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.2.1"}}',
        "usr/lib64/libnccl.so.2.30.4": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    play(
        tmp_path / "bin",
        "fi_info",
        {"--version": "fi_info: 2.7.0amzn2.0\nlibfabric: 2.7.0amzn2.0\nlibfabric api: 2.7\n"},
    )
    play(tmp_path / "bin", "modinfo", {"--field version lustre": "2.15.6_1_g1\n"})
    play(tmp_path / "bin", "slurmd", {"-V": "slurm 25.11.8\n"})
    found = software.versions(Machine(root, f"{tmp_path / 'bin'}:/usr/bin:/bin"))
    told = {
        "os": "Amazon 2023", "nvidia_driver": "580.126.09", "efa_driver": "3.3.1g", "efa_installer": "1.51.0",
        "aws_ofi_nccl": "1.22.0", "cuda": "13.2.1", "nccl": "2.30.4", "libfabric": "2.7.0amzn2.0",
        "lustre_client": "2.15.6_1_g1", "slurm": "25.11.8", "gdrcopy": "absent",
    }  # fmt: skip
    assert {name: found[name] for name in told} == told


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("2.30.4", "2.30.4-1", True), ("Debian 12", "Debian 12.11", True), ("13.2", "13.2.1", True),
     ("v4.1.4", "4.1.4", True),
     ("580.1", "580.126", False), ("2.28.9", "2.30.4-1", False), ("absent", "none", True), ("absent", "1.0", False)],
)  # fmt: skip
def test_versions_are_compared_by_their_parts(one: str, other: str, same: bool) -> None:
    assert software.alike(one, other) is same
    assert software.alike(other, one) is same


def test_what_changed_since_the_image_was_proven(tmp_path: Path) -> None:
    facts = {
        "flavour": "pcluster-gpu",
        "roles": [],
        "software": {"nvidia_driver": "595.112.07", "openmpi": "4.1.8", "docker": "29"},
    }
    (tmp_path / "etc/castra").mkdir(parents=True)
    (tmp_path / "etc/castra/image.json").write_text(json.dumps(facts))
    told = software.image(Machine(tmp_path))
    here = {"nvidia_driver": "580.126.09", "openmpi": "4.1.7", "kernel": "6.8"}
    driver, openmpi = software.against_image(here, told)
    assert (driver.severity, driver.device) == ("refuse", "nvidia_driver")
    assert driver.what == "nvidia_driver is 580.126.09, the image was proven with 595.112.07"
    assert (openmpi.severity, openmpi.device) == ("warn", "openmpi")
    assert software.against_image(here | {"nvidia_driver": "595.112.07", "openmpi": "4.1.8"}, told) == []
    assert software.against_image(here, software.image(Machine(tmp_path / "nowhere"))) == []


def reports(number: int, **odd: dict[str, str]) -> dict[str, dict[str, str]]:
    usual = {"nvidia_driver": "580.126.09", "libfabric": "2.7.0", "gdrcopy": "2.5", "os": "Ubuntu 24.04"}
    return {f"node{index}": usual | odd.get(f"node{index}", {}) for index in range(number)}


def test_one_odd_node_of_64_is_named_with_what_is_usual() -> None:
    found = differences.differences(reports(64, node37={"libfabric": "1.30.0"}))
    assert found == [Difference("libfabric", "1.30.0", ("node37",), "2.7.0")]
    (finding,) = differences.judge(found, ONE)
    assert (finding.severity, finding.node, finding.device) == ("refuse", "node37", "libfabric")
    assert finding.what == "libfabric is 1.30.0 here, 2.7.0 on most nodes"


def test_several_odd_nodes_in_several_ways() -> None:
    odd = {"node1": {"os": "Debian 12"}, "node2": {"libfabric": "1.30.0"}, "node3": {"libfabric": "1.22.0"}}
    findings = differences.judge(differences.differences(reports(64, **odd)), ONE)
    assert {(one.node, one.severity, one.device) for one in findings} == {
        ("node1", "warn", "os"), ("node2", "refuse", "libfabric"), ("node3", "refuse", "libfabric"),
    }  # fmt: skip


@pytest.mark.parametrize("number", [2, 4])
def test_half_against_half_blames_nobody_and_is_refused(number: int) -> None:
    half = {f"node{index}": {"libfabric": "1.30.0"} for index in range(number // 2)}
    found = differences.differences(reports(number, **half))
    assert [(one.value, one.usual, len(one.nodes)) for one in found] == [
        ("1.30.0", None, number // 2), ("2.7.0", None, number // 2),
    ]  # fmt: skip
    (finding,) = differences.judge(found, ONE)
    assert (finding.severity, finding.node) == ("refuse", "")
    assert finding.what.startswith("libfabric differs, and no value has most nodes: 1.30.0 on node0")


def test_three_ways_without_a_majority_name_all() -> None:
    told = {f"node{index}": {"nccl": value} for index, value in enumerate(["2.1", "2.1", "2.2", "2.2", "2.3"])}
    found = differences.differences(told)
    assert {(one.value, one.usual) for one in found} == {("2.1", None), ("2.2", None), ("2.3", None)}


def test_what_one_node_does_not_tell() -> None:
    told: dict[str, dict[str, str]] = {"a": {"vbios": "1"}, "b": {"vbios": "1"}, "c": {}}
    (finding,) = differences.judge(differences.differences(told), ONE)
    assert (finding.node, finding.what) == ("c", "vbios is unknown here, 1 on most nodes")
    assert differences.differences({"a": {"vbios": "1"}}) == []
    assert differences.differences({}) == []
