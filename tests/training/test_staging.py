"""Inputs from S3, output to S3: whole or not at all, in an order in which a crash at any moment loses nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from tests.clusters.yard import wait_until
from tests.sky import client, tell
from training.contract import Node
from training.mirror import SMALL
from training.process import JobError
from training.remote import PART, Trouble
from training.staging import Stage

BUCKET = "staging-test"


class Bench:
    """A bucket, and the stages of a job's nodes that write to it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder, self.s3 = site, folder, client("s3", site.endpoint)
        self.told: list[tuple[int, str]] = []
        self.trouble: list[tuple[str, bool]] = []
        self.url = f"s3://{BUCKET}/{folder.name}"

    def put(self, name: str, content: bytes = b"x") -> None:
        """Write an object."""
        self.s3.put_object(Bucket=BUCKET, Key=f"{self.folder.name}/{name}", Body=content)

    def get(self, name: str) -> bytes:
        """Read an object."""
        content: bytes = self.s3.get_object(Bucket=BUCKET, Key=f"{self.folder.name}/{name}")["Body"].read()
        return content

    def keys(self, below: str = "") -> list[str]:
        """The names of what is there."""
        start = f"{self.folder.name}/{below}"
        found = self.s3.list_objects_v2(Bucket=BUCKET, Prefix=start).get("Contents", [])
        return [told["Key"][len(start) :] for told in found]

    def checkpoint(self, step: int, *files: str, best: bool = False) -> None:
        """Put a complete checkpoint there."""
        for name in files:
            self.put(f"out/checkpoints/step-{step:08d}/{name}")
        told = {"files": {name: [1, "hash"] for name in files}, "best": best}
        self.put(f"out/checkpoints/step-{step:08d}/manifest.json", json.dumps(told).encode())

    def stage(self, rank: int = 0, nodes: int = 1) -> tuple[Stage, Path]:
        """A node's stage and its output folder."""
        node = Node("kubernetes", nodes, rank, "127.0.0.1", "job", 1)

        def uploaded(step: str) -> None:
            self.told.append((rank, step))

        stage = Stage("job", node, uploaded, lambda sentence, hopeless: self.trouble.append((sentence, hopeless)))
        return stage, Path(stage.bring({}, f"{self.url}/out")[1])

    def fault(self, kind: str, operation: str, times: int) -> None:
        """Let S3 fail."""
        told = [{"kind": kind, "service": "s3", "operation": operation, "times": times}]
        tell(self.site.endpoint, "faults", told)


