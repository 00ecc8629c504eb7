"""Try a finished image out: an instance of it is launched, proves every role again, and is terminated."""

import socket
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from ami import packer, stage
from ami.base import BuildFailed
from clusters import builds, keeper, ledger, machine_images
from clusters.base import Unreachable
from clusters.machine_images import Image, Place
from store import Store
from tasks import phrases, report
from tasks.image_follow import Story, follow
from tasks.image_wanted import Wanted
from tasks.policy import PATIENT
from tasks.workplace import cleared, now, undisturbed, workplace

REACHED_S, LOOK_S = 600.0, 0.5
GRACE_S = 5.0
BEFORE_A_CLUSTER = ["munge.service"]
"""What cannot run yet: its key comes with the cluster."""
STRANGER = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"


def prove(wanted: Wanted, store: Store, image: Image, place: Place) -> None:
    """Try an image out unless that has been done; raises `BuildFailed` if an instance of it is not what it should be.

    Then the image is kept, so that one can look, and neither shared nor named.
    """
    if image.booted:
        report.say(f"image {wanted.name}: was tried out {image.booted}")
        return
    with builds.alone(store, wanted.flavour.name, wanted.digest):
        boot(wanted, store, image, place)
    machine_images.booted(wanted.site, image.id, now())


@task(task_run_name="boot {wanted.name}", cache_policy=NO_CACHE, **PATIENT)
def boot(wanted: Wanted, store: Store, image: Image, place: Place) -> None:
    """Launch an instance, prove every role on it, terminate it; raises `BuildFailed`, with nothing left."""
    begun, flavour = time.monotonic(), wanted.flavour
    entry = builds.intend(store, wanted.site, flavour.name, wanted.digest, flavour.deadline_minutes)
    told = {
        "instance_type": flavour.instance_type,
        "tags": {**wanted.tags, **entry.tags, machine_images.BUILD: entry.token},
        "port": flavour.ssh.port,
        "minutes": flavour.deadline_minutes,
    }
    with cleared(store, entry), workplace() as folder:
        key = machine_images.try_out(wanted.site, image.id, told, entry.token, place)
        ledger.created(store, entry, entry.name)
        story = _proven(wanted, folder, key, _reached(wanted, entry.token))
    report.say(
        f"image {wanted.name}: an instance of {image.id} boots and proves {len(story.results)} tasks, "
        f"in {phrases.clock(time.monotonic() - begun)}"
    )


def _reached(wanted: Wanted, build: str) -> str:
    """The address of the instance, once its SSH answers; raises `Unreachable`."""
    until, ssh = time.monotonic() + REACHED_S, wanted.flavour.ssh
    while time.monotonic() < until:
        where = machine_images.address(wanted.site, build, ssh.interface)
        if where and _greets(where, ssh.port):
            return where
        time.sleep(LOOK_S)
    raise Unreachable(f"image {wanted.name}: its instance does not answer on port {ssh.port} in {REACHED_S:.0f} s")


def _greets(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5) as line:
            line.settimeout(5)
            return line.recv(4) == b"SSH-"
    except OSError:
        return False


def _proven(wanted: Wanted, folder: Path, key: str, where: str) -> Story:
    """Let Ansible prove every role; returns what it told."""
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_text(key)
    ssh = f"ansible_port={wanted.flavour.ssh.port} ansible_user={wanted.flavour.ssh.user}"
    how = f"ansible_ssh_private_key_file={folder / 'key'} ansible_ssh_extra_args='{STRANGER}'"
    (folder / "inventory").write_text(f"instance ansible_host={where} {ssh} {how}\n")
    launcher, *words = stage.lay(folder, _told(wanted))
    story = Story(tuple(wanted.flavour.roles), task="waiting for the instance", program="Ansible")
    argv = [launcher, "-i", str(folder / "inventory"), *words]
    limit_s = 60.0 * wanted.flavour.deadline_minutes
    keeper.start(folder, [keeper.Node(argv, packer.environment(folder))], timeout_s=limit_s, grace_s=GRACE_S)
    try:
        with report.progress("boot") as bar:
            well = follow(folder, story, bar, lambda: None)
    finally:
        with undisturbed():
            keeper.stop(folder, wait_s=GRACE_S + 5)
    if well:
        return story
    failure = story.failure(f"image {wanted.name} was tried out")
    if failure.passing:
        raise Unreachable(str(failure))
    raise BuildFailed(f"{failure}; it is kept, and not published")


def _told(wanted: Wanted) -> dict[str, object]:
    may_fail = wanted.flavour.variables.get("verify_may_fail", [])
    return {
        **wanted.told,
        "image_applied": {"verify": "install"},
        "verify_reboot": False,
        "verify_may_fail": [*(may_fail if isinstance(may_fail, list) else []), *BEFORE_A_CLUSTER],
    }
