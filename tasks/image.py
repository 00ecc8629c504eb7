"""The machine image that nodes start from: found, or baked once by Packer, then copied and published."""

import contextlib
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from ami import packer, stage
from clusters import builds, catalog, keeper, ledger, machine_images
from clusters.base import Refused, Unreachable
from clusters.ledger import Entry
from clusters.machine_images import ANYWHERE, Image, Place
from recipes.spec import Recipe
from store import Store, open_store
from store.lease import Busy
from tasks import image_wanted, phrases, report
from tasks.image_boot import prove
from tasks.image_follow import Story, follow
from tasks.image_wanted import Wanted, found
from tasks.policy import PATIENT
from tasks.workplace import cleared, now, undisturbed, workplace

WAIT_S = 2.0
NEAR_GRACE_S, FAR_GRACE_S = 20.0, 900.0
"""How long Packer may take to clean up after itself: at the emulator, and on AWS."""


@dataclass(frozen=True)
class Publication:
    """What is done with an image beside baking it."""

    latest: bool = False
    """Name it in the parameter `/castra/images/<flavour>/latest` of each region, and deprecate those before it."""
    accounts: tuple[str, ...] = ()
    """With whom it is shared."""
    kms_key: str = ""
    """What encrypts it; "" is the account's own key, with which nothing can be shared."""
    place: Place = ANYWHERE
    """Where in the account's network it is baked and tried out."""
    boot_test: bool = False
    """Launch an instance of it and prove all roles there, before it is shared or named."""


def build(recipe: Recipe) -> str:
    """Make sure that the recipe's image exists; returns what was done.

    The local flavour of a recipe is this machine as it is, and an AMI that is named is taken as it is.
    """
    if recipe.image.flavour == "local":
        return "skipped, the nodes are this machine as it is"
    if recipe.image.ami:
        return f"skipped, the nodes start from {recipe.image.ami}"
    region = getattr(recipe.cluster, "region", None)
    wanted = image_wanted.wanted(recipe.image.flavour, (region,) if region else ())
    return told(make(wanted, open_store(recipe.store)), wanted)


def told(made: dict[str, Image], wanted: Wanted) -> str:
    """Images in a sentence."""
    return f"{wanted.name} is " + ", ".join(f"{image.id} in {region}" for region, image in made.items())


def make(wanted: Wanted, store: Store, publication: Publication = Publication()) -> dict[str, Image]:
    """Find the image in all its regions, or bake it and copy it there; returns it by region.

    Whoever wants the same image at the same time waits for who bakes it. Raises `BuildFailed`.
    """
    if publication.accounts and not publication.kms_key:
        raise Refused("an image that the account's own key encrypts cannot be shared: name a key with --kms-key")
    while len(there := found(wanted)) < len(wanted.regions):
        try:
            with builds.alone(store, wanted.flavour.name, wanted.digest):
                _complete(wanted, store, publication)
        except Busy as busy:
            report.say(f"image {wanted.name}: {busy}")
            await_turn(store, wanted.flavour.name, wanted.digest)
    if publication.boot_test:
        prove(wanted, store, next(iter(there.values())), publication.place)
    _publish(wanted, there, publication)
    report.table("images", [{"region": region, **asdict(there[region])} for region in there], wanted.name)
    return there


def await_turn(store: Store, flavour: str, digest: str) -> None:
    """Wait until nobody bakes that image any more."""
    while True:
        time.sleep(WAIT_S)
        with contextlib.suppress(Busy), builds.alone(store, flavour, digest):
            return


def _complete(wanted: Wanted, store: Store, publication: Publication) -> None:
    """Bake the image unless somebody else just has, and copy it where it is missing."""
    builds.sweep(store, lambda line: report.relay([line]))
    there = found(wanted)
    if not there:
        machine_images.check_offered(wanted.site, wanted.flavour.instance_type)
        bake(wanted, store, publication.kms_key, publication.place)
        there = found(wanted)
    home, source = next(iter(there.items()))
    for region, site in wanted.sites.items():
        if region not in there:
            report.say(f"image {wanted.name}: copying it to {region}")
            made = machine_images.copy(site, wanted.sites[home], source, wanted.tags, publication.kms_key)
            machine_images.finish(site, made, now())


