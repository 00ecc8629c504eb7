"""ParallelCluster: what its configuration asks for, and what its own command line says about that."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from clusters import parallelcluster
from clusters.aws import Site, here
from clusters.base import Job, Refused, State
from clusters.capacity import parse
from clusters.parallelcluster import Part
from clusters.slurm import SlurmCluster
from emulator import aws as emulated
from recipes.cluster import SlurmCluster as Wanted
from recipes.spec import Recipe
from store import open_store
from tests.clusters import slurm_yard
from tests.clusters.yard import finished
from tests.sky import tell

OUTPUTS = {
    "PublicSubnet": "subnet-00000001",
    "PrivateSubnet": "subnet-00000002",
    "SecurityGroup": "sg-00000001",
    "Bucket": "a-bucket",
}
BLOCK, RESERVATION = "block:cr-0123456789abcdef0", "reservation:cr-0123456789abcdef0"
CLI = os.environ.get("CASTRA_REAL_PCLUSTER")
needs_cli = pytest.mark.skipif(
    not CLI, reason="needs ParallelCluster's own command line: CASTRA_REAL_PCLUSTER names it"
)
UNANSWERABLE = (
    "type:HeadNodeLaunchTemplateValidator",  # moto's dry run of RunInstances wants what a template may leave out
    "type:ComputeResourceLaunchTemplateValidator",
    "type:KeyPairValidator",  # moto's key pairs have no type
)


def configured(capacity: str = "on-demand", outputs: dict[str, str] | None = None, **cluster: Any) -> Part:
    wanted = Wanted(capacity=(capacity,), region="us-east-1", **cluster)
    recipe = Recipe(name="tiny", store="s3://results/here", cluster=wanted)
    rung = parse(capacity, wanted.instance_type)
    return parallelcluster.configuration(recipe, wanted, rung, OUTPUTS if outputs is None else outputs)


def queue(config: Part) -> Part:
    (only,) = config["Scheduling"]["SlurmQueues"]
    return dict(only)


def test_a_capacity_block_is_taken_whole_and_never_with_a_placement_group() -> None:
    block = queue(configured(BLOCK, instance_type="p5.48xlarge", nodes=4))
    (nodes,) = block["ComputeResources"]
    assert block["CapacityType"] == "CAPACITY_BLOCK"
    assert nodes["CapacityReservationTarget"] == {"CapacityReservationId": "cr-0123456789abcdef0"}
    assert (nodes["MinCount"], nodes["MaxCount"]) == (4, 4)
    assert "PlacementGroup" not in block["Networking"]


def test_a_reservation_keeps_its_placement_group() -> None:
    reserved = queue(configured(RESERVATION, instance_type="p5.48xlarge", nodes=2))
    assert reserved["CapacityType"] == "ONDEMAND"
    assert reserved["Networking"]["PlacementGroup"] == {"Enabled": True}
    assert reserved["ComputeResources"][0]["MinCount"] == 2


def test_what_is_not_reserved_scales_to_nothing() -> None:
    for capacity, kind in (("on-demand", "ONDEMAND"), ("spot", "SPOT")):
        told = queue(configured(capacity))
        assert told["CapacityType"] == kind
        assert told["ComputeResources"][0]["MinCount"] == 0
        assert "CapacityReservationTarget" not in told["ComputeResources"][0]


@pytest.mark.parametrize(("kind", "efa"), [("p4de.24xlarge", True), ("p5.48xlarge", True), ("g5.xlarge", False)])
def test_efa_is_on_where_the_type_has_it(kind: str, efa: bool) -> None:
    assert queue(configured(instance_type=kind))["ComputeResources"][0]["Efa"] == {"Enabled": efa}


def test_the_file_system_is_ours_or_comes_and_goes_with_the_cluster() -> None:
    assert "SharedStorage" not in configured()
    (own,) = configured(lustre_gib=4800)["SharedStorage"]
    assert own["FsxLustreSettings"]["StorageCapacity"] == 4800
    assert own["FsxLustreSettings"]["DeletionPolicy"] == "Delete"
    (ours,) = configured(outputs=OUTPUTS | {"FileSystem": "fs-1"}, lustre_gib=4800)["SharedStorage"]
    assert ours["FsxLustreSettings"] == {"FileSystemId": "fs-1"}


def test_the_nodes_may_use_the_store_and_nothing_else_in_s3() -> None:
    (access,) = queue(configured())["Iam"]["S3Access"]
    assert access == {"BucketName": "results", "KeyName": "here/*", "EnableWriteAccess": True}
    script = configured(containers=True)["HeadNode"]["CustomActions"]["OnNodeConfigured"]["Script"]
    assert script == f"s3://a-bucket/{parallelcluster.START_SCRIPT}"
    assert subprocess.run(["bash", "-n"], input=parallelcluster.START, text=True, check=True).returncode == 0


def test_without_outputs_it_is_told_with_their_names() -> None:
    config = configured(outputs={})
    assert config["HeadNode"]["Networking"]["SubnetId"] == "${PublicSubnet}"
    assert queue(config)["Networking"]["SubnetIds"] == ["${PrivateSubnet}"]


def test_the_head_is_reached_by_ssh_through_session_manager_if_it_has_no_public_address() -> None:
    wanted = Wanted(lustre_gib=1200)
    told = parallelcluster.outputs({"headNode": {"instanceId": "i-1", "publicIpAddress": "1.2.3.4"}}, wanted, "tiny")
    assert json.loads(told["reach"])[-1] == "ubuntu@1.2.3.4"
    assert "folder" not in told, "it is on /fsx then"
    told = parallelcluster.outputs({"headNode": {"instanceId": "i-1"}}, Wanted(), "tiny")
    assert json.loads(told["reach"])[-1] == "ubuntu@i-1"
    assert any("AWS-StartSSHSession" in word for word in json.loads(told["reach"]))
    assert told["folder"] == "/home/ubuntu/castra/tiny"


def test_a_missing_command_line_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CASTRA_PCLUSTER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="uv tool install"):
        parallelcluster.describe(Site("us-east-1"), "castra-tiny")
    monkeypatch.setenv("CASTRA_PCLUSTER", f"{tmp_path}/pcluster")
    with pytest.raises(Refused, match="is not there"):
        parallelcluster.describe(Site("us-east-1"), "castra-tiny")


@pytest.fixture(scope="module")
def land(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, dict[str, str]]]:
    """An emulator that has ParallelCluster's image, and a network in it."""
    folder = tmp_path_factory.mktemp("land")
    image = {
        "ami_id": "ami-0123456789abcdef0",
        "name": "aws-parallelcluster-3.16.1-ubuntu-2404-lts-hvm-x86_64-202511010000 2025-11-01T00-00-00.000Z",
        "description": "AWS ParallelCluster AMI for ubuntu2404",
        "owner_id": "247102896272",
        "architecture": "x86_64",
        "virtualization_type": "hvm",
        "platform": "Linux/UNIX",
        "creation_date": "2025-11-01T00:00:00.000Z",
        "root_device_name": "/dev/sda1",
        "root_device_type": "ebs",
    }
    (folder / "images.json").write_text(json.dumps([image]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_AMIS_PATH", str(folder / "images.json"))
        with emulated.running(folder) as running:
            for name, value in emulated.environment(running.endpoint).items():
                patch.setenv(name, value)
            patch.setenv("CASTRA_LAND", str(folder))
            yield here(), _network(running.endpoint)


def _network(endpoint: str) -> dict[str, str]:
    ec2 = boto3.session.Session("castra", "castra", region_name=emulated.REGION).client("ec2", endpoint_url=endpoint)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    public, private = (
        ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
        for block in ("10.0.0.0/20", "10.0.16.0/20")
    )
    group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
    return {"PublicSubnet": public, "PrivateSubnet": private, "SecurityGroup": group}


def test_a_cluster_is_made_once_changed_and_deleted_once(
    land: tuple[Site, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CASTRA_PCLUSTER", raising=False)
    (site, outputs), said = land, list[str]()
    config = configured(outputs=outputs, nodes=2)
    assert parallelcluster.describe(site, "castra-tiny") is None
    made = parallelcluster.create(site, "castra-tiny", config, said.append)
    assert made["clusterStatus"] == "CREATE_COMPLETE"
    assert said[-1] == "cluster castra-tiny: CREATE_COMPLETE"
    assert parallelcluster.create(site, "castra-tiny", config, said.append)["headNode"] == made["headNode"]
    assert parallelcluster.standing(site) == ["castra-tiny"]
    assert parallelcluster.update(site, "castra-tiny", config, said.append)["clusterStatus"] == "CREATE_COMPLETE"
    larger = parallelcluster.update(site, "castra-tiny", configured(outputs=outputs, nodes=3), said.append)
    assert larger["clusterStatus"] == "UPDATE_COMPLETE"
    parallelcluster.delete(site, "castra-tiny", said.append)
    parallelcluster.delete(site, "castra-tiny", said.append)
    assert parallelcluster.describe(site, "castra-tiny") is None


def test_what_parallelcluster_refuses_is_told_in_its_words(
    land: tuple[Site, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CASTRA_PCLUSTER", raising=False)
    site, outputs = land
    config = configured(BLOCK, outputs=outputs, instance_type="p5.48xlarge")
    with pytest.raises(Refused, match="'cr-0123456789abcdef0' does not exist"):
        parallelcluster.create(site, "castra-blocked", config, print)
    assert parallelcluster.describe(site, "castra-blocked") is None


@pytest.mark.root
@slurm_yard.needs_slurm
def test_a_cluster_of_the_emulator_is_a_real_slurm(
    land: tuple[Site, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CASTRA_PCLUSTER", raising=False)
    site, outputs = land
    made = parallelcluster.create(site, "castra-runs", configured(outputs=outputs, nodes=2), print)
    address = parallelcluster.outputs(made, Wanted(), "runs")
    look = [*json.loads(address["reach"]), "sinfo -h -o '%P %D %T'"]
    assert subprocess.check_output(look, text=True) == "train* 2 idle\n"
    assert Path(address["folder"]).is_relative_to(Path(os.environ["CASTRA_LAND"]))
    boto3.client("s3", endpoint_url=site.endpoint).create_bucket(Bucket="results")
    cluster = SlurmCluster(address, open_store("s3://results/here"))
    job_id = cluster.submit(Job("tells", "json.tool", {"spec": {"a": 1}, "output": "s3://results/here/out"}))
    assert finished(cluster, job_id).state is State.SUCCEEDED, cluster.logs(job_id)
    assert '    "spec": {' in cluster.logs(job_id)[0]
    parallelcluster.delete(site, "castra-runs", print)


@pytest.fixture
def real_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """ParallelCluster's own command line in place of the emulator's stand-in."""
    monkeypatch.setenv("CASTRA_PCLUSTER", str(CLI))


@needs_cli
@pytest.mark.usefixtures("real_cli")
@pytest.mark.parametrize("kind", ["p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge"])
def test_its_own_validators_find_nothing_wrong(land: tuple[Site, dict[str, str]], kind: str) -> None:
    site, outputs = land
    config = configured(outputs=outputs, instance_type=kind, lustre_gib=1200, nodes=2)
    assert parallelcluster.check(site, "castra-tiny", config, *UNANSWERABLE) == []


@needs_cli
@pytest.mark.usefixtures("real_cli")
@pytest.mark.parametrize("capacity", [BLOCK, RESERVATION])
def test_its_own_validators_accept_reserved_instances(land: tuple[Site, dict[str, str]], capacity: str) -> None:
    site, outputs = land
    block = capacity is BLOCK
    row = {"id": "cr-0123456789abcdef0", "type": "p5.48xlarge", "zone": "us-east-1a", "count": 2, "block": block}
    tell(site.endpoint, "reservations", method="DELETE")
    tell(site.endpoint, "reservations", [row])
    config = configured(capacity, outputs=outputs, instance_type="p5.48xlarge", nodes=2)
    assert parallelcluster.check(site, "castra-tiny", config, *UNANSWERABLE) == []


@needs_cli
@pytest.mark.usefixtures("real_cli")
def test_its_own_validators_see_what_is_wrong(land: tuple[Site, dict[str, str]]) -> None:
    site, outputs = land
    config = configured(outputs=outputs, lustre_gib=1300)
    problems = parallelcluster.check(site, "castra-tiny", config, *UNANSWERABLE)
    assert any("apacity" in problem for problem in problems)
