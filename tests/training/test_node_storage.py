"""Nodes that share nothing but S3: what was saved is found again, whole, and leads to the same bits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from clusters.base import Job
from tests.clusters.yard import wait_until
from tests.sky import client
from tests.training.hosts import Hosts
from tests.training.nursery import Nursery, losses, result, spec, write_job

pytestmark = [pytest.mark.torch]

BUCKET = "node-storage"
QUICK = {"CASTRA_COMM_TIMEOUT_S": "30"}
TRAIN: Mapping[str, Any] = {"steps": 12, "checkpoint_every": 3}


@pytest.fixture
def s3(site: Site, dataset: Path) -> Any:
    """A bucket with the dataset."""
    s3 = client("s3", site.endpoint)
    s3.create_bucket(Bucket=BUCKET)
    for path in dataset.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), BUCKET, f"dataset/{path.relative_to(dataset).as_posix()}")
    return s3


def training(name: str, strategy: str) -> Job:
    """A run on two nodes, from S3 to S3."""
    config = {
        "spec": spec(strategy, micro=2, **TRAIN),
        "inputs": {"dataset": f"s3://{BUCKET}/dataset"},
        "output": f"s3://{BUCKET}/{name}",
    }
    return Job(name, "training.run", config, nodes=2, processes_per_node=1, env=QUICK, timeout_s=120)


def keys(s3: Any, name: str) -> list[str]:
    """What is below a name."""
    found = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{name}/").get("Contents", [])
    return [told["Key"].removeprefix(f"{name}/") for told in found]


def brought(s3: Any, name: str, folder: Path) -> Path:
    """A run's result and journal, as files."""
    folder.mkdir()
    for file in ("result.json", "progress.jsonl"):
        s3.download_file(BUCKET, f"{name}/{file}", str(folder / file))
    return folder


@pytest.fixture
def undisturbed(nursery: Nursery, dataset: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return the output of a run that nobody disturbs, by ranks that share a folder."""

    def run(strategy: str) -> Path:
        job = write_job(tmp_path / "whole", spec(strategy, micro=2, **TRAIN), dataset=dataset)
        assert nursery.run(job, 2)[0] == [0, 0]
        return tmp_path / "whole/out"

    return run


def test_a_node_is_killed_and_others_go_on_from_s3_to_the_same_bits(
    hosts: Hosts, undisturbed: Callable[[str], Path], s3: Any, tmp_path: Path
) -> None:
    strategy = "fsdp2"
    job = training(strategy, strategy)
    first = hosts.start(job, f"s3://{BUCKET}/store")
    wait_until(lambda: any(name.endswith("manifest.json") for name in keys(s3, strategy)), 60)
    first.processes[1].kill()
    codes = first.wait()
    assert codes == [1, -9], first.log(0)
    assert first.say("node-lost")[0]["node"] == 1
    assert "result.json" not in keys(s3, strategy)

    (tmp_path / "scratch0").rename(tmp_path / "gone")  # node 0 comes back on another machine, node 1 on the same
    second = hosts.start(job, f"s3://{BUCKET}/store")
    assert second.wait() == [0, 0], second.log(0) + second.log(1)
    (resumed,) = second.say("resumed")
    out = brought(s3, strategy, tmp_path / "out")
    whole = undisturbed(strategy)
    assert result(out)["resumed_from"] == resumed["step"] >= 3
    assert losses(out) == losses(whole)
    assert result(out)["weights_sha256"] == result(whole)["weights_sha256"]
    kept = {name.split("/")[1] for name in keys(s3, strategy) if name.startswith("checkpoints/")}
    assert kept == {"step-00000009", "step-00000012"}
    shards = [name for name in keys(s3, strategy) if name.startswith("checkpoints/step-00000012/")]
    manifest = s3.get_object(Bucket=BUCKET, Key=f"{strategy}/checkpoints/step-00000012/manifest.json")["Body"].read()
    assert {f"checkpoints/step-00000012/{name}" for name in json.loads(manifest)["files"]} < set(shards)
    assert list((tmp_path / "scratch0").iterdir()) == list((tmp_path / "scratch1").iterdir()) == []


def test_stopped_nodes_save_first_and_a_finished_job_is_left_alone(
    hosts: Hosts, undisturbed: Callable[[str], Path], s3: Any, tmp_path: Path
) -> None:
    strategy = "zero2"
    job = training(strategy, strategy)
    first = hosts.start(job, f"s3://{BUCKET}/store", grace_s=30)
    wait_until(lambda: '"done": 2' in first.log(), 60)
    first.processes[1].terminate()
    assert first.wait() == [143, 143], first.log(0) + first.log(1)
    (stopped,) = first.say("stopped")
    assert f"checkpoints/step-{stopped['step']:08d}/manifest.json" in keys(s3, strategy)

    second = hosts.start(job, f"s3://{BUCKET}/store")
    assert second.wait() == [0, 0], second.log(0) + second.log(1)
    assert second.say("resumed")[0]["step"] == stopped["step"]
    out, whole = brought(s3, strategy, tmp_path / "out"), undisturbed(strategy)
    assert losses(out) == losses(whole)
    assert result(out)["weights_sha256"] == result(whole)["weights_sha256"]

    third = hosts.start(job, f"s3://{BUCKET}/store")
    assert third.wait() == [0, 0]
    assert [line for line in third.log().splitlines() if "gang-ready" not in line] == []
    assert result(brought(s3, strategy, tmp_path / "after")) == result(out)
