"""Ranks of the collective sweep that go wrong on purpose: a result is spoilt on one rank, or time is short."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from tests.training.forks import Forks, Run, serve
from tests.training.nursery import free_port

ENTRIES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
"""What each collective is in torch.distributed; its first argument is the result."""


class Saboteurs(Forks):
    """Forks ranks that measure, each a node of its own."""

    def __init__(self) -> None:
        super().__init__(__file__)

    def run(self, job: Path, ranks: int, **how: Any) -> tuple[list[int], Run]:
        """Measure with ranks of which number 1 spoils a `collective`, or within `limit_s`; exit codes and log."""
        port, size = str(free_port()), str(ranks)
        common = {"WORLD_SIZE": size, "GROUP_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places = [common | {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(ranks)]
        run = self.fork(job.parent, places, job=str(job), **how)
        return run.wait(), run


def _spoil(collective: str) -> None:
    """Have the results of a collective be wrong in one place on rank 1; of send_recv what it sends."""
    from torch import distributed

    if os.environ["RANK"] != "1":
        return
    name = ENTRIES.get(collective, "batch_isend_irecv")
    right = getattr(distributed, name)

    def wrong(*given: Any) -> Any:
        if name == "batch_isend_irecv":
            given[0][0].tensor[5] += 1
            return right(*given)
        done = right(*given)
        given[0].view(-1)[5] += 1
        return done

    setattr(distributed, name, wrong)


def _be_a_rank(question: dict[str, Any]) -> NoReturn:
    sys.argv = ["network", question["job"]]
    from training import ranks
    from training.checks import network

    if "limit_s" in question:
        network.LIMIT_S["cpu"] = question["limit_s"]
    if "collective" in question:
        _spoil(question["collective"])
    ranks.run(network.prove)


if __name__ == "__main__":
    import torch.distributed  # noqa: F401  # here, so that no forked rank has to

    import training.checks.network  # noqa: F401

    serve(_be_a_rank)
