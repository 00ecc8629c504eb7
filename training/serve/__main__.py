"""Answer requests over HTTP until a stop signal, then finish what was asked.

    python -m training.serve job.json
    torchrun --nproc-per-node 2 -m training.serve job.json

The job names inputs["export"]; the environment says where to listen and how much to take (training.serve.settings). The
first rank listens, the others hold their part of every layer. Ends with 0 after SIGTERM, with 1 when a rank is lost.
"""

import os
import threading

from training.job import NodeJob, say
from training.process import FAILED, StopSignal, leave
from training.ranks import World, run
from training.serve.engine import Engine, follow
from training.serve.model import open_model
from training.serve.server import Server
from training.serve.settings import Settings


def serve(job: NodeJob, world: World) -> None:
    """Serve a model with every rank of this world. Raises JobError for what cannot be served, or not listened at."""
    stop = StopSignal()
    with world.agreed():
        settings = Settings.of(os.environ)
        served = open_model(job, settings, world)
        engine = Engine(served, settings, world)
        server = Server(engine, served.reader, settings) if world.rank == 0 else None
    try:
        if server is None:
            follow(served.slots, world)
        else:
            _listen(server, engine, world, stop)
    except RuntimeError as problem:
        lost(problem, world)


def _listen(server: Server, engine: Engine, world: World, stop: StopSignal) -> None:
    """Listen and answer, and end when asked to."""
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    host, port = server.server_address[:2]
    say("serving", host=str(host), port=port, ranks=world.size, context=server.reader.context)
    try:
        engine.run(lambda: stop.asked)
    finally:
        server.settle()
    say("served", answers=engine.answered)


def lost(problem: RuntimeError, world: World) -> None:
    """End this process with a sentence where the other ranks cannot be reached; alone, the problem is our own."""
    if world.size == 1:
        raise problem
    why = str(problem).partition("] ")[2] if str(problem).startswith("[/") else str(problem)
    why = why.partition(". ")[0].partition("\n")[0] or type(problem).__name__
    say("error", message=f"rank {world.rank} cannot go on with the other ranks ({why}); start the server again")
    leave(FAILED)


if __name__ == "__main__":
    run(serve)
