"""Faults that are asked for: each befalls what it names, as often as it says, and then it is over."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore import exceptions as errors
from botocore.exceptions import ClientError

from clusters import aws
from clusters.aws import Site
from clusters.base import Unreachable
from tests.emulator.raw_stacks import Sky, eager, part, resources
from tests.sky import client, tell

Ask = Callable[..., Any]


@pytest.fixture
def ask(site: Site) -> Iterator[Ask]:
    """Ask one of the emulator's pages; all of them are cleared at the end."""

    def page(name: str, told: Any = None, method: str = "") -> Any:
        return tell(site.endpoint, name, told, method or ("GET" if told is None else "POST"))

    yield page
    for name in ("faults", "quotas", "reservations"):
        page(name, method="DELETE")


def code(call: Callable[[], Any]) -> str:
    try:
        call()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    except (errors.ConnectionError, errors.HTTPClientError):
        return "connection"
    return "fine"


THROTTLED = {
    "ec2": "RequestLimitExceeded",
    "iam": "Throttling",
    "s3": "SlowDown",
    "batch": "TooManyRequestsException",
    "fsx": "ThrottlingException",
    "cloudformation": "Throttling",
}
CALLS = {
    "ec2": "describe_vpcs",
    "iam": "list_roles",
    "s3": "list_buckets",
    "batch": "describe_job_queues",
    "fsx": "describe_file_systems",
    "cloudformation": "describe_stacks",
}


@pytest.mark.parametrize("service", THROTTLED)
def test_every_protocol_throttles_and_breaks_in_its_own_words(site: Site, ask: Ask, service: str) -> None:
    asking = getattr(eager(service, site.endpoint), CALLS[service])
    ask("faults", [{"service": service, "kind": "throttle"}, {"service": service, "kind": "500"}])
    assert code(asking) == THROTTLED[service]
    assert code(asking) in ("InternalFailure", "InternalError", "InternalServerError", "InternalServerException", "500")
    assert code(asking) == "fine"
    assert ask("faults") == []


def test_a_fault_befalls_its_operation_alone_and_skips_the_first(site: Site, ask: Ask) -> None:
    s3 = eager("s3", site.endpoint)
    s3.create_bucket(Bucket="faulty")
    ask("faults", {"service": "s3", "operation": "PutObject", "kind": "500", "skip": 1, "times": 2})
    puts = [code(lambda: s3.put_object(Bucket="faulty", Key="k", Body=b"")) for _ in range(4)]
    assert puts == ["fine", "InternalError", "InternalError", "fine"]
    upload = s3.create_multipart_upload(Bucket="faulty", Key="k")["UploadId"]
    ask("faults", {"service": "s3", "operation": "UploadPart", "kind": "500"})
    part_of = {"Bucket": "faulty", "Key": "k", "UploadId": upload, "PartNumber": 1, "Body": b""}
    assert code(lambda: s3.put_object(Bucket="faulty", Key="k", Body=b"")) == "fine"
    assert code(lambda: s3.upload_part(**part_of)) == "InternalError"


def test_an_answer_that_is_lost_leaves_the_work_done_one_that_is_dropped_does_not(site: Site, ask: Ask) -> None:
    batch, s3 = eager("batch", site.endpoint), eager("s3", site.endpoint)
    ask("faults", [{"service": "s3", "operation": "CreateBucket", "kind": "lost"}])
    assert code(lambda: s3.create_bucket(Bucket="was-made")) == "connection"
    assert code(lambda: s3.head_bucket(Bucket="was-made")) == "fine"
    ask("faults", [{"service": "s3", "operation": "CreateBucket", "kind": "drop"}])
    assert code(lambda: s3.create_bucket(Bucket="was-not")) == "connection"
    assert code(lambda: s3.head_bucket(Bucket="was-not")) == "404"
    policy = {"name": "lost", "fairsharePolicy": {}}
    ask("faults", [{"service": "batch", "operation": "CreateSchedulingPolicy", "kind": "drop"}])
    assert code(lambda: batch.create_scheduling_policy(**policy)) == "connection"


def test_slow_is_slow_and_down_is_down_for_a_while(site: Site, ask: Ask) -> None:
    sts = eager("sts", site.endpoint)
    ask("faults", {"service": "sts", "kind": "slow", "seconds": 0.3})
    began = time.monotonic()
    assert sts.get_caller_identity()["Account"] == "123456789012"
    assert time.monotonic() - began >= 0.3
    ask("faults", {"kind": "down", "seconds": 0.5})
    assert code(sts.get_caller_identity) == "connection"
    assert not aws.vanished(site)
    time.sleep(0.5)
    assert code(sts.get_caller_identity) == "fine"


def test_our_own_clients_tell_a_fault_in_one_sentence(site: Site, ask: Ask) -> None:
    ask("faults", {"service": "cloudformation", "kind": "throttle", "times": 0})
    told = r"^look: AWS in .* is overloaded \(Throttling\); run again"
    with pytest.raises(Unreachable, match=told), aws.sentences(site, "look"):
        aws.cloudformation(site).describe_stacks()


@pytest.mark.parametrize("which", ["Second", 2, "*"])
def test_a_resource_that_is_to_fail_fails_and_the_next_time_it_does_not(sky: Sky, ask: Ask, which: Any) -> None:
    group = part("Logs::LogGroup")
    template = resources(First=group, Second=group | {"DependsOn": "First"})
    ask("faults", {"kind": "fail", "stack": "unlucky", "resource": which, "reason": "InsufficientInstanceCapacity: no"})
    stack = sky.bring("unlucky", template)
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    assert sky.why("unlucky") == "InsufficientInstanceCapacity: no"
    sky.delete(stack)
    again = sky.bring("unlucky", template)
    assert again["StackStatus"] == "CREATE_COMPLETE"
    sky.delete(again)


