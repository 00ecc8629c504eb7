"""The gang watch on the node of rank 0: who is there, who is ready, who has ended how, and what follows for all."""

import hmac
import json
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.contract import Node
from training.gang import KEPT, STOPPED, Abort, AllDone, End, Gang, Go, Patience, Post, Stop, Uploaded, next_line

if TYPE_CHECKING:
    import asyncio


@dataclass(slots=True)
class _Member:
    """What the leader knows of a node."""

    host: str
    writer: "asyncio.StreamWriter | None" = None
    ready: bool = False
    code: int | None = None

    def send(self, message: dict[str, Any]) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")


@dataclass(slots=True)
class _Roll:
    """Who is there, and how far the gang has come."""

    members: dict[int, _Member] = field(default_factory=dict)
    stopping: int = 0
    gone: bool = False
    """All have started."""


class Leader(Gang):
    """The node of rank 0; with one node there is no network, and it leads itself."""

    def __init__(self, node: Node, job: str, patience: Patience, post: Post) -> None:
        self._roll = _Roll({0: _Member(socket.gethostname())})
        super().__init__(node, job, patience, post)

    def end(self, code: int) -> None:
        """All is done: let everybody leave with this code."""
        self._call({"end": code})

    def _told(self, message: dict[str, Any]) -> None:
        self._hear(0, message)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if "uploaded" in message:
            self.post(Uploaded(rank, message["uploaded"]))
        elif self._over:
            return
        elif "ready" in message:
            self._roll.members[rank].ready = True
            self._try_to_go()
        elif "stop" in message:
            self._stop(message["stop"])
        elif "done" in message:
            self._roll.members[rank].code = int(message["done"])
            self._settle(rank, message.get("message", ""))
        elif "end" in message and rank == 0:
            self._over = True
            self._send({"end": message["end"]})
            self.post(End(message["end"]))

    def _try_to_go(self) -> None:
        members = self._roll.members
        if len(members) == self.node.nodes and all(member.ready for member in members.values()):
            self._roll.gone = True
            hosts = [members[rank].host for rank in sorted(members)]
            self._send({"go": hosts})
            self.post(Go(hosts))

    def _stop(self, code: int) -> None:
        if not self._roll.stopping:
            self._roll.stopping = code
            self._send({"stop": code})
            self.post(Stop(code))

    def _settle(self, rank: int, message: str) -> None:
        """Look at how a node ended: a crash ends all at once, a stop stops all, and a good end waits for the others."""
        roll = self._roll
        code = roll.members[rank].code
        assert code is not None
        if code in STOPPED:
            self._stop(code)
        if code and not roll.stopping:
            self._abort(code, "node-failed", rank, message)
            return
        codes = [member.code for member in roll.members.values()]
        all_ended = len(codes) == self.node.nodes and None not in codes
        if all_ended or (code and not roll.gone):
            self._finish([code for code in codes if code is not None])

    def _finish(self, codes: list[int]) -> None:
        """Tell the common exit code: 0 if all ended well, else why they were stopped, else the first failure."""
        failures = sorted(code for code in codes if code)
        if not failures or set(failures) <= set(STOPPED) or self._roll.stopping == STOPPED[1]:
            self.post(AllDone(self._roll.stopping if failures else 0))
        else:
            self.post(AllDone(next(code for code in failures if code not in STOPPED)))

    def _lose(self, rank: int, how: str) -> None:
        if not self._over and self._roll.members[rank].code is None:
            self._abort(1, "node-lost", rank, f"node {rank} ({self._roll.members[rank].host}) was lost: {how}")

    def _abort(self, code: int, event: str, rank: int, message: str) -> None:
        roll = self._roll
        if self._over:
            return
        self._over = True
        code = code if code in KEPT else 1
        self._send({"abort": code})
        self.post(Abort(code, event, {"node": rank, "host": roll.members[rank].host, "message": message}))

    def _send(self, message: dict[str, Any]) -> None:
        for member in self._roll.members.values():
            member.send(message)

    async def _serve(self) -> None:
        import asyncio

        try:
            server = await asyncio.start_server(self._meet, self.node.master, self.node.gang_port)
        except OSError as problem:
            self._over = True
            where = f"{self.node.master} port {self.node.gang_port}"
            why = f"the gang watch cannot listen on {where} ({problem.strerror})"
            self.post(
                Abort(1, "error", {"message": f"{why}; set MASTER_PORT in the job's env to a free pair of ports"})
            )
            return
        async with server:
            until = time.monotonic() + self.patience.start
            while not self._over_and_alone():
                await asyncio.sleep(self.patience.beat)
                self._send({"beat": True})
                if time.monotonic() > until and len(self._roll.members) < self.node.nodes:
                    self._give_up()

    def _over_and_alone(self) -> bool:
        return self._over and all(member.writer is None for member in self._roll.members.values())

    def _give_up(self) -> None:
        roll = self._roll
        if not self._over:
            self._over = True
            missing = ", ".join(str(rank) for rank in range(self.node.nodes) if rank not in roll.members)
            sentence = f"of {self.node.nodes} nodes, number {missing} did not arrive within {self.patience.start:g} s"
            self._send({"abort": 1})
            self.post(Abort(1, "error", {"message": sentence}))

    async def _meet(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> None:
        """Serve one connection, from hello to the end."""
        rank = await self._welcome(reader, writer)
        if rank is None:
            writer.close()
        else:
            await self._listen(rank, reader)
            writer.transport.abort()  # it has closed, or is lost and would never take what is still to be sent

    async def _welcome(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> int | None:
        """Return the rank of a newcomer who belongs here."""
        hello = await next_line(reader, self.patience.silence)
        if not isinstance(hello, dict):
            return None
        rank, member = hello.get("hello"), _Member(str(hello.get("host")), writer)
        if not hmac.compare_digest(str(hello.get("token")), self.token):
            member.send({"refused": "node 0 belongs to another job, or to another attempt of this one"})
        elif not isinstance(rank, int) or rank in self._roll.members or not 0 < rank < self.node.nodes:
            member.send({"refused": f"node 0 does not expect a node {rank}, or has it already"})
        elif self._over:
            member.send({"refused": "the job is over"})
        else:
            member.send({"welcome": True})
            self._roll.members[rank] = member
            return rank
        return None

    async def _listen(self, rank: int, reader: "asyncio.StreamReader") -> None:
        try:
            while isinstance(message := await next_line(reader, self.patience.silence), dict):
                self._hear(rank, message)
            self._lose(rank, str(message))
        finally:
            self._roll.members[rank].writer = None
