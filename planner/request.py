"""What `python -m planner sweep` is asked for, read from its command line and the model's file, and checked."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from planner import cost
from planner.errors import PlanError
from planner.judge import Site, Work
from planner.machine import Machine, instance
from planner.model import from_file, weights
from planner.profiles import Profiles
from planner.schema import PRECISIONS, Shape
from planner.space import Axes
from planner.whatif import parse

BATCHES: Final = ("gbs", "global_batch_size", "global_batch")
"""What a model's file may call the sequences of an optimizer step."""
SIZES: Final = ("tp", "pp", "vpp", "cp", "ep")
TOKENS_PER_PARAMETER: Final = 20
"""Training tokens where nobody says how many (Hoffmann et al. 2022, arXiv:2203.15556)."""
TOKENS_PER_STEP: Final = 1 << 22
"""Likewise of one optimizer step."""
UNITS: Final = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
MOST_GPUS: Final = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A sweep of the layouts of a model on a range of numbers of GPUs."""

    model: str
    """As it was named; likewise the numbers of GPUs."""
    gpus: str
    work: Work
    site: Site
    ranks: list[int]
    """Numbers of GPUs."""
    cut_off: int
    """How many more need a network the machine lacks."""
    axes: Axes
    top: int
    """Layouts shown."""
    deadline_s: float | None
    max_usd: float | None
    what_if: dict[str, float]
    """Factors by resource."""
    json: bool
    """Whether programs read the answer."""


def read(argv: Sequence[str] | None) -> Request:
    """The request of a command line; raises `PlanError` for anything that is not there or cannot be."""
    asked = _parser().parse_args(argv)
    machine, (first, last) = instance(asked.instance), counts(asked.gpus)
    for name in ("top", "sequence", "max_usd"):
        if getattr(asked, name) is not None:
            _positive(f"--{name.replace('_', '-')}", getattr(asked, name))
    shape, told = from_file(asked.model, asked.sequence)
    work, ranks = _work(shape, told, asked), _whole_nodes(machine, first, last)
    reached = [count for count in ranks if not machine.lacks_network(-(-count // machine.accelerators))]
    if not reached:
        machine.share(-(-ranks[0] // machine.accelerators), machine.accelerators)
    axes = Axes.of(shape, machine.accelerators, **_pinned(asked, told))
    known = Profiles.load(Path(asked.profiles)) if asked.profiles else Profiles.shipped()
    return Request(
        model=asked.model,
        gpus=asked.gpus,
        work=work,
        site=Site(machine=machine, profiles=known),
        ranks=reached,
        cut_off=len(ranks) - len(reached),
        axes=axes,
        top=asked.top,
        deadline_s=duration(asked.deadline) if asked.deadline else None,
        max_usd=asked.max_usd,
        what_if=parse(asked.what_if) if asked.what_if else {},
        json=asked.json,
    )


def duration(text: str) -> float:
    """'36h', '7d' or '2w' in seconds; raises `PlanError`."""
    try:
        seconds = float(text[:-1]) * UNITS[text[-1:]]
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < np.inf:
        raise PlanError(f"{text!r} is no duration: write it as 36h, 7d or 2w.")
    return seconds


def counts(text: str) -> tuple[int, int]:
    """'280..3360' or '64' as its first and last number; raises `PlanError`."""
    low, dots, high = text.partition("..")
    try:
        first, last = int(low), int(high if dots else low)
    except ValueError:
        raise PlanError(f"--gpus {text!r} is no range: write it as 8..64, or 64.") from None
    if not 1 <= first <= last <= MOST_GPUS:
        raise PlanError(f"--gpus {text}: take at least 1 and at most {MOST_GPUS}, the smaller number first.")
    return first, last


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}; `{self.prog} --help` shows how it is used.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m planner sweep", description="The best layouts of a model on a range of GPU counts."
    )
    add = parser.add_argument
    add("--model", required=True, help="YAML (a recipe, or sizes), a Hugging Face config.json, or a name: gpt3-175b")
    add("--instance", required=True, help="EC2 instance type, such as p5.48xlarge")
    add("--gpus", required=True, metavar="A..B", help="how many GPUs, in whole nodes: 280..3360")
    add("--global-batch", type=int, help="sequences per optimizer step")
    add("--sequence", type=int, help="tokens per sequence")
    add("--precision", choices=PRECISIONS, help="bf16 unless the model's file says otherwise")
    add("--steps", type=int, help="optimizer steps of the whole training")
    add("--tokens", type=float, help="tokens of the whole training, instead of --steps; else 20 per parameter")
    add("--deadline", help="for all steps: 36h, 7d, 2w")
    add("--max-usd", type=float, help="for all steps")
    add("--what-if", metavar="nvlink=2x,efa=0.5x", help="as if the machine had more or less of something")
    add("--profiles", metavar="FOLDER", help="what `python -m planner calibrate` learned; else what came along")
    add("--top", type=int, default=10, help="layouts shown")
    for name in (*SIZES, "micro-batch"):
        add(f"--{name}", type=int, help="this size only")
    add("--json", action="store_true", help="for programs")
    return parser


def _work(shape: Shape, told: dict[str, Any], asked: argparse.Namespace) -> Work:
    """What is trained, as the command line, the model's file or custom says, in this order; raises `PlanError`."""
    train = told["train"] if isinstance(told.get("train"), dict) else {}
    batches = (asked.global_batch, *(told.get(name) for name in BATCHES), train.get("global_batch_size"))
    batch = _positive("global batch", _first(*batches, max(TOKENS_PER_STEP // int(shape.sequence), 1)))
    size, step_tokens = float(weights(shape)), batch * float(shape.sequence)
    tokens = _positive("number of tokens", _first(asked.tokens, TOKENS_PER_PARAMETER * size))
    stated = asked.steps if asked.tokens is None else math.ceil(tokens / step_tokens)
    steps = _positive("number of steps", _first(stated, train.get("steps"), math.ceil(tokens / step_tokens)))
    precision = _first(asked.precision, train.get("precision"), told.get("precision"), "bf16")
    if precision not in PRECISIONS:
        raise PlanError(f"{asked.model}: precision {precision!r} is none of {', '.join(PRECISIONS)}.")
    extras = cost.Extras(parameters=size, checkpoints=2)
    return Work(shape=shape, batch=int(batch), steps=int(steps), precision=precision, extras=extras)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < np.inf:
        raise PlanError(f"a {name} of {value!r} makes no sense: take at least 1.")
    return value


def _pinned(asked: argparse.Namespace, told: dict[str, Any]) -> dict[str, int | None]:
    """Sizes that the command line or the model's file sets."""
    parallel = told["parallel"] if isinstance(told.get("parallel"), dict) else told
    pinned: dict[str, int | None] = {}
    for name, option in {**{size: size for size in SIZES}, "mbs": "micro_batch"}.items():
        value = getattr(asked, option)
        value = parallel.get({"mbs": "micro_batch_size"}.get(name, name)) if value is None else value
        if value not in (None, "auto") and (not isinstance(value, int) or value < 1):
            raise PlanError(f"{name} {value!r} makes no sense: take a whole number of at least 1, or auto.")
        pinned[name] = None if value == "auto" else value
    return pinned


def _whole_nodes(machine: Machine, first: int, last: int) -> list[int]:
    """Numbers of GPUs in a range: powers of two inside a node, then whole nodes; raises `PlanError` if none is."""
    node = machine.accelerators
    inside = [
        count for count in (1 << place for place in range(node.bit_length())) if first <= count <= last and count < node
    ]
    whole = list(range(max(-(-first // node), 1) * node, last + 1, node))
    if not inside + whole:
        raise PlanError(f"--gpus {first}..{last} holds no whole number of {machine.name}, which have {node} GPUs each.")
    return inside + whole
