"""AWS PCS: Slurm as a service, a login node, and one queue of training nodes."""

from typing import Any

from clusters.capacity import Rung
from clusters.stacks import nodes
from clusters.stacks.parts import Part, allow, assemble, att, named, part, ref, role, store_rights
from recipes.cluster import SlurmCluster
from recipes.spec import Recipe

SLURM = "25.05"
SIZES = (("SMALL", 32), ("MEDIUM", 512), ("LARGE", 2048))
"""How many instances a cluster of each size manages."""
IDLE_S = 600
"""Nodes that nobody uses go after this long."""
LONGEST_NAME = 40
"""Characters of a cluster's name."""
QUEUE = "train"
PURCHASE = {"spot": "SPOT", "block": "CAPACITY_BLOCK"}


def template(recipe: Recipe, cluster: SlurmCluster, rung: Rung, place: nodes.Place) -> Part:
    """The template for one rung; the place has a /home.

    Outputs: PcsCluster (its id), LoginNodeGroup (its id), Queue (its name in Slurm).
    """
    group = nodes.close_together(cluster, rung)
    more: Part = {"Placement": {"GroupName": ref("PlacementGroup")}} if group else {}
    if rung.market == "block":
        more["InstanceType"] = rung.instance_type  # PCS asks for it there as well
    start = nodes.first_minutes(place)
    resources = {
        "Cluster": _cluster(recipe, cluster, place),
        "NodeRole": _role(recipe),
        "InstanceProfile": part("IAM::InstanceProfile", Path="/aws-pcs/", Roles=[ref("NodeRole")]),
        **({"PlacementGroup": nodes.placement_group()} if group else {}),
        "LaunchTemplate": nodes.launch_template(place, rung, UserData=start, **more),
        "LoginTemplate": _login_template(place, start),
        "Nodes": _group(
            recipe.image.ami,
            Name="nodes",
            InstanceConfigs=[{"InstanceType": rung.instance_type}],
            CustomLaunchTemplate=_latest("LaunchTemplate"),
            SubnetIds=[place.subnet_id],
            PurchaseOption=PURCHASE.get(rung.market, "ONDEMAND"),
            ScalingConfiguration={"MinInstanceCount": 0, "MaxInstanceCount": cluster.nodes},
        ),
        "Login": _group(
            recipe.image.ami,
            Name="login",
            InstanceConfigs=[{"InstanceType": cluster.head_instance_type}],
            CustomLaunchTemplate=_latest("LoginTemplate"),
            SubnetIds=[place.subnet_id],
            PurchaseOption="ONDEMAND",
            ScalingConfiguration={"MinInstanceCount": 1, "MaxInstanceCount": 1},
        ),
        "Queue": part(
            "PCS::Queue",
            Name=QUEUE,
            ClusterId=att("Cluster", "Id"),
            ComputeNodeGroupConfigurations=[{"ComputeNodeGroupId": att("Nodes", "Id")}],
        ),
    }
    outputs = {"PcsCluster": att("Cluster", "Id"), "LoginNodeGroup": att("Login", "Id"), "Queue": QUEUE}
    return assemble("Castra: Slurm on AWS PCS.", resources, outputs)


def cluster_name(run: str) -> str:
    """The name of a run's cluster; `clusters.validators` refuses a run whose name is too long for it."""
    return f"castra-{run}"


def _cluster(recipe: Recipe, cluster: SlurmCluster, place: nodes.Place) -> Part:
    size = next((size for size, most in SIZES if cluster.nodes < most), SIZES[-1][0])  # the login node counts too
    return part(
        "PCS::Cluster",
        Name=cluster_name(recipe.name),
        Size=size,
        Scheduler={"Type": "SLURM", "Version": SLURM},
        Networking={"SubnetIds": [place.subnet_id], "SecurityGroupIds": [place.group_id]},
        SlurmConfiguration={
            "ScaleDownIdleTimeInSeconds": IDLE_S,
            "Accounting": {"Mode": "STANDARD", "DefaultPurgeTimeInDays": 30},
            "SlurmCustomSettings": [{"ParameterName": "SelectTypeParameters", "ParameterValue": "CR_CPU"}],
        },
    )


def _role(recipe: Recipe) -> Part:
    """PCS knows its nodes by the path of their role; people reach them by Session Manager, without any open port."""
    rights = [allow(["pcs:RegisterComputeNodeGroupInstance"], "*"), *store_rights(recipe.store)]
    managed = ("AmazonSSMManagedInstanceCore",)
    return role(
        "What a Slurm node may do: join its cluster, its store", "ec2", *rights, managed=managed, Path="/aws-pcs/"
    )


def _group(ami: str, **properties: Any) -> Part:
    return part(
        "PCS::ComputeNodeGroup",
        ClusterId=att("Cluster", "Id"),
        IamInstanceProfileArn=att("InstanceProfile", "Arn"),
        **({"AmiId": ami} if ami else {}),
        **properties,
    )


def _latest(name: str) -> Part:
    return {"TemplateId": ref(name), "Version": att(name, "LatestVersionNumber")}


def _login_template(place: nodes.Place, start: Part) -> Part:
    data = {
        "UserData": start,
        "MetadataOptions": nodes.METADATA,
        "SecurityGroupIds": [place.group_id],
        "TagSpecifications": [{"ResourceType": kind, "Tags": named("login")} for kind in ("instance", "volume")],
    }
    return part("EC2::LaunchTemplate", LaunchTemplateData=data)
