"""The generated templates: what is in them, clean by cfn-lint, fit to be deployed, changed and deleted."""

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cfnlint.api import lint  # type: ignore[import-untyped]  # it has no types
from cfnlint.config import ManualArgs  # type: ignore[import-untyped]  # it has no types
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension

from clusters import catalog, ledger
from clusters.aws import Site
from clusters.base import Refused
from clusters.capacity import ladder
from clusters.interfaces import interfaces, problems
from clusters.ledger import Claim, Entry
from clusters.stacks import architecture, batch, camp, deploy, nodes, review, store
from recipes.cluster import AwsCluster
from store import open_store
from tests.clusters.gallery import BLOCK, KINDS, PLAN, RESERVATION, recipe, rung, stacks
from tests.sky import client

EFA = {
    "p4d.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
    "p6-b300.48xlarge": 16,
    "trn1.32xlarge": 8,
    "trn1n.32xlarge": 16,
    "trn2.48xlarge": 16,
}


@pytest.fixture
def golden(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(JSONSnapshotExtension)


@pytest.mark.parametrize("name", list(catalog.load()))
def test_every_type_has_all_its_efa_interfaces_and_one_address(name: str) -> None:
    instance = catalog.load()[name]
    layout = interfaces(instance, ["sg-1"])
    efa = [(one["NetworkCardIndex"], one["DeviceIndex"]) for one in layout if one["InterfaceType"] == "efa-only"]
    assert len(efa) == EFA.get(name, instance.efa_interfaces)
    assert len({card for card, _ in efa}) == len(efa), "one on a card"
    assert [one["InterfaceType"] for one in layout].count("interface") == 1
    assert problems(instance, layout) == []


def test_card_0_of_p6_b300_has_no_efa() -> None:
    cards = [one["NetworkCardIndex"] for one in interfaces(catalog.find("p6-b300.48xlarge"), [])]
    assert cards == list(range(17))
    assert len(interfaces(catalog.find("p5.48xlarge"), [])) == 33, "the p5 guide counts as many"


def test_a_wrong_layout_is_told() -> None:
    p5 = catalog.find("p5.48xlarge")
    right = interfaces(p5, [])
    assert "two interfaces are on card 0, device 0" in problems(p5, [right[0], *right])[0]
    assert (
        "on card 0, device 2, and there are 32 cards of 2 devices"
        in problems(p5, [*right, right[1] | {"DeviceIndex": 2}])[0]
    )
    assert problems(p5, right[1:])[0].endswith("card 0, device 0 must be an interface with an IP address")


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "batch": [{"capacity": [BLOCK]}, {"capacity": [RESERVATION]}, {"nodes": 1, "capacity": ["spot"]}],
    "eks": [{"capacity": [BLOCK]}, {"capacity": ["spot"]}, {"instance_type": "trn1.32xlarge"}],
    "pcs": [{"capacity": [BLOCK]}],
    "hyperpod": [{"capacity": [PLAN]}],
    "eks-hyperpod": [{"capacity": ["spot"]}],
}


def clean(template: Any) -> list[str]:
    """What cfn-lint has against a template."""
    return [str(match) for match in lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))]


@pytest.mark.parametrize("kind", KINDS)
def test_the_templates_are_clean_by_cfn_lint(kind: str) -> None:
    seen: dict[str, str] = {}
    for more in ({}, *VARIANTS.get(kind, [])):
        told = stacks(kind, **more).items()
        seen |= {json.dumps(one.template): f"{part} {more}" for part, one in told if part != "camp"}
    assert {what: clean(json.loads(body)) for body, what in seen.items()} == {what: [] for what in seen.values()}


def test_a_store_and_a_fleets_camp_are_clean_by_cfn_lint() -> None:
    assert clean(store.template("my-models")) == []
    assert clean(stacks("eks", zones=["us-east-1f", "us-east-1b"])["camp"].template) == []


