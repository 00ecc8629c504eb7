"""Machines: what EC2's instances are at the emulator, from their launch to the image that is made of them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from emulator import machines
from emulator.images import DEBIAN
from emulator.machines import SSH_PORT
from tests.clusters.yard import wait_until
from tests.sky import client

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        not machines.possible() and not os.environ.get("CI"),
        reason="needs root, slirp4netns, systemd-container and mmdebstrap",
    ),
]


class Account:
    """EC2 as a user sees it, with a key."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.ec2 = client("ec2", site.endpoint)
        self.key = folder / "key"
        self.name = folder.name
        self.key.write_text(self.ec2.create_key_pair(KeyName=self.name)["KeyMaterial"])
        self.key.chmod(0o600)
        self.debian = client("ssm", site.endpoint).get_parameter(Name=DEBIAN)["Parameter"]["Value"]

    def launch(self, image: str = "", **more: Any) -> str:
        """Launch an instance and wait until it lets in."""
        told = {"ImageId": image or self.debian, "MinCount": 1, "MaxCount": 1, "KeyName": self.name}
        instance = str(self.ec2.run_instances(**told, **more)["Instances"][0]["InstanceId"])
        wait_until(lambda: self.ssh(instance, "true")[0] == 0, 240)  # the first one makes Debian's file system
        return instance

    def about(self, instance: str) -> dict[str, Any]:
        return dict(self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0])

    def ssh(self, instance: str, command: str) -> tuple[int, str]:
        strange = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=5"]
        options = [word for option in strange for word in ("-o", option)]
        where = f"admin@{self.about(instance)['PrivateIpAddress']}"
        words = ["ssh", *options, "-i", str(self.key), "-p", str(SSH_PORT), where, command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout.strip()

    def state(self, instance: str) -> str:
        return str(self.about(instance)["State"]["Name"])


@pytest.fixture
def account(site: Site, tmp_path: Path) -> Iterator[Account]:
    made = Account(site, tmp_path)
    yield made
    living = [{"Name": "instance-state-name", "Values": ["running", "stopped"]}]
    for row in made.ec2.describe_instances(Filters=living)["Reservations"]:
        made.ec2.terminate_instances(InstanceIds=[one["InstanceId"] for one in row["Instances"]])
    made.ec2.delete_key_pair(KeyName=made.name)


def test_an_instance_is_a_machine_with_systemd_that_reboots_stops_and_starts(account: Account) -> None:
    one = account.launch()
    assert account.ssh(one, "systemctl is-system-running --wait") == (0, "running")
    assert account.ssh(one, "sudo id -un; hostname") == (0, f"root\n{one}")
    first = account.ssh(one, "cat /proc/sys/kernel/random/boot_id; echo mine > kept")[1]
    since = "systemctl show --property UserspaceTimestampMonotonic --value"
    before = account.ssh(one, since)[1]
    account.ssh(one, "sudo systemctl reboot")
    wait_until(lambda: account.ssh(one, since)[1] not in ("", before), 60)
    assert account.ssh(one, "cat kept") == (0, "mine"), first
    account.ec2.stop_instances(InstanceIds=[one])
    assert account.ssh(one, "true")[0] != 0
    account.ec2.start_instances(InstanceIds=[one])
    wait_until(lambda: account.ssh(one, "cat kept") == (0, "mine"), 60)


def test_an_image_of_a_machine_boots_with_what_was_written_and_without_who_it_was(account: Account) -> None:
    one = account.launch()
    account.ssh(one, "echo baked | sudo tee /etc/baked; sync")
    account.ec2.stop_instances(InstanceIds=[one])
    image = account.ec2.create_image(InstanceId=one, Name="baked")["ImageId"]
    account.ec2.terminate_instances(InstanceIds=[one])
    two = account.launch(image)
    assert account.ssh(two, "cat /etc/baked; hostname; ls /etc/ssh/ssh_host_* 2>/dev/null")[1] == f"baked\n{two}"
    account.ssh(two, "echo two | sudo tee /etc/two")
    three = account.launch(image)
    assert account.ssh(three, "ls /etc/baked /etc/two 2>/dev/null")[1] == "/etc/baked", "each has a disk of its own"


def test_a_machine_runs_its_user_data_and_ends_as_it_was_told(account: Account) -> None:
    told = "#!/bin/sh\ntouch /etc/told\n"
    one = account.launch(UserData=told, InstanceInitiatedShutdownBehavior="terminate")
    wait_until(lambda: account.ssh(one, "ls /etc/told") == (0, "/etc/told"), 20)
    account.ssh(one, "sudo systemctl poweroff")
    wait_until(lambda: account.state(one) == "terminated", 60)
    two = account.launch()
    account.ssh(two, "sudo systemctl poweroff")
    wait_until(lambda: account.state(two) == "stopped", 60)


def test_machines_reach_the_outside_and_not_each_other(account: Account) -> None:
    one, two = account.launch(), account.launch()
    other = account.about(two)["PrivateIpAddress"]
    reach = f"timeout 3 bash -c '</dev/tcp/{other}/{SSH_PORT}' 2>/dev/null && echo reached || echo none"
    assert account.ssh(one, reach)[1] == "none"
    assert account.ssh(one, "ip -4 route show default | cut -d' ' -f1")[1] == "default"


def test_instances_of_other_images_are_records(account: Account) -> None:
    images = account.ec2.describe_images(Owners=["247102896272"])["Images"]
    told = {"ImageId": images[0]["ImageId"], "MinCount": 1, "MaxCount": 1}
    instance = account.ec2.run_instances(**told)["Instances"][0]["InstanceId"]
    assert account.state(instance) == "running"
    assert not account.about(instance)["PrivateIpAddress"].startswith("127.")
