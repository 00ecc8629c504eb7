"""Other frameworks' programs: one launcher each, which tells them a recipe's plan in their own words."""

import importlib
from collections.abc import Mapping
from typing import Any, Final, cast

from training.cases.base import CaseError as CaseError
from training.cases.base import Command, Launcher, Paths

MODULE: Final = "training.cases.run"
"""The node program that runs all of them."""
RANKS: Final = "ranks_per_node"
"""Where a job's spec has the number of ranks on each node, beside the recipe."""
BENCHMARKS: Final = ("nccl-tests", "param")
"""Frameworks that measure: they read no data."""
PREPARED: Final = ("castra", "megatron-lm", "megatron-deepspeed", "nemo")
"""Frameworks that read what Castra prepares: its own dataset, or Megatron's files."""
MEASUREMENTS: Final = "training.checks.calibrate"
"""The node program of Castra's own measurements, which its cases with a `program` are."""


def measures(framework: str, program: str) -> bool:
    """Whether a case measures the cluster and trains nothing, so that it reads no data."""
    return framework in BENCHMARKS or (framework == "castra" and bool(program))


def reads_dataset(framework: str, program: str) -> bool:
    """Whether a case trains on a dataset that Castra has prepared; the others find `data.source` by themselves."""
    return framework in PREPARED and (framework, program) != ("nemo", "mock") and not measures(framework, program)


def launcher(framework: str) -> Launcher:
    """The launcher of a framework; raises `CaseError` where there is none."""
    name = f"training.cases.{framework.replace('-', '_')}"
    try:
        return cast("Launcher", importlib.import_module(name))
    except ModuleNotFoundError as lacking:
        if lacking.name != name:
            raise
        raise CaseError(f"case.framework {framework} has no launcher in training/cases: write one") from None


def command(spec: Mapping[str, Any], nodes: int, ranks_per_node: int, paths: Paths | None = None) -> Command:
    """What starts the program that a spec names; without `paths` these are told by name, as `${OUTPUT}`.

    Raises `CaseError` for a plan that the framework cannot carry out, or that is still open.
    """
    case, found = spec["case"], launcher(spec["case"]["framework"])
    if still := [name for name, value in spec["parallel"].items() if value == "auto" and name != "recompute"]:
        raise CaseError(f"parallel.{still[0]} is auto: the plan settles it, see `python -m flows.train --render`")
    if spec["train"]["rehearse_failure_at"]:
        raise CaseError("train.rehearse_failure_at is of Castra's own program: leave it out")
    data = "${DATASET}" if reads_dataset(case["framework"], case["program"]) else ""
    initial = "${INITIAL}" if spec["model"]["pretrained"] else ""
    return found.command(spec, nodes, ranks_per_node, paths or Paths("${OUTPUT}", folder(spec), data, initial))


def folder(spec: Mapping[str, Any]) -> str:
    """Where a spec's framework lies on the nodes."""
    case = spec["case"]
    return str(case["folder"] or launcher(case["framework"]).UPSTREAM.folder)


def processes(told: Command, ranks_per_node: int) -> int:
    """How many processes of ours each node starts for a command: one per rank, or one that starts the program."""
    return ranks_per_node if told.per == "rank" else 1
