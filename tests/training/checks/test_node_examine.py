"""Nodes examined for real: four hosts of their own of which three are not as they should be, and this very machine."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from emulator import guests
from emulator.guests import NamespaceGuest, Pool
from tests.clusters.yard import ROOT
from tests.sky import client
from tests.training.checks.played import play, ranks, recorded
from tests.training.nursery import result, write_job
from training.checks.clock import Skew
from training.checks.finding import Finding
from training.checks.machine import Machine
from training.checks.node import judge
from training.checks.report import Examination, Expected, merged
from training.job import NodeJob
from training.process import JobError

pytestmark = [pytest.mark.torch]
needs_namespaces = pytest.mark.skipif(
    not guests.possible() and not os.environ.get("CI"), reason="needs root, iproute2 and util-linux"
)
PROGRAM = "training.checks.node"
LISTED = recorded("fi_info-p4d.txt")
LOG = "[    0.0] Linux version 6.8.0 boots\n"


def tools(folder: Path, listed: str = LISTED, libfabric: str = "2.7.0amzn2.0", log: str = LOG) -> Path:
    """The tools of one node of a p4d without GPUs."""
    play(folder, "fi_info", {"--version": f"libfabric: {libfabric}\n", "-p efa": listed})
    play(folder, "dmesg", {"": log})
    return folder


class Hosts:
    """Four hosts with one image, told apart by what is then done to them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pool = folder, Pool([folder])
        self.hosts: list[NamespaceGuest] = []
        for number in range(4):
            host = self.pool.boot(f"node{number}")
            assert isinstance(host, NamespaceGuest)
            self.hosts.append(host)
            self.image(number, "9.9.9")
            tools(folder / f"bin{number}")

    def image(self, number: int, docker: str, **software: str) -> None:
        """Write what the image of a host says of itself."""
        facts = {
            "flavour": "local",
            "roles": ["base"],
            "software": {"kernel": os.uname().release, "docker": docker} | software,
        }
        self.hosts[number].write("/etc/castra/image.json", json.dumps(facts))

    def tell(self, number: int, command: str) -> None:
        """Run a command as root of a host."""
        log = (self.folder / f"told{number}").open("wb")
        with log:
            assert self.hosts[number].start(["bash", "-c", command], {"PATH": os.environ["PATH"]}, log).wait(20) == 0

    def examine(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Run the program on all of them, as torchrun would, and return result.json."""
        job = write_job(self.folder / "job", spec)
        shared = {
            "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CASTRA_SCRATCH": "/scratch",
        }  # fmt: skip
        started = []
        for number, host in enumerate(self.hosts):
            self.tell(number, "mkdir -p /scratch")
            path = f"{self.folder / f'bin{number}'}:{os.environ['PATH']}"
            env = shared | {"RANK": str(number), "GROUP_RANK": str(number), "PATH": path}
            with (self.folder / f"log{number}").open("wb") as log:
                started.append(host.start(["python", "-m", PROGRAM, str(job)], env, log, cwd=str(self.folder)))
        codes = [process.wait(120) for process in started]
        assert codes == [0, 0, 0, 0], [(self.folder / f"log{number}").read_text() for number in range(4)]
        return result(self.folder / "job" / "out")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.pool.close()


def refusals(told: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Who is refused for which device, and what is to be done; but for this machine's limit on locked memory."""
    return {
        (one["node"], one["device"], one["action"])
        for one in told["findings"]
        if one["severity"] == "refuse" and "may lock" not in one["what"]
    }


@pytest.mark.root
@needs_namespaces
def test_of_four_hosts_three_are_refused_for_what_is_wrong_with_them(hosts: Hosts, tmp_path: Path) -> None:
    hosts.image(1, "9.9.9", nvidia_driver="595.112.07", kernel="5.10.0")
    entries = LISTED.split("provider:")
    tools(tmp_path / "bin2", "provider:".join(entry for entry in entries if "rdmap144s27" not in entry), "1.30.0")
    hosts.tell(
        3, "mkdir -p /scratch && mount -t tmpfs -o size=2m tmpfs /scratch && head -c 2M /dev/zero > /scratch/full"
    )
    told = hosts.examine({"checks": {"level": "quick"}, "expected": {"efa_interfaces": 4}})
    assert [node["host"] for node in told["nodes"]] == ["node0", "node1", "node2", "node3"]
    assert refusals(told) == {
        ("node1", "kernel", ""), ("node1", "nvidia_driver", ""), ("node2", "EFA", "isolate"),
        ("node2", "rdmap144s27", "isolate"), ("node2", "libfabric", ""), ("node3", "/scratch", ""),
    }  # fmt: skip
    said = {one["device"]: one["what"] for one in told["findings"]}
    assert said["nvidia_driver"] == "nvidia_driver is absent, the image was proven with 595.112.07"
    assert said["libfabric"] == "libfabric is 1.30.0 here, 2.7.0amzn2.0 on most nodes"
    assert said["rdmap144s27"] == "it lacks rdmap144s27, which most nodes have"
    assert said["/scratch"] == "it is full"
    assert [(one["what"], one["value"], one["nodes"], one["usual"]) for one in told["differences"]] == [
        ("libfabric", "1.30.0", ["node2"], "2.7.0amzn2.0")
    ]
    # one machine under all of them: their clocks cannot differ
    for node in told["nodes"][1:]:
        assert abs(node["clock"]["seconds"]) <= node["clock"]["uncertainty_s"] + 0.01
    assert all(0 < node["seconds"] < 60 for node in told["nodes"])
    assert {"software", "gpus", "efa", "disks", "clock", "findings"} <= set(told["nodes"][0])
    assert told["nodes"][0]["efa"]["usable"] == ["rdmap16s27", "rdmap32s27", "rdmap144s27", "rdmap160s27"]


def test_two_processes_of_one_machine_are_seen_to_be_one(tmp_path: Path) -> None:
    log, _ = ranks(2, "-m", PROGRAM, str(write_job(tmp_path, {})))
    told = result(tmp_path / "out")
    first, second = told["nodes"]
    assert (first["node"], second["node"], first["host"]) == (0, 1, second["host"])
    assert told["differences"] == []
    (twin,) = [one for one in told["findings"] if "same machine" in one["what"]]
    assert (twin["severity"], twin["node"]) == ("warn", f"{first['host']} (node 1)")
    assert twin in second["findings"]
    assert '"event": "finding"' in log


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"expected": {"efa_interfaces": "four"}}, "expected.efa_interfaces is 'four', it must be int"),
        ({"expected": ["p4d"]}, "what is expected of nodes must be a mapping, and is ['p4d']"),
        ({"expected": {"dcgm_level": 1}}, "expected.dcgm_level is 1, it must be 2, 3 or 4"),
        ({"checks": {"level": "deep"}}, "checks.level is 'deep', it must be one of network, quick, full"),
    ],
)
def test_what_is_not_understood_is_refused(spec: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=re.escape(sentence)):
        Examination.of(NodeJob(spec, tmp_path), 2)


