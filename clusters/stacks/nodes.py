"""What the nodes of any kind of cluster are started from: the market, the place, the interfaces, the first minutes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusters import catalog
from clusters.capacity import Rung
from clusters.interfaces import interfaces
from clusters.stacks.parts import Part, imported, named, part
from recipes.cluster import AwsCluster

ROOT_GIB = 200
"""Of each node: the system, container images, logs."""
NEURON = "AWS Trainium"
METADATA = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 2}
"""Credentials by token only; two hops away, which is where a container is."""

SCRATCH = """#!/bin/bash
# One file system over all local drives, at /scratch.
set -euo pipefail
need() { command -v "$1" >/dev/null || dnf install -y "$2" || apt-get install -y "$2"; }
need mdadm mdadm
need mkfs.xfs xfsprogs
mapfile -t drives < <(lsblk -dpno NAME,MODEL | awk '/Instance Storage/ {print $1}')
mkdir -p /scratch
if [ "${#drives[@]}" -gt 1 ]; then
  mdadm --create /dev/md/scratch --run --level=0 --raid-devices="${#drives[@]}" "${drives[@]}"
  drives=(/dev/md/scratch)
fi
if [ "${#drives[@]}" -eq 1 ]; then
  mkfs.xfs -f "${drives[0]}"
  mount -o noatime "${drives[0]}" /scratch
fi
chmod 1777 /scratch
"""
LUSTRE = """need mount.lustre lustre-client
mkdir -p /fsx
mount -t lustre -o noatime,flock {dns}@tcp:/{mount} /fsx
"""
HOME = """need mount.nfs nfs-utils
mount -t nfs -o nfsvers=4.2,noatime {dns}:/fsx/ /home
"""
BOUNDARY = "==castra=="


@dataclass(frozen=True, slots=True)
class Place:
    """Where nodes stand: names of stacks, and the output of the camp's that is their subnet."""

    camp: str
    subnet: str
    fsx: str = ""
    home: str = ""
    control: tuple[str, ...] = ()
    """Outputs of the camp's that are subnets for what must be in two zones."""

    @property
    def subnet_id(self) -> Part:
        """The nodes' subnet."""
        return imported(self.camp, self.subnet)

    @property
    def group_id(self) -> Part:
        """The nodes' security group."""
        return imported(self.camp, "SecurityGroup")


def close_together(cluster: AwsCluster, rung: Rung) -> bool:
    """Whether the nodes go in a cluster placement group.

    Never in a capacity block, which is in one place already and refuses a group; elsewhere unless the recipe says no or
    there is one node only.
    """
    if rung.market in ("block", "plan"):
        return False
    return cluster.nodes > 1 if cluster.placement_group is None else cluster.placement_group


def market(rung: Rung) -> Part:
    """The part of a launch template that asks for reserved instances; nothing where none are reserved."""
    target = {"CapacityReservationTarget": {"CapacityReservationId": rung.id}}
    if rung.market == "block":
        return {
            "InstanceMarketOptions": {"MarketType": "capacity-block"},
            "CapacityReservationSpecification": target,
        }
    return {"CapacityReservationSpecification": target} if rung.market == "reservation" else {}


def launch_template(place: Place, rung: Rung, *, groups: tuple[Part, ...] = (), **more: Any) -> Part:
    """A launch template of the rung's type: interfaces, market, metadata by token only.

    The security groups are the camp's and `groups`, on each interface; no subnet is named, which EKS refuses. `more` is
    added to the template's data.
    """
    data: Part = {
        "NetworkInterfaces": interfaces(catalog.find(rung.instance_type), [place.group_id, *groups]),
        "MetadataOptions": METADATA,
        "TagSpecifications": [{"ResourceType": kind, "Tags": named("node")} for kind in ("instance", "volume")],
    }
    return part("EC2::LaunchTemplate", LaunchTemplateData=data | market(rung) | more)


def root_volume() -> list[Part]:
    """The block devices of an Amazon Linux image, which calls its root /dev/xvda."""
    volume = {"VolumeType": "gp3", "VolumeSize": ROOT_GIB, "Encrypted": True, "DeleteOnTermination": True}
    return [{"DeviceName": "/dev/xvda", "Ebs": volume}]


def placement_group() -> Part:
    """Nodes as close together as the zone has them."""
    return part("EC2::PlacementGroup", Strategy="cluster")


def first_minutes(place: Place) -> Part:
    """User data: local drives at /scratch, /fsx and /home where there are such, before anything else starts."""
    pieces: list[Any] = [_head("text/x-shellscript") + SCRATCH]
    if place.fsx:
        pieces += _filled(LUSTRE, dns=imported(place.fsx, "DnsName"), mount=imported(place.fsx, "MountName"))
    if place.home:
        pieces += _filled(HOME, dns=imported(place.home, "HomeDns"))
    return {"Fn::Base64": {"Fn::Join": ["", [*pieces, f"--{BOUNDARY}--\n"]]}}


def kubelet_config(cluster: Mapping[str, Any] | None = None) -> Part:
    """User data of an EKS node: its local drives become the disks of its pods.

    `cluster` (name, apiServerEndpoint, certificateAuthority, cidr) is for an image that EKS does not know and so does
    not introduce to the cluster by itself.
    """
    pieces: list[Any] = [_head("application/node.eks.aws")]
    pieces.append("apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig\nspec:\n")
    if cluster:
        pieces.append("  cluster:\n")
        for key, value in cluster.items():
            pieces += [f"    {key}: ", value, "\n"]
    pieces.append(f"  instance:\n    localStorage:\n      strategy: RAID0\n--{BOUNDARY}--\n")
    return {"Fn::Base64": {"Fn::Join": ["", pieces]}}


def is_neuron(instance_type: str) -> bool:
    """Whether the accelerators are AWS's own."""
    return catalog.find(instance_type).accelerator.startswith(NEURON)


def _head(kind: str) -> str:
    return (
        f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{BOUNDARY}"\n\n'
        f'--{BOUNDARY}\nContent-Type: {kind}; charset="us-ascii"\n\n'
    )


def _filled(text: str, **values: Part) -> list[Any]:
    """The text cut where values go in, for Fn::Join: Fn::Sub would read the shell's own variables."""
    pieces: list[Any] = [text]
    for name, value in values.items():
        before, _, after = pieces.pop().partition(f"{{{name}}}")
        pieces += [before, value, after]
    return pieces
