"""Planned against measured on this machine: calibrate on some real training steps, predict others, judge.

    python -m benchmarks.planner_live                      # measure all 36 (about 5 minutes), then judge
    python -m benchmarks.planner_live --rows rows.csv      # judge what was measured before
    python -m benchmarks.planner_live --out rows.csv       # measure, keep the rows, judge

Small Llamas of different shapes train with `training/`'s own model, strategies and optimizer, one core per process, on
random tokens. Which steps calibrate and which are predicted is settled before anything is measured. A step's time is
the shortest of many, and (with the right to) the processes run before all others: what else the machine does can only
make a step longer.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from planner.profiles import Profiles
    from planner.rows import Row

CALIBRATED_ON: Final = 12
PREDICTED: Final = 24
SEED: Final = 6
"""Of the configurations drawn; the figures of cores in `planner` were chosen on those of seeds 4 and 5."""
MFLOP: Final = (1_500.0, 60_000.0)
"""Least and most work per rank and step: 15 to 600 ms at 0.1 TFLOP/s, so that minutes are enough for all."""
SECONDS: Final = 2.0
"""How long each configuration trains after its first steps; processes that run before all others must be brief."""
WARM: Final = 3
FEWEST: Final = 5

Configuration = Mapping[str, Any]


def drawn(seed: int, count: int = CALIBRATED_ON + PREDICTED) -> list[Configuration]:
    """Configurations of different shapes and layouts, the same ones for a seed: a recipe's parts, and the ranks."""
    chance, found = random.Random(seed), list[Configuration]()
    while len(found) < count:
        one = _one(chance)
        if MFLOP[0] < _mflop(one) < MFLOP[1]:
            found.append(one)
    return found


def _one(chance: random.Random) -> Configuration:
    heads, ranks = chance.choice([2, 4, 6, 8]), chance.choice([1, 1, 2, 2, 2])
    micro, accumulation = chance.choice([1, 2, 4, 8]), chance.choice([1, 1, 2, 4])
    hidden = heads * chance.choice([16, 32, 64])
    return {
        "ranks": ranks,
        "model": {
            "hidden_size": hidden,
            "layers": chance.choice([1, 2, 3, 4, 6, 8]),
            "heads": heads,
            "kv_heads": chance.choice([heads, heads // 2]),
            "ffn_size": 32 * round(hidden * chance.choice([2, 8 / 3, 4]) / 32),
            "vocab_size": chance.choice([512, 1024, 4096, 8192]),
            "tie_embeddings": chance.random() < 0.5,
        },
        "data": {"sequence_length": chance.choice([64, 128, 256, 512])},
        "parallel": {"strategy": chance.choice(["ddp", "fsdp2"]) if ranks > 1 else "ddp", "micro_batch_size": micro},
        "train": {
            "global_batch_size": micro * accumulation * ranks,
            "activation_checkpointing": chance.random() < 0.2,
        },
    }


def _mflop(one: Configuration) -> float:
    """Work per rank and step: 6 operations per weight and token."""
    model = one["model"]
    weights = model["layers"] * model["hidden_size"] * (3 * model["ffn_size"] + 3 * model["hidden_size"])
    weights += model["hidden_size"] * model["vocab_size"]
    tokens = one["train"]["global_batch_size"] / one["ranks"] * one["data"]["sequence_length"]
    return float(6e-6 * weights * tokens)


def measured(configurations: Sequence[Configuration]) -> list[dict[str, str]]:
    """Train every configuration and tell each as a row of a table of steps."""
    rows = []
    for at, one in enumerate(configurations):
        found = _train(one)
        seconds = found["seconds"]
        print(
            f"{at:2} {one['ranks']} x {one['parallel']['strategy']:6} {1000 * seconds[0]:7.1f} ms, median "
            f"{1000 * seconds[len(seconds) // 2]:7.1f}, {len(seconds)} steps, {found['memory_gib']:.2f} GiB; load "
            f"{os.getloadavg()[0]:.1f}{'' if found['first'] else ', among other programs'}",
            flush=True,
        )
        rows.append(_row(at, one, found))
    return rows


def _row(at: int, one: Configuration, found: Mapping[str, Any]) -> dict[str, str]:
    from planner import local_machine
    from tasks.learning import Measured, row

    machine = replace(local_machine(cores=one["ranks"], ram_gib=8.0 * one["ranks"]))  # a process has one core
    best = Measured(f"live-{at:02}", found["seconds"][0], found["memory_gib"], found["torch"])
    told = row(_recipe(one), machine, one["ranks"], best)
    note = f"shortest of {len(found['seconds'])} steps, a core each; {_processor()}; {datetime.now(UTC):%Y-%m-%d}"
    return told | {"model": "live", "notes": note}


def _recipe(one: Configuration) -> Any:
    from recipes import Recipe

    return Recipe.model_validate({"name": "live", **{name: part for name, part in one.items() if name != "ranks"}})


def _processor() -> str:
    told = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return told[0].partition(":")[2].strip() if told else "an unknown processor"


def _train(one: Configuration) -> dict[str, Any]:
    """Train one configuration in processes of its own; returns what its first rank wrote."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"spec": _recipe(one).model_dump(mode="json")}))
        port = _free_port()
        processes = [_start(job, rank, one["ranks"], port) for rank in range(one["ranks"])]
        codes = [process.wait(timeout=120) for process in processes]
        if any(codes):
            raise SystemExit(f"planner_live: a training process ended with {codes}: {one}")
        return dict(json.loads((Path(folder) / "result.json").read_text()))


def _free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])


def _start(job: Path, rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers = place | {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    told = {name: str(value) for name, value in numbers.items()}
    here = os.environ | told | {"MASTER_ADDR": "127.0.0.1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([sys.executable, "-m", "benchmarks.planner_live", "--work", job], env=here)


def work(job: Path) -> None:
    """Be one rank: train for a while on random tokens as `training.run` would, and write what each step took."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    import torch

    from training.parallel import Layout, Rows, Share, spread
    from training.ranks import join

    spec, world = json.loads(job.read_text())["spec"], join()
    layout = Layout.of(spec["parallel"], world.rank, world.size)
    batch = spec["train"]["global_batch_size"]
    share = Share.of(batch, spec["parallel"]["micro_batch_size"], layout.data)
    length, vocabulary = spec["data"]["sequence_length"], spec["model"]["vocab_size"]
    engine = spread(spec, None, share, layout, world)
    tokens = torch.randint(vocabulary, (share.micro * share.accumulation, length + 1))
    rows = Rows(tokens, None, None, batch * length)
    for _ in range(WARM):
        _step(engine, rows, stop=False)
    first = _hurry()
    took = _steps(engine, rows)
    if world.rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        told = {"seconds": sorted(took), "memory_gib": peak, "torch": torch.__version__, "first": first}
        (job.parent / "result.json").write_text(json.dumps(told))
    world.part()
    os._exit(0)  # gloo may abort where Python tidies up


def _steps(engine: Any, rows: Any) -> list[float]:
    """Seconds of each step."""
    took, end, stop = list[float](), time.perf_counter() + SECONDS, False
    while not stop:
        began = time.perf_counter()
        stop = _step(engine, rows, stop=began > end and len(took) >= FEWEST)
        took.append(time.perf_counter() - began)
    return took


def _step(engine: Any, rows: Any, *, stop: bool) -> bool:
    """Do a step as the loop does, with its small all-reduce; returns whether any rank wants to stop."""
    import torch
    from torch import distributed

    loss, square = engine.gradients(rows)
    told = torch.tensor([float(loss), float(square), float(stop)], dtype=torch.float64)
    distributed.all_reduce(told)
    engine.update(1e-3, math.sqrt(float(told[1])))
    return bool(told[2])


def _hurry() -> bool:
    """Have all threads of this process run before other programs; returns whether that is allowed."""
    with contextlib.suppress(PermissionError):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))
        return True
    return False


