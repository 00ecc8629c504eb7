"""A lease in the store: at most one run works on a thing at a time, and a dead one does not block the next.

The holder renews its lease while it works. One that was killed is noticed at once on the same machine (its process
is gone), and after `TTL_S` from any other.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from store.objects import Conflict, Store, StoreError

TTL_S = 90.0


class Busy(StoreError):
    """Another run holds the lease; the text says which."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, and until when (Unix time, seconds)."""

    what: str
    host: str
    machine: str
    """Where `pid` means something: one boot of one machine, one container."""
    pid: int
    born: str
    token: str
    expires: float

    def alive(self) -> bool:
        """Whether this holder may still be at work."""
        if self.machine == _machine():
            return _born(self.pid) == self.born
        return time.time() < self.expires


@contextlib.contextmanager
def lease(store: Store, what: str) -> Iterator[None]:
    """Hold the lease on `what` (a key's worth of text) for the length of the block; raises `Busy` if it is taken."""
    key, mine = f"leases/{what}.json", _fresh(what)
    etag = _take(store, key, mine)
    done = threading.Event()
    renewer = threading.Thread(target=_renew, args=(store, key, mine, etag, done), daemon=True)
    renewer.start()
    try:
        yield
    finally:
        done.set()
        renewer.join(timeout=5)
        _release(store, key, mine)


def _take(store: Store, key: str, mine: Holder) -> str:
    there = store.get(key)
    try:
        if there is None:
            return store.put(key, _bytes(mine), if_absent=True)
        holder = Holder(**json.loads(there.data))
        if not holder.alive():
            return store.put(key, _bytes(mine), if_match=there.etag)
    except Conflict:
        if (there := store.get(key)) and there.data == _bytes(mine):
            return there.etag  # our own request, whose answer was lost and which was sent again
        raise Busy(f"{mine.what} was started twice at this moment: the other one goes on") from None
    raise Busy(
        f"{mine.what} is being run by process {holder.pid} on {holder.host}: wait for it, or stop it "
        f"(kill {holder.pid}), then run again"
    )


def _renew(store: Store, key: str, mine: Holder, etag: str, done: threading.Event) -> None:
    while not done.wait(TTL_S / 3):
        try:
            etag = store.put(key, _bytes(_fresh(mine.what, mine.token)), if_match=etag)
        except Conflict:
            return  # taken over after we were unreachable for a whole TTL_S: the ledger keeps the two runs apart
        except StoreError:
            continue  # a store that is away for a moment costs nothing until the lease ends


def _release(store: Store, key: str, mine: Holder) -> None:
    with contextlib.suppress(StoreError):  # an unreleased lease ends with its process
        there = store.get(key)
        if there and Holder(**json.loads(there.data)).token == mine.token:
            store.delete(key)


def _fresh(what: str, token: str = "") -> Holder:
    pid = os.getpid()
    return Holder(
        what, socket.gethostname(), _machine(), pid, _born(pid), token or secrets.token_hex(8), time.time() + TTL_S
    )


def _bytes(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _machine() -> str:
    boot, names = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists() and names.is_symlink():
        return f"{boot.read_text().strip()} {names.readlink()}"
    return f"{socket.gethostname()} {uuid.getnode()}"


def _born(pid: int) -> str:
    """When a process was started, so that a pid used again is not mistaken for it; "" where there is none."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            return "" if fields[0] == "Z" else fields[19]
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