@task(task_run_name="bake {wanted.name}", cache_policy=NO_CACHE, **PATIENT)
def bake(wanted: Wanted, store: Store, kms_key: str = "", place: Place = ANYWHERE) -> str:
    """Bake the image; returns its id. Tried again where that can help. Raises `BuildFailed`, with all cleared up."""
    begun = time.monotonic()
    programs = packer.programs()
    entry = builds.intend(store, wanted.site, wanted.flavour.name, wanted.digest, wanted.flavour.deadline_minutes)
    story = Story(tuple(wanted.flavour.roles))
    with cleared(store, entry), workplace() as folder:
        _stage(wanted, entry, folder, programs["packer"], kms_key, place)
        ledger.created(store, entry, entry.name)
        if not _run(wanted, entry, folder, programs["packer"], story):
            failure = story.failure(f"image {wanted.name}")
            raise Unreachable(str(failure)) if failure.passing else failure
        image = packer.images(folder)[wanted.site.region]
        machine_images.finish(wanted.site, image, now())
    _show(wanted, story, time.monotonic() - begun)
    return image


def _stage(wanted: Wanted, entry: Entry, folder: Path, program: str, kms_key: str, place: Place) -> None:
    flavour, site = wanted.flavour, wanted.site
    tags = {**wanted.tags, **entry.tags, machine_images.BUILD: entry.token}
    variables = {
        "flavour": flavour.name,
        "image_name": f"castra-{flavour.name}-{wanted.digest}-{entry.token}",
        "tags": tags,
        "region": site.region,
        "base_image": wanted.base.id,
        "root_device": wanted.base.root_device,
        "root_gib": flavour.root_gib,
        "kms_key": kms_key,
        "instance_type": flavour.instance_type,
        "instance_profile": place.profile,
        "subnet": place.subnet,
        "security_group": machine_images.open_door(site, tags, entry.token, flavour.ssh.port, place),
        "key_pair": machine_images.name_of(entry.token),
        "user": flavour.ssh.user,
        "ssh_port": flavour.ssh.port,
        "ssh_interface": flavour.ssh.interface,
        "deadline_minutes": flavour.deadline_minutes,
        "endpoint": site.endpoint,
        "poll_seconds": 1 if site.endpoint else 15,
    }
    stage.stage(folder, stage.packer_version(program), variables, wanted.told)


def _run(wanted: Wanted, entry: Entry, folder: Path, program: str, story: Story) -> bool:
    """Run Packer under a keeper, which ends it with this process; returns whether it went well."""
    grace_s = NEAR_GRACE_S if wanted.site.endpoint else FAR_GRACE_S
    node = keeper.Node(packer.command(program, folder), packer.environment(folder))
    keeper.start(folder, [node], timeout_s=60.0 * wanted.flavour.deadline_minutes, grace_s=grace_s)
    try:
        with report.progress("image") as bar:
            return follow(folder, story, bar, lambda: machine_images.require_tokens(wanted.site, entry.token))
    finally:
        with undisturbed():
            keeper.stop(folder, wait_s=grace_s + 5)


def _publish(wanted: Wanted, there: dict[str, Image], publication: Publication) -> None:
    at = (datetime.now(UTC) + timedelta(days=machine_images.DEPRECATED_DAYS)).isoformat(timespec="seconds")
    for region, image in there.items():
        if publication.accounts:
            machine_images.share(wanted.sites[region], image, publication.accounts)
        if publication.latest:
            machine_images.publish(wanted.sites[region], wanted.flavour.name, image, at)


def _show(wanted: Wanted, story: Story, seconds: float) -> None:
    """What was done, what is on the image, and what it cost."""
    columns = ("role", "task", "seconds", "changed")
    rows = [{name: event[name] for name in columns} for event in story.results if event["role"]]
    report.table("image-tasks", rows, f"What Ansible did to {wanted.name}")
    bill = [{"software": name, "version": version} for name, version in sorted(story.bill.items())]
    report.table("software-bill", bill, f"Versions as found on {wanted.name}")
    changed = sum(bool(row["changed"]) for row in rows)
    cost = _usd(wanted, seconds)
    report.say(
        f"image {wanted.name}: baked in {phrases.clock(seconds)}, {len(rows)} tasks, {changed} changed something; "
        f"{'its price is not known' if cost is None else f'{cost:.2f} USD'}"
    )


def _usd(wanted: Wanted, seconds: float) -> float | None:
    """What the builder cost on demand; None where the catalogue does not know its price."""
    if wanted.site.endpoint:
        return 0.0
    known = catalog.load().get(wanted.flavour.instance_type)
    return known.price_usd_per_hour * seconds / 3600 if known and known.price_usd_per_hour else None
