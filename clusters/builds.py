"""Builds of machine images in the ledger: which are under way, and how those are cleared whose process is gone.

A build is worked on for as long as its lease is held (`store.lease`), so a dead one needs no clock to be told apart.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from clusters import ledger, machine_images
from clusters.aws import Site
from clusters.ledger import Entry
from store import Store
from store.lease import Busy, lease

SPARE = timedelta(hours=1)
"""What a build may take beyond its instance's own deadline, for its snapshot."""


def alone(store: Store, flavour: str, digest: str) -> AbstractContextManager[None]:
    """The lease on baking one image; raises `Busy` if somebody bakes it."""
    return lease(store, f"image-{flavour}-{digest}")


def intend(store: Store, site: Site, flavour: str, digest: str, minutes: int) -> Entry:
    """Write down that an image is about to be baked; what an earlier attempt left is cleared away first.

    To be called with the lease held. The entry's token names the build.
    """
    claim = ledger.Claim(f"image-{flavour}", datetime.now(UTC) + timedelta(minutes=minutes) + SPARE)
    entry = ledger.intend(store, claim, "build", f"{flavour}-{digest}", asdict(site))
    if not machine_images.clear(site, entry.token):
        return entry
    ledger.gone(store, entry)
    return ledger.intend(store, claim, "build", entry.name, asdict(site))


def sweep(store: Store, tell: Callable[[str], None] = print) -> list[str]:
    """Clear up after the builds that nobody works on any more; returns what was removed."""
    removed: list[str] = []
    for entry in open_builds(store):
        try:
            with lease(store, f"image-{entry.name}"):
                found = end(entry)
                ledger.gone(store, entry)
        except Busy:
            continue
        tell(f"build of {entry.name}: removed {', '.join(found) or 'nothing'}")
        removed += found
    return removed


def open_builds(store: Store) -> list[Entry]:
    """The builds of ours that the ledger says may have left something, those under way among them."""
    return [one for one in ledger.open_entries(store) if one.kind == "build" and one.owner == ledger.owner()]


def end(entry: Entry) -> list[str]:
    """Remove what a build has made; returns what that was."""
    return [] if entry.vanished else machine_images.clear(Site(**entry.where), entry.token)
