"""What Castra's loop costs beside a bare one: steps per second of both, in turns, in the same processes.

    python -m benchmarks.loop_overhead                       # 0.3M and 27M weights, 1 and 2 processes, five rounds
    python -m benchmarks.loop_overhead --weights 0.3 --ranks 1 --rounds 3

bare: the same model and loss in a loop of torch alone (DDP, clipping, fused AdamW, the loss read each step); deepspeed:
DeepSpeed's own engine with ZeRO-1. Castra's loop reads its batch from the disk, sums loss and norm over the ranks,
judges the step, writes progress.jsonl and tells its progress. Each round times every loop once, in a changing order;
printed are the medians, and the medians of the rounds' ratios, by the clock and by the processor time of rank 0 (the
one to look at on a machine that others use too). Exit code 1 if the former is below 0.97 against the bare loop.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.crew import Crew
from tests.training.nursery import LENGTH, spec, write_dataset
from training.data.loader import TokenBatches
from training.job import NodeJob
from training.journal import Journal
from training.parallel import Layout, Share, check, objective_of, spread
from training.parallel.states import adamw
from training.ranks import World
from training.run import Loop

ENOUGH: Final = 0.97
SHAPES: Final = {
    "0.3": {"hidden_size": 64, "layers": 3, "ffn_size": 176, "vocab_size": 10_000},
    "27": {"hidden_size": 512, "layers": 7, "heads": 8, "kv_heads": 8, "ffn_size": 1376, "vocab_size": 10_000},
}
"""By their millions of weights, about, without (0.3) and with (27) the embedding."""
STEPS: Final = {"0.3": 20, "27": 3}
BATCH: Final = 8


def main() -> int:
    """Run it; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--weights", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    options.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    options.add_argument("--rounds", type=int, default=5)
    told = options.parse_args()
    crew, worst = Crew(), 1.0
    print(f"{'weights':>8} {'ranks':>5} {'loop':>12} {'steps/s':>9} {'castra beside it':>17} {'by CPU time':>12}")
    with tempfile.TemporaryDirectory(prefix="castra-overhead-") as place:
        dataset = write_dataset(Path(place) / "dataset", 4096)
        for weights in told.weights:
            for ranks in told.ranks:
                folder = Path(place) / f"{weights}-{ranks}"
                facts = {"weights": weights, "rounds": told.rounds, "dataset": str(dataset)}
                codes, run = crew.run("benchmarks.loop_overhead:measure", ranks, folder, **facts)
                assert set(codes) == {0}, run.log.read_text()[-3000:]
                worst = min(worst, report(weights, ranks, json.loads((folder / "times.json").read_text())))
    crew.close()
    return int(worst < ENOUGH)


def report(weights: str, ranks: int, times: dict[str, list[tuple[float, float]]]) -> float:
    """Print the rows of one size; return the ratio against the bare loop."""
    beside = {"castra": "castra", "bare": "castra", "castra zero1": "castra zero1", "deepspeed": "castra zero1"}
    ratios = {}
    for name, told in times.items():
        pairs = list(zip(told, times[beside[name]], strict=True))
        ratios[name], cpu = (median(theirs[i] / own[i] for theirs, own in pairs) for i in (0, 1))
        speed = 1 / median(wall for wall, _ in told)
        print(f"{weights + 'M':>8} {ranks:5} {name:>12} {speed:9.2f} {ratios[name]:17.3f} {cpu:12.3f}", flush=True)
    return ratios["bare"]


def measure(world: World, folder: Path, weights: str, rounds: int, dataset: str) -> None:
    """Time every loop on this rank; rank 0 writes seconds per step, by the clock and of its CPU, by loop and round."""
    torch.set_num_threads(1)
    loops = {
        "castra": castra(world, folder / "castra", weights, "ddp", dataset),
        "bare": bare(world, weights, dataset),
        "castra zero1": castra(world, folder / "zero1", weights, "zero1", dataset),
        "deepspeed": deepspeed(world, weights, dataset),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    names = [*loops]
    for turn in range(-1, rounds):
        for name in names[turn % 4 :] + names[: turn % 4]:
            distributed.barrier()
            began = time.perf_counter(), time.process_time()
            for _ in range(STEPS[weights]):
                loops[name]()
            if turn >= 0:  # the round before it warms up
                took = time.perf_counter() - began[0], time.process_time() - began[1]
                times[name].append((took[0] / STEPS[weights], took[1] / STEPS[weights]))
    if world.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))


def plan(weights: str, strategy: str, ranks: int) -> dict[str, Any]:
    """Return the recipe of a loop."""
    return spec(strategy, BATCH // ranks, SHAPES[weights], steps=10_000, checkpoint_every=10_000)


def castra(world: World, folder: Path, weights: str, strategy: str, dataset: str) -> Callable[[], None]:
    """Return Castra's step, with all that belongs to it."""
    told = plan(weights, strategy, world.size)
    job = NodeJob(told, folder, {"dataset": Path(dataset)})
    folder.mkdir(exist_ok=True)
    layout = Layout.of(told["parallel"], world.rank, world.size)
    share = Share.of(BATCH, BATCH // world.size, layout.data)
    check(told, share, layout, world.device)
    engine = spread(told, None, share, layout, world)
    loop = Loop(job, world, engine, TokenBatches(Path(dataset), BATCH, 1), layout, None)
    if world.rank == 0:
        loop.journal = Journal(folder, 0)
    steps = iter(range(1, 10_000))

    def step() -> None:
        number = next(steps)
        loop._finish(number, stop=loop._step(number))

    return step


def bare(world: World, weights: str, dataset: str) -> Callable[[], None]:
    """Return the step of a loop of torch alone."""
    module, model = model_of(weights, world)
    if world.size > 1:
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters(), plan(weights, "ddp", world.size)["train"])
    batches = batches_of(world, dataset)
    scale = world.size / (BATCH * LENGTH)

    def step() -> None:
        loss = module(next(batches)) * scale
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def deepspeed(world: World, weights: str, dataset: str) -> Callable[[], None]:
    """Return the step of DeepSpeed's engine alone, with ZeRO-1."""
    import deepspeed as library

    from training.parallel.zero import config

    told = plan(weights, "zero1", world.size)
    module, model = model_of(weights, world)
    settings = config(told["train"], told["parallel"], Share(BATCH // world.size, 1))
    optimizer = adamw(model.parameters(), told["train"])
    engine, *_ = library.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    batches = batches_of(world, dataset)
    scale = world.size / (BATCH * LENGTH)

    def step() -> None:
        loss = engine(next(batches)) * scale
        engine.backward(loss)
        engine.step()
        loss.item()

    return step


def model_of(weights: str, world: World) -> tuple[nn.Module, nn.Module]:
    """Return the objective that Castra trains, and its model."""
    from training.model import allocate, materialise

    objective = objective_of(plan(weights, "ddp", world.size), None)
    allocate(objective, world.device)
    materialise(objective.model, 1)
    return objective, objective.model


def batches_of(world: World, dataset: str) -> Any:
    """Yield this rank's rows for ever, all of them in memory."""
    batches = TokenBatches(Path(dataset), BATCH, 1)
    rows = [torch.from_numpy(batches.batch(step, world.rank, world.size).tokens) for step in range(100)]
    while True:
        yield from rows


if __name__ == "__main__":
    raise SystemExit(main())
