"""The types of AWS PCS: clusters, compute node groups and queues, made through its API."""

from typing import Any

from emulator import topology
from emulator.batch_types import template_data
from emulator.resources import Properties, Resource, tags


class PcsCluster(
    Resource,
    type="AWS::PCS::Cluster",
    fixed="Name Networking Size",
    mutable="Scheduler SlurmConfiguration Tags",
    required="Networking Scheduler Size",
):
    """A Slurm controller run by AWS. `Ref` is its ARN."""

    def create(self) -> str:
        name = str(self.p.get("Name") or self.name(40))
        told = self.chosen("Name", "Tags")
        return str(self.call("pcs", "create_cluster", told, clusterName=name, tags=tags(self.p))["cluster"]["arn"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "Scheduler", "SlurmConfiguration")):
            self.call("pcs", "update_cluster", told, clusterIdentifier=self.id)

    def attributes(self) -> dict[str, Any]:
        found = self.aws.pcs.get_cluster(clusterIdentifier=self.id)["cluster"]
        ends = [{key[0].upper() + key[1:]: value for key, value in end.items()} for end in found["endpoints"]]
        return {"Arn": self.id, "Id": found["id"], "Status": found["status"], "Endpoints": ends}

    def delete(self) -> None:
        self.aws.pcs.delete_cluster(clusterIdentifier=self.id)


class _PcsPart(Resource):
    """What belongs to a PCS cluster. `Ref` is its ARN."""

    word = ""
    member = ""
    renamed: tuple[str, ...] = ()

    def told(self, *names: str) -> dict[str, Any]:
        """The properties in the API's words."""
        kept = {key: self.p[key] for key in names if key in self.p}
        if template := kept.get("CustomLaunchTemplate"):
            kept["CustomLaunchTemplate"] = {"Id": template["TemplateId"], "Version": template["Version"]}
        return kept

    def create(self) -> str:
        self.check()
        name = str(self.p.get("Name") or self.name(25))
        told = self.told(*(self.fixed | self.mutable) - {"ClusterId", "Name", "Tags"})
        where = {"clusterIdentifier": self.p["ClusterId"], f"{self.member}Name": name, "tags": tags(self.p)}
        return str(self.call("pcs", f"create_{self.word}", told, **where)[self.member]["arn"])

    def settle(self, old: Properties) -> None:
        names = sorted(self.mutable - {"Tags"})
        if old and (changed := self.changed(old, *names)):
            self.check()
            self.call("pcs", f"update_{self.word}", self.told(*changed), **self._where())

    def check(self) -> None:
        """Refuse what PCS refuses."""

    def attributes(self) -> dict[str, Any]:
        found = self.call("pcs", f"get_{self.word}", **self._where())[self.member]
        return {"Arn": self.id, "Id": found["id"], "Status": found["status"]}

    def delete(self) -> None:
        self.call("pcs", f"delete_{self.word}", **self._where())

    def _where(self) -> dict[str, Any]:
        return {"clusterIdentifier": self.p["ClusterId"], f"{self.member}Identifier": self.attribute_id()}

    def attribute_id(self) -> str:
        """The id at the end of the ARN."""
        return self.id.rpartition("/")[2]


class PcsNodeGroup(
    _PcsPart,
    type="AWS::PCS::ComputeNodeGroup",
    fixed="ClusterId InstanceConfigs Name",
    mutable="AmiId CustomLaunchTemplate IamInstanceProfileArn NodeLifecycleActions PurchaseOption ScalingConfiguration "
    "SlurmConfiguration SpotOptions SubnetIds Tags",
    required="ClusterId CustomLaunchTemplate IamInstanceProfileArn InstanceConfigs ScalingConfiguration SubnetIds",
):
    """Nodes of a PCS cluster."""

    word, member = "compute_node_group", "computeNodeGroup"

    def check(self) -> None:
        told = self.p["CustomLaunchTemplate"]
        data = template_data(self.aws, {"Id": told["TemplateId"], "Version": told["Version"]})
        block = self.p.get("PurchaseOption") == "CAPACITY_BLOCK"
        if block != (topology.market(data) == "capacity-block"):
            raise ValueError("PurchaseOption CAPACITY_BLOCK needs a launch template with MarketType capacity-block")
        for one in self.p["InstanceConfigs"]:
            topology.check(data, str(one["InstanceType"]))


class PcsQueue(
    _PcsPart,
    type="AWS::PCS::Queue",
    fixed="ClusterId Name",
    mutable="ComputeNodeGroupConfigurations SlurmConfiguration Tags",
    required="ClusterId",
):
    """Where jobs of a PCS cluster wait."""

    word, member = "queue", "queue"
