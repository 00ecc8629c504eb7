"""Machine images at EC2: what one is baked from, which exist, what a build leaves behind, how they are published.

An image of ours counts once it is tagged `castra:ready`; until then it belongs to its build, and goes with it.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusters import aws
from clusters.aws import Site
from clusters.base import ClusterError, Refused

FLAVOUR, DIGEST, BUILD, READY = "castra:flavour", "castra:content-hash", "castra:build", "castra:ready"
BOOTED = "castra:booted"
"""When an instance of it was last seen to be what it should be."""
LIVING = ("pending", "running", "stopping", "stopped")
GONE_S, LOOK_S = 600.0, 2.0
DEPRECATED_DAYS = 90
"""After which an image that a newer one has replaced is told to be old."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a build's instance stands in the account's network, and who it is there."""

    subnet: str = ""
    """"" is the default VPC's."""
    profile: str = ""
    """The instance profile whose rights its programs have; "" is none."""
    source: str = "0.0.0.0/0"
    """The addresses (CIDR) that reach its SSH, for which there is a key that lives as long as the build."""


ANYWHERE = Place()


@dataclass(frozen=True, slots=True)
class BaseImage:
    """What an image is baked from."""

    id: str
    name: str
    root_device: str


@dataclass(frozen=True, slots=True)
class Image:
    """One of our images in one region."""

    id: str
    name: str
    created: str
    """UTC, ISO 8601."""
    digest: str
    snapshots: tuple[str, ...]
    booted: str = ""
    """When it was last tried, UTC, ISO 8601; "" if it never was."""


def parameter(flavour: str) -> str:
    """The parameter of the systems manager that holds the id of a flavour's newest image."""
    return f"/castra/images/{flavour}/latest"


def base_image(site: Site, told_in: str, owner: str, name: str) -> BaseImage:
    """The base image: the one that a public parameter names, else the newest of that owner and name.

    Raises `Refused` if there is none.
    """
    found = _parameter(site, told_in) if told_in else None
    with aws.sentences(site, f"look for the base image {name}"):
        ec2 = aws.client(site, "ec2")
        wanted = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
        rows = ec2.describe_images(ImageIds=[found])["Images"] if found else []
        rows = rows or ec2.describe_images(Owners=[owner], Filters=wanted)["Images"]
    if not rows:
        where = f"neither in {told_in} nor as {name} of {owner}" if told_in else f"as {name} of {owner}"
        raise Refused(f"no base image is published in {site.region} ({where}): take another region, or fix the flavour")
    row = max(rows, key=lambda one: one["CreationDate"])
    return BaseImage(row["ImageId"], row["Name"], row["RootDeviceName"])


def check_offered(site: Site, instance_type: str) -> None:
    """Raise `Refused` if a region does not have an instance type."""
    with aws.sentences(site, f"ask for {instance_type}"):
        wanted = [{"Name": "instance-type", "Values": [instance_type]}]
        rows = aws.client(site, "ec2").describe_instance_type_offerings(Filters=wanted)["InstanceTypeOfferings"]
    if not rows:
        raise Refused(f"{site.region} has no {instance_type}, on which the image is baked: take another region")


def images(site: Site, flavour: str, digest: str = "") -> list[Image]:
    """Our finished images of a flavour in a region, newest first; of one content hash, if it is given."""
    wanted = [{"Name": f"tag:{FLAVOUR}", "Values": [flavour]}, {"Name": "tag-key", "Values": [READY]}]
    wanted += [{"Name": f"tag:{DIGEST}", "Values": [digest]}] if digest else []
    with aws.sentences(site, f"list the images of {flavour}"):
        rows = aws.client(site, "ec2").describe_images(Owners=["self"], Filters=wanted)["Images"]
    return sorted((_image(row) for row in rows), key=lambda image: (image.created, image.id), reverse=True)


