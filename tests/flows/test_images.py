"""Machine images, end to end: Packer, Ansible and real machines behind an emulated EC2, as a person types it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emulator import machines
from emulator.aws import Emulator
from tests.camp import Camp, alive
from tests.flows.oven import Watch, camp, sky
from tests.sky import client, tell

__all__ = ["camp", "sky"]
pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not machines.possible() and not os.environ.get("CI"),
        reason="needs root, packer, slirp4netns, systemd-container and mmdebstrap",
    ),
]
SECRET = "sesame-open-the-door"
FLAVOUR = """
description: As little as an image can be.
os: debian-12
kernel: "6.1"
base: {{parameter: /aws/service/debian/release/12/latest/amd64, owner: "136693071363", name: debian-12-amd64-*}}
ssh: {{user: admin, port: 2222, interface: private_ip}}
instance_type: {instance_type}
root_gib: 8
deadline_minutes: 20
roles: {{base: install, image_facts: install, verify: install, clean: install}}
variables: {{mark: {mark}, {more}}}
"""


def flavour(camp: Camp, name: str, instance_type: str = "m7i.large", more: str = "") -> Path:
    return camp.recipe(FLAVOUR.format(mark=name, instance_type=instance_type, more=more), f"{name}.yaml")


def ec2(camp: Camp) -> Any:
    return client("ec2", camp.env["AWS_ENDPOINT_URL"])


def left(camp: Camp) -> list[str]:
    """What builds have left: all of ours but finished images and their snapshots."""
    api = ec2(camp)
    living = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}]
    found = [
        one["InstanceId"] for row in api.describe_instances(Filters=living)["Reservations"] for one in row["Instances"]
    ]
    groups = api.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["castra-*", "packer*"]}])
    found += [row["GroupId"] for row in groups["SecurityGroups"]]
    found += [row["KeyName"] for row in api.describe_key_pairs()["KeyPairs"]]
    found += [row["VolumeId"] for row in api.describe_volumes()["Volumes"]]
    images = api.describe_images(Owners=["self"])["Images"]
    ready = [row for row in images if any(tag["Key"] == "castra:ready" for tag in row.get("Tags", []))]
    found += [row["ImageId"] for row in images if row not in ready]
    kept = {disk["Ebs"]["SnapshotId"] for row in ready for disk in row["BlockDeviceMappings"]}
    ours = [{"Name": "tag-key", "Values": ["castra:build"]}]
    snapshots = api.describe_snapshots(OwnerIds=["self"], Filters=ours)["Snapshots"]
    return found + [row["SnapshotId"] for row in snapshots if row["SnapshotId"] not in kept]


def baking(camp: Camp, patience_s: float = 120.0) -> None:
    """Wait until Ansible is at work."""
    camp.wait_for(".castra/images/*/events.jsonl", patience_s)


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory, sky: tuple[Emulator, dict[str, str]]) -> tuple[Camp, Path, str]:
    """An image that two wanted at once: one baked it, the other waited and took the result.

    The first time SSH did not answer, so it was tried again. What Packer logs in with was seen by nobody else.
    """
    camp = Camp(tmp_path_factory.mktemp("baked"))
    camp.env |= sky[1] | {"PYTHONPATH": str(Path(__file__).parents[2]), "AWS_SESSION_TOKEN": SECRET}
    refused = weak_packer(camp)
    path = flavour(camp, "once")
    with Watch(SECRET, camp) as watch:
        both = [camp.start("build_image", "--flavour", path) for _ in range(2)]
        told = [build.communicate(timeout=400)[0] for build in both]
    assert [build.returncode for build in both] == [0, 0], told
    (image,) = {text.splitlines()[-1].split()[-3] for text in told}
    assert sum("baked in" in text for text in told) == 1
    assert refused.exists(), "and it was tried again"
    assert left(camp) == []
    layer = Path(tell(sky[0].endpoint, "disks")[image][0])
    assert [path for path in layer.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []
    assert watch.seen == set()
    assert SECRET not in "".join(told)
    return camp, path, image


def weak_packer(camp: Camp) -> Path:
    """Put a Packer on the user's PATH whose first build finds that SSH does not answer; returns what is there then."""
    (camp.folder / "bin").mkdir()
    refused, packer = camp.folder / "refused", camp.folder / "bin" / "packer"
    said = "1700000000,,ui,error,Build 'amazon-ebs.node' errored: Timeout waiting for SSH."
    first = f'[ $1 = build ] && [ ! -e {refused} ] && {{ touch {refused}; echo "{said}"; exit 1; }}'
    packer.write_text(f'#!/bin/sh\n{first}\nexec {shutil.which("packer")} "$@"\n')
    packer.chmod(0o755)
    camp.env["PATH"] = f"{camp.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return refused


