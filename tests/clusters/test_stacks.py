"""The camp and how it is deployed: clean by cfn-lint, least open, converging after every kind of death."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cfnlint.api import lint  # type: ignore[import-untyped]  # it has no types
from cfnlint.config import ManualArgs  # type: ignore[import-untyped]  # it has no types

from clusters import aws, inventory, ledger
from clusters.aws import Site
from clusters.base import ClusterError, Refused
from clusters.ledger import Claim, Entry
from clusters.stacks import camp, deploy
from store import Store, open_store
from tests.clusters.gallery import camp_stack
from tests.sky import client

ROOT = Path(__file__).parents[2]
SOON = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def entry(store: Store, site: Site, request: pytest.FixtureRequest) -> Iterator[Entry]:
    """A camp announced in the ledger, gone after the test."""
    run = request.node.originalname.replace("_", "-")[5:40]
    entry = ledger.intend(store, Claim(run, SOON), "stack", camp.name(run), asdict(site))
    yield entry
    list(deploy.delete(entry.name, site, entry.owner, "last"))


@contextmanager
def requests(site: Site) -> Iterator[list[str]]:
    """The CloudFormation requests that change something, as they are made."""
    seen: list[str] = []

    def note(model: Any, **_: Any) -> None:
        if not model.name.startswith(("Describe", "List", "Get")):
            seen.append(model.name)

    events = aws.cloudformation(site).meta.events
    events.register("before-call.cloudformation", note)
    yield seen
    events.unregister("before-call.cloudformation", note)


def bring(stack: deploy.Stack, token: str = "token") -> list[deploy.Event]:
    return list(deploy.apply(deploy.propose(stack), token))


@pytest.mark.parametrize("more", [{}, {"nat": True}, {"zones": ("us-west-2b",)}, {"tls_only": False}])
def test_the_camp_is_clean_by_cfn_lint(more: dict[str, Any]) -> None:
    found = lint(json.dumps(camp.template(**more)), config=ManualArgs(regions=["us-west-2"]))
    assert [str(match) for match in found] == []


def test_the_bucket_answers_nobody_without_tls_on_aws() -> None:
    (statement,) = camp.template()["Resources"]["BucketPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Action"], statement["Principal"]) == ("Deny", "s3:*", "*")
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_a_node_may_use_its_bucket_and_its_log_group_only() -> None:
    role = camp.template()["Resources"]["NodeRole"]["Properties"]
    statements = role["Policies"][0]["PolicyDocument"]["Statement"]
    assert all("*" not in action for statement in statements for action in statement["Action"])
    assert {json.dumps(statement["Resource"]) for statement in statements} == {
        '{"Fn::GetAtt": ["Bucket", "Arn"]}',
        '{"Fn::Sub": "${Bucket.Arn}/*"}',
        '{"Fn::GetAtt": ["LogGroup", "Arn"]}',
    }


def test_a_camp_is_proposed_applied_and_found_again(entry: Entry, site: Site) -> None:
    stack = camp_stack(entry)
    proposal = deploy.propose(stack)
    assert {change.action for change in proposal.changes} == {"Add"}
    assert {change.logical_id for change in proposal.changes} == set(stack.template["Resources"])
    events = list(deploy.apply(proposal, entry.token))
    assert events[-1].status == "CREATE_COMPLETE"
    assert set(deploy.outputs(entry.name, site)) == set(stack.template["Outputs"])
    with requests(site) as seen:
        again = deploy.propose(stack)
        assert (again.change_set, again.changes) == ("", ())
        assert list(deploy.apply(again, entry.token)) == []
        assert seen == []
        reworded = replace(stack, template={**stack.template, "Description": "the same in other words"})
        assert deploy.propose(reworded).change_set == ""
    assert seen == ["CreateChangeSet", "DeleteChangeSet"]


def test_the_camp_is_as_closed_as_it_says(entry: Entry, site: Site) -> None:
    bring(camp_stack(entry, nat=True))
    out = deploy.outputs(entry.name, site)
    ec2, s3 = client("ec2", site.endpoint), client("s3", site.endpoint)
    (group,) = ec2.describe_security_groups(GroupIds=[out["SecurityGroup"]])["SecurityGroups"]
    itself = [{"GroupId": out["SecurityGroup"]}]
    (inward,) = group["IpPermissions"]
    assert inward["IpProtocol"] == "-1"
    assert inward["IpRanges"] == []
    assert [{"GroupId": pair["GroupId"]} for pair in inward["UserIdGroupPairs"]] == itself
    outward = [pair["GroupId"] for rule in group["IpPermissionsEgress"] for pair in rule["UserIdGroupPairs"]]
    assert outward == [out["SecurityGroup"]]
    assert all(s3.get_public_access_block(Bucket=out["Bucket"])["PublicAccessBlockConfiguration"].values())
    assert s3.get_bucket_lifecycle_configuration(Bucket=out["Bucket"])["Rules"][0]["Expiration"] == {"Days": 30}
    for kind, found in {
        "vpc": ec2.describe_vpcs(VpcIds=[out["Vpc"]])["Vpcs"],
        "subnet": ec2.describe_subnets(SubnetIds=[out["PrivateSubnet"]])["Subnets"],
        "group": [group],
        "nat": ec2.describe_nat_gateways(Filter=[{"Name": "vpc-id", "Values": [out["Vpc"]]}])["NatGateways"],
    }.items():
        tags = {tag["Key"]: tag["Value"] for tag in found[0]["Tags"]}
        assert tags.items() >= entry.tags.items(), kind


def test_a_changed_camp_shows_what_changes(entry: Entry, site: Site) -> None:
    bring(camp_stack(entry))
    proposal = deploy.propose(camp_stack(entry, nat=True))
    assert [change.logical_id for change in proposal.changes] == ["NatAddress", "Nat", "PrivateRoute"]
    assert list(deploy.apply(proposal, entry.token))[-1].status == "UPDATE_COMPLETE"
    proposal = deploy.propose(camp_stack(entry))
    assert {change.action for change in proposal.changes} == {"Remove"}
    assert list(deploy.apply(proposal, entry.token))[-1].status == "UPDATE_COMPLETE"


def broken(stack: deploy.Stack) -> deploy.Stack:
    """The stack with a part that cannot be made."""
    parts: dict[str, Any] = json.loads(stack.body)
    parts["Resources"]["Vpc"]["Properties"]["CidrBlock"] = "10.42.0.0/99"
    return replace(stack, template=parts)


def test_a_failure_names_the_first_reason_after_a_second_try(entry: Entry, site: Site) -> None:
    stack = camp_stack(entry)
    with requests(site) as seen, pytest.raises(ClusterError, match=r"is in ROLLBACK_COMPLETE: Vpc: .*99"):
        bring(broken(stack))
    assert seen.count("ExecuteChangeSet") == deploy.TRIES
    assert bring(stack)[-1].status == "CREATE_COMPLETE", "a repaired template clears the ruin away"


def test_a_template_that_is_refused_is_one_sentence(entry: Entry) -> None:
    stack = replace(camp_stack(entry), template={"Resources": {"X": {"Type": "AWS::Nope::Thing"}}})
    with pytest.raises(ClusterError, match=rf"^stack {entry.name}: AWS in .* Unrecognized resource types"):
        deploy.propose(stack)
    with pytest.raises(Refused, match="split it in two stacks"):
        deploy.propose(replace(stack, template={"Description": "x" * 60_000}))


def test_a_stack_is_deleted_with_every_version_in_its_bucket(entry: Entry, site: Site) -> None:
    bring(camp_stack(entry))
    bucket = deploy.outputs(entry.name, site)["Bucket"]
    s3 = client("s3", site.endpoint)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"1", b"2"):
        s3.put_object(Bucket=bucket, Key="checkpoints/a", Body=body)
    s3.delete_object(Bucket=bucket, Key="checkpoints/a")
    s3.create_multipart_upload(Bucket=bucket, Key="begun")
    events = list(deploy.delete(entry.name, site, entry.owner, entry.token))
    assert events[-1].status == "DELETE_COMPLETE"
    assert bucket not in [one["Name"] for one in s3.list_buckets()["Buckets"]]
    assert list(deploy.delete(entry.name, site, entry.owner, entry.token)) == []


def test_a_stack_of_somebody_else_is_left_alone(entry: Entry, site: Site) -> None:
    bring(camp_stack(entry))
    with pytest.raises(Refused, match=rf"belongs to {entry.owner}, not to mallory: left alone"):
        list(deploy.delete(entry.name, site, "mallory", "t"))


def test_outputs_of_nothing_are_one_sentence(site: Site) -> None:
    with pytest.raises(ClusterError, match=r"stack none does not stand in .*; provision it first"):
        deploy.outputs("none", site)


LIFE = """
import os, signal, sys
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from clusters import aws, inventory, ledger
from clusters.ledger import Claim
from clusters.stacks import camp, deploy
from store import open_store
from tests.clusters.gallery import camp_stack

