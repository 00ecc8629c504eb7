"""The gang watch: all nodes start together, stop together and fail together, whatever the platform does about it.

The node of rank 0 leads: it listens beside torchrun's port, and the others connect, say hello and beat. Nobody trains
before all are ready, and a node that fails, falls silent or vanishes ends all of them within seconds, where a
collective would wait for its time limit and AWS Batch would do nothing at all. Messages are lines of JSON:

    member → leader   {"hello": rank, "token", "host"}   {"ready"}  {"beat"}  {"stop": code}  {"uploaded": name}
                      {"done": code, "message"}
    leader → member   {"welcome"} or {"refused": why}, {"go": [host, …]}  {"beat"}  {"stop": code}
                      {"abort": code}  {"end": code}

The token is derived from the job's name, id and attempt: it keeps apart jobs that meet on one host and attempts that
overlap. It is no secret; the network must be the job's own.
"""

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from training.contract import Node

if TYPE_CHECKING:
    import asyncio

BEAT_S: Final = 2.0
FAREWELL_S: Final = 10.0
"""How long the leader waits for members to finish their uploads after the gang has failed."""
STOPPED: Final = (143, 124)
"""Exit codes of a program that stopped as it was asked to: saved, and at the time limit."""
KEPT: Final = (2, 124, 143)
"""Exit codes of a node that all nodes end with; others mean a crash and become 1."""


