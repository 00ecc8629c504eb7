"""GPUs by what nvidia-smi and DCGM said of real ones, and with one thing wrong at a time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.checks.played import hang, play, recorded
from training.checks import accelerators, dcgm, gpus
from training.checks.finding import Finding
from training.checks.gpus import Gpu, Holder, Unreadable
from training.checks.machine import Machine

QUERY, STATUS, ERRORS = "-q -x", "nvlink --status", "nvlink -e"


def gpu(**wrong: object) -> Gpu:
    """An A100 of a p4de, as it was recorded but for MIG and persistence mode."""
    (told,) = gpus.read(recorded("nvidia-smi-a100-mig-535.xml"))
    well = {"mig": "Disabled", "persistence": "Enabled", "nvlinks": (25.0,) * 12}
    return replace(told, **(well | wrong))  # type: ignore[arg-type]  # fields by name


def judged(**wrong: object) -> list[tuple[str, str]]:
    findings = gpus.judge(gpu(**wrong), eight()[1:])
    assert all(finding.device == "GPU 0" and finding.todo for finding in findings)
    return [(finding.severity, finding.action) for finding in findings]


def test_an_a100_is_read() -> None:
    (told,) = gpus.read(recorded("nvidia-smi-a100-mig-535.xml"))
    assert (told.product, told.address, told.memory_mib) == ("NVIDIA A100-SXM4-80GB", "00000000:01:00.0", 81920)
    assert (told.link_width, told.link_generation, told.state) == ((16, 16), (4, 4), "P0")
    assert (told.volatile_uncorrected, told.aggregate_uncorrected, told.rows_pending) == (0, 0, "")
    assert (told.power_limit_w, told.power_default_w, told.temperature_c) == (500.0, 500.0, 27)
    assert (told.clock_mhz, told.max_clock_mhz, told.reset_required) == ((1275, 1275), 1410, "")
    assert {finding.what.partition(":")[0] for finding in gpus.judge(told)} == {
        "MIG is on", "persistence mode is off",
    }  # fmt: skip


def test_an_a10g_of_ec2_has_half_the_lanes_and_is_well() -> None:
    (told,) = gpus.read(recorded("nvidia-smi-a10g-515.xml"))
    assert (told.product, told.link_width, told.link_generation, told.rows_failed) == (
        "NVIDIA A10G",
        (8, 16),
        (1, 4),
        "No",
    )
    assert [finding.severity for finding in gpus.judge(told)] == ["warn"]  # persistence mode
    # beside one that has all its lanes, it has lost half
    (lost,) = [one for one in gpus.judge(told, [replace(told, link_width=(16, 16))]) if one.severity == "refuse"]
    assert lost.what == "its PCIe link has 8 lanes, not 16"


def test_the_newest_driver_is_read_and_processes_are_seen() -> None:
    (told,) = gpus.read(recorded("nvidia-smi-ada-595.xml"))
    assert (told.recovery, told.rows_pending, told.power_limit_w, told.volatile_uncorrected) == (
        "None",
        "No",
        70.0,
        None,
    )
    # what draws is no trouble, what computes is
    assert [(holder.pid, holder.mib) for holder in told.holders] == [(4937, 160), (34626, 183)]
    assert {finding.severity for finding in gpus.judge(told)} == {"warn"}


def test_a_healthy_gpu_has_no_findings() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("wrong", "severity", "action"),
    [
        ({"rows_failed": "Yes"}, "refuse", "isolate"),
        ({"rows_pending": "Yes"}, "refuse", "reset"),
        ({"sram_threshold_exceeded": "Yes"}, "refuse", "isolate"),
        ({"volatile_uncorrected": 2}, "refuse", "reset"),
        ({"aggregate_uncorrected": 2}, "warn", "monitor"),
        ({"pages_pending": "Yes"}, "refuse", "reboot"),
        ({"ecc": "Disabled"}, "warn", "monitor"),
        ({"recovery": "Reset"}, "refuse", "reset"),
        ({"recovery": "Reboot"}, "refuse", "reboot"),
        ({"recovery": "Drain and Reset"}, "refuse", "reset"),
        ({"reset_required": "Yes"}, "refuse", "reset"),
        ({"throttled": ("hw_thermal_slowdown",)}, "refuse", "isolate"),
        ({"throttled": ("sw_thermal_slowdown",)}, "warn", "monitor"),
        ({"link_width": (8, 16)}, "refuse", "reboot"),
        ({"link_generation": (3, 4)}, "warn", "monitor"),
        ({"power_limit_w": 300.0}, "warn", ""),
        ({"clock_mhz": (1005, 1275)}, "warn", ""),
        ({"compute_mode": "Prohibited"}, "refuse", ""),
        ({"fabric": ("In Progress", "")}, "refuse", "reboot"),
        ({"fabric": ("Completed", "Error")}, "refuse", "reboot"),
        ({"nvlinks": (25.0,) * 11 + (0.0,)}, "refuse", "reset"),
        ({"nvlinks": ()}, "refuse", "reset"),
        ({"nvlinks": (25.0,) * 11 + (12.0,)}, "warn", "monitor"),
        ({"nvlink_errors": {"Replay": 3}}, "warn", "monitor"),
        ({"holders": (Holder(7, "python", 160),)}, "warn", ""),
        ({"holders": (Holder(7, "python", 40000),)}, "refuse", ""),
    ],
    ids=str,
)
def test_one_thing_is_wrong(wrong: dict[str, object], severity: str, action: str) -> None:
    assert judged(**wrong) == [(severity, action)]


@pytest.mark.parametrize("word", ["reset_required", "drain_and_reset_recommended"])
def test_a_reset_that_the_driver_wants(word: str) -> None:
    xml = recorded("nvidia-smi-a100-mig-535.xml")
    (told,) = gpus.read(xml.replace(f"<{word}>No", f"<{word}>Yes"))
    assert "the driver asks for a reset" in [one.what for one in gpus.judge(told)]


def test_a_sleeping_gpu_has_a_slow_link_and_is_well() -> None:
    assert judged(state="P8", link_generation=(1, 4)) == []


def test_links_are_counted_by_the_product() -> None:
    links = gpus.read_nvlinks(recorded("nvlink-status-a100.txt"))
    assert {index: len(speeds) for index, speeds in links.items()} == dict.fromkeys(range(8), 12)
    lost = gpus.read_nvlinks(recorded("nvlink-status-v100-inactive.txt"))[3]
    assert lost == (25.781, 25.781, 25.781, 0.0, 25.781, 0.0)
    (finding,) = gpus.judge(gpu(product="Tesla V100-SXM2-32GB", nvlinks=lost), eight()[1:])
    assert finding.what == "4 of 6 NVLinks are up; down: link 3, 5"
    for product, number in (("NVIDIA H100 80GB HBM3", 18), ("NVIDIA B200", 18), ("NVIDIA H200", 18)):
        assert gpus.judge(gpu(product=product, nvlinks=(26.562,) * number)) == []
        assert gpus.judge(gpu(product=product, nvlinks=(26.562,) * 12), eight()[1:])[0].action == "reset"
        assert gpus.judge(gpu(product=product, nvlinks=(0.0,) * 18)) == []  # alone, as in a p5.4xlarge
    for product in ("NVIDIA H100 PCIe", "NVIDIA A100 80GB PCIe", "NVIDIA H200 NVL", "NVIDIA L40S", "NVIDIA A10G"):
        assert gpus.judge(gpu(product=product, nvlinks=()), eight()[1:]) == []


def test_errors_of_links() -> None:
    told = recorded("nvlink-errors-gb300.txt")
    assert gpus.read_nvlink_errors(told) == {0: {}}
    assert gpus.read_nvlink_errors(told.replace("CRC Errors: 0", "CRC Errors: 7")) == {0: {"CRC": 7}}


@pytest.mark.parametrize(
    ("product", "expected", "same"),
    [("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB", True), ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB", False),
     ("NVIDIA H100 80GB HBM3", "NVIDIA H100", True), ("NVIDIA H200", "NVIDIA H100", False),
     ("Tesla T4", "NVIDIA T4", True),
     ("Tesla V100-SXM2-32GB", "NVIDIA V100", True), ("NVIDIA A10G", "NVIDIA A10G", True),
     ("NVIDIA L40S", "NVIDIA L4", False),
     ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000", True)],
)  # fmt: skip
def test_names_of_the_catalogue_are_known(product: str, expected: str, same: bool) -> None:
    assert gpus.is_a(product, expected) is same


def eight(number: int = 8) -> list[Gpu]:
    return [replace(gpu(), index=index, address=f"00000000:{16 * index:02X}:1C.0") for index in range(number)]


def test_a_missing_gpu_is_told_by_its_place_on_the_bus() -> None:
    on_bus = [one.address for one in eight()]
    (lost,) = gpus.count(eight(7), 8, "NVIDIA A100 80GB", on_bus)
    assert (lost.severity, lost.action, lost.device) == ("refuse", "isolate", "GPU at 00000000:70:1C.0")
    (gone,) = gpus.count(eight(7), 8, "NVIDIA A100 80GB", on_bus[:7])
    assert gone.what == "7 of 8 GPUs answer; the others are not on the bus"
    assert gpus.count(eight(), 8, "NVIDIA A100 80GB", on_bus) == []
    assert len([one for one in gpus.count(eight(), 8, "NVIDIA H100", on_bus) if "not a NVIDIA H100" in one.what]) == 8


def test_no_xml_is_no_answer() -> None:
    with pytest.raises(Unreadable, match="no XML"):
        gpus.read("<nvidia_smi_log><gpu>")


def machine(folder: Path) -> Machine:
    (folder / "root").mkdir(parents=True, exist_ok=True)
    return Machine(folder / "root", f"{folder / 'bin'}:/usr/bin:/bin")


def examined(folder: Path, expected: int = 1, log: str = "") -> list[Finding]:
    return accelerators.examine(machine(folder), "NVIDIA A100 80GB", expected, log.splitlines()).findings


def test_the_tools_are_asked_and_the_log_names_the_gpu(tmp_path: Path) -> None:
    one = recorded("nvidia-smi-a100-mig-535.xml").replace(">Enabled</current_mig>", ">Disabled</current_mig>")
    begin, end = one.index("    <gpu id"), one.index("</nvidia_smi_log>")
    four = "".join(one[begin:end].replace("00000000:01:00.0", f"00000000:{n}1:00.0") for n in range(4))
    status = (
        recorded("nvlink-status-a100.txt").partition("GPU 4:")[0].replace("Link 11: 25 GB/s", "Link 11: <inactive>", 1)
    )
    answers = {QUERY: one[:begin] + four + one[end:], STATUS: status, ERRORS: ""}
    play(tmp_path / "bin", "nvidia-smi", answers)
    told = examined(tmp_path, 4, "NVRM: Xid (PCI:0000:21:00): 79, GPU has fallen off the bus.")
    links, fallen = [one for one in told if one.severity == "refuse"]
    assert (links.device, links.what, links.action) == ("GPU 0", "11 of 12 NVLinks are up; down: link 11", "reset")
    assert (fallen.device, fallen.action) == ("GPU 2", "reboot")


def test_switches_without_their_manager(tmp_path: Path) -> None:
    play(tmp_path / "bin", "nvidia-smi", {QUERY: recorded("nvidia-smi-a10g-515.xml")})
    play(tmp_path / "bin", "systemctl", {"is-active nvidia-fabricmanager": "inactive\n"}, code=3)
    assert not any("fabricmanager" in one.what for one in examined(tmp_path))
    for number in range(6):
        switch = tmp_path / f"root/sys/bus/pci/devices/0000:8{number}:00.0"
        switch.mkdir(parents=True)
        (switch / "vendor").write_text("0x10de\n")
        (switch / "class").write_text("0x068000\n")
    (unset,) = [one for one in examined(tmp_path) if "fabricmanager" in one.what]
    assert (unset.severity, unset.what) == ("refuse", "nvidia-fabricmanager is inactive, and there are 6 NVSwitches")


def test_a_driver_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    play(tmp_path / "bin", "nvidia-smi", {"": said}, code=9)
    (failed,) = examined(tmp_path)
    assert (failed.action, failed.what) == ("reboot", f"nvidia-smi fails with code 9: {said.strip()}")
    hang(tmp_path / "bin", "nvidia-smi")
    monkeypatch.setattr(accelerators, "SMI_PATIENCE_S", 0.2)
    (hung,) = examined(tmp_path)
    assert (hung.action, hung.what) == ("reboot", "nvidia-smi -q -x did not answer within 0.2 s")


def test_no_driver_is_refused_where_gpus_should_be(tmp_path: Path) -> None:
    (absent,) = examined(tmp_path, expected=8)
    assert absent.what == "nvidia-smi is not installed, and 8 NVIDIA A100 80GB are there to be used"
    assert examined(tmp_path, expected=0) == []


def test_neuron_devices_are_counted(tmp_path: Path) -> None:
    dev = tmp_path / "root" / "dev"
    dev.mkdir(parents=True)
    for number in range(15):
        (dev / f"neuron{number}").touch()
    found = accelerators.examine(machine(tmp_path), "AWS Trainium", 16, [])
    assert [one.what for one in found.findings] == ["15 of 16 AWS Trainium devices are there"]
    assert found.alike() == {"accelerators": "15 Neuron devices"}


def test_dcgm_3_passes_with_words_before_its_json() -> None:
    assert dcgm.read(recorded("dcgm-3.txt")) == []
    assert dcgm.read(recorded("dcgm-3-skip.json")) == []


def test_dcgm_4_tells_which_gpu_and_how_bad() -> None:
    *settings, memory = dcgm.read(recorded("dcgm-4.json"))
    assert [(one.severity, one.action, one.device) for one in settings] == [("warn", "", f"GPU {n}") for n in range(8)]
    assert (memory.severity, memory.action, memory.device) == ("refuse", "isolate", "GPU 3")
    assert memory.what == "DCGM's test memory failed: Uncorrectable ECC memory error detected"


@pytest.mark.parametrize(
    ("severity", "told"),
    [(1, ("warn", "monitor")), (2, ("refuse", "isolate")), (3, ("refuse", "isolate")), (4, ("refuse", "isolate")),
     (5, ("warn", "")), (6, ("refuse", "reset"))],
)  # fmt: skip
def test_dcgm_knows_how_bad_it_is(severity: int, told: tuple[str, str]) -> None:
    answer = recorded("dcgm-4.json").replace('"error_severity": 2', f'"error_severity": {severity}')
    (memory,) = [one for one in dcgm.read(answer) if "memory" in one.what]
    assert (memory.severity, memory.action) == told


def test_dcgm_says_nothing_of_what_it_did_not_test() -> None:
    tests = [{"name": "memory", "results": [{"entity_id": 0, "status": "Skip"}], "test_summary": {"status": "Skip"}}]
    answer = {"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}}
    (skipped,) = dcgm.read(json.dumps(answer))
    assert skipped.what == "DCGM skipped all of its tests"
    (failed,) = dcgm.read('{"DCGM Diagnostic": {"runtime_error": "no host engine"}}')
    assert (failed.severity, failed.what) == ("warn", "DCGM's diagnosis could not run: no host engine")
    with pytest.raises(Unreadable, match="something else than a diagnosis"):
        dcgm.read("Error: unable to establish a connection to the specified host: localhost")


def test_dcgm_is_asked_for_its_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path / "bin", "dcgmi", {"diag -r 2 -j": recorded("dcgm-4.json")}, code=226)
    assert len(accelerators.diagnose(machine(tmp_path), 2)) == 9
    (unasked,) = accelerators.diagnose(machine(tmp_path), 4)
    assert unasked.severity == "warn"
    hang(tmp_path / "bin", "dcgmi")
    monkeypatch.setitem(dcgm.PATIENCE_S, 2, 0.2)
    assert [one.action for one in accelerators.diagnose(machine(tmp_path), 2)] == ["isolate"]
    (absent,) = accelerators.diagnose(Machine(path="/nowhere"), 2)
    assert absent.what.startswith("DCGM is not installed")
