"""A node's limits, memory and names: what hinders a run is refused or told, what does not is left alone."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from training.checks import host, kernel_log
from training.checks.machine import Machine

WELL = {
    "shared_memory_bytes": 64 << 30, "open_files": 65536, "governor": "performance", "usable_cpus": 96, "cpus": 96,
    "address": "10.0.0.7",
}  # fmt: skip


def test_this_machine_is_looked_at() -> None:
    seen = host.look(Machine())
    assert seen["cpus"] == os.cpu_count()
    assert seen["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert seen["memory_gib"] == round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    assert seen["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert set(host.alike(seen)) < set(seen)


@pytest.mark.parametrize(
    ("wrong", "gpus", "severity", "what"),
    [
        ({"shared_memory_bytes": 64 << 20}, True, "refuse", "/dev/shm has 64 MiB, 1024 MiB are needed"),
        ({"shared_memory_bytes": 32 << 20}, False, "warn", "/dev/shm has 32 MiB, 64 MiB are needed"),
        ({"open_files": 1024}, True, "warn", "a process may open 1024 files, NCCL may need 8192"),
        ({"governor": "powersave"}, True, "warn", "the processors' governor is powersave"),
        ({"usable_cpus": 8}, True, "warn", "8 of 96 processors may be used"),
        ({"address": ""}, True, "warn", "its own name has no address"),
        (
            {"address": "127.0.1.1"},
            True,
            "warn",
            "its own name has the address 127.0.1.1, by which peers do not find it",
        ),
    ],
)
def test_one_thing_is_wrong(wrong: dict[str, Any], gpus: bool, severity: str, what: str) -> None:
    (finding,) = host.judge(WELL | wrong, gpus=gpus, nodes=2)
    assert (finding.severity, finding.what) == (severity, what)
    assert finding.todo


def test_what_does_not_hinder_is_left_alone() -> None:
    assert host.judge(WELL, gpus=True, nodes=64) == []
    assert host.judge(WELL | {"shared_memory_bytes": 64 << 20, "governor": ""}, gpus=False, nodes=64) == []
    assert host.judge(WELL | {"address": "127.0.0.1"}, gpus=True, nodes=1) == []
    assert host.judge(WELL | {"open_files": -1}, gpus=True, nodes=2) == []  # no limit


def test_names_are_compared_by_machine() -> None:
    nodes = {"a": ("a", "boot1"), "b": ("b", "boot2")}
    assert host.twins(nodes) == []
    (same,) = host.twins({"a (node 0)": ("a", "boot1"), "a (node 1)": ("a", "boot1")})
    (clash,) = host.twins({"a (node 0)": ("a", "boot1"), "a (node 1)": ("a", "boot2")})
    assert (same.severity, clash.severity, clash.node) == ("warn", "refuse", "a (node 1)")


def test_counts_of_the_memory_controllers(tmp_path: Path) -> None:
    for name, corrected, uncorrected in (("mc0", 0, 0), ("mc1", 7, 0), ("mc2", 0, 1)):
        folder = tmp_path / "sys/devices/system/edac/mc" / name
        folder.mkdir(parents=True)
        (folder / "ce_count").write_text(f"{corrected}\n")
        (folder / "ue_count").write_text(f"{uncorrected}\n")
    told = [(one.device, one.severity, one.action) for one in kernel_log.judge_edac(Machine(tmp_path))]
    assert told == [("mc1", "warn", "monitor"), ("mc2", "refuse", "isolate")]
    assert kernel_log.judge_edac(Machine(tmp_path / "nowhere")) == []