def open_door(site: Site, tags: Mapping[str, str], build: str, port: int, place: Place = ANYWHERE) -> str:
    """Make the security group through which a build reaches its instance; returns its id."""
    with aws.sentences(site, "make the security group of the build"):
        ec2 = aws.client(site, "ec2")
        subnet = [place.subnet] if place.subnet else []
        where = {"VpcId": ec2.describe_subnets(SubnetIds=subnet)["Subnets"][0]["VpcId"]} if subnet else {}
        labels = [{"ResourceType": "security-group", "Tags": _tags(tags)}]
        told = {"GroupName": name_of(build), "Description": "Castra bakes an image", "TagSpecifications": labels}
        group = str(ec2.create_security_group(**told, **where)["GroupId"])
        who = [{"CidrIp": place.source, "Description": "SSH with a key that lives as long as the build"}]
        rule = {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": who}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    return group


def name_of(build: str) -> str:
    """What a build calls its security group and its key pair."""
    return f"castra-build-{build}"


def try_out(site: Site, image: str, told: Mapping[str, Any], build: str, place: Place = ANYWHERE) -> str:
    """Launch an instance of an image, which has the build's door and key; returns the private key.

    `told` has instance_type, tags, port and minutes, after which the instance ends itself.
    """
    group, name = open_door(site, told["tags"], build, told["port"], place), name_of(build)
    labels = _tags(told["tags"])
    with aws.sentences(site, f"launch an instance of {image}"):
        ec2 = aws.client(site, "ec2")
        mark = [{"ResourceType": "key-pair", "Tags": labels}]
        key = str(ec2.create_key_pair(KeyName=name, TagSpecifications=mark)["KeyMaterial"])
        more: dict[str, Any] = {"SubnetId": place.subnet} if place.subnet else {}
        more |= {"IamInstanceProfile": {"Name": place.profile}} if place.profile else {}
        ec2.run_instances(
            ImageId=image,
            InstanceType=told["instance_type"],
            MinCount=1,
            MaxCount=1,
            KeyName=name,
            SecurityGroupIds=[group],
            MetadataOptions={"HttpTokens": "required", "HttpEndpoint": "enabled"},
            InstanceInitiatedShutdownBehavior="terminate",
            UserData=f"#!/bin/sh\nshutdown -h +{told['minutes']}\n",
            TagSpecifications=[{"ResourceType": kind, "Tags": labels} for kind in ("instance", "volume")],
            **more,
        )
    return key


def address(site: Site, build: str, interface: str) -> str:
    """Where the instance of a build is reached; "" while it does not run. With private_ip, only within its network."""
    found = standing(site, build)
    with aws.sentences(site, f"look for the instance of build {build}"):
        rows = aws.client(site, "ec2").describe_instances(InstanceIds=found)["Reservations"] if found else []
    one: Mapping[str, Any] = rows[0]["Instances"][0] if rows else {}
    if one.get("State", {}).get("Name") != "running":
        return ""
    public = "" if interface == "private_ip" else one.get("PublicIpAddress", "")
    return str(public or one.get("PrivateIpAddress", ""))


def booted(site: Site, image: str, at: str) -> None:
    """Note that an instance of an image was seen to be what it should be."""
    with aws.sentences(site, f"note that {image} boots"):
        aws.client(site, "ec2").create_tags(Resources=[image], Tags=_tags({BOOTED: at}))


def standing(site: Site, build: str) -> list[str]:
    """The instances of a build that are there."""
    wanted = [{"Name": f"tag:{BUILD}", "Values": [build]}, {"Name": "instance-state-name", "Values": [*LIVING]}]
    with aws.sentences(site, f"look for instances of build {build}"):
        rows = aws.client(site, "ec2").describe_instances(Filters=wanted)["Reservations"]
    return [str(one["InstanceId"]) for row in rows for one in row["Instances"]]


def require_tokens(site: Site, build: str) -> None:
    """Make the instances of a build refuse version 1 of the metadata service, where Packer could not ask for that."""
    for instance in standing(site, build):
        with aws.sentences(site, f"require IMDSv2 of {instance}"):
            aws.client(site, "ec2").modify_instance_metadata_options(InstanceId=instance, HttpTokens="required")


def clear(site: Site, build: str) -> list[str]:
    """Remove what a build that is over has left: instances, volumes, security group, keys, an image not finished.

    Returns what was removed; raises `ClusterError` if an instance does not end.
    """
    removed = standing(site, build)
    with aws.sentences(site, f"clear up after build {build}"):
        ec2 = aws.client(site, "ec2")
        if removed:
            ec2.terminate_instances(InstanceIds=removed)
            _await_gone(site, build)
        ours = [{"Name": f"tag:{BUILD}", "Values": [build]}]
        named = [{"Name": "name", "Values": [f"*-{build}"]}]
        found = {row["ImageId"]: row for by in (ours, named) for row in _own_images(ec2, by)}
        unfinished = [row for row in found.values() if READY not in _told(row)]
        unmarked = [row for row in unfinished if FLAVOUR not in _told(row)]
        if names := [one for row in unmarked for one in (row["ImageId"], *_image(row).snapshots)]:
            # killed before it could tag them, and only what is tagged may be removed (clusters.image_rights)
            ec2.create_tags(Resources=names, Tags=_tags({FLAVOUR: "unfinished", BUILD: build}))
        for row in unfinished:
            removed += remove(site, _image(row))
        kept = {one for row in found.values() if row not in unfinished for one in _image(row).snapshots}
        for row in ec2.describe_snapshots(OwnerIds=["self"], Filters=ours)["Snapshots"]:
            if row["SnapshotId"] not in {*kept, *removed}:
                ec2.delete_snapshot(SnapshotId=row["SnapshotId"])
                removed.append(row["SnapshotId"])
        for row in ec2.describe_volumes(Filters=[*ours, {"Name": "status", "Values": ["available"]}])["Volumes"]:
            ec2.delete_volume(VolumeId=row["VolumeId"])
            removed.append(row["VolumeId"])
        name = name_of(build)
        for row in ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [name]}])["KeyPairs"]:
            ec2.delete_key_pair(KeyName=row["KeyName"])
            removed.append(row["KeyName"])
        for row in ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [name]}])["SecurityGroups"]:
            ec2.delete_security_group(GroupId=row["GroupId"])
            removed.append(row["GroupId"])
    return removed


