"""All ranks of a job together: how a process joins them, how they agree, and how they end alike.

torch is imported no earlier than it must: a process ties itself to its parent first, in milliseconds.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from training.job import NodeJob, say
from training.process import REFUSED, STOPPED, JobError, Stopped, end_on_crash, follow_parent, leave, quiet, read_job

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among all ranks, and where its tensors live."""

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    device: "torch.device"
    private: bool = False
    """Whether every node has an output folder of its own, which the others do not see."""

    @property
    def keeper(self) -> bool:
        """Whether this rank makes and removes the files of a folder that several ranks write to."""
        return self.local_rank == 0 if self.private else self.rank == 0

    @property
    def share(self) -> slice:
        """This rank's part of the files of an output folder that several ranks see."""
        ranks = self.size // self.nodes
        return slice(self.local_rank, None, ranks) if self.private else slice(self.rank, None, self.size)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise a JobError of any rank on every rank, so that all end alike. Every rank must enter it."""
        problem: str | None = None
        try:
            yield
        except JobError as error:
            problem = str(error)
        for sentence in self.gather(problem):
            if sentence is not None:
                raise JobError(sentence)

    def gather(self, mine: T) -> list[T]:
        """Return every rank's value, by rank. Every rank must call it."""
        from torch import distributed

        every: list[Any] = [None] * self.size
        distributed.all_gather_object(every, mine)
        return every

    def barrier(self) -> None:
        """Wait until every rank is here."""
        from torch import distributed

        distributed.barrier()

    def part(self) -> None:
        """Leave the process group together with all ranks; the process works on alone."""
        from torch import distributed

        if distributed.is_initialized():
            distributed.barrier()
            # gloo aborts the process when a group is still referenced while its threads are torn down
            gc.collect()
            distributed.destroy_process_group()


def run(program: Callable[[NodeJob, World], None]) -> NoReturn:
    """Run a node program on the job.json named on the command line, in all ranks, and end the process.

    Exit codes: 0 done (or already done: result.json exists), 1 crashed, 2 refused (JobError), 143 stopped and saved.
    """
    follow_parent()
    quiet()
    world = join()
    end_on_crash()
    try:
        with world.agreed():
            job = read_job()
        if not world.gather((job.output / "result.json").exists())[0]:
            program(job, world)
        code = 0
    except Stopped:
        code = STOPPED
    except JobError as error:
        if world.rank == 0:
            say("error", message=str(error))
        code = REFUSED
    world.part()
    leave(code)


def use_efa(devices: Path = Path("/sys/class/infiniband")) -> None:
    """Have NCCL's plugin use the Elastic Fabric Adapter where this machine has one; what is set already stays.

    Source: awslabs/awsome-distributed-ai, efa-cheatsheet.md (read 2026-11): FI_PROVIDER=efa; FI_EFA_USE_HUGE_PAGE=0 for
    processes that fork; FI_EFA_USE_DEVICE_RDMA is not set, as libfabric >= 1.18 decides it by the device; nor is
    NCCL_TUNER_PLUGIN, as NCCL asks the network plugin for its tuner.
    """
    if any(devices.glob("efa*")) or any(devices.glob("rdmap*")):
        os.environ.setdefault("FI_PROVIDER", "efa")
        os.environ.setdefault("FI_EFA_USE_HUGE_PAGE", "0")


def join() -> World:
    """Join the process group torchrun describes in the environment, or make one of a single process.

    gloo between CPUs, NCCL between GPUs. CASTRA_COMM_TIMEOUT_S (seconds, 120) bounds every collective.
    """
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    alone = "RANK" not in os.environ
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    for name, value in here.items():
        os.environ.setdefault(name, value)
    rank, size, local_rank, node, nodes = (int(os.environ[name]) for name in here)
    if sys.platform == "linux" and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        use_efa()
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    distributed.init_process_group(
        backend,
        device_id=device if device.type == "cuda" else None,  # NCCL connects now, and splits groups off cheaply
        timeout=timedelta(seconds=float(os.environ.get("CASTRA_COMM_TIMEOUT_S", "120"))),
        store=HashStore() if alone else None,
        rank=rank,
        world_size=size,
    )
    return World(rank, size, local_rank, node, nodes, device, os.environ.get("CASTRA_PRIVATE_OUTPUT") == "1")
