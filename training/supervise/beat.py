"""Heartbeats: what every rank tells the others of itself, in datagrams, which can be lost but never wait.

Every rank tells rank 0, and rank 0 tells all: a second's traffic grows with the ranks, not with their square. TCPStore
would do as well until the process that serves it is the one that hangs.
"""

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from training.contract import own_address
from training.ranks import World

LARGEST: Final = 2048
"""Bytes of a datagram that are read; a heartbeat has some 300."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What one rank was doing, as it said itself."""

    rank: int
    step: int = 0
    phase: str = "start"
    order: int = 0
    """How many phases of this step it has entered."""
    age_s: float = 0.0
    """Since when it is in this phase."""
    steps: int = 0
    seconds: float = 0.0
    """How many steps it has done in this attempt, and how long it worked for them itself."""
    place: str = ""
    """Where in the code its main thread is."""
    waits: bool = False
    """Whether that is a collective."""
    hang: bool = False
    """Whether it has decided that this attempt hangs."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank is."""

    node: int
    host: str
    address: tuple[str, int]


class Pulse:
    """This rank's end of the heartbeats; used by one thread. All ranks must make it together."""

    def __init__(self, world: World, master: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1" if world.nodes == 1 else own_address(master), 0))
        address: tuple[str, int] = self._socket.getsockname()
        seat = Seat(world.node, socket.gethostname(), address)
        every = world.gather((seat, secrets.token_hex(8)))
        self.seats = [told for told, _ in every]
        self._token, self._rank = every[0][1], world.rank
        now = time.monotonic()
        self.table = {rank: (Beat(rank), now) for rank in range(world.size) if world.rank in (0, rank) or rank == 0}
        """The last beat of every rank this one hears, and when it came (time.monotonic)."""

    def send(self, beat: Beat) -> None:
        """Tell the rank that gathers, or all from there; whoever cannot be reached is not told."""
        message = json.dumps({"token": self._token, **asdict(beat)}).encode()
        self.table[self._rank] = (beat, time.monotonic())
        for seat in self.seats[1:] if self._rank == 0 else self.seats[:1]:
            try:
                self._socket.sendto(message, seat.address)
            except OSError:  # its machine is gone, or the network is: its silence says so
                continue

    def listen(self, until: float, *, alert: bool = False) -> None:
        """Hear the others until a moment of time.monotonic; if `alert`, no longer than until one says it hangs."""
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                beat = self._understand(self._socket.recv(LARGEST))
            except OSError:  # the time is over, or a rank that ended answers that nobody listens
                continue
            if beat is not None:
                self.table[beat.rank] = (beat, time.monotonic())
                if alert and beat.hang:
                    return

    def now(self) -> dict[int, tuple[Beat, float]]:
        """Return every beat, aged to this moment, and how long nothing was heard of that rank, by rank. Unit: s."""
        moment = time.monotonic()
        return {
            rank: (replace(beat, age_s=beat.age_s + moment - heard), moment - heard)
            for rank, (beat, heard) in self.table.items()
        }

    def close(self) -> None:
        """Say and hear no more."""
        self._socket.close()

    def _understand(self, message: bytes) -> Beat | None:
        try:
            told: dict[str, Any] = json.loads(message)
            beat = Beat(**told) if told.pop("token") == self._token else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        return beat if beat is not None and beat.rank in self.table else None
