"""Ranks that do anything, in milliseconds: a process that has imported torch once forks them, joined by gloo.

crew.start("tests.training.test_x:work", 2, folder, key=value)    # each rank calls work(world, folder, key=value)
"""

import importlib
import os
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.training.forks import Forks, Run, serve


class Crew(Forks):
    """Ranks that do what a function of a test module says."""

    def __init__(self) -> None:
        super().__init__(__file__, CASTRA_COMM_TIMEOUT_S="60")

    def start(
        self, work: str, ranks: int, folder: Path, env: dict[str, str] | None = None, nodes: int = 1, **told: Any
    ) -> Run:
        """Start the ranks of a run, on so many nodes."""
        folder.mkdir(parents=True, exist_ok=True)
        rendezvous = folder / f".store-{time.monotonic_ns()}"
        per_node = ranks // nodes
        places = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_node),
                "GROUP_RANK": str(rank // per_node),
                "WORLD_SIZE": str(ranks),
                "GROUP_WORLD_SIZE": str(nodes),
            }
            | (env or {})
            for rank in range(ranks)
        ]
        return self.fork(folder, places, work=work, folder=str(folder), told=told, store=str(rendezvous))

    def run(self, work: str, ranks: int, folder: Path, **told: Any) -> tuple[list[int], Run]:
        """Start ranks and wait for their end: exit codes and what they said."""
        started = self.start(work, ranks, folder, **told)
        return started.wait(), started


def _be_a_rank(question: dict[str, Any]) -> NoReturn:
    from training.job import say
    from training.process import FAILED, REFUSED, JobError, follow_parent, leave

    follow_parent()
    code = FAILED
    try:
        world = _join(question["store"])
        module, _, name = question["work"].partition(":")
        getattr(importlib.import_module(module), name)(world, Path(question["folder"]), **question["told"])
        world.part()
        code = 0
    except JobError as problem:
        say("error", message=str(problem), rank=int(os.environ["RANK"]))
        code = REFUSED
    except Exception:  # noqa: BLE001  told in the log, where the test shows it
        import traceback

        traceback.print_exc()
    leave(code)


def _join(store: str) -> Any:
    """Join the ranks through a file, so that no port is needed."""
    from datetime import timedelta

    import torch
    from torch import distributed
    from torch._C._distributed_c10d import FileStore, HashStore

    from training.ranks import World

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    rank, size, local, node, nodes = (int(os.environ[name]) for name in names)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = FileStore(store, size) if size > 1 else HashStore()
    distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return World(rank, size, local, node, nodes, torch.device("cpu"), os.environ.get("CASTRA_PRIVATE_OUTPUT") == "1")


if __name__ == "__main__":
    import pytest  # noqa: F401  # here, so that no forked rank has to: what they do is in test modules
    import torch.distributed

    import training.checkpoint
    import training.supervise  # noqa: F401

    torch.set_num_threads(1)
    serve(_be_a_rank)