store, moment = open_store(sys.argv[1]), sys.argv[2]
site = aws.here()
events = aws.cloudformation(site).meta.events
die = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
if moment:
    events.register(moment, die)
claim = Claim("mortal", datetime.now(UTC) + timedelta(hours=1))
entry = ledger.intend(store, claim, "stack", camp.name("mortal"), asdict(site))
list(deploy.apply(deploy.propose(camp_stack(entry)), entry.token))
ledger.created(store, entry)
print(deploy.outputs(entry.name, site)["Vpc"], flush=True)
print(inventory.teardown(store, "mortal", site))
"""


@pytest.mark.parametrize("request_", ["CreateChangeSet", "ExecuteChangeSet", "DeleteStack"])
@pytest.mark.parametrize("moment", ["before-send", "after-call"])
def test_a_life_killed_at_a_request_converges(site: Site, store: Store, moment: str, request_: str) -> None:
    def live(moment: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", LIFE, store.url, moment]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, check=False, timeout=60)

    before = vpcs(site)
    assert live(f"{moment}.cloudformation.{request_}").returncode < 0
    again = live("")
    assert again.returncode == 0
    assert again.stdout.endswith("[]\n"), "the inventory is empty afterwards"
    assert vpcs(site) == before
    assert inventory.inventory(store, "mortal", site) == []


def vpcs(site: Site) -> list[str]:
    return sorted(vpc["VpcId"] for vpc in client("ec2", site.endpoint).describe_vpcs()["Vpcs"])
