"""Servers in milliseconds: a process that has imported what serving needs forks every rank that the tests ask for."""

import sys
from pathlib import Path
from typing import Any, NoReturn

from tests.training.forks import Forks, Run, serve
from tests.training.nursery import free_port


class Kitchen(Forks):
    """The ranks of servers."""

    def __init__(self) -> None:
        super().__init__(__file__, CASTRA_LISTEN="127.0.0.1:0", CASTRA_SLOTS="4")

    def start(self, job: Path, ranks: int = 1, program: str = "training.serve.__main__") -> Run:
        """Start the ranks of a program, as torchrun would on one node."""
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
        return self.fork(job.parent, places, program=program, job=str(job))


def _be_a_rank(question: dict[str, Any]) -> NoReturn:
    sys.argv = [question["program"], question["job"]]
    from training import ranks
    from training.export import generate
    from training.serve import __main__ as server
    from training.serve import batch

    programs = {
        "training.serve.__main__": server.serve,
        "training.serve.batch": batch.answer_file,
        "training.export.generate": generate.generate,
    }
    ranks.run(programs[question["program"]])


if __name__ == "__main__":
    from transformers.models.gemma import modeling_gemma  # noqa: F401  # here, so that no forked rank has to
    from transformers.models.llama import modeling_llama  # noqa: F401

    import training.serve.batch  # noqa: F401

    serve(_be_a_rank)
