"""The kernel's log: every Xid NVIDIA knows has an action, recorded lines are read, and what is past is past."""

from pathlib import Path

import pytest

from tests.training.checks.played import play, recorded
from training.checks import kernel_log, xid
from training.checks.finding import Finding
from training.checks.machine import Machine


def found(log: str, product: str = "") -> list[Finding]:
    gpus = {"0000:9b:00": "GPU 4", "0000:10:1c": "GPU 0"}
    return xid.findings(xid.events(log.splitlines(), product), gpus)


def line(code: int, text: str = "pid=1", address: str = "0000:9b:00") -> str:
    return f"[  12.5] NVRM: Xid (PCI:{address}): {code}, {text}\n"


def test_every_code_of_the_catalogue_is_in_one_bucket() -> None:
    codes = [code for bucket in xid.BUCKETS.values() for code in bucket]
    assert sorted(codes) == list(range(1, 173))


@pytest.mark.parametrize(
    ("code", "action"),
    [(54, "isolate"), (79, "reboot"), (151, "reboot"), (168, "reboot"), (48, "reset"), (64, "reset"), (74, "reset"),
     (95, "reset"), (119, "reset"), (158, "reset"), (13, "monitor"), (31, "monitor"), (43, "monitor"), (94, "monitor"),
     (63, "monitor"), (125, "monitor"), (999, "monitor")],
)  # fmt: skip
def test_an_xid_asks_for_what_nvidia_says(code: int, action: str) -> None:
    (finding,) = found(line(code))
    assert (finding.action, finding.severity) == (action, "warn" if action == "monitor" else "refuse")
    assert finding.device == "GPU 4"
    assert finding.todo
    assert ("not in NVIDIA's catalogue" in finding.what) == (code == 999)


def test_a100_needs_a_reboot_where_others_need_a_reset() -> None:
    assert [finding.action for finding in found(line(95), "NVIDIA A100-SXM4-80GB")] == ["reboot"]
    assert [finding.action for finding in found(line(95), "NVIDIA H100 80GB HBM3")] == ["reset"]


def test_a_timeout_of_the_gsp_is_told_once_with_its_gpu_and_count() -> None:
    (finding,) = found(recorded("dmesg-xid-119.log"))
    assert (finding.severity, finding.action, finding.device) == ("refuse", "reset", "GPU 4")
    assert finding.what.startswith("Xid 119: GSP RPC timeout: ")
    assert finding.what.endswith(", 4 times")


def test_a_lost_gpu_and_its_switches() -> None:
    gpu, *switches = found(recorded("dmesg-sxid.log"))
    assert (gpu.action, gpu.device) == ("reboot", "0000:91:00")
    assert "fallen off the bus" in gpu.what
    assert [switch.device for switch in switches] == [f"NVSwitch 0000:0{number}:00.0" for number in (6, 5, 7)]
    assert {switch.action for switch in switches} == {"reset"}


def test_lines_of_several_machines() -> None:
    told = {
        (int(finding.what.split()[1].rstrip(":")), finding.device): finding
        for finding in found(recorded("dmesg-xids.log"))
    }
    assert told[31, "000d:00:00"].severity == "warn"
    assert told[45, "0000:dc:00"].action == "monitor"
    # of Blackwell's NVLink errors the line says whether they are fatal
    assert told[145, "0008:01:00"].action == "monitor"
    assert told[149, "0008:01:00"].action == "reset"
    assert told[154, "0008:01:00"].action == "reset"
    assert told[63, "GPU 0"].action == "monitor"


def test_what_was_recovered_is_not_told() -> None:
    recovered = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert found(line(119) + line(154, recovered)) == []
    assert [finding.device for finding in found(line(119, address="0000:91:00") + line(154, recovered))] == [
        "0000:91:00"
    ]
    assert found(line(79) + "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.126.09\n") == []
    assert len(found("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.126.09\n" + line(79))) == 1


@pytest.mark.parametrize(
    ("words", "action"),
    [("0x2 (Node Reboot Required)", "reboot"), ("0x4 (Drain and Reset)", "reset"), ("0x3 (Drain P2P)", "reset"),
     ("0x9 (Dance)", "monitor")],
)  # fmt: skip
def test_xid_154_is_taken_by_its_words(words: str, action: str) -> None:
    (finding,) = found(line(154, f"GPU recovery action changed from 0x0 (None) to {words}"))
    assert finding.action == action


def test_processes_killed_for_memory() -> None:
    (finding,) = kernel_log.judge(recorded("dmesg-oom.log").splitlines())
    assert (finding.severity, finding.action) == ("warn", "monitor")
    assert finding.what.startswith("a process was killed for memory, 7 times")


@pytest.mark.parametrize(
    ("said", "severity", "action"),
    [("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "refuse", "isolate"),
     ("mce: [Hardware Error]: Machine check events logged", "warn", "monitor"),
     ("EXT4-fs error (device nvme1n1p1): ext4_find_entry:1455: inode #2", "refuse", "isolate"),
     ("nvme1: I/O 23 QID 4 timeout, aborting", "warn", "monitor"),
     ("INFO: task python3:4242 blocked for more than 120 seconds.", "warn", "monitor")],
)  # fmt: skip
def test_other_trouble(said: str, severity: str, action: str) -> None:
    (finding,) = kernel_log.judge(["[ 1.0] all is well", f"[ 2.0] {said}"])
    assert (finding.severity, finding.action) == (severity, action)
    assert said[-40:] in finding.what


def test_the_log_is_asked_for_in_several_ways(tmp_path: Path) -> None:
    machine = Machine(path=f"{tmp_path}:/usr/bin:/bin")
    play(tmp_path, "dmesg", {"": "dmesg: read kernel buffer failed: Operation not permitted\n"}, code=1)
    play(tmp_path, "journalctl", {"-k -b": "kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n"})
    assert [event.code for event in xid.events(kernel_log.lines(machine) or ())] == [79]
    play(tmp_path, "journalctl", {"": "No journal files were opened due to insufficient permissions.\n"}, code=1)
    assert kernel_log.lines(machine) is None


def test_a_log_that_cannot_be_read_is_not_taken_for_health() -> None:
    (finding,) = kernel_log.unreadable(None)
    assert "cannot be read" in finding.what
    assert kernel_log.unreadable([]) == []
