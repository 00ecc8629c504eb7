"""The types of SageMaker: what serves a model, and HyperPod clusters, made through its API."""

from typing import Any

from emulator.resources import Properties, Resource, tag_list


class SageMakerModel(
    Resource,
    type="AWS::SageMaker::Model",
    fixed="Containers EnableNetworkIsolation ExecutionRoleArn InferenceExecutionConfig ModelName PrimaryContainer "
    "VpcConfig",
    mutable="Tags",
):
    """A model to serve. `Ref` is its ARN, as of the two below; its name is an attribute."""

    def create(self) -> str:
        name = str(self.p.get("ModelName") or self.name(63))
        told = self.chosen("ModelName", "Tags")
        return str(self.call("sagemaker", "create_model", told, ModelName=name, Tags=tag_list(self.p))["ModelArn"])

    def attributes(self) -> dict[str, Any]:
        return {"ModelName": _last(self.id)}

    def delete(self) -> None:
        self.aws.sagemaker.delete_model(ModelName=_last(self.id))


class EndpointConfig(
    Resource,
    type="AWS::SageMaker::EndpointConfig",
    fixed="AsyncInferenceConfig DataCaptureConfig EndpointConfigName KmsKeyId ProductionVariants",
    mutable="Tags",
    required="ProductionVariants",
):
    """What an endpoint serves, and on which instances."""

    def create(self) -> str:
        name = str(self.p.get("EndpointConfigName") or self.name(63))
        told = self.chosen("EndpointConfigName", "Tags")
        made = self.call("sagemaker", "create_endpoint_config", told, EndpointConfigName=name, Tags=tag_list(self.p))
        return str(made["EndpointConfigArn"])

    def attributes(self) -> dict[str, Any]:
        return {"EndpointConfigName": _last(self.id)}

    def delete(self) -> None:
        self.aws.sagemaker.delete_endpoint_config(EndpointConfigName=_last(self.id))


class Endpoint(
    Resource,
    type="AWS::SageMaker::Endpoint",
    fixed="EndpointName",
    mutable="DeploymentConfig EndpointConfigName RetainAllVariantProperties Tags",
    required="EndpointConfigName",
):
    """What answers requests with a model."""

    def create(self) -> str:
        name = str(self.p.get("EndpointName") or self.name(63))
        told = {"EndpointConfigName": _last(self.p["EndpointConfigName"]), "Tags": tag_list(self.p)}
        return str(self.call("sagemaker", "create_endpoint", told, EndpointName=name)["EndpointArn"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "EndpointConfigName")):
            config = _last(told["EndpointConfigName"])
            self.call("sagemaker", "update_endpoint", EndpointName=_last(self.id), EndpointConfigName=config)

    def attributes(self) -> dict[str, Any]:
        return {"EndpointName": _last(self.id)}

    def delete(self) -> None:
        self.aws.sagemaker.delete_endpoint(EndpointName=_last(self.id))


class HyperPod(
    Resource,
    type="AWS::SageMaker::Cluster",
    fixed="ClusterName VpcConfig",
    mutable="AutoScaling ClusterRole InstanceGroups NodeProvisioningMode NodeRecovery Orchestrator "
    "RestrictedInstanceGroups Tags TieredStorageConfig",
):
    """A HyperPod cluster. `Ref` is its ARN."""

    unmoved = frozenset(("NodeProvisioningMode", "Orchestrator", "RestrictedInstanceGroups", "TieredStorageConfig"))

    def create(self) -> str:
        name = str(self.p.get("ClusterName") or self.name(63))
        told = self.chosen("ClusterName", "Tags")
        made = self.call("sagemaker", "create_cluster", told, ClusterName=name, Tags=tag_list(self.p))
        return str(made["ClusterArn"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "InstanceGroups", "NodeRecovery", "AutoScaling", "ClusterRole")):
            gone = {one["InstanceGroupName"] for one in old.get("InstanceGroups", [])}
            gone -= {one["InstanceGroupName"] for one in self.p.get("InstanceGroups", [])}
            told |= {"InstanceGroupsToDelete": sorted(gone)} if gone else {}
            told |= {"InstanceGroups": self.p.get("InstanceGroups", [])}
            self.call("sagemaker", "update_cluster", told, ClusterName=_last(self.id))

    def attributes(self) -> dict[str, Any]:
        found = self.aws.sagemaker.describe_cluster(ClusterName=_last(self.id))
        told = {"ClusterStatus": found["ClusterStatus"], "CreationTime": str(found["CreationTime"])}
        return {"ClusterArn": self.id} | told

    def delete(self) -> None:
        self.aws.sagemaker.delete_cluster(ClusterName=_last(self.id))


def _last(arn: str) -> str:
    return str(arn).rpartition("/")[2]
