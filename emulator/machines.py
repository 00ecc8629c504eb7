"""Instances of EC2 that are real: systemd in namespaces, on a disk of layers, reached over SSH like any other host.

Each has a network of its own, from which it reaches the outside (slirp4netns) and which nothing else reaches but its
port 22, at port 2222 of an address of this machine's loopback. Its key and its user data wait in /run, as cloud-init
would find them; what it writes is on its disk. Needs root, slirp4netns, systemd-container, mmdebstrap.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulator import guests
from emulator.debian import USER

INIT = Path(__file__).with_name("machine.sh")
TOOLS = ("slirp4netns", "systemd-nspawn", "mmdebstrap")
SSH_PORT = 2222
NETWORK_S = 10.0
STOP_S = 30.0
"""How long systemd may take to stop everything before its plug is pulled."""
MASKED = (
    *("ssh.service", "systemd-networkd.service", "systemd-resolved.service", "systemd-timesyncd.service"),
    *("console-getty.service", "getty@.service", "apt-daily.timer", "apt-daily-upgrade.timer"),
)
SSHD = f"""[Unit]
Description=The machine's door
[Service]
RuntimeDirectory=sshd door
RuntimeDirectoryPreserve=yes
ExecStartPre=/bin/sh -c 'test -e /run/door/key || ssh-keygen -q -t ed25519 -N "" -f /run/door/key'
ExecStart=/usr/sbin/sshd -D -e -h /run/door/key -o UsePAM=no -o PasswordAuthentication=no -o UseDNS=no \
  -o AllowUsers={USER} -o AuthorizedKeysFile=/run/login/authorized_keys
Restart=always
[Install]
WantedBy=multi-user.target
"""
USER_DATA = """[Unit]
Description=What the instance was told when it was launched
[Service]
ExecStart=/bin/sh /run/login/user-data
"""


def possible() -> bool:
    """Whether machines can be run here."""
    return guests.possible() and all(map(shutil.which, TOOLS))


@dataclass(eq=False)
class Machine:
    """One instance. `layers` are what is below its disk, uppermost first; `ended` is called if it ends by itself."""

    name: str
    folder: Path
    address: str
    layers: Sequence[Path]
    key: str
    """The public key that lets in."""
    user_data: str = ""
    ended: Callable[[], None] = lambda: None
    _first: subprocess.Popen[bytes] | None = None
    _network: subprocess.Popen[bytes] | None = None
    _work: threading.RLock = field(default_factory=threading.RLock)

    def boot(self) -> None:
        """Start it; raises `RuntimeError` with what went wrong."""
        with self._work:
            for name in ("upper", "work", "root", "units", "login"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self._prepare()
            lower = ":".join(str(layer) for layer in self.layers)
            spaces = ["--mount", "--net", "--pid", "--uts", "--ipc", "--mount-proc", "--fork", "--kill-child"]
            with (self.folder / "console").open("ab") as console:
                first = self._first = subprocess.Popen(
                    ["unshare", *spaces, "bash", str(INIT), lower, str(self.folder), self.name],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=console,
                )  # fmt: skip
            assert first.stdin is not None
            assert first.stdout is not None
            if first.stdout.readline() != b"ready\n":
                self.power_off()
                raise RuntimeError(f"machine {self.name} does not start: {(self.folder / 'console').read_text()}")
            self._connect(_child(first.pid))
            first.stdin.write(b"go\n")
            first.stdin.flush()
            threading.Thread(target=self._relay, args=(first,), daemon=True).start()

    def stop(self) -> None:
        """Shut it down as EC2 does; fine if it is off."""
        with self._work:
            if (first := self._first) and first.poll() is None:
                with contextlib.suppress(ProcessLookupError, LookupError, subprocess.TimeoutExpired):
                    os.kill(_child(first.pid), signal.SIGTERM)
                    first.wait(STOP_S)
            self.power_off()

    def power_off(self) -> None:
        """Pull the plug."""
        with self._work:
            network, self._network, first, self._first = self._network, None, self._first, None
            for process in (first, network):
                if process:
                    process.kill()
                    process.wait()
            if first and first.stdin:
                first.stdin.close()

    def destroy(self) -> None:
        """Pull the plug and throw the disk away."""
        self.power_off()
        shutil.rmtree(self.folder, ignore_errors=True)

    def snapshot(self, place: Path) -> list[Path]:
        """Move what it has written to `place`; returns the layers of an image of it, on which it goes on itself.

        It must be off.
        """
        with self._work:
            place.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "upper").rename(place)
            shutil.rmtree(self.folder / "work", ignore_errors=True)
            self.layers = [place, *self.layers]
            return list(self.layers)

    def _prepare(self) -> None:
        units, wants = self.folder / "units", self.folder / "units" / "multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        for name in MASKED:
            _link(units / name, "/dev/null")
        _link(units / "default.target", "/lib/systemd/system/multi-user.target")
        (units / "door.service").write_text(SSHD)
        _link(wants / "door.service", "../door.service")
        (self.folder / "login" / "authorized_keys").write_text(f"{self.key}\n")
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {self.name}\n")
        (self.folder / "resolv.conf").write_text("nameserver 10.0.2.3\n")  # slirp4netns's
        if self.user_data.startswith("#!"):
            (self.folder / "login" / "user-data").write_text(self.user_data)
            (units / "user-data.service").write_text(USER_DATA)
            _link(wants / "user-data.service", "../user-data.service")

    def _connect(self, pid: int) -> None:
        """Give the machine a network: out through this machine, in to port 22."""
        (self.folder / "network").unlink(missing_ok=True)
        words = ["slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", "--api-socket=network"]
        with (self.folder / "console").open("ab") as console:
            self._network = subprocess.Popen(
                [*words, str(pid), "tap0"], cwd=self.folder, stdout=console, stderr=console
            )
        door = {"proto": "tcp", "host_addr": self.address, "host_port": SSH_PORT, "guest_port": 22}
        told = json.dumps({"execute": "add_hostfwd", "arguments": door}).encode()
        until = time.monotonic() + NETWORK_S
        while not (answer := self._tell_network(told)):
            if time.monotonic() > until or self._network.poll() is not None:
                answer = {"error": (self.folder / "console").read_text()}
            time.sleep(0.02)
        if "error" in answer:
            raise RuntimeError(f"machine {self.name} has no network: {answer['error']}")

    def _tell_network(self, told: bytes) -> dict[str, Any] | None:
        """What slirp4netns answers; None while it does not listen."""
        folder = os.open(self.folder, os.O_PATH)  # a socket's path has 107 letters at most
        try:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                line.connect(f"/proc/self/fd/{folder}/network")
                line.sendall(told)
                line.shutdown(socket.SHUT_WR)
                return dict(json.loads(line.recv(1 << 16)))
        finally:
            os.close(folder)
        return None

    def _relay(self, first: subprocess.Popen[bytes]) -> None:
        """Keep what the machine says; tell if it has ended by itself."""
        assert first.stdout is not None
        with (self.folder / "console").open("ab") as console, contextlib.suppress(OSError):
            shutil.copyfileobj(first.stdout, console)
        first.stdout.close()
        first.wait()
        with self._work:
            itself = self._first is first
            if itself:
                self.power_off()
        if itself:
            self.ended()


def _child(pid: int) -> int:
    """The one child of a process; raises `LookupError` if it has none."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _link(place: Path, target: str) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to(target)
