"""What moto's EC2 lacks: placement groups; and how all our EC2 answers are written."""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers, listed

PLACEMENT = "placement group"
STRATEGIES = ("cluster", "partition", "spread")


def query_list(call: Call, name: str) -> list[str]:
    """The values of `name.1`, `name.2` … of a request."""
    return listed(call.told, name)


def query_tags(call: Call) -> list[dict[str, str]]:
    """The tags of a request's first tag specification."""
    found, number = [], 1
    while (key := call.told.get(f"TagSpecification.1.Tag.{number}.Key")) is not None:
        found.append({"Key": key, "Value": call.told.get(f"TagSpecification.1.Tag.{number}.Value", "")})
        number += 1
    return found


def filtered(call: Call, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that pass the request's filters: `tag:name`, `tag-key`, and members by their names in kebab case."""
    number = 1
    while (name := call.told.get(f"Filter.{number}.Name")) is not None:
        values = query_list(call, f"Filter.{number}.Value")
        rows = [row for row in rows if set(_values(row, name)) & set(values)]
        number += 1
    return rows


def answer(call: Call, told: Mapping[str, Any]) -> dict[str, Any]:
    """An answer in the API's names, written in those that go over the wire."""
    out: dict[str, Any] = _wire(_model().operation_model(call.operation).output_shape, told)
    return out


@answers("ec2", "CreatePlacementGroup")
def create_placement_group(call: Call) -> dict[str, Any]:
    """A placement group, usable at once."""
    name, strategy = call.told.get("GroupName", ""), call.told.get("Strategy", "cluster")
    if strategy not in STRATEGIES:
        raise Fault("InvalidParameterValue", f"Value ({strategy}) for parameter Strategy is invalid.")
    with memory.lock:
        rows = memory.table(PLACEMENT, call.region)
        if name in rows:
            raise Fault("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
        rows[name] = {
            "GroupName": name,
            "GroupId": memory.new_id("pg"),
            "GroupArn": memory.arn("ec2", call.region, f"placement-group/{name}"),
            "State": "available",
            "Strategy": strategy,
            "Tags": query_tags(call),
        }
        if "PartitionCount" in call.told:
            rows[name]["PartitionCount"] = int(call.told["PartitionCount"])
    return answer(call, {"PlacementGroup": rows[name]})


@answers("ec2", "DescribePlacementGroups")
def describe_placement_groups(call: Call) -> dict[str, Any]:
    """The placement groups of a region; a name that does not exist is an error."""
    rows = memory.table(PLACEMENT, call.region)
    names, ids = query_list(call, "GroupName"), query_list(call, "GroupId")
    for missing in (name for name in names if name not in rows):
        raise Fault("InvalidPlacementGroup.Unknown", f"The Placement Group '{missing}' is unknown.")
    found = [row for row in rows.values() if not names + ids or row["GroupName"] in names or row["GroupId"] in ids]
    return answer(call, {"PlacementGroups": filtered(call, found)})


@answers("ec2", "DeletePlacementGroup")
def delete_placement_group(call: Call) -> dict[str, Any]:
    """Remove one; an unknown one is an error."""
    name = call.told.get("GroupName", "")
    with memory.lock:
        if memory.table(PLACEMENT, call.region).pop(name, None) is None:
            raise Fault("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    return {"return": True}


def _values(row: Mapping[str, Any], name: str) -> list[str]:
    own = {tag["Key"]: tag["Value"] for tag in row.get("Tags", [])}
    if name == "tag-key":
        return list(own)
    if name.startswith("tag:"):
        return [own[name[4:]]] if name[4:] in own else []
    member = "".join(word.capitalize() for word in name.split("-"))
    return [str(row[member])] if member in row else []


def _wire(shape: Any, value: Any) -> Any:
    if shape.type_name == "structure":
        given = {name: one for name, one in value.items() if one is not None}
        members = {name: shape.members[name] for name in given}
        return {members[name].serialization.get("name", name): _wire(members[name], one) for name, one in given.items()}
    if shape.type_name == "list":
        return [_wire(shape.member, one) for one in value]
    return value.strftime("%Y-%m-%dT%H:%M:%S.000Z") if isinstance(value, datetime) else value


@cache
def _model() -> Any:
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model("ec2", "service-2"), "ec2")
