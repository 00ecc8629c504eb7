"""The ledger: what exists because of us, written in the store before it is made and after it is gone.

`ledger/<run>/<kind>-<name>.json` goes intent → created → gone, each by a conditional write. An intent without a result
means: look, it may exist. Its token is the client token of the request, so that a repeated request is one request.
"""

import getpass
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from clusters import aws
from clusters.base import Refused
from store import Conflict, Store
from store.objects import Versioned

Kind = Literal["job", "stack", "pcluster", "build"]
"""pcluster is a cluster of AWS ParallelCluster, whose stacks its own command line makes and deletes; build is that of
a machine image."""


def owner() -> str:
    """Who we are: `CASTRA_OWNER`, or the name of the user."""
    return os.environ.get("CASTRA_OWNER") or getpass.getuser()


@dataclass(frozen=True, slots=True)
class Claim:
    """For which run something is made, until when, and for whom."""

    run: str
    expires: datetime
    keep: bool = False
    """Teardown leaves it standing until it expires."""
    owner: str = field(default_factory=owner)


@dataclass(frozen=True, slots=True)
class Entry:
    """One resource of one run. Times are UTC, ISO 8601."""

    run: str
    kind: Kind
    name: str
    where: Mapping[str, str]
    """How to find it: a stack's `Site` as a dict, a job's cluster as `clusters.kinds.attach` takes it."""
    owner: str
    token: str
    expires: str
    keep: bool = False
    state: Literal["intent", "created", "gone", "stray"] = "intent"
    """A stray was found by its tags and was never written here."""
    id: str = ""
    """What its cluster calls it."""
    since: str = ""
    """When the intent was written."""

    @property
    def key(self) -> str:
        """Its place in the store."""
        return f"ledger/{self.run}/{self.kind}-{self.name}.json"

    @property
    def site(self) -> aws.Site | None:
        """The part of AWS it is in, None for what is on this machine."""
        found = aws.Site.at(self.where)
        return found if found.region else None

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self.where.get("workdir") or str(self.site or self.where.get("folder", ""))

    @property
    def vanished(self) -> bool:
        """Whether it was in the memory of an emulator that is gone."""
        return self.site is not None and aws.vanished(self.site)

    @property
    def tags(self) -> dict[str, str]:
        """What the resource itself must carry."""
        kept = {"castra:keep": "true"} if self.keep else {}
        return {"castra:owner": self.owner, "castra:run": self.run, "castra:expires": self.expires} | kept


def intend(store: Store, claim: Claim, kind: Kind, name: str, where: Mapping[str, str], token: str = "") -> Entry:
    """Record that we are about to make something; if it is open already, the entry (token, expiry) that it has.

    An entry with the `token` that is given is the caller's own. Raises `Refused` if it is elsewhere: two things of one
    name would share one entry.
    """
    fresh = Entry(
        run=claim.run,
        kind=kind,
        name=name,
        where=dict(where),
        owner=claim.owner,
        token=token or secrets.token_hex(16),
        expires=claim.expires.astimezone(UTC).isoformat(timespec="seconds"),
        keep=claim.keep,
        since=datetime.now(UTC).isoformat(timespec="microseconds"),
    )
    return _write(store, fresh, lambda there: _standing(there, fresh))


def created(store: Store, entry: Entry, id: str = "") -> Entry:  # noqa: A002  the word of every cluster's API
    """Record that it exists, under the id its cluster gave it."""
    return _write(store, entry, lambda there: replace(there or entry, state="created", id=id))


def gone(store: Store, entry: Entry) -> Entry:
    """Record that it does not exist any more, or never came to be."""
    return _write(store, entry, lambda there: replace(there or entry, state="gone"))


def entries(store: Store, run: str | None = None) -> list[Entry]:
    """Everything ever written, in the order of the intents."""
    found = (store.get(key) for key in store.keys(f"ledger/{run}/" if run else "ledger/"))
    return sorted((_read(there) for there in found if there), key=lambda entry: entry.since)


def open_entries(store: Store, run: str | None = None) -> list[Entry]:
    """What exists or may exist, oldest first."""
    return [entry for entry in entries(store, run) if entry.state != "gone"]


def expired(store: Store, now: datetime) -> list[Entry]:
    """The open entries whose time is over, oldest first."""
    return [entry for entry in open_entries(store) if datetime.fromisoformat(entry.expires) <= now]


def renewed(store: Store, entry: Entry) -> Entry:
    """Take over an intent that whoever wrote it did not carry out; raises `Conflict` if it has changed meanwhile."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")

    def change(there: Entry | None) -> Entry:
        if there != entry:
            raise Conflict(entry.key)
        return replace(entry, token=secrets.token_hex(16), since=now)

    return _write(store, entry, change)


def _standing(there: Entry | None, fresh: Entry) -> Entry:
    if there is None or there.state == "gone":
        return fresh
    if there.where == fresh.where:
        return there
    if there.vanished:
        return fresh
    if there.kind == "job":  # its cluster may have been changed under it; it is where it was submitted
        return there
    raise Refused(f"{there.kind} {there.name} of run {there.run} is in {there.place} already: tear that run down first")


def _write(store: Store, entry: Entry, change: Callable[[Entry | None], Entry]) -> Entry:
    while True:
        there = store.get(entry.key)
        before = _read(there) if there else None
        after = change(before)
        if after == before:
            return after
        data = json.dumps(asdict(after), indent=1, sort_keys=True).encode()
        try:
            store.put(entry.key, data, if_absent=there is None, if_match=there.etag if there else None)
        except Conflict:
            continue  # somebody else was faster: look again
        return after


def _read(there: Versioned) -> Entry:
    return Entry(**json.loads(there.data))