def test_all_templates_are_small_and_start_instances_of_every_type() -> None:
    wanted = [(kind, more) for kind in KINDS for more in ({}, *VARIANTS.get(kind, []))]
    wanted += [(kind, {"instance_type": name}) for kind in ("batch", "eks", "pcs") for name in catalog.load()]
    for kind, more in wanted:
        for one in stacks(kind, **more).values():
            assert review.problems(one.template) == [], (kind, more)
            body = json.dumps(one.template, separators=(",", ":")).encode()
            assert len(body) < deploy.LARGEST_TEMPLATE / 2, (kind, more)


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_stack_imports_only_what_those_before_it_export(kind: str) -> None:
    exported: set[str] = set()
    told = recipe(kind, zones=["us-east-1a", "us-east-1b"])
    assert isinstance(told.cluster, AwsCluster)
    for one in architecture.needed(told, ladder(told.cluster)[1]):
        assert imports(one.template) <= exported
        assert one.name == architecture.stack_name("tiny", one.part)
        exported |= {f"{one.name}-{name}" for name in one.template["Outputs"]}


def imports(told: Any) -> set[str]:
    if isinstance(told, list):
        return set().union(*map(imports, told))
    if not isinstance(told, dict):
        return set()
    if set(told) == {"Fn::ImportValue"}:
        return {told["Fn::ImportValue"]}
    return set().union(*map(imports, told.values()))


OUTPUTS = {
    "batch": {"JobQueue", "ComputeEnvironment", "JobRole", "ExecutionRole", "Repository", "LogGroup"},
    "eks": {"Cluster", "Namespace", "ServiceAccount", "PodRole"},
    "sagemaker": {"Role"},
    "pcs": {"PcsCluster", "LoginNodeGroup", "Queue"},
    "files": {"FileSystem", "MountName", "DnsName"},
    "camp": {"Vpc", "PublicSubnet", "PrivateSubnet", "PrivateSubnets", "SecurityGroup", "Bucket", "LogGroup"}
    | {"NodeRole", "InstanceProfile"},
}


def test_the_outputs_that_adapters_read_are_there() -> None:
    for kind in KINDS:
        for part, one in stacks(kind).items():
            assert OUTPUTS.get(part, set()) <= set(one.template["Outputs"])


def test_the_next_rung_moves_nothing_of_the_camp_but_what_is_told() -> None:
    told = recipe("batch", zones=["us-east-1c", "us-east-1a"], capacity=["on-demand", BLOCK])
    assert isinstance(told.cluster, AwsCluster)
    first, second, *_ = (architecture.needed(told, one) for one in ladder(told.cluster))
    assert first[0].template["Resources"] == second[0].template["Resources"]
    environments = [one[2].template["Resources"]["ComputeEnvironment"]["Properties"] for one in (first, second)]
    subnets = [made["ComputeResources"]["Subnets"] for made in environments]
    assert subnets == [[{"Fn::ImportValue": f"castra-tiny-camp-PrivateSubnet{letter}"}] for letter in "CA"]


def test_an_eks_control_plane_has_two_zones_whatever_the_recipe_names() -> None:
    for zones, wanted in ((["us-east-1b"], "AB"), (["us-east-1a"], "AB"), ([], ["", "2"])):
        made = stacks("eks", zones=zones)["camp"].template["Resources"]
        assert {f"PrivateSubnet{letter}" for letter in wanted} == {name for name in made if "PrivateSubnet" in name}


