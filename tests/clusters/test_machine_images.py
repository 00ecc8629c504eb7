"""Machine images at EC2, without a build: which count, how they are published, copied, shared, pruned and cleared."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusters import builds, ledger, machine_images
from clusters.aws import Site
from clusters.base import Refused
from clusters.machine_images import BUILD, DIGEST, FLAVOUR, Image, Place
from store import Store, open_store
from store.lease import lease
from tests.sky import client

PCLUSTER = ("247102896272", "aws-parallelcluster-3.16.1-ubuntu-2404-lts-hvm-x86_64-*")
numbers = itertools.count(1)


@pytest.fixture
def flavour() -> str:
    """One that no other test has images of."""
    return f"flavour{next(numbers)}"


def instance(site: Site, **tags: str) -> str:
    ec2 = client("ec2", site.endpoint)
    base = machine_images.base_image(site, "", *PCLUSTER)
    labels = [{"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}]
    more = {"TagSpecifications": labels} if tags else {}
    return str(ec2.run_instances(ImageId=base.id, MinCount=1, MaxCount=1, **more)["Instances"][0]["InstanceId"])


def made(site: Site, flavour: str, digest: str = "d1", build: str = "b", *, ready: bool = True) -> Image:
    """An image as Packer makes it."""
    ec2 = client("ec2", site.endpoint)
    one = instance(site)
    image = ec2.create_image(InstanceId=one, Name=f"castra-{flavour}-{digest}-{build}")["ImageId"]
    ec2.terminate_instances(InstanceIds=[one])
    tags = {FLAVOUR: flavour, DIGEST: digest, BUILD: build}
    ec2.create_tags(Resources=[image], Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
    if ready:
        machine_images.finish(site, image, "2026-11-20T00:00:00+00:00")
        (found,) = [one for one in machine_images.images(site, flavour) if one.id == image]
        return found
    return Image(image, "", "", digest, ())


def test_a_base_image_is_the_parameter_s_or_the_newest_of_its_name(site: Site) -> None:
    base = machine_images.base_image(site, "", *PCLUSTER)
    assert (base.name.partition("-3.16.1")[0], base.root_device) == ("aws-parallelcluster", "/dev/sda1")
    told = "/aws/service/debian/release/12/latest/amd64"
    assert machine_images.base_image(site, told, "136693071363", "none").name.startswith("debian-12")
    with pytest.raises(Refused, match=r"no base image is published in us-east-1 \(as none of 000000000000\)"):
        machine_images.base_image(site, "", "000000000000", "none")


def test_a_region_without_the_instance_type_is_refused(site: Site) -> None:
    machine_images.check_offered(site, "m7i.large")
    with pytest.raises(Refused, match=r"has no p9\.metal"):
        machine_images.check_offered(site, "p9.metal")


def test_only_finished_images_of_the_hash_count(site: Site, flavour: str) -> None:
    made(site, flavour, "d1", "b1", ready=False)
    second = made(site, flavour, "d2", "b2")
    assert machine_images.images(site, flavour) == [second]
    assert machine_images.images(site, flavour, "d1") == []
    assert machine_images.images(site, flavour, "d2") == [second]


def test_the_newest_is_published_and_those_that_nobody_uses_are_pruned(site: Site, flavour: str) -> None:
    images = [made(site, flavour, f"d{number}") for number in range(4)]
    machine_images.publish(site, flavour, images[0], "2027-01-01T00:00:00+00:00")
    assert machine_images.published(site, flavour) == images[0].id
    doomed = machine_images.superseded(site, flavour, keep=1)
    assert images[0] not in doomed, "the published one stays, however old"
    assert len(doomed) in (2, 3)
    ec2 = client("ec2", site.endpoint)
    used = ec2.run_instances(ImageId=doomed[0].id, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    left = machine_images.superseded(site, flavour, keep=1)
    assert doomed[0] not in left, "what runs stays"
    ec2.terminate_instances(InstanceIds=[used])
    for image in left:
        machine_images.remove(site, image)
        assert image.id not in [one.id for one in machine_images.images(site, flavour)]
        assert not ec2.describe_snapshots(Filters=[{"Name": "snapshot-id", "Values": [*image.snapshots]}])["Snapshots"]


def test_an_image_is_copied_with_its_tags_and_shared_with_its_snapshots(site: Site, flavour: str) -> None:
    image = made(site, flavour)
    there = replace(site, region="us-west-2")
    copied = machine_images.copy(there, site, image, {FLAVOUR: flavour, DIGEST: image.digest})
    assert machine_images.images(there, flavour) == [], "not finished yet"
    machine_images.finish(there, copied, "2026-11-20T00:00:00+00:00")
    assert [one.id for one in machine_images.images(there, flavour, image.digest)] == [copied]
    machine_images.share(site, image, ["111122223333"])
    told: Any = client("ec2", site.endpoint).describe_image_attribute(ImageId=image.id, Attribute="launchPermission")
    assert told["LaunchPermissions"] == [{"UserId": "111122223333"}]


def test_what_a_build_left_is_cleared_and_what_it_finished_stays(site: Site, flavour: str) -> None:
    ec2 = client("ec2", site.endpoint)
    build = f"build{next(numbers)}"
    finished = made(site, flavour, "d1", build)
    half = made(site, flavour, "d1", build, ready=False)
    group = machine_images.open_door(site, {BUILD: build}, build, 22)
    ec2.create_key_pair(KeyName=machine_images.name_of(build))
    one, other = instance(site, **{BUILD: build}), instance(site, **{BUILD: "another"})
    removed = machine_images.clear(site, build)
    assert {one, half.id, group, machine_images.name_of(build)} <= set(removed)
    assert finished.id not in removed
    assert machine_images.clear(site, build) == []
    assert machine_images.standing(site, "another") == [other]
    ec2.terminate_instances(InstanceIds=[other])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_a_build_that_nobody_works_on_is_swept_and_one_at_work_is_not(site: Site, store: Store, flavour: str) -> None:
    entry = builds.intend(store, site, flavour, "d1", 20)
    one = instance(site, **{BUILD: entry.token})
    with lease(store, f"image-{entry.name}"):
        assert builds.sweep(store, lambda _: None) == []
    assert builds.sweep(store, lambda _: None) == [one]
    assert ledger.open_entries(store) == []


def test_another_attempt_clears_the_last_one_and_has_a_name_of_its_own(site: Site, store: Store, flavour: str) -> None:
    first = builds.intend(store, site, flavour, "d1", 20)
    instance(site, **{BUILD: first.token})
    second = builds.intend(store, site, flavour, "d1", 20)
    assert machine_images.standing(site, first.token) == []
    assert second.token != first.token
    assert builds.intend(store, site, flavour, "d1", 20).token == second.token, "nothing was made under it"


def test_an_image_that_could_not_be_tagged_any_more_is_tagged_and_then_removed(site: Site) -> None:
    """Whoever bakes may remove only what is tagged, see `clusters.image_rights`."""
    ec2, build = client("ec2", site.endpoint), f"build{next(numbers)}"
    one = instance(site)
    image = ec2.create_image(InstanceId=one, Name=f"castra-mine-d1-{build}")["ImageId"]
    ec2.terminate_instances(InstanceIds=[one])
    assert image in machine_images.clear(site, build)
    assert ec2.describe_images(Owners=["self"], Filters=[{"Name": "name", "Values": [f"*-{build}"]}])["Images"] == []


def test_a_build_stands_where_it_is_told_and_lets_in_whom_it_is_told(site: Site) -> None:
    ec2, build = client("ec2", site.endpoint), f"build{next(numbers)}"
    vpc = ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.1.0/24")["Subnet"]["SubnetId"]
    place = Place(subnet, "", "203.0.113.7/32")
    base = machine_images.base_image(site, "", *PCLUSTER)
    told = {"instance_type": "m7i.large", "tags": {BUILD: build, FLAVOUR: "mine"}, "port": 22, "minutes": 20}
    assert machine_images.address(site, build, "") == ""
    key = machine_images.try_out(site, base.id, told, build, place)
    assert "PRIVATE KEY" in key
    (one,) = machine_images.standing(site, build)
    (row,) = ec2.describe_instances(InstanceIds=[one])["Reservations"][0]["Instances"]
    assert (row["SubnetId"], row["MetadataOptions"]["HttpTokens"]) == (subnet, "required")
    (group,) = ec2.describe_security_groups(GroupIds=[row["SecurityGroups"][0]["GroupId"]])["SecurityGroups"]
    assert group["VpcId"] == vpc
    (rule,) = group["IpPermissions"]
    assert [who["CidrIp"] for who in rule["IpRanges"]] == ["203.0.113.7/32"]
    assert machine_images.address(site, build, "private_ip").startswith("10.7.1.")
    assert {one, group["GroupId"], machine_images.name_of(build)} <= set(machine_images.clear(site, build))
    ec2.delete_subnet(SubnetId=subnet)
    ec2.delete_vpc(VpcId=vpc)


def test_an_image_remembers_that_it_was_tried_out(site: Site, flavour: str) -> None:
    image = made(site, flavour)
    assert image.booted == ""
    machine_images.booted(site, image.id, "2026-11-20T00:00:00+00:00")
    assert machine_images.images(site, flavour)[0].booted == "2026-11-20T00:00:00+00:00"
