"""Amazon EKS: control plane, add-ons, a few small nodes for them, a node group with accelerators, the jobs' role."""

from typing import Any

from clusters.capacity import Rung
from clusters.stacks import nodes
from clusters.stacks.parts import (
    LOG_DAYS,
    Part,
    allow,
    assemble,
    att,
    document,
    imported,
    part,
    ref,
    role,
    store_rights,
)
from recipes.cluster import EksCluster
from recipes.spec import Recipe

NAMESPACE = SERVICE_ACCOUNT = "castra"
SYSTEM_TYPE, SYSTEM_NODES = "m6i.large", 2
"""What runs the cluster's own pods: an accelerator node is too dear for them, and may not be there yet."""
SERVICES = "172.20.0.0/16"
"""Addresses of services within the cluster, beside the camp's network."""
CAPACITY = {"spot": "SPOT", "block": "CAPACITY_BLOCK"}
LOGS = ("api", "audit", "authenticator", "controllerManager", "scheduler")
NODE_POLICIES = ("AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly")


def template(recipe: Recipe, cluster: EksCluster, rung: Rung, place: nodes.Place) -> Part:
    """The template for one rung; the control plane and the small nodes stand in two of the camp's zones.

    Under HyperPod somebody else brings the accelerators. Whoever deploys it administers the cluster.
    Device plugins (NVIDIA, Neuron, EFA) are no add-ons of EKS: the adapter applies them as manifests.
    Outputs: Cluster (its name), ClusterArn, Namespace, ServiceAccount, PodRole (its ARN).
    """
    resources = {
        "LogGroup": _log_group(recipe),
        "ControlRole": role("What EKS does for its cluster", "eks", managed=("AmazonEKSClusterPolicy",)),
        "Cluster": _cluster(recipe, cluster, place),
        "NodeRole": role("What a node does for Kubernetes", "ec2", managed=NODE_POLICIES),
        "SystemTemplate": _system_template(),
        "SystemNodes": _system_nodes(place),
        **_addons(lustre=cluster.lustre_gib > 0),
        **_pods(recipe),
    }
    if cluster.flavour == "nodegroup":
        resources |= _nodegroup(recipe, cluster, rung, place)
    outputs = {
        "Cluster": ref("Cluster"),
        "ClusterArn": att("Cluster", "Arn"),
        "Namespace": NAMESPACE,
        "ServiceAccount": SERVICE_ACCOUNT,
        "PodRole": att("PodRole", "Arn"),
    }
    return assemble("Castra: Amazon EKS for indexed Jobs.", resources, outputs)


def cluster_name(run: str) -> str:
    """The name of a run's cluster."""
    return f"castra-{run}"


def _cluster(recipe: Recipe, cluster: EksCluster, place: nodes.Place) -> Part:
    return part(
        "EKS::Cluster",
        Name=cluster_name(recipe.name),
        Version=cluster.kubernetes_version,
        RoleArn=att("ControlRole", "Arn"),
        AccessConfig={"AuthenticationMode": "API", "BootstrapClusterCreatorAdminPermissions": True},
        BootstrapSelfManagedAddons=False,
        KubernetesNetworkConfig={"IpFamily": "ipv4", "ServiceIpv4Cidr": SERVICES},
        Logging={"ClusterLogging": {"EnabledTypes": [{"Type": kind} for kind in LOGS]}},
        ResourcesVpcConfig={
            "SubnetIds": _control_subnets(place),
            "SecurityGroupIds": [place.group_id],
            "EndpointPrivateAccess": True,
            "EndpointPublicAccess": True,
        },
        UpgradePolicy={"SupportType": "EXTENDED"},  # a version that leaves standard support costs more, and goes on
    ) | {"DependsOn": "LogGroup"}


def _log_group(recipe: Recipe) -> Part:
    """Made before EKS makes it by itself, without an end to its lines and for nobody to delete."""
    return part(
        "Logs::LogGroup", LogGroupName=f"/aws/eks/{cluster_name(recipe.name)}/cluster", RetentionInDays=LOG_DAYS
    )


def _control_subnets(place: nodes.Place) -> list[Part]:
    return [imported(place.camp, name) for name in place.control]


def _system_template() -> Part:
    return part("EC2::LaunchTemplate", LaunchTemplateData={"MetadataOptions": nodes.METADATA})


def _system_nodes(place: nodes.Place) -> Part:
    return part(
        "EKS::Nodegroup",
        NodegroupName="system",
        ClusterName=ref("Cluster"),
        NodeRole=att("NodeRole", "Arn"),
        AmiType="AL2023_x86_64_STANDARD",
        InstanceTypes=[SYSTEM_TYPE],
        Subnets=_control_subnets(place),
        LaunchTemplate=_latest("SystemTemplate"),
        ScalingConfig={"MinSize": SYSTEM_NODES, "DesiredSize": SYSTEM_NODES, "MaxSize": SYSTEM_NODES},
    ) | {"DependsOn": ["VpcCni", "KubeProxy"]}