@pytest.mark.parametrize(
    ("capacity", "group", "market", "aimed"),
    [
        ("on-demand", True, None, None),
        (RESERVATION, True, None, "cr-0fedcba9876543210"),
        (BLOCK, False, "capacity-block", "cr-0123456789abcdef0"),
    ],
)
@pytest.mark.parametrize("kind", ["batch", "eks", "pcs"])
def test_a_capacity_block_and_a_placement_group_never_meet(
    kind: str, capacity: str, group: bool, market: str | None, aimed: str | None
) -> None:
    resources = stacks(kind, capacity=[capacity])[kind].template["Resources"]
    data = resources["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    assert ("PlacementGroup" in resources) == group
    assert data.get("InstanceMarketOptions", {}).get("MarketType") == market
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    assert target.get("CapacityReservationId") == aimed


def test_a_recipe_can_say_no_to_the_placement_group() -> None:
    assert "PlacementGroup" not in stacks("batch", placement_group=False)["batch"].template["Resources"]
    assert "PlacementGroup" not in stacks("batch", nodes=1)["batch"].template["Resources"]


def test_batch_can_be_changed_in_place_and_gives_up_waiting() -> None:
    resources = stacks("batch", patience_minutes=1)["batch"].template["Resources"]
    environment, queue = (resources[name]["Properties"] for name in ("ComputeEnvironment", "JobQueue"))
    assert environment["ComputeResources"]["AllocationStrategy"] == "BEST_FIT_PROGRESSIVE"
    assert environment["ReplaceComputeEnvironment"] is False
    assert "ServiceRole" not in environment, "only the service-linked role lets it be updated"
    assert environment["ComputeResources"]["MaxvCpus"] == 2 * 192
    limits = queue["JobStateTimeLimitActions"]
    assert {row["MaxTimeSeconds"] for row in limits} == {batch.SHORTEST_PATIENCE_S}


def test_user_data_mounts_the_files_and_leaves_the_shells_variables_alone() -> None:
    data = nodes.first_minutes(nodes.Place("camp", "PrivateSubnet", "files", "files"))["Fn::Base64"]["Fn::Join"]
    text = "".join(one if isinstance(one, str) else f"<{one['Fn::ImportValue']}>" for one in data[1])
    assert "mount -t lustre -o noatime,flock <files-DnsName>@tcp:/<files-MountName> /fsx" in text
    assert "<files-HomeDns>:/fsx/ /home" in text
    assert '"${#drives[@]}"' in text
    assert text.endswith(f"--{nodes.BOUNDARY}--\n")
    assert len(base64.b64encode(text.encode())) < 16_384


def test_an_own_image_introduces_itself_to_eks() -> None:
    told = recipe("eks")
    told = told.model_copy(update={"image": told.image.model_copy(update={"ami": "ami-0123456789abcdef0"})})
    made = {one.part: one for one in architecture.needed(told, rung(told))}["eks"].template
    data = made["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    assert data["ImageId"] == "ami-0123456789abcdef0"
    assert {"Fn::GetAtt": ["Cluster", "CertificateAuthorityData"]} in data["UserData"]["Fn::Base64"]["Fn::Join"][1]
    assert "AmiType" not in made["Resources"]["Nodes"]["Properties"]
    assert clean(made) == []


GOLDEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "batch-p4d": ("batch", "batch", {"instance_type": "p4d.24xlarge", "capacity": [RESERVATION]}),
    "batch-p6-b300-block": ("batch", "batch", {"instance_type": "p6-b300.48xlarge", "capacity": [BLOCK]}),
    "camp-two-zones": ("eks", "camp", {"zones": ["us-east-1b", "us-east-1d"]}),
    "eks-p4d": ("eks", "eks", {"instance_type": "p4d.24xlarge"}),
    "files": ("pcs", "files", {}),
    "hyperpod-slurm": ("hyperpod", "hyperpod", {"capacity": [PLAN]}),
    "pcs-p4d": ("pcs", "pcs", {"instance_type": "p4d.24xlarge"}),
    "sagemaker": ("sagemaker", "sagemaker", {}),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: SnapshotAssertion) -> None:
    kind, part, more = GOLDEN[name]
    assert stacks(kind, **more)[part].template == golden


def test_golden_store(golden: SnapshotAssertion) -> None:
    assert store.template("my-models") == golden


Ground = tuple[list[Entry], Site]


@pytest.fixture
def ground(tmp_path: Path, site: Site) -> Iterator[Ground]:
    """Entries of the stacks that a test announces, taken down last made first."""
    entries: list[Entry] = []
    yield entries, site
    for entry in reversed(entries):
        list(deploy.delete(entry.name, site, entry.owner, "last"))


def bring(told: architecture.Wanted, ground: Ground, tmp_path: Path) -> list[str]:
    """Deploy one stack; returns what was changed."""
    entries, site = ground
    claim = Claim("tiny", datetime.now(UTC) + timedelta(hours=1))
    entry = ledger.intend(open_store(str(tmp_path / "store")), claim, "stack", told.name, asdict(site))
    if entry.name not in [one.name for one in entries]:
        entries.append(entry)
    proposal = deploy.propose(deploy.Stack(entry.name, told.template, entry.tags, site))
    list(deploy.apply(proposal, entry.token))
    return [f"{change.action} {change.logical_id}" for change in proposal.changes]


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_architecture_is_deployed_found_standing_and_deleted(kind: str, ground: Ground, tmp_path: Path) -> None:
    told = recipe(kind, zones=["us-east-1a", "us-east-1b"])
    wanted = architecture.needed(told, rung(told), tls_only=False)
    outputs: dict[str, str] = {}
    for one in wanted:
        assert len(bring(one, ground, tmp_path)) == len(one.template["Resources"])
        outputs |= deploy.outputs(one.name, ground[1])
    assert set().union(*(one.template["Outputs"] for one in wanted)) == set(outputs)
    assert all("${" not in value for value in outputs.values())
    assert [bring(one, ground, tmp_path) for one in wanted] == [[] for _ in wanted], "a second time nothing is changed"


def test_a_cluster_is_changed_in_place(ground: Ground, tmp_path: Path) -> None:
    for count in (2, 4):
        told = recipe("batch", nodes=count, lustre_gib=0)
        for one in architecture.needed(told, rung(told), tls_only=False):
            changed = set(bring(one, ground, tmp_path))
    assert changed == {"Modify ComputeEnvironment"}


def test_the_next_zone_is_tried_where_the_first_had_nothing(ground: Ground, tmp_path: Path) -> None:
    told = recipe("batch", zones=["us-east-1c", "us-east-1a"], lustre_gib=0)
    assert isinstance(told.cluster, AwsCluster)
    subnets = []
    for one in ladder(told.cluster):
        for wanted in architecture.needed(told, one, tls_only=False):
            bring(wanted, ground, tmp_path)
        subnets.append(deploy.outputs(camp.name("tiny"), ground[1])["PrivateSubnet"])
    ec2 = client("ec2", ground[1].endpoint)
    there = {row["SubnetId"]: row["AvailabilityZone"] for row in ec2.describe_subnets(SubnetIds=subnets)["Subnets"]}
    assert [there[subnet] for subnet in subnets] == ["us-east-1c", "us-east-1a"]


def test_in_another_zone_all_but_the_camp_is_made_anew(ground: Ground, tmp_path: Path) -> None:
    told = recipe("batch", zones=["us-east-1c", "us-east-1a"], lustre_gib=2400)
    assert isinstance(told.cluster, AwsCluster)
    first, second = ladder(told.cluster)
    for one in architecture.needed(told, first, tls_only=False):
        bring(one, ground, tmp_path)
    gone = architecture.in_the_way(told, first, second)
    assert gone == ["castra-tiny-batch", "castra-tiny-files"]
    owners = {entry.name: entry.owner for entry in ground[0]}
    for name in gone:
        list(deploy.delete(name, ground[1], owners[name], "token"))
    for one in architecture.needed(told, second, tls_only=False):
        bring(one, ground, tmp_path)
    assert deploy.outputs("castra-tiny-files", ground[1])["MountName"]


def test_what_is_in_the_way_of_the_next_rung() -> None:
    told = recipe("eks", capacity=[BLOCK, "on-demand"], zones=["us-east-1a"])
    assert isinstance(told.cluster, AwsCluster)
    block, demand = ladder(told.cluster)
    assert architecture.in_the_way(told, block, demand) == [], "a node group is changed in place"
    assert architecture.in_the_way(recipe("pcs"), block, demand) == ["castra-tiny-pcs", "castra-tiny-files"]
    assert architecture.in_the_way(recipe("pcs"), block, block) == []


def test_a_store_outlives_its_stack_with_all_that_is_in_it(site: Site) -> None:
    name = store.name("our.models")
    stack = deploy.Stack(name, store.template("our.models", tls_only=False), {"castra:owner": "us"}, site)
    list(deploy.apply(deploy.propose(stack), "token"))
    s3 = client("s3", site.endpoint)
    s3.put_object(Bucket="our.models", Key="castra/models/a", Body=b"weights")
    assert list(deploy.delete(name, site, "us", "token"))[-1].status == "DELETE_COMPLETE"
    assert s3.get_object(Bucket="our.models", Key="castra/models/a")["Body"].read() == b"weights"
    assert s3.get_bucket_versioning(Bucket="our.models")["Status"] == "Enabled"


def test_no_teardown_takes_a_store_for_something_left_over(site: Site) -> None:
    stack = deploy.Stack(store.name("kept"), store.template("kept", tls_only=False), store.tags(), site)
    list(deploy.apply(deploy.propose(stack), "token"))
    with pytest.raises(Refused, match="left alone"):
        list(deploy.delete(stack.name, site, ledger.owner(), "token"))
