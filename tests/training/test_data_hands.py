"""Preparing data by many hands: the same bytes whatever processes and nodes work, also after kills and full disks."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from tests.sky import client
from tests.training.corpora import lines, made, mixed, node, refusal, spec, start, straight, texts
from training.data import files, records
from training.data.format import verify
from training.data.prepare import prepare
from training.data.sources import SourceError, documents
from training.job import NodeJob

__all__ = ["mixed", "straight"]
BUCKET = "data-pipeline"


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_processes_makes_the_same_bytes(
    mixed: Path, straight: Path, tmp_path: Path, workers: int
) -> None:
    program = start(tmp_path / "job.json", spec(mixed, workers=workers), tmp_path / "out")
    program.communicate(timeout=120)
    assert program.returncode == 0
    assert made(tmp_path / "out") == made(straight)


def test_two_nodes_make_the_same_bytes_though_one_is_killed_and_starts_again(
    mixed: Path, straight: Path, tmp_path: Path
) -> None:
    asked = spec(mixed, nodes=2)
    first, second = (node(tmp_path / "job.json", asked, tmp_path / "out", rank) for rank in range(2))
    time.sleep(1.0)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    again = node(tmp_path / "job.json", asked, tmp_path / "out", 1)
    for program in (first, again):
        program.communicate(timeout=120)
        assert program.returncode == 0
    assert made(tmp_path / "out") == made(straight)


def test_a_node_that_is_refused_ends_the_others(mixed: Path, tmp_path: Path) -> None:
    asked = spec(mixed, nodes=2, tokenizer=str(tmp_path / "nothing.json"))
    both = [node(tmp_path / "job.json", asked, tmp_path / "out", rank) for rank in range(2)]
    sentences = [refusal(program) for program in both]
    assert all("nothing.json" in sentence for sentence in sentences)
    alone = start(tmp_path / "job.json", spec(mixed, nodes=3), tmp_path / "out")
    assert "data.nodes is 3 and the job has 1 nodes" in refusal(alone)


def test_kills_at_any_moment_leave_no_trace(mixed: Path, straight: Path, tmp_path: Path) -> None:
    rng = random.Random(os.environ.get("CASTRA_KILLS_SEED", "1"))
    asked = spec(mixed, workers=2)
    killed = 0
    for _ in range(int(os.environ.get("CASTRA_KILLS", "6"))):
        program = start(tmp_path / "job.json", asked, tmp_path / "out")
        time.sleep(rng.uniform(0.3, 2.5))
        if rng.random() < 0.5:
            program.kill()  # its processes die with it
        else:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        killed += program.returncode == -signal.SIGKILL
        if (tmp_path / "out" / "result.json").exists():
            assert made(tmp_path / "out") == made(straight)
            shutil.rmtree(tmp_path / "out")
    program = start(tmp_path / "job.json", asked, tmp_path / "out")
    program.communicate(timeout=120)
    assert killed
    assert made(tmp_path / "out") == made(straight)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_loses_nothing(
    mixed: Path, straight: Path, tmp_path: Path, small_disk: Path, workers: int
) -> None:
    asked = spec(mixed, workers=workers)
    sentence = refusal(start(tmp_path / "job.json", asked, small_disk / "out"))
    assert "No space left on device; make room" in sentence
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    again = start(tmp_path / "job.json", asked, small_disk / "out")
    again.communicate(timeout=60)
    assert again.returncode == 0
    assert made(small_disk / "out") == made(straight)


@pytest.fixture
def s3(site: Site, mixed: Path) -> Any:
    """A bucket with the corpus."""
    s3 = client("s3", site.endpoint)
    s3.create_bucket(Bucket=BUCKET)
    for path in mixed.rglob("*"):
        if path.is_file() and path.parent == mixed:
            s3.upload_file(str(path), BUCKET, f"corpus/{path.relative_to(mixed)}")
    return s3


def test_a_prefix_in_s3_gives_what_the_folder_gives(
    s3: Any, mixed: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "UNIT_BYTES", 5000)
    asked = [f"s3://{BUCKET}/corpus", f"s3://{BUCKET}/corpus/a.jsonl"]
    tokenizer = str(straight / "tokenizer.json")
    prepare(NodeJob(spec(asked, tokenizer=tokenizer), tmp_path / "out"))
    shutil.copytree(mixed, tmp_path / "corpus", ignore=shutil.ignore_patterns("texts"))
    here = [str(tmp_path / "corpus"), str(tmp_path / "corpus" / "a.jsonl")]
    prepare(NodeJob(spec(here, tokenizer=tokenizer), tmp_path / "here"))
    told = verify(tmp_path / "out")
    assert told | {"sources": 0} == verify(tmp_path / "here") | {"sources": 0}
    assert list(told["sources"]) == asked
    listed = documents(asked[0])
    assert all(one.version for one in listed)
    s3.put_object(Bucket=BUCKET, Key="corpus/a.jsonl", Body=lines(texts(200, 77)))
    with pytest.raises(SourceError, match=r"a\.jsonl changed while it was being prepared"):
        list(files.blocks(listed[0]))


def test_what_s3_refuses_is_one_sentence(s3: Any, tmp_path: Path) -> None:
    for source, words in (
        ("s3://no-such-bucket-here/x", "S3 answers NoSuchBucket"),
        (f"s3://{BUCKET}/nowhere", "there are no files at all"),
    ):
        program = start(tmp_path / "job.json", spec(source), tmp_path / "out")
        assert words in refusal(program)


def test_nodes_that_share_no_folder_make_their_shards_from_what_the_others_found(
    s3: Any, mixed: Path, straight: Path, tmp_path: Path
) -> None:
    asked = spec(mixed, nodes=2)
    told = {"CASTRA_PRIVATE_OUTPUT": "1", "CASTRA_NODES": "2", "MASTER_ADDR": "127.0.0.1"}
    url = f"s3://{BUCKET}/exchange"
    both = [
        start(
            tmp_path / f"{i}.json",
            asked,
            tmp_path / f"out{i}",
            CASTRA_OUTPUT_URL=url,
            JOB_COMPLETION_INDEX=str(i),
            **told,
        )
        for i in range(2)
    ]
    for program in both:
        out, _ = program.communicate(timeout=120)
        assert program.returncode == 0, out
    found = [made(tmp_path / f"out{i}") for i in range(2)]
    assert not set(found[0]) & set(found[1])
    assert found[0] | found[1] == made(straight)
    assert s3.list_objects_v2(Bucket=BUCKET, Prefix="exchange/").get("KeyCount") == 0
    alone = start(tmp_path / "1.json", asked, tmp_path / "out2", JOB_COMPLETION_INDEX="1", **told)
    assert "an output folder that all nodes see" in refusal(alone)
