"""Every layout against one process: the same batches, the same losses? Prints a table; exit code 1 unless all agree.

    python -m benchmarks.loss_equality                          # all layouts, 50 steps, about ten minutes on two cores
    python -m benchmarks.loss_equality --steps 10 --only "tp 2" "pp 2"

fp32 on gloo, masked targets, documents apart; a layout agrees when no step's loss is further than 1e-5 (relative) from
that of one process. Ranks are forked from a warm process (tests/training/nursery.py).
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.training.nursery import Nursery, losses, spec, write_dataset, write_job

LIMIT: Final = 1e-5
MAIN: Final = ("fsdp2 2", "tp 2", "pp 2", "cp 2", "zero3")
FAMILIES: Final = ("gpt2", "gemma2", "qwen3")


@dataclass(frozen=True)
class Layout:
    """Ranks, strategy, micro-batch and the rest of a recipe's `parallel` part."""

    ranks: int
    strategy: str
    micro: int
    parallel: dict[str, Any] = field(default_factory=dict)


ALONE: Final = Layout(1, "ddp", 8)
LAYOUTS: Final = {
    "accumulation 4": Layout(1, "ddp", 2),
    "ddp 2": Layout(2, "ddp", 4),
    "fsdp2 2": Layout(2, "fsdp2", 4),
    "fsdp2 4": Layout(4, "fsdp2", 2),
    "hsdp 2x2": Layout(4, "fsdp2", 2, {"shard": 2}),
    "tp 2": Layout(2, "fsdp2", 8, {"tp": 2}),
    "pp 2": Layout(2, "fsdp2", 2, {"pp": 2}),
    "pp 2 interleaved": Layout(2, "fsdp2", 2, {"pp": 2, "vpp": 2}),
    "cp 2": Layout(2, "fsdp2", 8, {"cp": 2}),
    "tp 2 x cp 2": Layout(4, "fsdp2", 8, {"tp": 2, "cp": 2}),
    "tp 2 x pp 2 x dp 2": Layout(8, "fsdp2", 2, {"tp": 2, "pp": 2}),
    "zero0": Layout(2, "zero0", 4),
    "zero1": Layout(2, "zero1", 4),
    "zero2": Layout(2, "zero2", 4),
    "zero3": Layout(2, "zero3", 4),
    "zero2 offload": Layout(2, "zero2", 4, {"offload": "optimizer"}),
    "zero3 offload": Layout(2, "zero3", 4, {"offload": "parameters"}),
}
LEGS: Final = (Layout(4, "fsdp2", 2), Layout(4, "fsdp2", 4, {"tp": 2}), ALONE)
"""FSDP2 on four ranks, then tp 2 x dp 2, then one process."""


def main() -> int:
    """Run it; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--only", nargs="*", default=[*LAYOUTS, "resumed", *FAMILIES])
    told = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="castra-equality-") as place:
        trial = Trial(Path(place), told.steps)
        try:
            return int(not all(trial.look(told.only)))
        finally:
            trial.nursery.close()


class Trial:
    """The runs of one table."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps, self.nursery = folder, steps, Nursery()
        self._dataset = write_dataset(folder / "dataset", 512, marked=True)

    def look(self, wanted: list[str]) -> list[bool]:
        """Print the table's rows; return which layouts agree."""
        print(f"{'model':8} {'layout':20} {'ranks':>5} {'last loss':>10} {'largest difference':>19} {'seconds':>8}")
        alone = self._run("llama", "alone", ALONE)
        agree = [self._row("llama", name, LAYOUTS[name], alone) for name in LAYOUTS if name in wanted]
        if "resumed" in wanted:
            agree.append(self._resumed(alone))
        for family in (family for family in FAMILIES if family in wanted):
            other = self._run(family, "alone", ALONE)
            layouts = [name for name in MAIN if not (family == "gpt2" and name == "tp 2")]
            agree += [self._row(family, name, LAYOUTS[name], other) for name in layouts]
        return agree

    def _row(self, family: str, name: str, layout: Layout, alone: list[float]) -> bool:
        began = time.monotonic()
        return self._tell(family, name, layout.ranks, self._run(family, name, layout), alone, time.monotonic() - began)

    def _resumed(self, alone: list[float]) -> bool:
        """Change the layout at a third and at two thirds of the steps, each time after every rank was killed."""
        began, third = time.monotonic(), self._steps // 3
        for number, layout in enumerate(LEGS, 1):
            marker = self._folder / "llama/resumed/out/rehearsed-failure.json"
            marker.unlink(missing_ok=True)
            fails = {"rehearse_failure_at": number * third + 1} if number < len(LEGS) else {}
            curve = self._run("llama", "resumed", layout, dies=bool(fails), checkpoint_every=third, **fails)
        return self._tell("llama", "fsdp2 4 > tp x dp > 1", 4, curve, alone, time.monotonic() - began)

    def _run(self, family: str, name: str, layout: Layout, *, dies: bool = False, **train: Any) -> list[float]:
        """Return the losses of a run."""
        shape = {"family": family, "layers": 4, "sliding_window": 7 if family == "gemma2" else None}
        train = {"steps": self._steps, "checkpoint_every": 10_000} | train
        plan = spec(layout.strategy, layout.micro, shape, layout.parallel, **train)
        plan["data"]["documents_apart"] = True
        folder = self._folder / family / name.replace(" ", "-")
        codes, run = self.nursery.run(write_job(folder, plan, dataset=self._dataset), layout.ranks)
        assert dies or set(codes) == {0}, run.log.read_text()[-3000:]
        return losses(folder / "out")

    @staticmethod
    def _tell(family: str, name: str, ranks: int, curve: list[float], alone: list[float], seconds: float) -> bool:
        apart = max(abs(one - other) / other for one, other in zip(curve, alone, strict=True))
        verdict = "" if apart <= LIMIT else "   TOO FAR"
        print(f"{family:8} {name:20} {ranks:5} {curve[-1]:10.6f} {apart:19.1e} {seconds:8.1f}{verdict}", flush=True)
        return apart <= LIMIT


if __name__ == "__main__":
    raise SystemExit(main())
