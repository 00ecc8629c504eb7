"""AWS Batch in templates: compute environments, queues, definitions and policies, made through Batch's own API."""

from collections.abc import Mapping
from typing import Any

from emulator import topology
from emulator.request import truth
from emulator.resources import Properties, Resource, Services, until

INFRASTRUCTURE = {
    *("AllocationStrategy", "BidPercentage", "Ec2Configuration", "Ec2KeyPair", "ImageId", "InstanceRole"),
    *("InstanceTypes", "LaunchTemplate", "PlacementGroup", "Tags", "Type"),
}
"""A change of these needs new instances."""


class ComputeEnvironment(
    Resource,
    type="AWS::Batch::ComputeEnvironment",
    fixed="ComputeEnvironmentName EksConfiguration Tags Type",
    mutable="ComputeResources Context ReplaceComputeEnvironment ServiceRole State UnmanagedvCpus UpdatePolicy",
    required="Type",
):
    """Where Batch finds instances. `Ref` is its ARN."""

    def create(self) -> str:
        resources = self.p.get("ComputeResources", {})
        check_template(self.aws, resources)
        told = self.chosen("ComputeResources", "ReplaceComputeEnvironment", "UpdatePolicy")
        told["ComputeEnvironmentName"] = self.p.get("ComputeEnvironmentName") or self.name(128)
        if resources:
            told["ComputeResources"] = dict(resources)
            told["ComputeResources"].pop("UpdateToLatestImageVersion", None)  # is about updates
        made = self.call("batch", "create_compute_environment", told)
        self.id = made["computeEnvironmentArn"]
        self._settled()
        return self.id

    def replaces(self, old: Properties) -> bool:
        before, after = old.get("ComputeResources", {}), self.p.get("ComputeResources", {})
        heavy = any(before.get(name) != after.get(name) for name in INFRASTRUCTURE)
        in_place = not truth(self.p.get("ReplaceComputeEnvironment", True))
        return super().replaces(old) or (heavy and not in_place)

    def settle(self, old: Properties) -> None:
        names = ("ComputeResources", "Context", "ServiceRole", "State", "UnmanagedvCpus", "UpdatePolicy")
        if not old or not (told := self.changed(old, *names)):
            return
        check_template(self.aws, self.p.get("ComputeResources", {}))
        self.call("batch", "update_compute_environment", told, computeEnvironment=self.id)
        self._settled()

    def attributes(self) -> dict[str, Any]:
        return {"ComputeEnvironmentArn": self.id}

    def delete(self) -> None:
        batch = self.aws.batch
        if self._row() is None:
            return
        batch.update_compute_environment(computeEnvironment=self.id, state="DISABLED")
        self._settled()
        batch.delete_compute_environment(computeEnvironment=self.id)
        until(lambda: self._row() is None, f"Resource {self.logical_id}")

    def _row(self) -> Mapping[str, Any] | None:
        rows = self.aws.batch.describe_compute_environments(computeEnvironments=[self.id])["computeEnvironments"]
        return rows[0] if rows and rows[0]["status"] != "DELETED" else None

    def _settled(self) -> None:
        until(lambda: _is_settled(self._row()), f"Resource {self.logical_id}")


