"""What only AWS can say before anything is made there: who we are, which zones have the type, quotas, reservations."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from clusters import aws, catalog
from clusters.aws import Site
from clusters.base import NoCapacity, Refused
from clusters.capacity import Rung, ladder
from clusters.validators import check as check_offline
from recipes.cluster import AwsCluster, EksCluster, SageMakerCluster, SlurmCluster
from recipes.spec import Recipe

QUOTAS = {
    ("on-demand", "p"): "L-417A185B",
    ("on-demand", "g"): "L-DB2E81BA",
    ("on-demand", "trn"): "L-2C3B7624",
    ("spot", "p3"): "L-7212CCBC",
    ("spot", "p4"): "L-7212CCBC",
    ("spot", "p5"): "L-C4BD4855",
    ("spot", "g"): "L-3819A6DF",
    ("spot", "trn"): "L-6B0D517C",
}
"""Service Quotas of EC2 in vCPUs: market and beginning of the type. Instances of a capacity block count for none."""
UNKNOWN_RESERVATION = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
UNKNOWN_PLAN = ("ResourceNotFound", "ResourceNotFoundException", "ValidationException")
UNKNOWN_QUOTA = ("NoSuchResourceException",)


CREDENTIALS = "credentials"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    detail: str
    fix: str = ""
    """What to do; empty where all is well."""


def findings(recipe: Recipe, site: Site) -> Iterator[Finding]:
    """What AWS says to the first rung of a recipe's ladder (`narrowed` leaves one), as it is asked.

    Without credentials nothing else is asked. Raises `Unreachable` if AWS does not answer.
    """
    cluster = recipe.cluster
    if not isinstance(cluster, AwsCluster):
        return
    rung = ladder(cluster)[0]
    known = _credentials(site)
    yield known
    if not known.ok:
        return
    if _sagemakers(cluster):
        yield _plan(rung, cluster.nodes, site) if rung.market == "plan" else _sagemaker_quota(rung, cluster, site)
        return
    yield _offered(rung, site)
    if rung.market in ("block", "reservation"):
        yield _reservation(rung, cluster.nodes, site)
    if rung.market != "block":
        yield _quota(rung, cluster.nodes, site)


def check(recipe: Recipe, site: Site) -> None:
    """Raise `Refused` if the recipe or the credentials are wrong, `NoCapacity` if the rung has no chance.

    What a rung lacks (the zone its type, the account the quota, the reservation its instances) another may have.
    """
    check_offline(recipe)
    for finding in findings(recipe, site):
        if not finding.ok:
            kind = Refused if finding.what == CREDENTIALS else NoCapacity
            raise kind(f"{finding.what}: {finding.detail}; {finding.fix}")


def offered(instance_type: str, site: Site) -> tuple[str, ...]:
    """The zones of a site's region in which EC2 offers an instance type, sorted; none if the region has none."""
    filters = [{"Name": "instance-type", "Values": [instance_type]}]
    with aws.sentences(site, f"zones of {instance_type}"):
        pages = aws.client(site, "ec2").get_paginator("describe_instance_type_offerings")
        told = pages.paginate(LocationType="availability-zone", Filters=filters)
        return tuple(sorted(row["Location"] for page in told for row in page["InstanceTypeOfferings"]))


def window(rung: Rung, site: Site) -> tuple[datetime, datetime | None] | None:
    """When a capacity block or reservation begins and when it ends (None: never); None for any other rung.

    Raises `NoCapacity` if it does not exist or is over.
    """
    if rung.market not in ("block", "reservation"):
        return None
    told = _described(rung, site)
    if told is None or told["State"] not in ("active", "scheduled", "pending", "assessing", "delayed"):
        raise NoCapacity(f"{rung}: it is {told['State']}" if told else f"{rung}: there is no such reservation")
    return told.get("StartDate", datetime.now(UTC)), told.get("EndDate")


def _credentials(site: Site) -> Finding:
    try:
        with aws.sentences(site, "credentials"):
            told = aws.client(site, "sts").get_caller_identity()
    except Refused as error:
        return Finding(CREDENTIALS, False, str(error).removeprefix("credentials: "), "log in, or set AWS_PROFILE")
    return Finding(CREDENTIALS, True, f"{told['Arn']} in {site}")


def _offered(rung: Rung, site: Site) -> Finding:
    what, zones = f"region {site.region}", offered(rung.instance_type, site)
    if not zones:
        return Finding(what, False, f"it has no {rung.instance_type}", "change cluster.region or cluster.instance_type")
    listed = ", ".join(zones)
    if rung.zone and rung.zone not in zones:
        return Finding(what, False, f"{rung.instance_type} is in {listed}, not in {rung.zone}", "change cluster.zones")
    return Finding(what, True, f"{rung.instance_type} is in {listed}")


