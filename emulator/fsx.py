"""FSx in place of moto's: Lustre and OpenZFS with their sizes checked, mount names, data repository associations."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers
from emulator.memory import Row, table
from emulator.shapes import checked

FILES, LINKS = "fsx file system", "fsx association"
EFA_STEP_GIB = {125: 38400, 250: 19200, 500: 9600, 1000: 4800}
"""Throughput per TiB → what the size of an EFA file system is a multiple of (FSx user guide, storage capacity)."""
PER_TIB = {"PERSISTENT_1": (50, 100, 200), "PERSISTENT_2": (125, 250, 500, 1000)}
"""MB/s per TiB of SSD (FSx user guide, throughput capacity)."""
SETTINGS = ("LustreConfiguration", "OpenZFSConfiguration")
OPENZFS_GIB = (64, 524_288)


@answers("fsx", "CreateFileSystem")
def create_file_system(call: Call) -> dict[str, Any]:
    """A file system, available at once; the same client token is the same file system."""
    told = checked(call, "CreateFileSystem", "BadRequest")
    files, token = table(FILES, call.region), told.get("ClientRequestToken")
    with memory.lock:
        for row in files.values():
            if token and row["Token"] == token:
                return {"FileSystem": _seen(row)}
        kind = told["FileSystemType"]
        if kind not in ("LUSTRE", "OPENZFS"):
            raise Fault("BadRequest", f"file systems of type {kind} are not emulated here")
        check_size(told)
        name = memory.new_id("fs")
        row = files[name] = _made(name, call.region, told) | {"Token": token}
    return {"FileSystem": _seen(row)}


def check_size(told: Mapping[str, Any]) -> None:
    """Refuse what FSx refuses of sizes and throughputs."""
    size = int(told.get("StorageCapacity", 0))
    if told["FileSystemType"] == "OPENZFS":
        _within("StorageCapacity", size, *OPENZFS_GIB)
        return
    lustre = told.get("LustreConfiguration", {})
    kind = lustre.get("DeploymentType", "SCRATCH_1")
    per_tib = lustre.get("PerUnitStorageThroughput")
    if len(told["SubnetIds"]) != 1:
        raise Fault("BadRequest", "Exactly one subnet ID must be provided for a Lustre file system")
    if kind in PER_TIB and told.get("StorageType", "SSD") == "SSD" and per_tib not in PER_TIB[kind]:
        allowed = ", ".join(map(str, PER_TIB[kind]))
        raise Fault("BadRequest", f"PerUnitStorageThroughput {per_tib} is invalid for {kind}: one of {allowed}")
    if lustre.get("EfaEnabled"):
        if kind != "PERSISTENT_2" or "MetadataConfiguration" not in lustre:
            raise Fault("BadRequest", "EFA needs a PERSISTENT_2 file system with a metadata configuration")
        fine, step = size > 0 and size % EFA_STEP_GIB[per_tib] == 0, EFA_STEP_GIB[per_tib]
    elif told.get("StorageType") == "HDD":
        step = 6000 if per_tib == 12 else 1800
        fine = size > 0 and size % step == 0
    else:
        step = 3600 if kind == "SCRATCH_1" else 2400
        fine = size in (1200, 2400) or (size > 0 and size % step == 0)
    if not fine:
        more = "" if lustre.get("EfaEnabled") or told.get("StorageType") == "HDD" else "1200 GiB, 2400 GiB, or "
        raise Fault("BadRequest", f"StorageCapacity {size} is invalid for {kind}: {more}increments of {step} GiB")


@answers("fsx", "DescribeFileSystems")
def describe_file_systems(call: Call) -> dict[str, Any]:
    """The file systems of a region, or those asked for."""
    wanted = call.told.get("FileSystemIds", [])
    return {"FileSystems": [_seen(_file(call, name)) for name in wanted or list(table(FILES, call.region))]}


@answers("fsx", "UpdateFileSystem")
def update_file_system(call: Call) -> dict[str, Any]:
    """Another size or other settings; a size never shrinks."""
    told = checked(call, "UpdateFileSystem", "BadRequest")
    row = _file(call, told["FileSystemId"])
    size = told.get("StorageCapacity", row["StorageCapacity"])
    if size < row["StorageCapacity"]:
        raise Fault("BadRequest", f"StorageCapacity must be greater than {row['StorageCapacity']} GiB")
    settings = {name: row[name] | told[name] for name in SETTINGS if name in told}
    check_size(row | settings | {"StorageCapacity": size})
    row |= settings | {"StorageCapacity": size}
    return {"FileSystem": _seen(row)}


@answers("fsx", "DeleteFileSystem")
def delete_file_system(call: Call) -> dict[str, Any]:
    """Remove it together with its associations."""
    name = _file(call, call.told.get("FileSystemId", ""))["FileSystemId"]
    with memory.lock:
        table(FILES, call.region).pop(name, None)
        links = table(LINKS, call.region)
        for link in [key for key, row in links.items() if row["FileSystemId"] == name]:
            del links[link]
    return {"FileSystemId": name, "Lifecycle": "DELETING"}


@answers("fsx", "CreateDataRepositoryAssociation")
def create_association(call: Call) -> dict[str, Any]:
    """A folder of a Lustre file system tied to a prefix in S3."""
    told = checked(call, "CreateDataRepositoryAssociation", "BadRequest")
    lustre = _file(call, told["FileSystemId"]).get("LustreConfiguration")
    if lustre is None or lustre["DeploymentType"] == "SCRATCH_1":
        raise Fault("BadRequest", "Data repository associations need a Lustre file system other than SCRATCH_1")
    path, links = told.get("FileSystemPath", "/"), table(LINKS, call.region)
    if not told["DataRepositoryPath"].startswith("s3://"):
        raise Fault("BadRequest", f"DataRepositoryPath {told['DataRepositoryPath']!r} must begin with s3://")
    with memory.lock:
        for row in links.values():
            if row["FileSystemId"] == told["FileSystemId"] and row["FileSystemPath"] == path:
                raise Fault("BadRequest", f"FileSystemPath {path} is used by {row['AssociationId']}")
        name = memory.new_id("dra")
        arn = memory.arn("fsx", call.region, f"association/{told['FileSystemId']}/{name}")
        own = {"AssociationId": name, "ResourceARN": arn, "Lifecycle": "AVAILABLE", "CreationTime": time.time()}
        links[name] = told | own | {"FileSystemPath": path}
    return {"Association": _seen(links[name])}


@answers("fsx", "DescribeDataRepositoryAssociations")
def describe_associations(call: Call) -> dict[str, Any]:
    """The associations of a region, those asked for, or those of some file systems."""
    links, wanted = table(LINKS, call.region), call.told.get("AssociationIds", [])
    filters = {row["Name"]: row["Values"] for row in call.told.get("Filters", [])}
    of = filters.get("file-system-id")
    rows = [_link(call, name) for name in wanted] if wanted else list(links.values())
    return {"Associations": [_seen(row) for row in rows if of is None or row["FileSystemId"] in of]}


@answers("fsx", "UpdateDataRepositoryAssociation")
def update_association(call: Call) -> dict[str, Any]:
    """Other import and export policies."""
    row = _link(call, call.told.get("AssociationId", ""))
    row |= {key: call.told[key] for key in ("ImportedFileChunkSize", "S3") if key in call.told}
    return {"Association": _seen(row)}


@answers("fsx", "DeleteDataRepositoryAssociation")
def delete_association(call: Call) -> dict[str, Any]:
    """Untie the two."""
    name = _link(call, call.told.get("AssociationId", ""))["AssociationId"]
    table(LINKS, call.region).pop(name, None)
    return {"AssociationId": name, "Lifecycle": "DELETING", "DeleteDataInFileSystem": False}


@answers("fsx", "ListTagsForResource")
def list_tags(call: Call) -> dict[str, Any]:
    """The tags of a file system or an association."""
    return {"Tags": _tagged(call).get("Tags", [])}


@answers("fsx", "TagResource")
def tag_resource(call: Call) -> dict[str, Any]:
    """Add or replace tags."""
    row, new = _tagged(call), call.told["Tags"]
    kept = [tag for tag in row.get("Tags", []) if tag["Key"] not in {one["Key"] for one in new}]
    row["Tags"] = kept + new
    return {}


@answers("fsx", "UntagResource")
def untag_resource(call: Call) -> dict[str, Any]:
    """Remove tags."""
    row = _tagged(call)
    row["Tags"] = [tag for tag in row.get("Tags", []) if tag["Key"] not in call.told["TagKeys"]]
    return {}


def _made(name: str, region: str, told: Mapping[str, Any]) -> Row:
    row = {key: value for key, value in told.items() if key not in ("ClientRequestToken", "SecurityGroupIds")} | {
        "FileSystemId": name,
        "OwnerId": memory.ACCOUNT,
        "CreationTime": time.time(),
        "Lifecycle": "AVAILABLE",
        "StorageType": told.get("StorageType", "SSD"),
        "DNSName": f"{name}.fsx.{region}.amazonaws.com",
        "ResourceARN": memory.arn("fsx", region, f"file-system/{name}"),
        "NetworkInterfaceIds": [memory.new_id("eni")],
    }
    if told["FileSystemType"] == "LUSTRE":
        lustre = {"DeploymentType": "SCRATCH_1"} | told.get("LustreConfiguration", {})
        mount = "fsx" if lustre["DeploymentType"] == "SCRATCH_1" else secrets.token_hex(4)
        row["LustreConfiguration"] = lustre | {"MountName": mount}
    else:
        zfs = {**told.get("OpenZFSConfiguration", {}), "RootVolumeId": memory.new_id("fsvol")}
        zfs.pop("RootVolumeConfiguration", None)
        row["OpenZFSConfiguration"] = zfs
    return row


def _file(call: Call, name: str) -> Row:
    if name not in (files := table(FILES, call.region)):
        raise Fault("FileSystemNotFound", f"File system '{name}' does not exist.")
    return files[name]


def _link(call: Call, name: str) -> Row:
    if name not in (links := table(LINKS, call.region)):
        raise Fault("DataRepositoryAssociationNotFound", f"Data repository association '{name}' does not exist.")
    return links[name]


def _tagged(call: Call) -> Row:
    arn = call.told.get("ResourceARN")
    for row in (*table(FILES, call.region).values(), *table(LINKS, call.region).values()):
        if row["ResourceARN"] == arn:
            return row
    raise Fault("ResourceNotFound", f"The resource {arn} does not exist.")


def _seen(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("Token", "ClientRequestToken")}


def _within(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Fault("BadRequest", f"{what} {value} is invalid: from {least} to {most} GiB")
