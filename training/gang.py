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
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from training.contract import Node
from training.process import JobError

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
        """Read CASTRA_GANG_START_S and CASTRA_GANG_SILENCE_S. Raises JobError if they are no numbers."""
        try:
            return cls(float(env.get("CASTRA_GANG_START_S", 600)), float(env.get("CASTRA_GANG_SILENCE_S", 15)))
        except ValueError as problem:
            raise JobError(f"CASTRA_GANG_START_S and CASTRA_GANG_SILENCE_S are seconds: {problem}") from problem

    @property
    def beat(self) -> float:
        """The time between two signs of life."""
        return min(BEAT_S, self.silence / 4)


class Gang(ABC):
    """One node's side of the watch. Its methods may be called from any thread; what happens is told by `post`."""

    def __init__(self, node: Node, job: str, patience: Patience, post: Post) -> None:
        self.node, self.patience, self.post = node, patience, post
        self.token = token(node, job)
        self._over = False  # the end, good or bad, has been told
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
            if not self._over:
                self.post(Abort(1, "error", {"message": "this node's gang watch has ended"}))

    @abstractmethod
    def _told(self, message: dict[str, Any]) -> None:
        """This node says it; called where the connections are served."""

    @abstractmethod
    async def _serve(self) -> None:
        """Talk with the other nodes until all is said."""


def token(node: Node, job: str) -> str:
    """Return what the nodes of one attempt of one job know each other by."""
    return hashlib.sha256(f"castra gang {job} {node.job_id} {node.attempt}".encode()).hexdigest()


async def next_line(reader: "asyncio.StreamReader", silence: float) -> dict[str, Any] | str:
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
