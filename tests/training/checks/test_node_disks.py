"""Disks: real ones of this machine, a full and a read-only one, a hanging one, and the speed of files and of S3."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.aws import Site
from tests.sky import client
from tests.training.checks.played import recorded
from training.checks import disks, storage
from training.checks.disks import Disk
from training.checks.machine import Hung, Machine, within
from training.checks.storage import Speed

HERE = Machine()
needs_root = pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="mounts a file system")
BUCKET = "speed-test"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def disk(**told: object) -> Disk:
    well = {"path": "/fsx", "folder": "/fsx", "mount": "/fsx", "kind": "lustre", "total": 10**13, "free": 10**13}
    return Disk(**(well | {"read_only": False, "to_write": True} | told))  # type: ignore[arg-type]  # fields by name


def test_this_machines_disk_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    (found, *_) = disks.look(HERE, [str(tmp_path / "not" / "there" / "yet"), str(tmp_path)])
    there = os.statvfs(tmp_path)
    assert (found.folder, found.total) == (str(tmp_path), there.f_frsize * there.f_blocks)
    assert (found.problem, found.read_only) == ("", False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_root
def test_a_full_disk_is_refused(small: Path) -> None:
    (small / "data").write_bytes(bytes(2 << 20))
    found = disks.look(HERE, [str(small)], [])
    assert (found[0].mount, found[0].kind, found[0].free, found[0].problem) == (str(small), "tmpfs", 0, "it is full")
    (finding,) = disks.judge(found)
    assert (finding.severity, finding.what, finding.device) == ("refuse", "it is full", str(small))
    assert "CASTRA_SCRATCH" in finding.todo


@pytest.mark.root
@needs_root
def test_a_disk_with_little_room_and_one_that_is_read_only(small: Path) -> None:
    (little,) = disks.judge(disks.look(HERE, [str(small)], []))
    assert little.what == "2 MB are free of 0.0 GB, 1.1 GB are needed"
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    (closed,) = disks.judge(disks.look(HERE, [str(small)], []))
    assert (closed.action, closed.what) == ("reboot", f"{small} is mounted read-only")
    assert storage.folder(str(small)).problem == "it cannot be written: Read-only file system"


def test_what_a_job_does_not_write_may_be_full_and_closed() -> None:
    root = {"kind": "overlay", "mount": "/", "path": "/", "to_write": False}
    assert list(disks.judge([disk(**root, read_only=True, free=0)])) == []
    (full,) = disks.judge([disk(**root, free=10)])
    assert full.severity == "warn"


def test_lustre_must_be_lustre() -> None:
    assert list(disks.judge([disk()], "/fsx")) == []
    (finding,) = disks.judge([disk(kind="ext4", mount="/")], "/fsx")
    assert (finding.severity, finding.what) == ("refuse", "it is ext4 at /, not a Lustre file system")
    (soon,) = disks.judge([disk(free=10**11)], "/fsx")
    assert (soon.severity, soon.what) == ("warn", "100.0 GB are free of 10000.0 GB")


def test_what_hangs_is_told_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(Hung, match=r"the file system of /fsx did not answer within 0\.1 s"):
        within(0.1, "the file system of /fsx", lambda: time.sleep(2))
    assert time.monotonic() - began < 1.5
    (finding,) = disks.judge([disk(problem="the file system of /fsx did not answer within 10 s")], "/fsx")
    assert (finding.severity, finding.action) == ("refuse", "reboot")
    with pytest.raises(ZeroDivisionError):
        within(1.0, "a division", lambda: 1 / 0)


def test_disks_that_wear_out() -> None:
    told = recorded("nvme-smart-log.json")
    assert disks.read_smart(told, "nvme1") == []
    log = json.loads(told)
    (bad, errors, old) = disks.read_smart(
        json.dumps(log | {"critical_warning": 4, "media_errors": 3, "percent_used": 104}), "nvme1"
    )
    assert (bad.severity, bad.action, bad.device) == ("refuse", "isolate", "nvme1")
    assert bad.what == "the disk says: it is unreliable"
    assert (errors.what, old.what) == ("3 errors of its media", "104 % of its life is used")
    # as nvme-cli 2 tells it
    assert (
        len(disks.read_smart(json.dumps(log | {"critical_warning": {"value": 1, "available_spare": 1}}), "nvme1")) == 1
    )


def test_the_speed_of_a_folder_within_its_bounds(tmp_path: Path) -> None:
    speed = storage.folder(str(tmp_path), most=8 << 20)
    assert (speed.bytes, speed.problem) == (8 << 20, "")
    assert speed.write_mb_per_s > 1
    assert speed.read_mb_per_s > 1
    assert list(tmp_path.iterdir()) == []
    began = time.monotonic()
    assert 0 < storage.folder(str(tmp_path), seconds=0.05).bytes < storage.MOST
    assert time.monotonic() - began < 10
    assert storage.folder("/nowhere").problem == "it cannot be written: No such file or directory"


def test_the_speed_of_s3_and_nothing_is_left(site: Site) -> None:
    s3 = client("s3", site.endpoint)
    s3.create_bucket(Bucket=BUCKET)
    speed = storage.s3(f"s3://{BUCKET}/place", size=1 << 18, seconds=0.3)
    assert speed.problem == ""
    assert speed.bytes >= 1 << 18
    assert speed.write_mb_per_s > 0
    assert speed.read_mb_per_s > 0
    assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET)
    assert "NoSuchBucket" in storage.s3("s3://not-there/place", seconds=0.3).problem


def test_a_slow_node_is_told_by_its_peers() -> None:
    speeds = {f"node{number}": [Speed("/fsx", 900.0 + number, 1500.0, 1 << 30)] for number in range(3)}
    assert storage.judge(speeds) == []
    (slow,) = storage.judge(speeds | {"node3": [Speed("/fsx", 300.0, 1500.0, 1 << 30)]})
    assert (slow.severity, slow.node, slow.device) == ("warn", "node3", "/fsx")
    assert slow.what == "it writes 300 MB/s where most do 900 MB/s"
    (broken,) = storage.judge(speeds | {"node3": [Speed("/fsx", 0, 0, 0, "it cannot be written: no")]})
    assert (broken.severity, broken.node) == ("refuse", "node3")