@dataclass(frozen=True, slots=True)
class Go:
    """All nodes are ready; their host names, by rank."""

    hosts: list[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """A node was asked to stop (143) or reached the time limit (124): all stop and save."""

    code: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The gang has failed: end at once with this code."""

    code: int
    event: str = ""
    """What there is to tell: "node-lost", "node-failed" or "error"; nothing where the leader tells it."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A node has put its files of a folder into the store. Only the leader hears it."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class AllDone:
    """Every node's program has ended well; what is left to do is the leader's. Only the leader hears it."""

    code: int


@dataclass(frozen=True, slots=True)
class End:
    """The leader has finished too: leave with this code."""

    code: int


Post = Callable[[Go | Stop | Abort | Uploaded | AllDone | End], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits, in seconds."""

    start: float = 600.0
    """Until all nodes must have said hello."""
    silence: float = 15.0
    """After which a node that says nothing is lost."""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Patience":
        """Read CASTRA_GANG_START_S and CASTRA_GANG_SILENCE_S."""
        return cls(float(env.get("CASTRA_GANG_START_S", 600)), float(env.get("CASTRA_GANG_SILENCE_S", 15)))

    @property
    def beat(self) -> float:
        """The time between two signs of life."""
        return min(BEAT_S, self.silence / 4)


class Gang:
    """One node's side of the watch. Its methods may be called from any thread; what happens is told by `post`."""

    def __init__(self, node: Node, job: str, patience: Patience, post: Post) -> None:
        self.node, self.patience, self.post = node, patience, post
        self.token = token(node, job)
        self._left = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        if node.nodes > 1:
            self._began = threading.Event()
            threading.Thread(target=self._work, daemon=True).start()
            self._began.wait()

    def ready(self) -> None:
        """This node has all it needs to start its program."""
        self._call({"ready": True})

    def stop(self, code: int) -> None:
        """Have every node stop its program politely."""
        self._call({"stop": code})

    def uploaded(self, name: str) -> None:
        """This node's files of a folder are in the store."""
        self._call({"uploaded": name})

    def done(self, code: int, message: str = "") -> None:
        """This node's program has ended."""
        self._call({"done": code, "message": message})

    def left(self, wait_s: float) -> bool:
        """Wait until all connections have ended, at most so long; returns whether they have."""
        return self.node.nodes == 1 or self._left.wait(wait_s)

    def leave(self, wait_s: float) -> None:
        """Part from the others when there is nothing left to say, within so long."""
        self.left(wait_s)

    def _call(self, message: dict[str, Any]) -> None:
        if self._loop is None:
            self._told(message)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to be told
                self._loop.call_soon_threadsafe(self._told, message)

    def _work(self) -> None:
        import asyncio

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._began.set()
            await self._serve()

        try:
            asyncio.run(serve())
        finally:
            self._left.set()

    def _told(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    async def _serve(self) -> None:
        raise NotImplementedError


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
    over: bool = False
    """The end, good or bad, has been told."""


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
        roll, member = self._roll, self._roll.members[rank]
        if roll.over or "beat" in message:
            if "uploaded" in message:
                self.post(Uploaded(rank, message["uploaded"]))
        elif "ready" in message:
            member.ready = True
            self._try_to_go()
        elif "stop" in message:
            self._stop(message["stop"])
        elif "uploaded" in message:
            self.post(Uploaded(rank, message["uploaded"]))
        elif "done" in message:
            member.code = int(message["done"])
            self._settle(rank, message.get("message", ""))
        elif "end" in message and rank == 0:
            roll.over = True
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
        if not self._roll.over and self._roll.members[rank].code is None:
            self._abort(1, "node-lost", rank, f"node {rank} ({self._roll.members[rank].host}) was lost: {how}")

    def _abort(self, code: int, event: str, rank: int, message: str) -> None:
        roll = self._roll
        if roll.over:
            return
        roll.over = True
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
        return self._roll.over and all(member.writer is None for member in self._roll.members.values())

    def _give_up(self) -> None:
        roll = self._roll
        if not roll.over:
            roll.over = True
            missing = ", ".join(str(rank) for rank in range(self.node.nodes) if rank not in roll.members)
            sentence = f"of {self.node.nodes} nodes, number {missing} did not arrive within {self.patience.start:g} s"
            self._send({"abort": 1})
            self.post(Abort(1, "error", {"message": sentence}))

    async def _meet(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> None:
        """Serve one connection, from hello to the end."""
        try:
            rank = await self._welcome(reader, writer)
            if rank is not None:
                await self._listen(rank, reader)
        finally:
            with contextlib.suppress(OSError):
                writer.close()
                await writer.wait_closed()

    async def _welcome(self, reader: "asyncio.StreamReader", writer: "asyncio.StreamWriter") -> int | None:
        """Return the rank of a newcomer who belongs here."""
        hello = await _line(reader, self.patience.silence)
        if not isinstance(hello, dict):
            return None
        rank, member = hello.get("hello"), _Member(str(hello.get("host")), writer)
        if not hmac.compare_digest(str(hello.get("token")), self.token):
            member.send({"refused": "node 0 belongs to another job, or to another attempt of this one"})
        elif not isinstance(rank, int) or rank in self._roll.members or not 0 < rank < self.node.nodes:
            member.send({"refused": f"node 0 does not expect a node {rank}, or has it already"})
        elif self._roll.over:
            member.send({"refused": "the job is over"})
        else:
            member.send({"welcome": True})
            self._roll.members[rank] = member
            return rank
        return None

    async def _listen(self, rank: int, reader: "asyncio.StreamReader") -> None:
        try:
            while isinstance(message := await _line(reader, self.patience.silence), dict):
                self._hear(rank, message)
            self._lose(rank, str(message))
        finally:
            self._roll.members[rank].writer = None


class Follower(Gang):
    """Any other node."""

    def __init__(self, node: Node, job: str, patience: Patience, post: Post) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._unsaid: list[dict[str, Any]] = []
        self._over = False
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
        while isinstance(message := await _line(reader, self.patience.silence), dict):
            self._hear(message)
        beating.cancel()
        if not self._over:
            self._abort("node-lost", f"node 0 ({self.node.master}) was lost: {message}")

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
        answer = await _line(reader, self.patience.silence)
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

    def _abort(self, event: str, sentence: str) -> None:
        if not self._over:
            self._over = True
            self.post(Abort(1, event, {"message": sentence}))


def join(node: Node, job: str, patience: Patience, post: Post) -> Leader | Follower:
    """Take this node's place in the gang of a job."""
    return (Follower if node.rank else Leader)(node, job, patience, post)


def token(node: Node, job: str) -> str:
    """Return what the nodes of one attempt of one job know each other by."""
    return hashlib.sha256(f"castra gang {job} {node.job_id} {node.attempt}".encode()).hexdigest()


async def _line(reader: "asyncio.StreamReader", silence: float) -> dict[str, Any] | str:
    """Return the next message, or why there is none: a sentence's end."""
    import asyncio

    try:
        line = await asyncio.wait_for(reader.readline(), silence)
        if not line.endswith(b"\n"):
            return "its connection broke"
        told = json.loads(line)
    except TimeoutError:
        return f"it was silent for {silence:g} s"
    except OSError as problem:
        return f"its connection broke ({problem.strerror})"
    except ValueError:
        return "it did not speak our language"
    return told if isinstance(told, dict) else "it did not speak our language"
