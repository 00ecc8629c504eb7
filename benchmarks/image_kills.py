"""Kill builds of a machine image at random moments, reap, and count what is left in the account.

    python -m benchmarks.image_kills --rounds 30      (root; packer, slirp4netns, systemd-container, mmdebstrap)

Each round: one build, after a random share of an undisturbed build's time hit by SIGTERM or by SIGKILL to every process
of it; then the reaper; then a look at instances, security groups, key pairs, volumes, images and snapshots. At the end
one build that nobody disturbs. Exit code 1 if anything was left or the last build failed.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3
from rich.console import Console

from clusters import keeper
from emulator import aws as emulated
from flows._server import embedded

FLAVOUR = """
description: As little as an image can be.
os: debian-12
kernel: "6.1"
base: {parameter: /aws/service/debian/release/12/latest/amd64, owner: "136693071363", name: debian-12-amd64-*}
ssh: {user: admin, port: 2222, interface: private_ip}
instance_type: m7i.large
root_gib: 8
deadline_minutes: 20
roles: {base: install, image_facts: install, verify: install, clean: install}
variables: {mark: MARK}
"""
LIVING = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}]
OURS = [{"Name": "tag-key", "Values": ["castra:build"]}]


def main() -> int:
    """Run the rounds; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--seed", type=int, default=1)
    told = options.parse_args()
    chance = random.Random(told.seed)
    with contextlib.ExitStack() as life:
        place = Path(life.enter_context(tempfile.TemporaryDirectory(prefix="castra-kills-")))
        aws = life.enter_context(emulated.running(place))
        url = life.enter_context(embedded(keeper.free_port(), Console(quiet=True)))
        account = Account(place, aws.endpoint, f"{url}/api")
        begun = time.monotonic()
        failed = account.bake("undisturbed").wait()
        undisturbed = time.monotonic() - begun
        print(f"undisturbed: {undisturbed:.0f} s, exit code {failed}", flush=True)
        moments = [chance.uniform(0.05, 1.0) * undisturbed for _ in range(told.rounds)]
        lost = sum(account.round(number, moment) for number, moment in enumerate(moments))
        failed = account.bake("last").wait()
    print(f"{told.rounds} kills: {lost} things left after the reaper; the build after them ended with {failed}")
    return int(bool(lost or failed))


class Account:
    """An emulated account, and the builds in it."""

    def __init__(self, folder: Path, endpoint: str, api: str) -> None:
        self.folder = folder
        state = {"CASTRA_STATE": str(folder / "state"), "PREFECT_API_URL": api}
        self.env = os.environ | emulated.environment(endpoint) | state
        session = boto3.session.Session("castra", "castra", region_name=emulated.REGION)
        self.ec2: Any = session.client("ec2", endpoint_url=endpoint)

    def bake(self, mark: str) -> subprocess.Popen[bytes]:
        """Start to bake an image that nobody has baked."""
        path = self.folder / "kills.yaml"
        path.write_text(FLAVOUR.replace("MARK", mark))
        return self.run("flows.build_image", "--flavour", str(path))

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a module of ours, silently."""
        argv = [sys.executable, "-m", *words]
        silent = subprocess.DEVNULL
        return subprocess.Popen(argv, env=self.env, stdin=silent, stdout=silent, stderr=silent)

    def round(self, number: int, moment_s: float) -> int:
        """Disturb one build after that long, and reap; returns how many things are left."""
        build, sign = self.bake(f"round{number}"), (signal.SIGTERM, signal.SIGKILL)[number % 2]
        with contextlib.suppress(subprocess.TimeoutExpired):
            build.wait(moment_s)
        for pid in [build.pid] if sign == signal.SIGTERM else self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        begun = time.monotonic()
        build.wait()
        ended, before = time.monotonic() - begun, self.left()
        self.run("flows.reap", str(self.folder / "state" / "store")).wait()
        after = self.left()
        told = f"{sign.name} after {moment_s:.1f} s: ended in {ended:.1f} s, {len(before)} left, {len(after)} reaped on"
        print(f"{number:2}  {told}", *after, flush=True)
        return len(after)

    def processes(self) -> list[int]:
        """Everybody who works on a build."""
        mark, found = f"CASTRA_STATE={self.folder / 'state'}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes():
                    found.append(int(place.name))
        return found

    def left(self) -> list[str]:
        """What is in the account, but for images that are finished and their snapshots."""
        rows = self.ec2.describe_instances(Filters=LIVING)["Reservations"]
        found = [one["InstanceId"] for row in rows for one in row["Instances"]]
        groups = self.ec2.describe_security_groups()["SecurityGroups"]
        found += [row["GroupName"] for row in groups if row["GroupName"] != "default"]
        found += [row["KeyName"] for row in self.ec2.describe_key_pairs()["KeyPairs"]]
        found += [row["VolumeId"] for row in self.ec2.describe_volumes()["Volumes"]]
        images = self.ec2.describe_images(Owners=["self"])["Images"]
        ready = [row for row in images if any(tag["Key"] == "castra:ready" for tag in row.get("Tags", []))]
        found += [row["ImageId"] for row in images if row not in ready]
        kept = {disk["Ebs"]["SnapshotId"] for row in ready for disk in row["BlockDeviceMappings"]}
        snapshots = self.ec2.describe_snapshots(OwnerIds=["self"], Filters=OURS)["Snapshots"]
        return found + [row["SnapshotId"] for row in snapshots if row["SnapshotId"] not in kept]


if __name__ == "__main__":
    sys.exit(main())
