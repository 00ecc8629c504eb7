"""The root file system that Debian's image has at the emulator: made once from Debian's archive, then kept.

It lies in the user's cache (`XDG_CACHE_HOME`), named by what it is made from; making it takes a minute or two.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

PACKAGES = "systemd,systemd-sysv,dbus,openssh-server,python3,python3-apt,sudo,ca-certificates,iproute2,procps"
USER = "admin"
"""Whom Debian's images on EC2 let in."""
CUSTOMIZE = f"""set -e
chroot "$1" useradd --create-home --shell /bin/bash {USER}
chroot "$1" usermod --password '*' {USER}
echo '{USER} ALL=(ALL) NOPASSWD:ALL' > "$1/etc/sudoers.d/90-{USER}"
rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/hostname"
: > "$1/etc/machine-id"
: > "$1/etc/resolv.conf"
: > "$1/etc/hosts"
"""
OPTIONS = (
    *("--variant=minbase", "--mode=root", f"--include={PACKAGES}", "--dpkgopt=force-unsafe-io"),
    *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*"),
    f"--customize-hook={CUSTOMIZE}",
)
RELEASE = "bookworm"


def root() -> Path:
    """The folder of the file system, made if it is not there; raises `RuntimeError` with why it cannot be made."""
    digest = hashlib.sha256(repr((RELEASE, OPTIONS)).encode()).hexdigest()[:12]
    place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "castra" / f"{RELEASE}-{digest}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.with_suffix(".lock")):
        if not place.exists():
            _make(place)
    return place


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make(place: Path) -> None:
    fresh = place.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    words = ["mmdebstrap", *OPTIONS, RELEASE, str(fresh)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        shutil.rmtree(fresh, ignore_errors=True)
        raise RuntimeError(f"Debian's file system cannot be made: {done.stderr.strip().rpartition(chr(10))[2]}")
    fresh.rename(place)
