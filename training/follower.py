"""The gang watch on every node but that of rank 0: join the leader, beat, tell, obey."""

import json
import socket
import time
from typing import TYPE_CHECKING, Any

from training.contract import Node
from training.gang import Abort, End, Gang, Go, Patience, Post, Stop, next_line

if TYPE_CHECKING:
    import asyncio


class Follower(Gang):
    """Any other node."""

    def __init__(self, node: Node, job: str, patience: Patience, post: Post) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._unsaid: list[dict[str, Any]] = []
        super().__init__(node, job, patience, post)

    def leave(self, wait_s: float) -> None:
        self._call({"leave": True})
        super().leave(wait_s)

    def _told(self, message: dict[str, Any]) -> None:
        if "leave" in message:
            self._over = True
            if self._writer is not None:
                self._writer.close()
        elif self._writer is None:
            self._unsaid.append(message)
        elif not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _serve(self) -> None:
        import asyncio

        reader = await self._reach()
        if reader is None:
            return
        beating = asyncio.create_task(self._beat())
        while isinstance(message := await next_line(reader, self.patience.silence), dict):
            self._hear(message)
        beating.cancel()
        self._abort("node-lost", f"node 0 ({self.node.master}) was lost: {message}", node=0, host=self.node.master)

    async def _reach(self) -> "asyncio.StreamReader | None":
        """Connect to the leader, who may come up later than this node, and join."""
        import asyncio

        until, why = time.monotonic() + self.patience.start, "nobody was asked"
        while time.monotonic() < until and not self._over:
            try:
                connected = asyncio.open_connection(self.node.master, self.node.gang_port)
                reader, writer = await asyncio.wait_for(connected, self.patience.silence)
            except (OSError, TimeoutError) as problem:
                why = str(problem) or "no answer"
            else:
                why = await self._join(reader, writer)
                if not why:
                    return reader
            await asyncio.sleep(self.patience.beat / 4)
        where = f"node 0 at {self.node.master} port {self.node.gang_port}"
        self._abort("error", f"{where} was not joined within {self.patience.start:g} s: {why}")
        return None

    async def _join(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> str:
        """Say hello; return why that was in vain, or nothing."""
        hello = {"hello": self.node.rank, "token": self.token, "host": socket.gethostname()}
        writer.write(json.dumps(hello).encode() + b"\n")
        answer = await next_line(reader, self.patience.silence)
        if not isinstance(answer, dict) or "welcome" not in answer:
            writer.close()
            return str(answer.get("refused") if isinstance(answer, dict) else answer)
        self._writer = writer
        for message in self._unsaid:
            self._told(message)
        return ""

    async def _beat(self) -> None:
        import asyncio

        while True:
            self._told({"beat": True})
            await asyncio.sleep(self.patience.beat)

    def _hear(self, message: dict[str, Any]) -> None:
        if "go" in message:
            self.post(Go(message["go"]))
        elif "stop" in message:
            self.post(Stop(message["stop"]))
        elif "abort" in message:
            self._over = True
            self.post(Abort(message["abort"]))
        elif "end" in message:
            self._over = True
            self.post(End(message["end"]))

    def _abort(self, event: str, sentence: str, **facts: Any) -> None:
        if not self._over:
            self._over = True
            self.post(Abort(1, event, {**facts, "message": sentence}))
