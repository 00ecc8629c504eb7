"""One case of each kind as a job of every scheduler, on two hosts of their own: the same weights come out everywhere.

slurm is a real one; batch, eks and sagemaker are emulated services whose nodes are real processes.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from clusters.base import Cluster, Job, State
from store import open_store
from tests.clusters import batch_yard, eks_yard, sagemaker_yard, slurm_yard
from tests.clusters.yard import finished
from tests.sky import client
from tests.training.cases.matrix import record
from tests.training.miniatures import miniature
from tests.training.nursery import Nursery, result, write_dataset, write_job
from training.cases import MEASUREMENTS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

CASES = Path(__file__).parents[3] / "recipes/cases"
YARDS: dict[str, Callable[[Path], Cluster]] = {
    "slurm": slurm_yard.cluster,
    "batch": batch_yard.batch,
    "eks": eks_yard.eks,
    "sagemaker": sagemaker_yard.sagemaker,
}
EVERYWHERE = ("ddp", "fsdp-mixtral-8x7b", "deepspeed-zero-finetune", "param-mlp")
BUCKET = "castra-everywhere"
AT_HOME = {"sagemaker": ("lab1",)}


def places() -> list[Any]:
    found = [(kind, name) for kind in YARDS for name in (*EVERYWHERE, *AT_HOME.get(kind, ()))]
    marks = [pytest.mark.root, slurm_yard.needs_slurm]
    return [pytest.param(*place, marks=marks if place[0] == "slurm" else []) for place in found]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    return {kind: write_dataset(folder / kind, marked=kind == "chat") for kind in ("text", "chat")}


@pytest.fixture(scope="module")
def here(
    nursery: Nursery, datasets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What a miniature comes to as plain processes of this machine."""
    known: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            spec, ranks = miniature(CASES / f"{name}.yaml")
            folder = tmp_path_factory.mktemp(name)
            job = write_job(folder, spec, dataset=datasets[spec["data"]["kind"]])
            codes, run = nursery.run(job, ranks, program(spec))
            assert set(codes) == {0}, run.log.read_text()
            known[name] = result(folder / "out")
        return known[name]

    return of


@pytest.mark.parametrize(("kind", "name"), places())
def test_it_trains_there_as_here(
    kind: str,
    name: str,
    here: Callable[[str], dict[str, Any]],
    datasets: dict[str, Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if kind != "slurm":
        endpoint = request.getfixturevalue("site").endpoint
        with contextlib.suppress(ClientError):  # another test has made it
            client("s3", endpoint).create_bucket(Bucket=BUCKET)
    spec, ranks = miniature(CASES / f"{name}.yaml")
    cluster, dataset = YARDS[kind](tmp_path), datasets[spec["data"]["kind"]]
    output = str(tmp_path / "out")
    inputs = {"dataset": str(dataset)}
    if kind != "slurm":  # whose nodes share a folder
        inputs["dataset"], output = uploaded(dataset, f"s3://{BUCKET}/{tmp_path.name}")
    config = {"spec": spec, "inputs": inputs, "output": output}
    env = {"OMP_NUM_THREADS": "1", "CASTRA_GANG_START_S": "120"}
    job = Job(name, program(spec), config, nodes=2, processes_per_node=ranks // 2, env=env, timeout_s=200)
    job_id = cluster.submit(job)
    status = finished(cluster, job_id, 200)
    log = cluster.logs(job_id)[0]
    assert status.state is State.SUCCEEDED, "\n".join(log[-40:])
    there, expected = told(output), here(name)
    if spec["case"]["program"]:
        assert [row["what"] for row in there["rows"]] == [row["what"] for row in expected["rows"]]
    else:
        assert there["weights_sha256"] == expected["weights_sha256"]
        assert there["world_size"] == ranks
    gang = next(json.loads(line.partition("@castra ")[2]) for line in log if '"gang-ready"' in line)
    assert len(set(gang["hosts"])) == 2
    proof = f"test_own_everywhere.py: test_it_trains_there_as_here, {ranks} ranks on 2 hosts"
    record(name, kind, "ran" if kind == "slurm" else "emulated", proof)


def program(spec: dict[str, Any]) -> str:
    return MEASUREMENTS if spec["case"]["program"] else "training.run"


def uploaded(dataset: Path, url: str) -> tuple[str, str]:
    """Put a dataset into S3; returns its URL, and where a job may write."""
    store = open_store(url)
    for path in dataset.rglob("*"):
        if path.is_file():
            store.put(f"dataset/{path.relative_to(dataset)}", path.read_bytes())
    return f"{url}/dataset", f"{url}/out"


def told(output: str) -> dict[str, Any]:
    if not output.startswith("s3://"):
        return result(Path(output))
    found = open_store(output).get("result.json")
    assert found is not None
    value: dict[str, Any] = json.loads(found.data)
    return value
