"""SageMaker HyperPod: nodes that are watched and replaced, under Slurm or as nodes of an EKS cluster."""

from clusters.capacity import Rung
from clusters.stacks.nodes import Place
from clusters.stacks.parts import Part, allow, assemble, att, imported, part, role
from clusters.stacks.sagemaker import rights
from recipes.cluster import EksCluster, SlurmCluster
from recipes.spec import Recipe

LONGEST_NAME = 63
"""Characters of a cluster's name."""
PARTITION = "train"
EBS_GIB = 500
"""Of each instance, at /opt/sagemaker."""


def template(recipe: Recipe, cluster: SlurmCluster | EksCluster, rung: Rung, place: Place, eks: str = "") -> Part:
    """The template for one rung. With the stack `eks` its nodes join that cluster, else a Slurm of their own.

    HyperPod sets up Slurm by itself (controller, login and training nodes, /fsx), so there are no lifecycle scripts to
    be kept. Outputs: HyperPodCluster (its ARN), Partition (of Slurm).
    """
    role_arn = att("NodeRole", "Arn")
    groups = [_group(role_arn, "train", rung.instance_type, cluster.nodes, place)]
    if rung.market == "plan":
        groups[0]["TrainingPlanArn"] = rung.id
    if rung.market == "spot":
        groups[0]["CapacityRequirements"] = {"Spot": {}}
    orchestrator: Part = {"Eks": {"ClusterArn": imported(eks, "ClusterArn")}}
    if isinstance(cluster, SlurmCluster):
        heads = [_group(role_arn, name, cluster.head_instance_type, 1, place) for name in ("controller", "login")]
        groups = [group | {"SlurmConfig": _slurm(group["InstanceGroupName"])} for group in (*heads, *groups)]
        orchestrator = {"Slurm": {"SlurmConfigStrategy": "Managed"}}
    made = part(
        "SageMaker::Cluster",
        ClusterName=cluster_name(recipe.name),
        InstanceGroups=groups,
        Orchestrator=orchestrator,
        NodeRecovery="Automatic",
        VpcConfig={"Subnets": [place.subnet_id], "SecurityGroupIds": [place.group_id]},
    )
    outputs = {"HyperPodCluster": att("Cluster", "ClusterArn")} | ({} if eks else {"Partition": PARTITION})
    return assemble("Castra: SageMaker HyperPod.", {"NodeRole": _role(recipe), "Cluster": made}, outputs)


def cluster_name(run: str) -> str:
    """The name of a run's cluster."""
    return f"castra-{run}"


def _group(role_arn: Part, name: str, instance_type: str, count: int, place: Place) -> Part:
    storage: list[Part] = [{"EbsVolumeConfig": {"VolumeSizeInGB": EBS_GIB}}]
    if place.fsx:
        lustre = {"DnsName": imported(place.fsx, "DnsName"), "MountName": imported(place.fsx, "MountName")}
        storage.append({"FsxLustreConfig": lustre | {"MountPath": "/fsx"}})
    return {
        "InstanceGroupName": name,
        "InstanceType": f"ml.{instance_type}",
        "InstanceCount": count,
        "ExecutionRole": role_arn,
        "InstanceStorageConfigs": storage,
    }


def _slurm(name: str) -> Part:
    kind = {"controller": "Controller", "login": "Login"}.get(name, "Compute")
    return {"NodeType": kind} | ({"PartitionNames": [PARTITION]} if kind == "Compute" else {})


def _role(recipe: Recipe) -> Part:
    """What its nodes do: what training jobs do, and be reached by Session Manager."""
    sessions = allow(
        [
            "ssm:UpdateInstanceInformation",
            "ssmmessages:CreateControlChannel",
            "ssmmessages:CreateDataChannel",
            "ssmmessages:OpenControlChannel",
            "ssmmessages:OpenDataChannel",
        ],
        "*",
    )
    return role("What a HyperPod node may do", "sagemaker", *rights(recipe.store), sessions)
