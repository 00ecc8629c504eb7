"""What a job takes along: the same bytes for the same code, and a node that starts from them or says why not."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from clusters import payload
from clusters.aws import Site
from clusters.base import Job, Refused
from clusters.payload import Payload, deliver, pack
from store import open_store
from tests.clusters.yard import Yard
from tests.sky import client

NOTHING = {"PATH": os.environ["PATH"]}


def start(packed: Payload, **env: str) -> tuple[int, list[str]]:
    """Run a node's command in an environment that has nothing else; its exit code and lines."""
    aws = {name: told for name, told in os.environ.items() if name.startswith("AWS_")}
    done = subprocess.run(
        packed.command, check=False, env=NOTHING | aws | dict(packed.env) | env, capture_output=True, timeout=60
    )
    return done.returncode, (done.stdout + done.stderr).decode().splitlines()


def local(yard: Yard, job: Job) -> Payload:
    """A payload delivered to a folder."""
    packed = pack(job, str(yard.folder / "a store"), python=sys.executable)
    deliver(packed, open_store(str(yard.folder / "a store")))
    return packed


def test_a_node_starts_from_a_shared_folder(yard: Yard, tmp_path: Path) -> None:
    packed = local(yard, yard.job("job", say=["hello"], code=3))
    assert start(packed, TMPDIR=str(tmp_path)) == (3, ["hello", "ready"])
    assert not list(tmp_path.glob("castra-*"))


def test_a_node_starts_from_s3(yard: Yard, site: Site, tmp_path: Path) -> None:
    client("s3", site.endpoint).create_bucket(Bucket="payload-test")
    packed = pack(yard.job("job", say=["hello"]), "s3://payload-test/some/where/", python=sys.executable)
    deliver(packed, open_store("s3://payload-test/some/where"))
    assert start(packed, TMPDIR=str(tmp_path)) == (0, ["hello", "ready"])
    assert not list(tmp_path.glob("castra-*"))
    nowhere = pack(yard.job("other"), "s3://payload-test/elsewhere", python=sys.executable)
    code, lines = start(nowhere, TMPDIR=str(tmp_path))
    assert (code, len(lines)) == (1, 1)
    told = json.loads(lines[0].removeprefix("@castra "))
    assert told["event"] == "error"
    assert "s3://payload-test/elsewhere/code/training-" in told["message"]
    assert "Not Found" in told["message"]


def test_without_boto3_the_image_is_named(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError('no boto3')")
    packed = pack(yard.job("job"), "s3://payload-test", python=sys.executable)
    code, lines = start(packed, PYTHONPATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert (code, len(lines)) == (1, 1)
    assert not list(tmp_path.glob("castra-*"))
    assert "boto3 is not installed: install it in the image" in lines[0]


def test_a_missing_file_is_named(yard: Yard) -> None:
    packed = pack(yard.job("job"), f"file://{yard.folder}/nowhere", python=sys.executable)
    code, lines = start(packed)
    assert (code, len(lines)) == (1, 1)
    assert f"{yard.folder}/nowhere/code/" in lines[0]
    assert "no such file on this node" in lines[0]


def test_the_zip_alone_is_enough(yard: Yard, tmp_path: Path) -> None:
    packed = local(yard, yard.job("job", say=["hello"]))
    code, job = (str(yard.folder / "a store" / key) for key in packed.objects)
    path = os.pathsep.join([code, packed.env["PYTHONPATH"]])
    command = (sys.executable, "-m", "training.node", job)
    assert start(replace(packed, command=command), PYTHONPATH=path, TMPDIR=str(tmp_path)) == (0, ["hello", "ready"])


def test_code_of_the_working_directory_is_not_taken(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__init__.py").write_text("raise SystemExit(9)")
    packed = local(yard, replace(yard.job("job"), env={"PYTHONPATH": str(yard.folder)}))
    monkeypatch.chdir(tmp_path)
    assert start(packed)[0] == 0


def test_the_same_code_is_the_same_zip(yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack(yard.job("job"), "s3://bucket")
    shutil.copytree(payload.CODE, tmp_path / "copy/training")  # with other times, and what Python left behind
    monkeypatch.setattr(payload, "CODE", tmp_path / "copy/training")
    payload._code.cache_clear()
    again = pack(yard.job("job"), "s3://bucket")
    (tmp_path / "copy/training/job.py").write_text("")
    payload._code.cache_clear()
    changed = pack(yard.job("job"), "s3://bucket")
    payload._code.cache_clear()
    assert first == again != changed
    (code, content), (job, _) = first.objects.items()
    assert code == f"code/training-{hashlib.sha256(content).hexdigest()[:16]}.zip"
    assert job == "jobs/job/job.json"
    names = zipfile.ZipFile(BytesIO(content)).namelist()
    assert {"training/node.py", "training/data/loader.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)


def test_what_is_told(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTRA_COMM_TIMEOUT_S", "20")
    job = replace(yard.job("job", timeout_s=7, x=1), nodes=2, processes_per_node=8, env={"A": "b"})
    packed = pack(job, "s3://bucket/prefix", python="/opt/python", grace_s=9)
    assert json.loads(packed.objects["jobs/job/job.json"]) == {
        "name": "job",
        "module": "conduct",
        "spec": {"x": 1, "ran": str(yard.folder / "job.ran")},
        "inputs": {},
        "output": str(yard.folder / "job"),
        "nodes": 2,
        "processes_per_node": 8,
        "timeout_s": 7,
        "grace_s": 9,
    }
    assert dict(packed.env) == {"A": "b", "CASTRA_COMM_TIMEOUT_S": "20", "CASTRA_JOB": "job", "PYTHONSAFEPATH": "1"}
    assert packed.command[:2] == ("/opt/python", "-c")
    assert packed.command[4] == "s3://bucket/prefix/jobs/job/job.json"
    for word in packed.command:  # neither a shell's nor Batch's nor Kubernetes' own
        assert not any(sign in word for sign in ("$(", "Ref::", "`", "'", "\\"))


def test_code_is_sent_once(yard: Yard) -> None:
    packed = local(yard, yard.job("job"))
    code, job = (yard.folder / "a store" / key for key in packed.objects)
    before = code.stat().st_mtime_ns, job.stat().st_mtime_ns
    deliver(packed, open_store(str(yard.folder / "a store")))
    assert code.stat().st_mtime_ns == before[0]
    assert job.stat().st_mtime_ns > before[1]


def test_what_cannot_travel_is_refused(yard: Yard) -> None:
    with pytest.raises(Refused, match="its config lacks 'output'"):
        pack(Job("job", "m", {"spec": {}}), "s3://bucket")
    with pytest.raises(Refused, match="nodes cannot reach a store at http://host/x"):
        pack(yard.job("job"), "http://host/x")
