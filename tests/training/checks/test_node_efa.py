"""EFA: what libfabric lists against what the instance should have, and which card it is that is not there."""

from pathlib import Path

import pytest

from tests.training.checks.played import hang, play, recorded
from training.checks import efa, topology
from training.checks.efa import Adapters
from training.checks.machine import Machine

P4D = {
    "rdmap16s27": "0000:10:1b.0",
    "rdmap32s27": "0000:20:1b.0",
    "rdmap144s27": "0000:90:1b.0",
    "rdmap160s27": "0000:a0:1b.0",
}
GPUS = {"GPU 0": "0000:10:1c.0", "GPU 4": "0000:90:1c.0"}
EFA = "-p efa -t FI_EP_RDM"
DIRECT = f"{EFA} -c FI_HMEM"


class Box:
    """A p4d's /sys, /dev and libfabric, from which things are taken away."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "root", folder / "bin"
        self.machine = Machine(self.root, f"{self.bin}:/usr/bin:/bin")
        for address in P4D.values():
            self.on_bus(address, "0x1d0f", "0xefa1", "0x020000")
        for address in GPUS.values():
            self.on_bus(address, "0x10de", "0x20b0", "0x030200")
        for name, address in P4D.items():
            self.driven(name, address)
        self.listed(recorded("fi_info-p4d.txt"))
        verbs = self.root / "dev" / "infiniband"
        verbs.mkdir(parents=True)
        for number in range(len(P4D)):
            (verbs / f"uverbs{number}").touch()

    def on_bus(self, address: str, vendor: str, device: str, kind: str) -> None:
        bridge = f"pci0000:{address[5:7]}/0000:{address[5:7]}:00.0"
        place = self.root / "sys/devices" / bridge / address
        self.write(
            place, vendor=vendor, device=device, numa_node="0" if address < "0000:80" else "1", **{"class": kind}
        )
        link = self.root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place)

    def driven(self, name: str, address: str) -> None:
        card = self.root / "sys/class/infiniband" / name
        counters = dict(line.split(":") for line in recorded("efa-counters-p4d.txt").split())
        self.write(card / "ports/1/hw_counters", **counters)
        self.write(card / "ports/1", state="4: ACTIVE")
        self.write(card, fw_ver="0.0.0.0")
        (card / "device").symlink_to(self.root / "sys/bus/pci/devices" / address)

    def listed(self, told: str) -> None:
        play(self.bin, "fi_info", {DIRECT: told, EFA: told})

    def write(self, folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")

    def without(self, name: str) -> str:
        """What libfabric lists without a card."""
        entries = recorded("fi_info-p4d.txt").split("provider:")
        return "provider:".join(entry for entry in entries if f"{name}-rdm" not in entry)

    def judged(self, expected: int = 4, locked: int | None = None) -> list[tuple[str, str, str, str]]:
        found = efa.judge(efa.look(self.machine), expected, gpus=True, locked=locked)
        return [(one.severity, one.action, one.device, one.what) for one in found]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_the_names_libfabric_lists() -> None:
    assert efa.read_domains(recorded("fi_info-p4d.txt")) == list(P4D)
    # efa and efa-direct are two fabrics of one card, and datagrams are not what NCCL uses
    assert efa.read_domains(recorded("fi_info-direct.txt")) == ["rdmap47s0"]
    assert efa.read_domains("fi_getinfo: -61\n") == []


def test_a_whole_p4d_has_no_findings(box: Box) -> None:
    assert box.judged() == []
    seen = efa.look(box.machine)
    assert (len(seen.bus), seen.names, seen.direct, seen.user_devices) == (4, list(P4D), list(P4D), 4)
    assert [(card.name, card.address) for card in seen.cards] == sorted(P4D.items())
    assert seen.cards[0].counters["rx_pkts"] == 1776383627


def test_a_card_libfabric_does_not_list_is_refused_by_its_name(box: Box) -> None:
    box.listed(box.without("rdmap144s27"))
    ((severity, action, device, what),) = box.judged()
    assert (severity, action, device) == ("refuse", "isolate", "rdmap144s27")
    assert what == "libfabric lists 3 of 4 EFA adapters; the kernel has, but libfabric has not: rdmap144s27"


def test_a_card_without_a_driver_is_refused_by_its_address(box: Box) -> None:
    box.listed(box.without("rdmap32s27"))
    (box.root / "sys/class/infiniband/rdmap32s27").rename(box.root / "gone")
    ((_, action, device, what),) = box.judged()
    assert (action, device) == ("isolate", "0000:20:1b.0")
    assert "on the bus without a driver: 0000:20:1b.0" in what


def test_a_card_that_is_not_there_at_all(box: Box) -> None:
    box.listed(box.without("rdmap32s27"))
    (box.root / "sys/class/infiniband/rdmap32s27").rename(box.root / "gone")
    (box.root / "sys/bus/pci/devices/0000:20:1b.0").unlink()
    ((_, action, device, what),) = box.judged()
    assert (action, device) == ("isolate", "EFA")
    assert "there are rdmap16s27, rdmap144s27, rdmap160s27" in what
    # its peers tell which it is
    names = {f"node{number}": list(P4D) for number in range(3)} | {"node3": efa.look(box.machine).names}
    (lost,) = efa.lost(names)
    assert (lost.node, lost.device, lost.severity, lost.action) == ("node3", "rdmap32s27", "refuse", "isolate")
    assert efa.lost({"a": ["rdmap16s27"], "b": ["rdmap32s27"]}) == []


def test_a_port_that_is_down(box: Box) -> None:
    box.write(box.root / "sys/class/infiniband/rdmap16s27/ports/1", state="1: DOWN")
    assert box.judged() == [("refuse", "isolate", "rdmap16s27", "its port is DOWN")]


def test_counters_that_should_be_zero_are_told(box: Box) -> None:
    box.write(
        box.root / "sys/class/infiniband/rdmap16s27/ports/1/hw_counters", rx_drops="12", retrans_timeout_events="3"
    )
    assert box.judged() == [
        ("warn", "monitor", "rdmap16s27", "since it was started: rx_drops 12, retrans_timeout_events 3")
    ]


def test_a_container_without_its_devices_or_limits(box: Box) -> None:
    (box.root / "dev/infiniband/uverbs3").unlink()
    devices, limits = box.judged(locked=8 << 20)
    assert (devices[0], devices[3]) == ("refuse", "/dev/infiniband has 3 of 4 uverbs devices")
    assert limits[3] == "a process may lock 8 MiB of memory, EFA needs unlimited"
    (box.root / "dev/infiniband/uverbs3").touch()
    assert box.judged(locked=64 << 30) == []


def test_memory_of_gpus_that_is_not_reached_is_told(box: Box) -> None:
    play(box.bin, "fi_info", {DIRECT: "fi_getinfo: -61\n", EFA: recorded("fi_info-p4d.txt")})
    ((severity, _, _, what),) = box.judged()
    assert (severity, "FI_HMEM" in what) == ("warn", True)


def test_libfabric_that_is_absent_or_hangs(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    (box.bin / "fi_info").unlink()
    assert [one[0] for one in box.judged()] == ["refuse"]
    assert "libfabric is not installed" in box.judged()[0][3]
    assert box.judged(expected=0) == []
    hung = Adapters([], [], None, [], hung="fi_info did not answer within 20 s")
    assert [one.action for one in efa.judge(hung, 4)] == ["reboot"]


def test_a_tool_that_hangs_is_told(box: Box) -> None:
    hang(box.bin, "fi_info")
    with pytest.raises(Exception, match=r"fi_info -v did not answer within 0\.2 s"):
        box.machine.run("fi_info", "-v", patience_s=0.2)


def test_where_cards_and_gpus_sit(box: Box) -> None:
    assert topology.gpu_addresses(box.machine) == ["00000000:10:1C.0", "00000000:90:1C.0"]
    seen = topology.look(box.machine, list(GPUS.items()), list(P4D.items()))
    assert seen["numa"] == {
        "GPU 0": 0, "GPU 4": 1, "rdmap16s27": 0, "rdmap32s27": 0, "rdmap144s27": 1, "rdmap160s27": 1,
    }  # fmt: skip
    assert seen["nearest"] == {"GPU 0": ["rdmap16s27"], "GPU 4": ["rdmap144s27"]}
    assert "GPU 0~rdmap16s27" in topology.alike(seen)