def _nodegroup(recipe: Recipe, cluster: EksCluster, rung: Rung, place: nodes.Place) -> Part:
    group = nodes.close_together(cluster, rung)
    more: Part = {"BlockDeviceMappings": nodes.root_volume()}
    more |= {"Placement": {"GroupName": ref("PlacementGroup")}} if group else {}
    if rung.market == "block":
        more["InstanceType"] = rung.instance_type  # a block is asked for by the template alone
    if recipe.image.ami:
        more |= {"ImageId": recipe.image.ami, "UserData": nodes.kubelet_config(_introduction())}
    else:
        more |= {"UserData": nodes.kubelet_config()}
    made = part(
        "EKS::Nodegroup",
        ClusterName=ref("Cluster"),
        NodeRole=att("NodeRole", "Arn"),
        **({} if recipe.image.ami else {"AmiType": _image(rung.instance_type)}),
        **({} if rung.market == "block" else {"InstanceTypes": [rung.instance_type]}),
        CapacityType=CAPACITY.get(rung.market, "ON_DEMAND"),
        Subnets=[place.subnet_id],
        LaunchTemplate=_latest("LaunchTemplate"),
        ScalingConfig={"MinSize": 0, "DesiredSize": cluster.nodes, "MaxSize": cluster.nodes},
        NodeRepairConfig={"Enabled": True},
        Labels={"castra.dev/pool": "train"},
    ) | {"DependsOn": ["VpcCni", "KubeProxy"]}
    return {
        **({"PlacementGroup": nodes.placement_group()} if group else {}),
        "LaunchTemplate": nodes.launch_template(place, rung, groups=(_own_group(),), **more),
        "Nodes": made,
    }


def _own_group() -> Part:
    """The group through which nodes and control plane talk; a template with interfaces must name it itself."""
    return att("Cluster", "ClusterSecurityGroupId")


def _introduction() -> Part:
    return {
        "name": ref("Cluster"),
        "apiServerEndpoint": att("Cluster", "Endpoint"),
        "certificateAuthority": att("Cluster", "CertificateAuthorityData"),
        "cidr": SERVICES,
    }


def _image(instance_type: str) -> str:
    return "AL2023_x86_64_NEURON" if nodes.is_neuron(instance_type) else "AL2023_x86_64_NVIDIA"


def _latest(name: str) -> Part:
    return {"Id": ref(name), "Version": att(name, "LatestVersionNumber")}


def _addons(*, lustre: bool) -> Part:
    """The network before the nodes; what runs on nodes after the first of them."""
    first = {"VpcCni": _addon("vpc-cni"), "KubeProxy": _addon("kube-proxy")}
    then = {
        "CoreDns": _addon("coredns"),
        "PodIdentityAgent": _addon("eks-pod-identity-agent"),
        "NodeMonitor": _addon("eks-node-monitoring-agent"),
    }
    if lustre:
        identity = [{"ServiceAccount": "fsx-csi-controller-sa", "RoleArn": att("FilesRole", "Arn")}]
        then["FilesDriver"] = _addon("aws-fsx-csi-driver", PodIdentityAssociations=identity)
    after = {name: made | {"DependsOn": "SystemNodes"} for name, made in then.items()}
    describes = allow(["fsx:DescribeFileSystems"], "*")
    return first | after | ({"FilesRole": _pod_role("What the driver of /fsx may do", [describes])} if lustre else {})


def _addon(name: str, **more: Any) -> Part:
    return part("EKS::Addon", AddonName=name, ClusterName=ref("Cluster"), ResolveConflicts="OVERWRITE", **more)


def _pods(recipe: Recipe) -> Part:
    """The jobs' pods get the store by the service account castra/castra, and nothing by their node."""
    return {
        "PodRole": _pod_role("What a job may do: its store", store_rights(recipe.store)),
        "PodIdentity": part(
            "EKS::PodIdentityAssociation",
            ClusterName=ref("Cluster"),
            Namespace=NAMESPACE,
            ServiceAccount=SERVICE_ACCOUNT,
            RoleArn=att("PodRole", "Arn"),
        ),
    }


def _pod_role(description: str, rights: list[Part]) -> Part:
    trusts = {
        "Effect": "Allow",
        "Principal": {"Service": "pods.eks.amazonaws.com"},
        "Action": ["sts:AssumeRole", "sts:TagSession"],
    }
    made = role(description, "pods.eks", *rights)
    made["Properties"]["AssumeRolePolicyDocument"] = document(trusts)
    return made