@pytest.fixture
def bench(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench of an empty prefix, its nodes' disks in the test's folder."""
    monkeypatch.setenv("CASTRA_SCRATCH", str(tmp_path / "scratch"))
    bench = Bench(site, tmp_path)
    bench.s3.create_bucket(Bucket=BUCKET)
    yield bench
    tell(site.endpoint, "faults", method="DELETE")


def write(folder: Path, name: str, content: bytes = b"x") -> Path:
    """Write a file as a program would."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def save(folder: Path, step: int, *files: str, manifest: bool = True) -> None:
    """Write what one node has of a checkpoint."""
    for name in files:
        write(folder, f"checkpoints/step-{step:08d}/{name}")
    if manifest:
        write(folder, f"checkpoints/step-{step:08d}/manifest.json", b'{"files": {}}')


def test_a_folder_and_a_single_file_come_as_they_are(bench: Bench, tmp_path: Path) -> None:
    for name in ("data/a.bin", "data/deep/b.bin", "data-of-others/c", "tokenizer.json"):
        bench.put(name, name.encode())
    node = Node("alone", 1, 0, "127.0.0.1", "job", 1)
    inputs = {
        "data": f"{bench.url}/data/",
        "tokenizer": f"{bench.url}/tokenizer.json",
        "home": "/shared",
        "url": "file:///a%20b",
    }
    places, output = Stage("job", node, lambda _: None, lambda *_: None).bring(inputs, str(tmp_path / "out"))
    data = Path(places["data"])
    found = {path.relative_to(data).as_posix(): path.read_text() for path in data.rglob("*") if path.is_file()}
    assert found == {"a.bin": "data/a.bin", "deep/b.bin": "data/deep/b.bin"}
    assert Path(places["tokenizer"]).name == "tokenizer.json"
    assert Path(places["tokenizer"]).read_text() == "tokenizer.json"
    assert (places["home"], places["url"], output) == ("/shared", "/a b", str(tmp_path / "out"))


def test_what_is_here_already_is_not_brought_again(bench: Bench) -> None:
    bench.put("data/a", b"first")
    bench.put("data/b", b"other")
    node = Node("alone", 1, 0, "127.0.0.1", "job", 1)

    def bring() -> Path:
        stage = Stage("job", node, lambda _: None, lambda *_: None)
        return Path(stage.bring({"data": f"{bench.url}/data"}, "/out")[0]["data"])

    folder = bring()
    before = (folder / "a").stat().st_ino, (folder / "b").stat().st_ino
    bench.put("data/b", b"newer")
    folder = bring()
    assert (folder / "a").stat().st_ino == before[0]
    assert (folder / "b").read_bytes() == b"newer"
    (folder / "a").write_bytes(b"FIRST")
    assert (bring() / "a").read_bytes() == b"first"


def test_of_a_training_run_only_the_newest_complete_checkpoint_comes(bench: Bench) -> None:
    bench.put("out/progress.jsonl")
    bench.checkpoint(2, "a")
    bench.checkpoint(4, "a", ".metadata", "zero/b")
    bench.checkpoint(6, "a", "b")
    bench.s3.delete_object(Bucket=BUCKET, Key=f"{bench.folder.name}/out/checkpoints/step-00000006/b")
    bench.put("out/checkpoints/step-00000008/a")
    _, folder = bench.stage()
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == [
        "checkpoints/step-00000004/.metadata",
        "checkpoints/step-00000004/a",
        "checkpoints/step-00000004/manifest.json",
        "checkpoints/step-00000004/zero/b",
        "progress.jsonl",
    ]


def test_a_run_that_goes_on_has_its_best_checkpoint_too(bench: Bench) -> None:
    for step in (2, 4, 6, 8):
        bench.checkpoint(step, "a", best=step in (2, 4))
    _, folder = bench.stage()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]


def test_what_an_earlier_attempt_left_here_and_s3_never_had_goes(bench: Bench) -> None:
    _, folder = bench.stage()
    save(folder, 2, "a")
    write(folder, "checkpoints/.step-00000004.fresh/a")
    write(folder, "progress.jsonl")
    _, folder = bench.stage()
    assert list(folder.rglob("*")) == []


