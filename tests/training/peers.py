"""A few real processes that talk over gloo on the loopback: each runs one function of a test and hands back tensors."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_S = 120.0


def together(count: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Call function(rank, *arguments) in `count` forked ranks and return what each gave, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, count, function, folder, arguments)) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    for process in ranks:
        process.kill()
        process.join()
    failed = [path.read_text() for path in sorted(folder.glob("*.failed"))]
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(rank: int, count: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # OpenMP's threads do not live on in a forked process
    try:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
        distributed.barrier()
    except BaseException:
        (folder / f"{rank}.failed").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(0)