def test_what_others_want_of_the_expectations_is_left_to_them() -> None:
    assert Expected.read({"accelerators": 8, "line_gb_per_s": 50.0, "lustre": None}) == Expected(accelerators=8)
    with pytest.raises(JobError):
        Expected.read(None)


def test_a_full_examination_measures_and_diagnoses(site: Site, tmp_path: Path) -> None:
    client("s3", site.endpoint).create_bucket(Bucket="examined")
    bin_ = tools(tmp_path / "bin", log="NVRM: Xid (PCI:0000:01:00): 48, pid=1, DBE\n")
    play(bin_, "nvidia-smi", {"-q -x": recorded("nvidia-smi-a100-mig-535.xml"), "": ""})
    play(bin_, "dcgmi", {"diag -r 2": recorded("dcgm-4.json")})
    expected = Expected("NVIDIA A100 80GB", 1, 4, s3="s3://examined/speed", dcgm_level=2)
    machine = Machine(path=f"{bin_}:/usr/bin:/bin")
    report = Examination(expected, full=True, writable=(str(tmp_path / "out"),), machine=machine, speed_s=0.2).make()
    assert [gpu["product"] for gpu in report.gpus] == ["NVIDIA A100-SXM4-80GB"]
    assert [speed.where for speed in report.speeds][1:] == ["s3://examined/speed"]
    assert all(speed.write_mb_per_s > 0 and not speed.problem for speed in report.speeds)
    devices = {(one.device, one.action) for one in report.findings if one.severity == "refuse"}
    assert {("GPU 3", "isolate"), ("GPU 0", "reset")} <= devices  # DCGM's, and MIG or the Xid
    (persistence,) = [one for one in report.findings if "Persistence mode for GPU 0" in one.what]
    assert persistence.severity == "warn"
    assert report.alike["accelerators"] == "1 NVIDIA A100-SXM4-80GB"
    assert "Contents" not in client("s3", site.endpoint).list_objects_v2(Bucket="examined")