def finish(site: Site, image: str, at: str) -> None:
    """Let an image count from now on; it and its instances have version 2 of the metadata service alone."""
    with aws.sentences(site, f"finish image {image}"):
        ec2 = aws.client(site, "ec2")
        ec2.modify_image_attribute(ImageId=image, ImdsSupport={"Value": "v2.0"})
        ec2.create_tags(Resources=[image], Tags=_tags({READY: at}))


def copy(site: Site, source: Site, image: Image, tags: Mapping[str, str], kms_key: str = "") -> str:
    """Copy a finished image to another region; returns its id there, where it is not finished yet."""
    with aws.sentences(site, f"copy {image.id} from {source.region}"):
        ec2 = aws.client(site, "ec2")
        encrypted = {"Encrypted": True} | ({"KmsKeyId": kms_key} if kms_key else {})
        told = {"SourceImageId": image.id, "SourceRegion": source.region, "Name": image.name}
        made = str(ec2.copy_image(**told, **encrypted, ClientToken=f"{image.id}-{site.region}")["ImageId"])
        ec2.create_tags(Resources=[made], Tags=_tags(tags))
        _await_available(site, made)
        row = ec2.describe_images(ImageIds=[made])["Images"][0]
        if snapshots := _image(row).snapshots:
            ec2.create_tags(Resources=list(snapshots), Tags=_tags(tags))
    return made