def test_mistakes_are_one_sentence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("alone", 1, 0, "127.0.0.1", "job", 1)
    stage = Stage("job", node, lambda _: None, lambda *_: None)
    with pytest.raises(JobError, match=rf"the input 'data' is not at {bench.url}/none: nothing is there"):
        stage.bring({"data": f"{bench.url}/none"}, "/out")
    with pytest.raises(Trouble, match="s3://no-such-bucket/x: S3 answers NoSuchBucket") as told:
        stage.bring({"data": "s3://no-such-bucket/x"}, "/out")
    assert not told.value.passing
    bench.put("big", b"x" * 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(JobError, match=r"needs 0\.0 GB and the disk of .* point CASTRA_SCRATCH at a larger disk"):
        stage.bring({"data": f"{bench.url}/big"}, "/out")


def test_a_manifest_waits_for_all_nodes_and_the_result_for_everything(bench: Bench) -> None:
    (first, mine), (second, other) = bench.stage(0, 2), bench.stage(1, 2)
    write(mine, "progress.jsonl", b"1\n")
    save(mine, 2, "a", ".metadata")
    save(other, 2, "zero/b")
    write(mine, "result.json")
    write(mine, ".result.json.77")
    write(mine, "checkpoints/.step-00000004.fresh/a")
    assert first.finish(hurry=False) == ""
    assert bench.told == [(0, "step-00000002")]
    assert bench.keys("out/") == [
        "checkpoints/step-00000002/.metadata", "checkpoints/step-00000002/a", "progress.jsonl"
    ]  # fmt: skip
    first.heard(0, "step-00000002")
    assert first.publish(whole=False) == ""
    assert "checkpoints/step-00000002/manifest.json" not in bench.keys("out/")
    assert second.finish(hurry=False) == ""
    assert bench.told == [(0, "step-00000002"), (1, "step-00000002")]
    first.heard(1, "step-00000002")
    assert first.publish(whole=False) == ""
    assert bench.get("out/checkpoints/step-00000002/manifest.json") == b'{"files": {}}'
    assert "result.json" not in bench.keys("out/")
    assert first.publish(whole=True) == ""
    assert bench.keys("out/") == [
        "checkpoints/step-00000002/.metadata",
        "checkpoints/step-00000002/a",
        "checkpoints/step-00000002/manifest.json",
        "checkpoints/step-00000002/zero/b",
        "progress.jsonl",
        "result.json",
    ]


def test_an_old_checkpoint_goes_only_once_a_newer_one_is_complete(bench: Bench) -> None:
    bench.checkpoint(2, "a")
    bench.put("out/checkpoints/step-00000001/left-by-a-crash")
    bench.put("out/notes.txt")
    stage, folder = bench.stage()
    assert (folder.parent / "uploaded/step-00000002").exists()
    save(folder, 4, "a", manifest=False)
    for path in (folder / "checkpoints/step-00000002").iterdir():
        path.unlink()
    (folder / "checkpoints/step-00000002").rmdir()
    (folder / "notes.txt").unlink()
    stage.finish(hurry=False)
    assert [name for name in bench.keys("out/checkpoints/") if "step-00000002" in name]
    assert bench.keys("out/notes.txt") == []
    save(folder, 4)
    stage.finish(hurry=False)
    stage.heard(0, "step-00000004")
    stage.publish(whole=False)
    assert bench.keys("out/checkpoints/") == ["step-00000004/a", "step-00000004/manifest.json"]


def test_the_mirror_follows_the_program(bench: Bench) -> None:
    stage, folder = bench.stage()
    stage.begin()
    journal = write(folder, "progress.jsonl", b"1\n")
    wait(lambda: "progress.jsonl" in bench.keys("out/"))
    journal.write_bytes(b"1\n2\n")
    wait(lambda: bench.get("out/progress.jsonl") == b"1\n2\n")
    save(folder, 2, "a")
    wait(lambda: bench.told == [(0, "step-00000002")])
    stage.heard(0, "step-00000002")
    wait(lambda: "checkpoints/step-00000002/manifest.json" in bench.keys("out/"))
    wait((Path(stage.env()["CASTRA_UPLOADED"]) / "step-00000002").exists)
    assert stage.env()["CASTRA_PRIVATE_OUTPUT"] == "1"
    assert stage.finish(hurry=True) == ""
    stage.clear()
    assert not folder.parent.parent.exists()


def test_big_files_go_up_in_parts_once_they_are_settled(bench: Bench) -> None:
    stage, folder = bench.stage()
    write(folder, "train.bin", b"x" * (SMALL + 1))
    write(folder, "held_out.bin", b"y" * (PART + 5))
    assert stage.finish(hurry=True) == ""
    assert bench.keys("out/") == []
    assert stage.finish(hurry=False) == ""
    assert bench.keys("out/") == ["held_out.bin", "train.bin"]
    told: dict[str, Any] = bench.s3.head_object(Bucket=BUCKET, Key=f"{bench.folder.name}/out/held_out.bin")
    assert (told["ContentLength"], told["ETag"][-3:]) == (PART + 5, '-2"')


@pytest.mark.parametrize("kind", ["throttle", "500", "drop"])
def test_passing_trouble_passes(kind: str, bench: Bench) -> None:
    stage, folder = bench.stage()
    write(folder, "progress.jsonl", b"1\n")
    bench.fault(kind, "PutObject", 2)
    assert stage.finish(hurry=False) == ""
    assert bench.get("out/progress.jsonl") == b"1\n"


def test_what_cannot_be_saved_is_told(bench: Bench) -> None:
    bench.s3.create_bucket(Bucket="staging-gone")
    bench.url = "s3://staging-gone/runs"
    stage, folder = bench.stage()
    bench.s3.delete_bucket(Bucket="staging-gone")
    write(folder, "progress.jsonl", b"1\n")
    stage.begin()
    wait(lambda: bench.trouble)
    sentence, hopeless = bench.trouble[0]
    assert hopeless
    assert sentence.startswith("s3://staging-gone/runs/out: S3 answers NoSuchBucket")
    told = stage.finish(hurry=False)
    assert told == (
        f"what this node wrote could not be saved: {sentence}; start the job again, it resumes from what is there"
    )


def wait(true: Any) -> None:
    """Wait until S3 shows it."""
    wait_until(true, 20)
