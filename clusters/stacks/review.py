"""A template read against what we know of instance types: mistakes that deploy well and then start no instance.

CloudFormation checks each property for itself; what follows is how they go together. It reads our templates and
anybody's: a launch template is judged by the instance types of whatever starts instances from it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from clusters import catalog, interfaces

Resource = Mapping[str, Any]


def problems(template: Mapping[str, Any]) -> list[str]:
    """What no instance would start from, or no gang run on, one sentence each with the resource's name."""
    resources = template["Resources"]
    found: list[str] = []
    for name, told in resources.items():
        properties = told.get("Properties", {})
        match told["Type"]:
            case "AWS::EC2::LaunchTemplate":
                found += _launch(name, properties["LaunchTemplateData"])
            case "AWS::Batch::ComputeEnvironment":
                made = properties["ComputeResources"]
                found += _environment(name, made)
                found += _fits(name, resources, made.get("LaunchTemplate", {}), made.get("InstanceTypes", []))
                found += _block(name, resources, made.get("LaunchTemplate", {}), "PlacementGroup" in made)
            case "AWS::EKS::Nodegroup":
                found += _nodegroup(name, resources, properties)
                found += _fits(
                    name, resources, properties.get("LaunchTemplate", {}), properties.get("InstanceTypes", [])
                )
            case "AWS::PCS::ComputeNodeGroup":
                types = [one["InstanceType"] for one in properties["InstanceConfigs"]]
                found += _fits(name, resources, properties.get("CustomLaunchTemplate", {}), types)
    return found


def _launch(name: str, data: Resource) -> Iterator[str]:
    if data.get("NetworkInterfaces") and (data.get("SecurityGroupIds") or data.get("SecurityGroups")):
        yield f"{name}: a launch template with interfaces has its security groups there: move SecurityGroupIds to each"
    if _is_block(data) and data.get("Placement", {}).get("GroupName"):
        yield f"{name}: a capacity block takes no placement group: take Placement out"
    if _is_block(data) and not data.get("CapacityReservationSpecification"):
        yield f"{name}: MarketType capacity-block needs the block's id: add a CapacityReservationTarget"
    if "InstanceType" in data:
        yield from _layout(name, data, data["InstanceType"])


def _environment(name: str, made: Resource) -> Iterator[str]:
    if made.get("Type") == "EC2" and len(made.get("Subnets", [])) > 1:
        yield f"{name}: the nodes of one job would be spread over several zones: name one subnet"


def _block(name: str, resources: Resource, wanted: Resource, grouped: bool) -> Iterator[str]:
    if grouped and _is_block(_data(resources, wanted)):
        yield f"{name}: a capacity block takes no placement group: take PlacementGroup out"


def _nodegroup(name: str, resources: Resource, properties: Resource) -> Iterator[str]:
    data = _data(resources, properties.get("LaunchTemplate", {}))
    if any("SubnetId" in one for one in data.get("NetworkInterfaces", [])):
        yield f"{name}: EKS places the nodes itself: take SubnetId out of the launch template's interfaces"
    if _is_block(data) != (properties.get("CapacityType") == "CAPACITY_BLOCK"):
        yield f"{name}: CapacityType CAPACITY_BLOCK and the launch template's MarketType go together: set both or none"
    if "InstanceType" in data and properties.get("InstanceTypes"):
        yield f"{name}: the instance type is told twice: leave it in the launch template or in InstanceTypes"


def _fits(name: str, resources: Resource, wanted: Resource, types: list[str]) -> Iterator[str]:
    data = _data(resources, wanted)
    for kind in types:
        if data:
            yield from _layout(name, data, kind)


def _layout(name: str, data: Resource, kind: str) -> Iterator[str]:
    known, layout = catalog.load().get(kind), data.get("NetworkInterfaces")
    if known and layout:
        yield from (f"{name}: {problem}" for problem in interfaces.problems(known, layout))


def _is_block(data: Resource) -> bool:
    return bool(data.get("InstanceMarketOptions", {}).get("MarketType") == "capacity-block")


def _data(resources: Resource, wanted: Resource) -> Resource:
    """The data of the launch template that is referred to, nothing if it is of another stack."""
    told = next((wanted[key] for key in ("LaunchTemplateId", "Id", "TemplateId") if key in wanted), None)
    name = told.get("Ref", "") if isinstance(told, Mapping) else ""
    found: Resource = resources.get(name, {}).get("Properties", {}).get("LaunchTemplateData", {})
    return found
