"""What a checkpoint costs the training, and how soon it is safe: ours beside torch's own ways, on two gloo ranks.

    python -m benchmarks.checkpoint [--gb 1.5] [--rounds 5] [--folder /a/disk]

A state of weights and two moments (fp32, sharded as FSDP2 does it) is saved by every method in turn; medians over the
rounds, of the slower rank. stall: seconds the loop stands still; durable: until all is fsynced, manifest included.
The disk's limit is a bare write and fsync of the same bytes. Everything is read back from the page cache.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from training import checkpoint
from training.checkpoint import Identity, Piece, Saver
from training.ranks import World, join

LAYERS: Final = 24
WIDTH: Final = 1024
Times = tuple[float, float]
"""Seconds of stall, seconds until durable."""


class Bench:
    """One rank's state and the ways to save it."""

    def __init__(self, gigabytes: float, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        rows = int(gigabytes * 1e9 / 4 / 3 / LAYERS / WIDTH) // world.size * world.size
        mesh = init_device_mesh("cpu", (world.size,))
        self.state = {
            f"{kind}layers.{layer}.weight": DTensor.from_local(torch.randn(rows // world.size, WIDTH), mesh, [Shard(0)])
            for layer in range(LAYERS)
            for kind in ("", "exp_avg/", "exp_avg_sq/")
        }
        self.bytes = sum(held.numel() * 4 for held in self.state.values())
        self.saver = Saver(folder / "ours", Identity(1, "bench", world.size, {}), world, keep=1)
        self.step = 0
        self.group = distributed.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))

    @property
    def local(self) -> dict[str, Tensor]:
        """This rank's part of each tensor."""
        return {name: held.to_local() for name, held in self.state.items()}

    def pieces(self) -> Iterator[Piece]:
        """The same, as ours takes it."""
        for name, held in self.state.items():
            local = held.to_local()
            yield Piece(name, tuple(held.shape), (self.world.rank * len(local), 0), local)

    def ours(self, _: Path) -> Times:
        """Copy, then a thread."""
        began = time.perf_counter()
        self.step += 1
        self.saver.save(self.step, self.pieces(), {})
        stall = time.perf_counter() - began
        self.saver.wait()
        return stall, self.saver.seconds[-1]

    def torch_save(self, folder: Path) -> Times:
        """torch.save of this rank's shard, and fsync."""
        began = time.perf_counter()
        with (folder / f"{self.world.rank}.pt").open("wb") as file:
            torch.save(self.local, file)
            file.flush()
            os.fsync(file.fileno())
        return _both(began)

    def raw_write(self, folder: Path) -> Times:
        """The disk's limit: the bytes, and fsync."""
        began = time.perf_counter()
        handle = os.open(folder / f"{self.world.rank}.bin", os.O_WRONLY | os.O_CREAT)
        for held in self.local.values():
            content, done = held.numpy().data.cast("B"), 0
            while done < len(content):
                done += os.write(handle, content[done : done + (16 << 20)])
        os.fsync(handle)
        os.close(handle)
        return _both(began)

    def dcp_save(self, folder: Path) -> Times:
        """torch.distributed.checkpoint, synchronous."""
        began = time.perf_counter()
        save(self.state, storage_writer=FileSystemWriter(folder, sync_files=True))
        return _both(began)

    def dcp_async(self, folder: Path) -> Times:
        """torch.distributed.checkpoint beside the loop, as it comes."""
        return self._async(folder)

    def dcp_async_tuned(self, folder: Path) -> Times:
        """The same with a stager that keeps its memory and needs neither CUDA nor shared memory."""
        return self._async(folder, async_stager=self.stager)

    def _async(self, folder: Path, **more: Any) -> Times:
        began = time.perf_counter()
        writer = FileSystemWriter(folder, sync_files=True)
        future: Any = async_save(self.state, storage_writer=writer, process_group=self.group, **more)
        stall = time.perf_counter() - began
        getattr(future, "upload_completion", future).result()
        return stall, time.perf_counter() - began

    def timed(self, method: Callable[[Path], Times]) -> Times:
        """One save by all ranks into an empty folder: the times of the slower one."""
        place = self.folder / "other"
        if self.world.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        os.sync()
        self.world.barrier()
        every = self.world.gather(method(place))
        return max(stall for stall, _ in every), max(durable for _, durable in every)

    def loads(self) -> dict[str, float]:
        """Seconds of reading back what ours and torch wrote last, and of proving ours sound."""
        found = checkpoint.path_of(self.folder / "ours", self.step)
        work: dict[str, Callable[[], Any]] = {
            "load, ours": lambda: checkpoint.load(found, self.pieces()),
            "load, dcp.load": lambda: load(self.state, storage_reader=FileSystemReader(self.folder / "dcp")),
            "verify, ours (SHA-256)": lambda: checkpoint.latest(self.folder / "ours", self.world),
        }
        taken = {}
        for name, read in work.items():
            self.world.barrier()
            began = time.perf_counter()
            read()
            taken[name] = max(self.world.gather(time.perf_counter() - began))
        return taken


def _both(began: float) -> Times:
    taken = time.perf_counter() - began
    return taken, taken


def _rank(gigabytes: float, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    bench = Bench(gigabytes, folder, world)
    ways = [bench.raw_write, bench.torch_save, bench.dcp_save, bench.dcp_async, bench.dcp_async_tuned, bench.ours]
    taken: dict[str, list[Times]] = {way.__name__: [] for way in ways}
    reads: dict[str, list[float]] = {}
    save(bench.state, storage_writer=FileSystemWriter(folder / "dcp", sync_files=True))
    for number in range(rounds + 1):  # the first round warms up
        for way in ways:
            times = bench.timed(way)
            if number:
                taken[way.__name__].append(times)
        for name, seconds in bench.loads().items():
            if number:
                reads.setdefault(name, []).append(seconds)
    bench.saver.close()
    if world.rank == 0:
        _report(taken, reads, bench.bytes)
    world.barrier()
    os._exit(0)


def _report(taken: dict[str, list[Times]], reads: dict[str, list[float]], size: int) -> None:
    middle = {
        name: tuple(statistics.median(column) for column in zip(*times, strict=True)) for name, times in taken.items()
    }
    (shard, _), (_, limit) = middle["torch_save"], middle["raw_write"]
    print(f"{size / 1e9:.2f} GB on 2 ranks, {len(next(iter(taken.values())))} rounds")
    for name, (stall, durable) in middle.items():
        print(
            f"{name:16} stall {stall:6.3f} s ({stall / shard:5.2f} x torch.save)  "
            f"durable {durable:6.3f} s ({durable / limit:5.2f} x the disk's limit)"
        )
    theirs = statistics.median(reads["load, dcp.load"])
    for name, seconds in ((name, statistics.median(taken)) for name, taken in reads.items()):
        print(f"{name:24} {seconds:6.3f} s ({theirs / seconds:5.1f} x as fast as dcp.load)")


def main() -> None:
    """Start two ranks and have them measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    told = parser.parse_args()
    if "RANK" in os.environ:
        _rank(told.gb, told.rounds, told.folder)
    with tempfile.TemporaryDirectory(prefix="castra-checkpoint-", dir=told.folder) as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.checkpoint"]
        sizes = ["--gb", str(told.gb), "--rounds", str(told.rounds), "--folder", folder]
        subprocess.run([*launch, *sizes], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
