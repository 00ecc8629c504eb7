"""What AWS is asked before anything is made, and how each bad answer is told."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from clusters import aws, preflight
from clusters.aws import Site
from clusters.base import NoCapacity
from clusters.capacity import parse
from recipes import Recipe
from tests.clusters.gallery import BLOCK, RESERVATION, recipe, rung
from tests.sky import tell

NOW = datetime.now(UTC).replace(microsecond=0)


def control(site: Site, page: str, told: Any = None) -> None:
    """Tell the emulator what is there; nothing to forget it all."""
    tell(site.endpoint, page, told, "DELETE" if told is None else "POST")


@pytest.fixture
def account(site: Site) -> Iterator[Site]:
    """An account whose quotas and reservations are forgotten after the test."""
    yield site
    for page in ("quotas", "reservations"):
        control(site, page)


def wrong(told: Recipe, site: Site) -> str:
    """What is not ok, as one text."""
    return "; ".join(f"{one.what}: {one.detail}: {one.fix}" for one in preflight.findings(told, site) if not one.ok)


def test_all_is_well_with_an_account_that_has_enough(account: Site) -> None:
    for kind in ("batch", "eks", "parallelcluster", "sagemaker", "hyperpod"):
        assert wrong(recipe(kind), account) == ""
    assert [one.what for one in preflight.findings(recipe("batch"), account)] == [
        "credentials",
        "region us-east-1",
        "quota L-417A185B",
    ]
    assert list(preflight.findings(Recipe(), account)) == []
    preflight.check(recipe("batch"), account)


@pytest.mark.parametrize(
    ("kind", "cluster", "code"),
    [
        ("batch", {}, "L-417A185B"),
        ("eks", {"capacity": ["spot"]}, "L-C4BD4855"),
        ("eks", {"capacity": ["spot"], "instance_type": "p4d.24xlarge"}, "L-7212CCBC"),
        ("eks", {"capacity": ["spot"], "instance_type": "trn1.32xlarge"}, "L-6B0D517C"),
        ("batch", {"instance_type": "g6e.48xlarge"}, "L-DB2E81BA"),
    ],
)
def test_a_quota_that_is_too_small(kind: str, cluster: dict[str, Any], code: str, account: Site) -> None:
    control(account, "quotas", {"code": code, "value": 96})
    told = wrong(recipe(kind, **cluster), account)
    assert told.startswith(f"quota {code}: 96 vCPUs of ")
    assert told.endswith(" are wanted: ask for more in Service Quotas, or use fewer")
    with pytest.raises(NoCapacity, match=f"quota {code}: 96 vCPUs"):
        preflight.check(recipe(kind, **cluster), account)


def test_a_block_needs_no_quota(account: Site) -> None:
    control(account, "quotas", {"code": "L-417A185B", "value": 0})
    row = {"id": BLOCK[6:], "type": "p5.48xlarge", "zone": "us-east-1a", "count": 2, "block": True}
    control(account, "reservations", row)
    assert wrong(recipe("batch", capacity=[BLOCK]), account) == ""


def test_a_region_or_a_zone_without_the_type(account: Site) -> None:
    paris = replace(account, region="eu-west-3")
    assert preflight.offered("p5.48xlarge", paris) == ()
    assert wrong(recipe("batch", region="eu-west-3"), paris) == (
        "region eu-west-3: it has no p5.48xlarge: change cluster.region or cluster.instance_type"
    )
    zones = preflight.offered("p4de.24xlarge", account)
    missing = next(zone for zone in preflight.offered("m5.large", account) if zone not in zones)
    told = wrong(recipe("batch", instance_type="p4de.24xlarge", zones=[missing]), account)
    assert told == f"region us-east-1: p4de.24xlarge is in {', '.join(zones)}, not in {missing}: change cluster.zones"


@pytest.mark.parametrize(
    ("row", "cluster", "sentence"),
    [
        ({"count": 1}, {}, "has 1 instances, 2 are wanted: use fewer nodes, or reserve more"),
        ({"type": "p4d.24xlarge"}, {}, "is of p4d.24xlarge: change cluster.instance_type"),
        ({"zone": "us-east-1c"}, {"zones": ["us-east-1a"]}, "is in us-east-1c: set cluster.zones to [us-east-1c]"),
        ({"block": False}, {}, "is no capacity block: say so in cluster.capacity"),
        ({"end": (NOW - timedelta(hours=1)).isoformat()}, {}, "is expired: reserve anew"),
        ({"available": 1}, {}, "has 1 instances, 2 are wanted: use fewer nodes, or reserve more"),
    ],
)
def test_a_reservation_that_does_not_fit(
    row: dict[str, Any], cluster: dict[str, Any], sentence: str, account: Site
) -> None:
    good = {"id": BLOCK[6:], "type": "p5.48xlarge", "zone": "us-east-1a", "count": 2, "block": True}
    control(account, "reservations", good | row)
    assert wrong(recipe("batch", capacity=[BLOCK], **cluster), account) == f"{BLOCK}: {sentence}"


def test_the_window_of_a_block(account: Site) -> None:
    begins, ends = NOW + timedelta(hours=2), NOW + timedelta(days=1)
    row = {"id": BLOCK[6:], "type": "p5.48xlarge", "zone": "us-east-1a", "count": 2, "block": True}
    control(account, "reservations", row | {"start": begins.isoformat(), "end": ends.isoformat()})
    told = rung(recipe("batch", capacity=[BLOCK]))
    assert preflight.window(told, account) == (begins, ends)
    assert wrong(recipe("batch", capacity=[BLOCK]), account) == "", "it may be scheduled"
    assert preflight.window(rung(recipe("batch")), account) is None
    with pytest.raises(NoCapacity, match="there is no such reservation"):
        preflight.window(parse(RESERVATION, "p5.48xlarge"), account)
    control(account, "reservations", row | {"state": "expired"})
    with pytest.raises(NoCapacity, match="it is expired"):
        preflight.window(told, account)


@pytest.fixture
def unknown_yet() -> Iterator[None]:
    """No session has read credentials: it does so once."""
    for kept in (aws._session, aws._made):
        kept.cache_clear()
    yield
    for kept in (aws._session, aws._made):
        kept.cache_clear()


@pytest.mark.usefixtures("unknown_yet")
def test_without_credentials_nothing_else_is_asked(account: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (only,) = preflight.findings(recipe("batch"), replace(account, memory=""))
    assert (only.what, only.ok, only.fix) == ("credentials", False, "log in, or set AWS_PROFILE")
    assert only.detail.startswith("no AWS credentials")