def share(site: Site, image: Image, accounts: Iterable[str]) -> None:
    """Let other accounts start instances from an image."""
    users = [{"UserId": account} for account in accounts]
    with aws.sentences(site, f"share {image.id}"):
        ec2 = aws.client(site, "ec2")
        ec2.modify_image_attribute(ImageId=image.id, LaunchPermission={"Add": users})
        for snapshot in image.snapshots:
            told = {"SnapshotId": snapshot, "Attribute": "createVolumePermission", "OperationType": "add"}
            ec2.modify_snapshot_attribute(**told, UserIds=[user["UserId"] for user in users])


def publish(site: Site, flavour: str, image: Image, at: str) -> None:
    """Make an image the flavour's newest: its id in a parameter, and a date on those before it."""
    with aws.sentences(site, f"publish {image.id}"):
        aws.client(site, "ssm").put_parameter(
            Name=parameter(flavour), Value=image.id, Type="String", DataType="aws:ec2:image", Overwrite=True
        )
        for older in images(site, flavour):
            if older.id != image.id:
                aws.client(site, "ec2").enable_image_deprecation(ImageId=older.id, DeprecateAt=at)


def published(site: Site, flavour: str) -> str:
    """The id of a flavour's newest image; "" if none is published."""
    return _parameter(site, parameter(flavour)) or ""


def superseded(site: Site, flavour: str, keep: int) -> list[Image]:
    """The images of a flavour but for the newest `keep`, the published one, and those that instances run."""
    latest = published(site, flavour)
    old = [image for image in images(site, flavour)[keep:] if image.id != latest]
    if not old:
        return []
    running = [{"Name": "image-id", "Values": [image.id for image in old]}]
    with aws.sentences(site, f"look for instances of {flavour}"):
        rows = aws.client(site, "ec2").describe_instances(
            Filters=[*running, {"Name": "instance-state-name", "Values": [*LIVING]}]
        )["Reservations"]
    used = {one["ImageId"] for row in rows for one in row["Instances"]}
    return [image for image in old if image.id not in used]


def remove(site: Site, image: Image) -> list[str]:
    """Deregister an image and delete its snapshots; returns their ids."""
    with aws.sentences(site, f"remove {image.id}"):
        ec2 = aws.client(site, "ec2")
        ec2.deregister_image(ImageId=image.id)
        for snapshot in image.snapshots:
            ec2.delete_snapshot(SnapshotId=snapshot)
    return [image.id, *image.snapshots]


def _image(row: Mapping[str, Any]) -> Image:
    disks = [one.get("Ebs", {}).get("SnapshotId") for one in row.get("BlockDeviceMappings", [])]
    told, name, created = _told(row), row.get("Name", ""), row.get("CreationDate", "")
    snapshots = tuple(one for one in disks if one)
    return Image(row["ImageId"], name, created, told.get(DIGEST, ""), snapshots, told.get(BOOTED, ""))


def _own_images(ec2: Any, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(ec2.describe_images(Owners=["self"], Filters=wanted)["Images"])


def _parameter(site: Site, name: str) -> str | None:
    with aws.sentences(site, f"read {name}"):
        rows = aws.client(site, "ssm").get_parameters(Names=[name])["Parameters"]
    return str(rows[0]["Value"]) if rows else None


def _await_gone(site: Site, build: str) -> None:
    until = time.monotonic() + GONE_S
    while standing(site, build):
        if time.monotonic() > until:
            raise ClusterError(f"instances of build {build} do not end in {site.region}: terminate them by hand")
        time.sleep(LOOK_S)


def _await_available(site: Site, image: str) -> None:
    with aws.sentences(site, f"wait for {image}"):
        wait = {"Delay": 1 if site.endpoint else 15, "MaxAttempts": 240}
        aws.client(site, "ec2").get_waiter("image_available").wait(ImageIds=[image], WaiterConfig=wait)


def _told(row: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", [])}


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]