def test_an_image_is_found_copied_and_pruned(baked: tuple[Camp, Path, str]) -> None:
    camp, path, first = baked
    row = ec2(camp).describe_images(ImageIds=[first])["Images"][0]
    assert row["RootDeviceType"] == "ebs"
    requests = ec2(camp).describe_instances()["Reservations"]
    assert requests[-1]["Instances"][0]["MetadataOptions"]["HttpTokens"] == "required"
    code, told = camp.run("build_image", "--flavour", path)
    assert (code, told.splitlines()[-1]) == (0, first), "found, not baked again"
    code, told = camp.run("build_image", "--flavour", path, "--region", "us-east-1", "--region", "us-west-2")
    assert code == 0, told
    assert len(ec2(camp).describe_instances()["Reservations"]) == len(requests), "copied, not baked"
    code, told = camp.run("build_image", "--flavour", path, "--prune", "keep=1")
    assert (code, told.splitlines()[-1]) == (0, "0 images would be removed; --yes does it")


def test_an_image_is_published_once_an_instance_of_it_has_proven_itself(
    baked: tuple[Camp, Path, str], sky: tuple[Emulator, dict[str, str]]
) -> None:
    camp, path, image = baked
    words = ("--flavour", path, "--boot-test", "--publish")
    told_at = client("ssm", camp.env["AWS_ENDPOINT_URL"])
    setting = Path(tell(sky[0].endpoint, "disks")[image][0], "etc", "sysctl.d", "90-castra.conf")
    damaged = setting.rename(setting.with_name("elsewhere"))
    code, told = camp.run("build_image", *words)
    damaged.rename(setting)
    assert code == 1
    assert 'was tried out: task "Read the kernel\'s settings" of role base failed on instance' in told
    assert "it is kept, and not published" in told
    assert left(camp) == []
    assert told_at.get_parameters(Names=["/castra/images/once/latest"])["Parameters"] == []

    code, told = camp.run("build_image", *words)
    assert code == 0, told
    assert f"an instance of {image} boots and proves" in told
    assert told_at.get_parameter(Name="/castra/images/once/latest")["Parameter"]["Value"] == image
    assert left(camp) == []
    tried = ec2(camp).describe_instances()["Reservations"][-1]["Instances"][0]
    assert (tried["ImageId"], tried["MetadataOptions"]["HttpTokens"]) == (image, "required")
    code, told = camp.run("build_image", *words)
    assert "was tried out 20" in told, "not twice"


def test_a_role_that_fails_is_named_with_what_it_said_and_leaves_nothing(camp: Camp) -> None:
    before = len(ec2(camp).describe_instances()["Reservations"])
    code, told = camp.run("build_image", "--flavour", flavour(camp, "broken", more="verify_roles: missing"))
    assert code == 1
    assert len(ec2(camp).describe_instances()["Reservations"]) == before + 1, "it is not tried again"
    assert "of role verify failed on default" in told
    assert "fix ansible/roles/verify, then run again" in told
    assert "Traceback" not in told
    assert left(camp) == []


def test_a_cancelled_build_leaves_nothing(camp: Camp) -> None:
    build = camp.start("build_image", "--flavour", flavour(camp, "cancelled"))
    baking(camp)
    build.send_signal(signal.SIGTERM)
    told, _ = build.communicate(timeout=60)
    assert build.returncode != 0, told
    assert left(camp) == []
    assert camp.processes(10) == []