def judge(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Calibrate on the first rows alone, predict the others, and say how far off that is."""
    from planner.calibrate import calibrate
    from planner.keys import key_of
    from planner.rows import steps

    seen, unseen = rows[:CALIBRATED_ON], steps(rows[CALIBRATED_ON:])
    learned = calibrate(seen)
    told = learned.predict(unseen.configs, [key_of(row) for row in unseen.rows])
    off = 100 * (told.seconds / unseen.seconds - 1)
    within = (told.low <= unseen.seconds) & (unseen.seconds <= told.high)
    each = zip(unseen.rows, 1000 * told.seconds, 1000 * unseen.seconds, off, within, strict=True)
    missed, half = np.abs(off), 100 * float(np.median(told.high / told.seconds - 1))
    return [
        *(_line(*one) for one in each),
        f"calibrated on {len(seen)} steps, predicted {len(off)} others: MAPE {missed.mean():.1f} %, "
        f"median {np.median(missed):.1f} %, worst {missed.max():.1f} %",
        f"the 90 % intervals (typically +{half:.0f} %) hold {within.sum()} of {len(off)}",
        f"memory: MAPE {100 * np.mean([_memory_off(learned, row) for row in unseen.rows]):.1f} %",
    ]


def _memory_off(learned: "Profiles", row: "Row") -> float:
    """How far a row's predicted memory is from the measured, as a share of it."""
    from planner.keys import key_of
    from planner.memory import peak
    from planner.rows import steps

    key, one = key_of(row), steps([row])
    found = learned.find(key.accelerator, key.framework, key.precision)
    return abs(float(np.ravel(peak(one.configs, found.memory))[0] / one.memory_gib[0]) - 1)


def _line(row: Mapping[str, str], planned: float, true: float, off: float, inside: bool) -> str:
    return (
        f"{row['id']}  {row['n_gpus']} x {row['framework']:12} hidden {row['hidden']:>4} layers {row['layers']} "
        f"vocabulary {row['vocab']:>5} sequence {row['seq']:>4} micro batch {row['mbs']} x {row['ga']}: "
        f"{planned:6.1f} ms planned, {true:6.1f} measured, {off:+5.1f} %{'' if inside else '  outside'}"
    )


def main() -> None:
    """Measure unless told rows, and print the judgement."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_live", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=Path, help="rows measured before")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the configurations; default: {SEED}")
    parser.add_argument("--out", type=Path, help="keep the rows here")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work)
    from planner.rows import read

    rows = read(asked.rows).rows if asked.rows else measured(drawn(asked.seed))
    if asked.out:
        with asked.out.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    print("\n".join(judge(rows)))


if __name__ == "__main__":
    main()