class JobQueue(
    Resource,
    type="AWS::Batch::JobQueue",
    fixed="JobQueueName JobQueueType Tags",
    mutable="ComputeEnvironmentOrder JobStateTimeLimitActions Priority SchedulingPolicyArn State",
    required="ComputeEnvironmentOrder Priority",
):
    """Where jobs wait. `Ref` is its ARN."""

    def create(self) -> str:
        name = str(self.p.get("JobQueueName") or self.name(128))
        made = self.call("batch", "create_job_queue", self.p, JobQueueName=name)
        self.id = made["jobQueueArn"]
        self._settled()
        return self.id

    def settle(self, old: Properties) -> None:
        names = ("ComputeEnvironmentOrder", "JobStateTimeLimitActions", "Priority", "SchedulingPolicyArn", "State")
        if old and (told := self.changed(old, *names)):
            self.call("batch", "update_job_queue", told, jobQueue=self.id)
            self._settled()

    def attributes(self) -> dict[str, Any]:
        return {"JobQueueArn": self.id}

    def delete(self) -> None:
        if self._row() is None:
            return
        self.aws.batch.update_job_queue(jobQueue=self.id, state="DISABLED")
        self._settled()
        self.aws.batch.delete_job_queue(jobQueue=self.id)
        until(lambda: self._row() is None, f"Resource {self.logical_id}")

    def _row(self) -> Mapping[str, Any] | None:
        rows = self.aws.batch.describe_job_queues(jobQueues=[self.id])["jobQueues"]
        return rows[0] if rows and rows[0]["status"] != "DELETED" else None

    def _settled(self) -> None:
        until(lambda: _is_settled(self._row()), f"Resource {self.logical_id}")


class JobDefinition(
    Resource,
    type="AWS::Batch::JobDefinition",
    fixed="JobDefinitionName",
    mutable="ContainerProperties EcsProperties EksProperties NodeProperties Parameters PlatformCapabilities "
    "PropagateTags RetryStrategy SchedulingPriority Tags Timeout Type",
    required="Type",
):
    """What a job runs; a change registers a new revision. `Ref` is its ARN, with the revision."""

    def create(self) -> str:
        name = str(self.p.get("JobDefinitionName") or self.name(128))
        return str(self.call("batch", "register_job_definition", self.p, JobDefinitionName=name)["jobDefinitionArn"])

    def replaces(self, old: Properties) -> bool:
        return bool(old)

    def attributes(self) -> dict[str, Any]:
        return {"JobDefinitionArn": self.id}

    def delete(self) -> None:
        self.aws.batch.deregister_job_definition(jobDefinition=self.id)


class SchedulingPolicy(Resource, type="AWS::Batch::SchedulingPolicy", fixed="Name", mutable="FairsharePolicy Tags"):
    """Who gets how much of a queue. `Ref` is its ARN."""

    def create(self) -> str:
        name = str(self.p.get("Name") or self.name(128))
        return str(self.call("batch", "create_scheduling_policy", self.p, Name=name)["arn"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "FairsharePolicy")):
            self.call("batch", "update_scheduling_policy", told, arn=self.id)

    def attributes(self) -> dict[str, Any]:
        return {"Arn": self.id}

    def delete(self) -> None:
        self.aws.batch.delete_scheduling_policy(arn=self.id)


def check_template(aws: Services, resources: Mapping[str, Any]) -> None:
    """Look at the launch template of compute resources, for each of their instance types; raises `ValueError`."""
    data = template_data(aws, resources.get("LaunchTemplate", {}))
    if topology.market(data) == "capacity-block" and resources.get("PlacementGroup"):
        raise ValueError("InvalidParameterCombination: a Capacity Block cannot be used with a placement group")
    for kind in resources.get("InstanceTypes", []):
        topology.check(data, str(kind))


def template_data(aws: Services, told: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a launch template, told by id or name and version; empty if none is told."""
    template = told.get("LaunchTemplateId") or told.get("Id")
    name = told.get("LaunchTemplateName") or told.get("Name")
    if not template and not name:
        return {}
    named = {"LaunchTemplateId": template} if template else {"LaunchTemplateName": name}
    version = str(told.get("Version") or "$Default")
    found = aws.ec2.describe_launch_template_versions(**named, Versions=[version])["LaunchTemplateVersions"]
    return dict(found[0]["LaunchTemplateData"]) if found else {}


def _is_settled(row: Mapping[str, Any] | None) -> bool:
    if row is None:
        raise ValueError("it is gone while it is being changed")
    if row["status"] == "INVALID":
        raise ValueError(f"Operation failed, resource went into an INVALID state: {row.get('statusReason', '')}")
    return bool(row["status"] == "VALID")