@pytest.mark.parametrize(
    "told",
    [{"kind": "magic"}, {"kind": "slow", "colour": 1}, [1], {"service": "s3"}],
)
def test_what_is_no_fault_is_refused(ask: Ask, told: Any) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask("faults", told)
    assert ask("faults") == []


def test_capacity_is_asked_for_by_type_zone_and_market() -> None:
    from emulator import faults

    try:
        faults.add({"kind": "capacity", "instance_type": "p5*", "market": "on-demand", "times": 2})
        assert faults.no_capacity("p4d.24xlarge", "us-east-1a", "on-demand") is None
        assert faults.no_capacity("p5.48xlarge", "us-east-1a", "spot") is None
        for _ in range(2):
            why = faults.no_capacity("p5.48xlarge", "us-east-1a", "on-demand")
            assert why
            assert why.startswith("InsufficientInstanceCapacity: ")
        assert faults.no_capacity("p5.48xlarge", "us-east-1a", "on-demand") is None
        assert "does not exist" in (faults.no_capacity("p5.48xlarge", "us-east-1a", "cr-0") or "")
    finally:
        faults.clear()


def test_reservations_are_told_by_the_clock(site: Site, ask: Ask) -> None:
    ec2 = client("ec2", site.endpoint)
    row = {"type": "p5.48xlarge", "zone": "us-east-1a", "count": 4}
    block = row | {"id": "cr-0123456789abcdef0", "block": True}
    ask("reservations", [block | {"start": "2020-01-01T00:00:00Z", "end": "2999-01-01T00:00:00Z"}])
    ask("reservations", row | {"id": "cr-00000000000000001", "start": "2999-01-01T00:00:00Z"})
    ask("reservations", row | {"id": "cr-00000000000000002", "end": "2020-01-01T00:00:00Z"})
    rows = {one["CapacityReservationId"]: one for one in ec2.describe_capacity_reservations()["CapacityReservations"]}
    assert {key: one["State"] for key, one in rows.items() if key in ask_ids(ask)} == {
        "cr-0123456789abcdef0": "active",
        "cr-00000000000000001": "scheduled",
        "cr-00000000000000002": "expired",
    }
    found = rows["cr-0123456789abcdef0"]
    assert (found["ReservationType"], found["TotalInstanceCount"], found["EndDate"].year) == ("capacity-block", 4, 2999)
    with pytest.raises(ClientError, match="does not exist"):
        ec2.describe_capacity_reservations(CapacityReservationIds=["cr-0"])
    (offer,) = ec2.describe_capacity_block_offerings(
        InstanceType="p5.48xlarge", InstanceCount=2, CapacityDurationHours=48
    )["CapacityBlockOfferings"]
    assert (offer["EndDate"] - offer["StartDate"]).days == 2


def ask_ids(ask: Ask) -> set[str]:
    return {one["CapacityReservationId"] for one in ask("reservations")}


def test_quotas_are_generous_unless_they_are_set(site: Site, ask: Ask) -> None:
    quotas = client("service-quotas", site.endpoint)

    def value(service: str, code: str) -> float:
        return float(quotas.get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]["Value"])

    assert value("ec2", "L-417A185B") >= 10_000
    ask("quotas", [{"code": "L-417A185B", "value": 96}, {"code": "ml.p5.48xlarge for training job usage", "value": 1}])
    assert value("ec2", "L-417A185B") == 96
    names = {row["QuotaName"]: row for row in quotas.list_service_quotas(ServiceCode="sagemaker")["Quotas"]}
    assert names["ml.p5.48xlarge for training job usage"]["Value"] == 1
    assert len(quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]) >= 8
    with pytest.raises(ClientError, match="NoSuchResource"):
        value("ec2", "L-00000000")


def test_prices_are_those_of_the_catalogue(site: Site) -> None:
    from clusters import catalog

    wanted = [{"Type": "TERM_MATCH", "Field": "instanceType", "Value": "p5.48xlarge"}]
    (told,) = client("pricing", site.endpoint).get_products(ServiceCode="AmazonEC2", Filters=wanted)["PriceList"]
    price = next(iter(json.loads(told)["terms"]["OnDemand"]["term"]["priceDimensions"].values()))
    assert float(price["pricePerUnit"]["USD"]) == catalog.find("p5.48xlarge").price_usd_per_hour


def test_ec2_knows_where_a_type_is_offered(site: Site) -> None:
    rows = client("ec2", site.endpoint).describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["p5.48xlarge"]}]
    )["InstanceTypeOfferings"]
    assert rows
    assert all(row["Location"].startswith("us-east-1") for row in rows)


def test_placement_groups_are_told_once(site: Site) -> None:
    ec2 = client("ec2", site.endpoint)
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "castra:run", "Value": "r"}]}]
    ec2.create_placement_group(GroupName="close", Strategy="cluster", TagSpecifications=tags)
    with pytest.raises(ClientError, match="Duplicate"):
        ec2.create_placement_group(GroupName="close", Strategy="cluster")
    mine = [{"Name": "tag:castra:run", "Values": ["r"]}]
    (row,) = ec2.describe_placement_groups(Filters=mine)["PlacementGroups"]
    assert (row["GroupName"], row["Strategy"], row["State"]) == ("close", "cluster", "available")
    ec2.delete_placement_group(GroupName="close")
    with pytest.raises(ClientError, match="Unknown"):
        ec2.delete_placement_group(GroupName="close")