def _quota(rung: Rung, nodes: int, site: Site) -> Finding:
    what, wanted = "quota", catalog.find(rung.instance_type).vcpus * nodes
    market = "spot" if rung.market == "spot" else "on-demand"
    families = (name for (bought, name) in QUOTAS if bought == market and rung.instance_type.startswith(name))
    family = next(families, None)
    if family is None:
        return Finding(what, True, f"no {market} quota of {rung.instance_type} is known; {wanted} vCPUs are wanted")
    code = QUOTAS[market, family]
    with aws.sentences(site, f"quota {code}"):
        told = aws.client(site, "service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
    return _enough(f"quota {code}", told["Value"], wanted, f"vCPUs of {rung.instance_type}, {market}", site)


def _sagemaker_quota(rung: Rung, cluster: AwsCluster, site: Site) -> Finding:
    """SageMaker counts instances, type by type; its quotas are found by their names."""
    use = "cluster" if not isinstance(cluster, SageMakerCluster) else "training job"
    name = f"ml.{rung.instance_type} for {'spot ' if rung.market == 'spot' else ''}{use} usage"
    with aws.sentences(site, f"quota {name!r}"):
        pages = (
            aws.client(site, "service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        )
        values = [row["Value"] for page in pages for row in page["Quotas"] if row["QuotaName"] == name]
    if not values:
        return Finding(f"quota {name!r}", True, f"AWS does not tell it in {site.region}; {cluster.nodes} are wanted")
    return _enough(f"quota {name!r}", values[0], cluster.nodes, "instances", site)


def _enough(what: str, value: float, wanted: int, unit: str, site: Site) -> Finding:
    detail = f"{value:g} {unit} in {site.region}, {wanted} are wanted"
    return Finding(
        what, value >= wanted, detail, "" if value >= wanted else "ask for more in Service Quotas, or use fewer"
    )


def _reservation(rung: Rung, nodes: int, site: Site) -> Finding:
    told = _described(rung, site)
    if told is None:
        return Finding(rung.capacity, False, f"there is none in {site.region}", "correct its id, or cluster.region")
    block = told.get("ReservationType") == "capacity-block"
    zone, free = told["AvailabilityZone"], told["AvailableInstanceCount"]
    # of what is yet to begin nothing is available
    count = free if told["State"] == "active" else told["TotalInstanceCount"]
    wrong = [
        (
            block != (rung.market == "block"),
            f"is {'a' if block else 'no'} capacity block",
            "say so in cluster.capacity",
        ),
        (told["State"] not in ("active", "scheduled", "pending"), f"is {told['State']}", "reserve anew"),
        (told["InstanceType"] != rung.instance_type, f"is of {told['InstanceType']}", "change cluster.instance_type"),
        (rung.zone not in ("", zone), f"is in {zone}", f"set cluster.zones to [{zone}]"),
        (count < nodes, f"has {count} instances, {nodes} are wanted", "use fewer nodes, or reserve more"),
    ]
    for is_wrong, detail, fix in wrong:
        if is_wrong:
            return Finding(rung.capacity, False, detail, fix)
    return Finding(rung.capacity, True, f"{count} x {told['InstanceType']} in {zone}, {told['State']}")


def _plan(rung: Rung, nodes: int, site: Site) -> Finding:
    from botocore.exceptions import ClientError

    with aws.sentences(site, rung.capacity):
        try:
            told = aws.client(site, "sagemaker").describe_training_plan(TrainingPlanName=rung.id.rpartition("/")[2])
        except ClientError as error:
            if error.response["Error"]["Code"] not in UNKNOWN_PLAN:
                raise
            return Finding(
                rung.capacity, False, f"there is none in {site.region}", "correct its ARN, or cluster.region"
            )
    count, state = told.get("TotalInstanceCount", 0), told["Status"]
    if state not in ("Active", "Scheduled"):
        return Finding(rung.capacity, False, f"is {state}", "reserve anew")
    fix = "" if count >= nodes else "use fewer nodes, or reserve more"
    return Finding(rung.capacity, count >= nodes, f"{count} instances, {nodes} are wanted, {state}", fix)


def _described(rung: Rung, site: Site) -> dict[str, Any] | None:
    """A reservation as EC2 tells it; None if there is none of that id."""
    from botocore.exceptions import ClientError

    with aws.sentences(site, rung.capacity):
        try:
            told = aws.client(site, "ec2").describe_capacity_reservations(CapacityReservationIds=[rung.id])
        except ClientError as error:
            if error.response["Error"]["Code"] not in UNKNOWN_RESERVATION:
                raise
            return None
    return next(iter(told["CapacityReservations"]), None)


def _sagemakers(cluster: AwsCluster) -> bool:
    hyperpod = isinstance(cluster, SlurmCluster | EksCluster) and cluster.flavour == "hyperpod"
    return hyperpod or isinstance(cluster, SageMakerCluster)