def test_what_several_devices_share_is_told_once() -> None:
    one = Finding("warn", "persistence mode is off", todo="start it")
    other = Finding("refuse", "MIG is on", device="GPU 1", action="reset")
    every = [*(Finding(one.severity, one.what, device=f"GPU {number}", todo=one.todo) for number in range(3)), other]
    assert [(found.severity, found.device) for found in merged(every)] == [
        ("refuse", "GPU 1"),
        ("warn", "GPU 0, GPU 1, GPU 2"),
    ]


def test_of_64_nodes_the_odd_one_is_named() -> None:
    real = [replace(Examination().make(), findings=[]) for _ in range(2)]
    reports = [replace(real[number % 2], host=f"node{number}", boot=str(number)) for number in range(64)]
    reports[37] = replace(reports[37], alike=reports[37].alike | {"nvidia_driver": "580.126.09", "cpus": "191"})
    told = judge(reports, [Skew(0.0, 0.0)] * 40 + [Skew(60.0, 0.001)] + [Skew(0.0, 0.001)] * 23)
    assert {(one["node"], one["severity"], one["device"]) for one in told["findings"]} == {
        ("node37", "refuse", "nvidia_driver"), ("node37", "warn", "cpus"), ("node40", "warn", "clock"),
    }  # fmt: skip
    assert [len(node["findings"]) for node in told["nodes"]].count(0) == 62
    assert len(told["nodes"]) == 64


def test_two_nodes_of_one_name_are_refused() -> None:
    report = Examination().make()
    told = judge([report, replace(report, boot="another")], [])
    (clash,) = [one for one in told["findings"] if "has the name of" in one["what"]]
    assert (clash["severity"], clash["node"]) == ("refuse", f"{report.host} (node 1)")


def here(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    argv = [sys.executable, "-m", PROGRAM, "--here", *words]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_person_gets_a_table_of_this_machine(tmp_path: Path) -> None:
    well = here(tools(tmp_path / "bin"))
    assert well.returncode == 0, well.stdout + well.stderr
    assert f"kernel        {os.uname().release}" in well.stdout
    assert "rdmap16s27" in well.stdout
    play(tmp_path / "bin", "dmesg", {"": recorded("dmesg-xid-119.log")})
    ill = here(tmp_path / "bin")
    assert ill.returncode == 1
    assert "REFUSE  0000:9b:00: Xid 119: GSP RPC timeout" in ill.stdout
    assert here(tmp_path / "bin", "--quickly").returncode == 2
    assert json.loads(here(tmp_path / "bin", "--json").stdout)["findings"][0]["action"] == "reset"
