"""What a batch costs: our loader beside torch's DataLoader over a memory map, and how long a resume takes at any depth.

    python -m benchmarks.loader [folder]      # a folder for 0.4 GB of random tokens, kept in memory by the system

One core and no workers on both sides, sequences of 2048 tokens, batches of 8; the two alternate, medians of 5 rounds.
DataLoader's order is a permutation in memory, which it draws again on every resume; ours is computed.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.data.format import Layout, PartWriter, part_facts, write_facts
from training.data.loader import TokenBatches

LENGTH, BATCH, SEQUENCES, SHARDS = 2048, 8, 50_000, 4
ROUNDS, STEPS = 5, 2000
DEPTHS: Final = (0, 1_000, 1_000_000, 10**12)
"""Steps at which a run is resumed."""


def write(folder: Path, masked: bool) -> Path:
    """Write a dataset of random ids below 128,000; `masked`: best-fit rows, a sixteenth of whose ids is not learned."""
    random = np.random.default_rng(0)
    layout = Layout(LENGTH, LENGTH + masked, "uint32", masked)
    with PartWriter(folder, "train", layout, SEQUENCES // SHARDS) as out:
        for _ in range(SEQUENCES // 500):
            ids = random.integers(0, 128_000, 500 * layout.stride, np.uint32)
            out.write(ids, (random.integers(0, 16, len(ids)) > 0).astype(np.uint8) if masked else None)
        out.write(np.zeros(layout.shared, np.uint32), None)
        train = part_facts(out.close(), SEQUENCES * LENGTH, 1, 1)
    facts = {"dtype": "uint32", "sequence_length": LENGTH, "stride": layout.stride, "vocab_size": 128_000, "eos_id": 0}
    held_out = part_facts([], 0, 0, 0)
    write_facts(folder, facts | {"documents_apart": False, "marks": masked, "train": train, "held_out": held_out})
    return folder


class Mapped(Dataset[Any]):
    """The same rows as torch's users read them: a memory map and a slice."""

    def __init__(self, path: Path) -> None:
        self._ids = np.memmap(path, dtype=np.uint32, mode="r")

    def __len__(self) -> int:
        return (len(self._ids) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._ids[index * LENGTH : index * LENGTH + LENGTH + 1].astype(np.int64))


def ours(folder: Path) -> Iterator[object]:
    """Yield batches as the training loop takes them."""
    batches = TokenBatches(folder, BATCH, seed=1)
    for step in range(STEPS):
        yield torch.from_numpy(batches.batch(step).tokens)


def torchs(folder: Path) -> Iterator[object]:
    """Yield batches of DataLoader, over the first shard."""
    yield from DataLoader(Mapped(folder / "train/00000.bin"), batch_size=BATCH, shuffle=True, num_workers=0)


def rate(batches: Iterator[object]) -> float:
    """Return samples per second, after the first batch."""
    next(batches)
    begun = time.perf_counter()
    count = sum(1 for _ in islice(batches, STEPS - 1))
    return count * BATCH / (time.perf_counter() - begun)


def resumed(folder: Path, step: int) -> float:
    """Return milliseconds from nothing to a step's batch on the third of four ranks."""
    begun = time.perf_counter()
    TokenBatches(folder, BATCH, seed=1).batch(step, 2, 4)
    return (time.perf_counter() - begun) * 1e3


def measure(folder: Path) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    plain, masked = write(folder / "plain", masked=False), write(folder / "masked", masked=True)
    sides: dict[str, Callable[[], Iterator[object]]] = {
        "DataLoader": lambda: torchs(plain),
        "TokenBatches": lambda: ours(plain),
        "TokenBatches, mask": lambda: ours(masked),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            rates[name].append(rate(side()))
    base = statistics.median(rates["DataLoader"])
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:20s} {middle:10,.0f} samples/s of {LENGTH}   {middle / base:5.2f}x DataLoader")
    for step in DEPTHS:
        print(f"resume at step {step:>16,}: {statistics.median(resumed(plain, step) for _ in range(ROUNDS)):.2f} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            measure(Path(temporary))
