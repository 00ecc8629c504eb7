"""The container that jobs run in: found in ECR, or built once by podman and pushed."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ami import container, packer
from ami.base import BuildFailed
from clusters import builds, container_images, keeper
from clusters.aws import Site
from clusters.base import Unreachable
from clusters.container_images import Registry
from store import Store
from store.lease import Busy
from tasks import phrases, report
from tasks.container_wanted import Wanted, found, references
from tasks.image import await_turn
from tasks.image_follow import Story, follow
from tasks.policy import PATIENT
from tasks.workplace import undisturbed, workplace

GRACE_S = 5.0
CONTEXT, NAME = "context", "castra"


@dataclass
class Telling(Story):
    """What is known of a build from the lines that Ansible says in the container."""

    program: str = "podman"
    _begun: float = field(default_factory=time.monotonic)
    _told: dict[str, Any] = field(default_factory=dict)

    def take_line(self, text: str) -> None:
        """Learn from a line of the build's."""
        event = container.event(text)
        if event is None:
            self.last.extend([text] if text.strip() else [])
        elif event["event"] == "playbook_on_task_start":
            event["role"] = event["role"] or self._told.get("role", "")  # a task that includes roles names none
            self._begun, self._told = time.monotonic(), {name: event[name] for name in ("role", "task")}
            report.relay([text.rstrip(" *")])
            self.take_event(event)
        elif self._told:
            self._learn(event)

    def _learn(self, event: dict[str, Any]) -> None:
        """One row for a task, however many items it has."""
        seconds = time.monotonic() - self._begun
        if self.results and self.results[-1].get("of") is self._told and not event.get("why"):
            self.results[-1] |= {"seconds": seconds, "changed": self.results[-1]["changed"] or event["changed"]}
            return
        self.take_event(event | self._told | {"of": self._told, "seconds": seconds, "host": "the container"})


def make(wanted: Wanted, store: Store) -> str:
    """Find the container in all its regions, or build and push it; returns what to write as `image.container`.

    Whoever wants the same container at the same time waits for who builds it. Raises `BuildFailed`.
    """
    lease = f"container-{wanted.kind.name}"
    while len(there := found(wanted)) < len(wanted.regions):
        try:
            with builds.alone(store, lease, wanted.digest):
                if len(found(wanted)) < len(wanted.regions):
                    build(wanted)
        except Busy as busy:
            report.say(f"container {wanted.name}: {busy}")
            await_turn(store, lease, wanted.digest)
    rows = zip(there.items(), references(wanted, there), strict=True)
    report.table(
        "containers", [{"region": at, "digest": one, "container": ref} for (at, one), ref in rows], wanted.name
    )
    return ", ".join(references(wanted, there))


@task(task_run_name="build container {wanted.name}", cache_policy=NO_CACHE, **PATIENT)
def build(wanted: Wanted) -> None:
    """Build the container and push it wherever it shall be; tried again where that can help. Raises `BuildFailed`."""
    begun = time.monotonic()
    with workplace() as folder:
        try:
            telling = _built(wanted, folder)
            bill = _bill(folder)
            for site in wanted.sites.values():
                _push(wanted, folder, site)
        except BuildFailed as failure:
            raise (Unreachable(str(failure)) if failure.passing else failure) from None
    _show(wanted, telling, bill, time.monotonic() - begun)


def _built(wanted: Wanted, folder: Path) -> Telling:
    """Build it under a keeper, which ends podman with this process; returns what was told."""
    if wanted.rootfs:
        _import(wanted, folder)
    labels = {"castra.flavour": wanted.kind.name, "castra.content-hash": wanted.digest}
    (folder / CONTEXT).mkdir()
    container.write(folder / CONTEXT, wanted.kind, wanted.base, labels)
    telling = Telling(tuple(wanted.kind.roles), task="making the first layer")
    argv = [*container.podman(folder), *container.command(folder / CONTEXT, NAME)]
    limit_s = 60.0 * wanted.kind.deadline_minutes
    keeper.start(folder, [keeper.Node(argv, _environment(folder))], timeout_s=limit_s, grace_s=GRACE_S)
    try:
        with report.progress("container") as bar:
            well = follow(folder, telling, bar, lambda: None)
    finally:
        with undisturbed():
            keeper.stop(folder, wait_s=GRACE_S + 5)
    if not well:
        raise telling.failure(f"container {wanted.name}")
    return telling


def _import(wanted: Wanted, folder: Path) -> None:
    """Make an image of the file system that it starts from."""
    with subprocess.Popen(["tar", "-C", wanted.rootfs, "-c", "."], stdout=subprocess.PIPE) as tar:
        _podman(folder, ["import", "--quiet", "-", wanted.base], stdin=tar.stdout)


def _bill(folder: Path) -> dict[str, str]:
    """The versions that the roles found, as they are written in the container."""
    _podman(folder, ["create", "--name", NAME, f"localhost/{NAME}:latest", "true"])
    _podman(folder, ["cp", f"{NAME}:/etc/castra/image.json", str(folder / "image.json")])
    told: dict[str, str] = json.loads((folder / "image.json").read_text())["software"]
    return told


def _push(wanted: Wanted, folder: Path, site: Site) -> None:
    """Push it; the password goes through a pipe, and what podman keeps of it goes with the folder."""
    container_images.make_repository(site, wanted.kind.name, {"castra:flavour": wanted.kind.name})
    registry = container_images.registry(site)
    place = f"{registry.host}/{container_images.repository(wanted.kind.name)}:{wanted.digest}"
    report.say(f"container {wanted.name}: pushing it to {place}")
    how = [f"--authfile={folder / 'login.json'}", f"--tls-verify={str(registry.secure).lower()}"]
    _login(folder, registry, how)
    _podman(folder, ["push", "--quiet", *how, f"localhost/{NAME}:latest", place])
    container_images.require(site, wanted.kind.name, wanted.digest)


def _login(folder: Path, registry: Registry, how: Sequence[str]) -> None:
    words = ["login", *how, "--username", registry.user, "--password-stdin", registry.host]
    _podman(folder, words, told=registry.password)


def _podman(folder: Path, words: Sequence[str], *, told: str | None = None, stdin: Any = None) -> None:
    """Run one command of podman's; raises `BuildFailed` with the last that it said."""
    given: dict[str, Any] = {"input": told} if told is not None else {"stdin": stdin or subprocess.DEVNULL}
    argv, env = [*container.podman(folder), *words], os.environ | _environment(folder)
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False, **given)
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        sentence = f"podman {words[0]} failed: {said}"
        raise BuildFailed(sentence, passing=bool(packer.PASSING.search(sentence)))


def _environment(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str((folder / "tmp").resolve())}


def _show(wanted: Wanted, telling: Telling, bill: dict[str, str], seconds: float) -> None:
    columns = ("role", "task", "seconds", "changed")
    rows = [{name: event[name] for name in columns} for event in telling.results if event["role"]]
    report.table("image-tasks", rows, f"What Ansible did to {wanted.name}")
    software = [{"software": name, "version": version} for name, version in sorted(bill.items())]
    report.table("software-bill", software, f"Versions as found in {wanted.name}")
    changed = sum(bool(row["changed"]) for row in rows)
    report.say(
        f"container {wanted.name}: built and pushed in {phrases.clock(seconds)}, {len(rows)} tasks, "
        f"{changed} changed something"
    )
