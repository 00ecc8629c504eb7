"""Carry connections from a guest's loopback to a server outside, which the guest's network cannot reach."""

import contextlib
import ctypes
import socket
import threading
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000


class Relay:
    """Carries connections from a listening socket to another address until it is closed."""

    def __init__(self, listening: socket.socket, target: tuple[str, int]) -> None:
        self.listening, self.target = listening, target
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=_carry, args=(near, self.target), daemon=True).start()


def listen_in(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1:port in the network of a process, where it stays; raises `OSError`."""
    made: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            with Path(f"/proc/{pid}/ns/net").open("rb") as network:
                libc: Any = ctypes.CDLL(None, use_errno=True)
                if libc.setns(network.fileno(), CLONE_NEWNET):  # moves this thread alone, which ends here
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server(("127.0.0.1", port), backlog=128))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _carry(near: socket.socket, target: tuple[str, int]) -> None:
    """Both ways, until both have ended."""
    with near, contextlib.suppress(OSError), socket.create_connection(target) as far:
        back = threading.Thread(target=_copy, args=(far, near), daemon=True)
        back.start()
        _copy(near, far)
        back.join()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)