def test_what_a_killed_build_has_left_is_reaped_and_the_next_one_succeeds(camp: Camp) -> None:
    words = ("--flavour", flavour(camp, "killed"))
    build = camp.start("build_image", *words)
    baking(camp)
    (short,) = [place.resolve() for place in camp.folder.glob(".castra/images/*/tmp")]
    kill(camp)
    build.communicate(timeout=60)
    assert left(camp), "nobody was there to clear up"
    code, told = camp.run("reap", camp.folder / ".castra" / "store")
    assert code == 0, told
    assert left(camp) == []
    code, told = camp.run("build_image", *words)
    assert code == 0, told
    assert not short.exists()
    assert alive(f"TMPDIR={short}".encode()) == []


def kill(camp: Camp) -> None:
    """SIGKILL to every process of a build at once."""
    for place in alive(camp.mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(place.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--flavour", "pcluster-gp"), "did you mean 'pcluster-gpu'?"),
        (("--flavour", "pcluster-gpu"), "is baked from an image that AWS alone has"),
        (("--flavour", "local", "--prune", "all"), "write --prune keep=3"),
        (("--flavour", "local", "--source", "everywhere"), "write --source 203.0.113.7/32"),
        (("--flavour", "local", "--share", "123456789012"), "name a key with --kms-key"),
        ((), "which image?"),
    ],
)
def test_a_mistake_is_one_sentence_and_creates_nothing(camp: Camp, words: tuple[str, ...], sentence: str) -> None:
    before = len(ec2(camp).describe_instances()["Reservations"])
    code, told = camp.run("build_image", *words)
    assert code in (1, 2)
    assert sentence in told.replace("\n", " ")
    assert "Traceback" not in told
    assert len(ec2(camp).describe_instances()["Reservations"]) == before
    assert left(camp) == []


def test_a_region_without_the_instance_type_and_a_base_that_is_not_there(camp: Camp) -> None:
    code, told = camp.run("build_image", "--flavour", flavour(camp, "nowhere", instance_type="p9.metal"))
    assert code == 1
    assert "us-east-1 has no p9.metal" in told
    text = (camp.folder / "nowhere.yaml").read_text().replace("p9.metal", "m7i.large")
    strange = text.replace("/aws/service/debian/release/12/latest/amd64", "/aws/none").replace(
        "debian-12-amd64", "none"
    )
    camp.recipe(strange, "baseless.yaml")
    code, told = camp.run("build_image", "--flavour", camp.folder / "baseless.yaml")
    assert code == 2
    assert "no base image is published in us-east-1" in told


def test_without_its_tools_nothing_is_created(camp: Camp) -> None:
    camp.env["PATH"] = str(Path(sys.executable).parent)
    code, told = camp.run("build_image", "--flavour", flavour(camp, "toolless"))
    assert code == 2
    assert "packer is not on PATH" in told
    (camp.folder / "bin").mkdir()
    for name in ("packer", "ssh"):
        (camp.folder / "bin" / name).symlink_to(str(shutil.which(name)))
    camp.env["PATH"] += f"{os.pathsep}{camp.folder / 'bin'}"
    code, told = camp.run("build_image", "--flavour", camp.folder / "toolless.yaml")
    assert code == 2
    assert "is baked on a machine of the emulator, which needs root" in told
    assert left(camp) == []


CLUSTER = """
import json, sys
from pathlib import Path
from emulator.slurm import SlurmGuests
with SlurmGuests(2, [sys.argv[1]], image=[Path(layer) for layer in sys.argv[2:]]) as slurm:
    print(slurm.sh("srun --nodes=2 sh -c 'hostname; grep flavour /etc/castra/image.json'"))
"""


@pytest.mark.timeout(1500)
def test_a_slurm_cluster_boots_from_the_image_that_was_baked(camp: Camp, sky: tuple[Emulator, dict[str, str]]) -> None:
    """The whole chain with the real flavour: packages of Debian, a reboot, the layer, two nodes, munge, srun."""
    build = camp.start("build_image", "--flavour", "local")
    told, _ = build.communicate(timeout=1200)
    assert build.returncode == 0, told
    image = told.splitlines()[-1].split()[2]
    disk = tell(sky[0].endpoint, "disks")[image]
    words = [sys.executable, "-c", CLUSTER, str(camp.folder), *disk]
    ran = subprocess.run(words, env=camp.environment(), capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count('"flavour": "local"') == 2
    assert {"node-1", "node-2"} <= set(ran.stdout.split())
