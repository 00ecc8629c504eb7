"""A node's place: what each platform tells, read as it is documented."""

import json
import socket
from pathlib import Path

import pytest

from training import contract
from training.process import JobError

HERE = contract.own_address()
BATCH = {
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2",
    "AWS_BATCH_JOB_ATTEMPT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[09-10,12]",
    "SLURM_RESTART_COUNT": "1",
}
INDEXED = {"CASTRA_NODES": "2", "MASTER_ADDR": "job-0.job", "CASTRA_JOB": "job", "MASTER_PORT": "4000"}
PET = {"PET_NNODES": "2", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_NPROC_PER_NODE": "1", "CASTRA_JOB": "job"}


@pytest.mark.parametrize(("index", "rank"), [(2, 0), (0, 1), (1, 2), (3, 3)])
def test_batch_s_main_node_is_rank_0(index: int, rank: int) -> None:
    env = BATCH | {"AWS_BATCH_JOB_NODE_INDEX": str(index), "AWS_BATCH_JOB_ID": "id" if rank == 0 else f"id#{index}"}
    if rank:
        env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "10.0.0.5"
    node = contract.read(env)
    assert (node.platform, node.nodes, node.rank, node.job_id, node.attempt) == ("batch", 4, rank, "id", 2)
    assert node.master == ("10.0.0.5" if rank else HERE)
    assert (node.port, node.gang_port) == (29500, 29501)


def test_slurm() -> None:
    node = contract.read(SLURM | {"SLURM_NODEID": "2"})
    assert (node.platform, node.nodes, node.rank, node.master, node.job_id, node.attempt) == (
        "slurm", 3, 2, "n09", "7", 2
    )  # fmt: skip
    step = {"SLURM_STEP_NODELIST": "n10", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert (contract.read(SLURM | step).nodes, contract.read(SLURM | step).master) == (1, "127.0.0.1")
    assert contract.read(SLURM | {"SLURM_NODEID": "0"}).master == HERE


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("q-dy-p5-[1-4]", "q-dy-p5-1"), ("r[1-2]n[03,07]x,z", "r1n03x"), ("n[7,9]", "n7")],
)
def test_slurm_s_host_lists(hosts: str, first: str) -> None:
    assert contract.read(SLURM | {"SLURM_JOB_NODELIST": hosts, "SLURM_NODEID": "1"}).master == first


def test_kubernetes_and_kubeflow() -> None:
    child = contract.read(INDEXED | {"JOB_COMPLETION_INDEX": "1", "CASTRA_ATTEMPT": "3"})
    assert (child.platform, child.rank, child.master, child.port, child.attempt) == (
        "kubernetes", 1, "job-0.job", 4000, 3
    )  # fmt: skip
    assert contract.read(INDEXED | {"JOB_COMPLETION_INDEX": "0"}).master == HERE
    assert contract.read(INDEXED | {"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "10.1.2.3"}).master == "10.1.2.3"
    assert contract.read({"CASTRA_NODES": "1", "JOB_COMPLETION_INDEX": "0"}).master == "127.0.0.1"
    assert contract.read(PET | {"PET_NODE_RANK": "1"}).master == "job-node-0-0.job"
    old = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "job-master-0"}
    assert contract.read(old).master == "job-master-0"


def test_sagemaker(tmp_path: Path) -> None:
    config = {"current_host": "algo-10", "hosts": ["algo-10", "algo-9", "algo-1"]}
    (tmp_path / "input/config").mkdir(parents=True)
    told = tmp_path / "input/config/resourceconfig.json"
    told.write_text(json.dumps(config))
    node = contract.read({"SM_ROOT": str(tmp_path), "TRAINING_JOB_NAME": "job"})
    assert (node.platform, node.nodes, node.rank, node.master, node.job_id) == ("sagemaker", 3, 2, "algo-1", "job")
    told.write_text("{}")
    with pytest.raises(JobError, match="does not tell hosts and current_host"):
        contract.read({"SM_ROOT": str(tmp_path), "TRAINING_JOB_NAME": "job"})


def test_anything_else_is_one_node() -> None:
    node = contract.read({"AWS_BATCH_JOB_ID": "x", "AWS_BATCH_JOB_ATTEMPT": "3", "CASTRA_JOB": "job"})
    assert (node.nodes, node.rank, node.master, node.job_id, node.attempt) == (1, 0, "127.0.0.1", "job", 3)


def test_nonsense_is_refused() -> None:
    with pytest.raises(JobError, match="does not tell MASTER_ADDR"):
        contract.read({"CASTRA_NODES": "2", "JOB_COMPLETION_INDEX": "0"})
    with pytest.raises(JobError, match="this is node 2 of 2"):
        contract.read(INDEXED | {"JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(JobError, match="tells nonsense"):
        contract.read(INDEXED | {"JOB_COMPLETION_INDEX": "x"})


def test_the_way_to_an_address_has_an_interface() -> None:
    assert contract.own_address("127.0.0.1") == "127.0.0.1"
    assert contract.interface_of("127.0.0.1") == "lo"
    assert contract.interface_of("203.0.113.1") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HERE, 0))
