"""Does calibrating the cluster help the plan? The miniature, planned before and after, and really trained.

    python -m benchmarks.planner_site

For fp32 and bf16: `training.checks.calibrate` measures, the plan is made without and with what it found (no training
is known to it beside those that ship with the planner), and the plan's layout trains for some steps. The step is the
median after the first ones. With the right to, the processes run before all others once they have begun, for some
seconds each: what else the machine does would be in both measurements, but not in the plan before.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import planner
from planner.achieved import Achieved
from planner.profiles import Profiles
from recipes import Recipe
from training.job import MARK
from training.node import _free_port

STEPS: Final = 40
WARM: Final = 8
RANKS: Final = 2


def main() -> None:
    """Measure and print a line for each case."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.planner_site",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dataset = _prepared(Path(folder))
        for precision in ("fp32", "bf16"):
            _judge(Path(folder) / precision, dataset, precision)


def _judge(folder: Path, dataset: Path, precision: str) -> None:
    recipe = _recipe(precision)
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine, shipped = planner.local_machine(os.cpu_count() or 1, ram), Profiles.shipped()
    before = planner.plan(recipe, machine, 1, RANKS, shipped).best
    settled = _spec(recipe) | {"parallel": _parallel(recipe, before.layout)}
    found = Achieved.of(_run(folder / "calibrated", "training.checks.calibrate", settled, RANKS), machine)
    after = planner.plan(_prescribed(recipe, before.layout), machine, 1, RANKS, replace(shipped, achieved=found)).best
    _run(folder / "trained", "training.run", settled, RANKS, {"dataset": str(dataset)})
    lines = (folder / "trained/out/progress.jsonl").read_text().splitlines()
    step = median(json.loads(line)["step_seconds"] for line in lines[WARM:])
    told = ", ".join(f"{name} x {factor:.2f}" for name, factor in found.factors.items())
    load = os.getloadavg()[0]
    print(
        f"{precision}, {before.layout}: measured {1000 * step:.1f} ms a step; "
        f"planned before {1000 * before.step_seconds:.1f} ({before.step_seconds / step - 1:+.0%}), after "
        f"{1000 * after.step_seconds:.1f} ({after.step_seconds / step - 1:+.0%}); {told}; load {load:.1f}",
        flush=True,
    )


def _recipe(precision: str) -> Recipe:
    train = {"precision": precision, "steps": STEPS, "warmup_steps": 5, "checkpoint_every": STEPS}
    return Recipe.model_validate({"name": "site", "train": train})


def _spec(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json")


def _parallel(recipe: Recipe, layout: planner.Layout) -> dict[str, Any]:
    told = {"strategy": layout.strategy, "micro_batch_size": layout.micro_batch_size}
    told |= {"shard": layout.shard if layout.strategy == "fsdp2" else 1}
    return recipe.parallel.model_dump(mode="json") | told | dict.fromkeys(("tp", "pp", "vpp", "cp", "ep"), 1)


def _prescribed(recipe: Recipe, layout: planner.Layout) -> Recipe:
    chosen = type(recipe.parallel).model_validate(_parallel(recipe, layout))
    return recipe.model_copy(update={"parallel": chosen})


def _prepared(folder: Path) -> Path:
    spec = _spec(_recipe("fp32"))
    spec["data"] |= {"max_documents": 120}
    _run(folder / "data", "training.data.prepare", spec, 1)
    return folder / "data/out"


def _run(
    folder: Path, module: str, spec: dict[str, Any], ranks: int, inputs: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a node program on so many ranks of one node; returns its result."""
    folder.mkdir(parents=True)
    told = {"spec": spec, "inputs": inputs or {}, "output": str(folder / "out")}
    (folder / "job.json").write_text(json.dumps(told))
    port = _free_port()
    with (folder / "log").open("w") as log:
        processes = [_start(module, folder / "job.json", (rank, ranks), port, log) for rank in range(ranks)]
        while any(process.poll() is None for process in processes):
            if ranks > 1 and MARK in (folder / "log").read_text():
                _hurry(processes)
            time.sleep(0.1)
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{module} ended with {codes}: {(folder / 'log').read_text()[-2000:]}")
    return dict(json.loads((folder / "out/result.json").read_text()))


def _start(module: str, job: Path, place: Sequence[int], port: int, log: Any) -> subprocess.Popen[bytes]:
    rank, ranks = place
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    told = {name: str(value) for name, value in (numbers | {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}).items()}
    here = os.environ | (told if ranks > 1 else {"OMP_NUM_THREADS": "1"}) | {"MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen([sys.executable, "-m", module, str(job)], env=here, stdout=log, stderr=log)


def _hurry(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have all threads of processes run before other programs, where that is allowed."""
    for process in processes:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))


if __name__ == "__main__":
    main()
